"""The inputs of grounding, from a batch of the loader."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.sam.random_values import random_words
from sa1b.stream.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Phrased:
    """The M masks of a micro-batch of B images, with a phrase for each.

    Attributes:
        dense: uint8 [M, R, R], 1 is foreground, the targets.
        coarse: uint8 [M, side, side], the same masks at the resolution of the embedding.
        points: float32 [M, 2], x and y of a foreground pixel in the padded square.
        image, counts: as in `sa1b.sam.targets.Targets`; so is sizes.
        tokens, belongs: int64 [M, L] and bool, False for padding; L is 0 with embeddings.
        vectors: float32 [M, D], precomputed embeddings; D is 0 with tokens.
        keys: int64 [M], equal for equal phrases; -1 without a phrase.
        counted: bool [M]: the mask has a phrase and a pixel, and its image is valid.
    """

    dense: Tensor
    coarse: Tensor
    points: Tensor
    image: Tensor
    counts: tuple[int, ...]
    sizes: Tensor
    tokens: Tensor
    belongs: Tensor
    vectors: Tensor
    keys: Tensor
    counted: Tensor


def phrased(batch: Batch, seed: int, side: int, width: int) -> tuple[Tensor, Phrased, Tensor]:
    """Images, masks with phrases, and a hash for each image and visit; UsageError without texts of masks.

    Args:
        side: size of the embedding.
        width: numbers of a precomputed embedding; 0: phrases are tokens.
    """
    texts = batch.texts
    if texts is None or texts.key != "mask_id":
        raise UsageError(
            "--data.text: grounding needs a phrase for each mask; pass a table with a column mask_id and "
            "--data.text-key mask_id"
        )
    if texts.vectors.shape[1] != width:
        raise UsageError(
            f"--data.text-width {width}: the column of texts has "
            f"{f'embeddings of {texts.vectors.shape[1]} numbers' if texts.vectors.shape[1] else 'strings'}; "
            f"pass --data.text-width {texts.vectors.shape[1]}"
        )
    assert batch.dense is not None, "the batch has no dense masks"
    image = batch.masks.image
    tokens, belongs = texts.padded(0 if width else None)
    key = torch.full((), seed, dtype=torch.int64, device=batch.positions.device)
    masks = Phrased(
        dense=batch.dense,
        coarse=batch.masks.dense(side),
        points=batch.points,
        image=image,
        counts=batch.masks.counts,
        sizes=batch.framed_sizes,
        tokens=tokens,
        belongs=belongs,
        vectors=texts.vectors,
        keys=texts.keys,
        counted=texts.given & batch.valid[image] & batch.dense.flatten(1).any(dim=1).bool(),
    )
    return batch.images, masks, random_words(key, int(Purpose.VISIT), batch.positions)
