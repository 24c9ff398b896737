"""`sa1b.ground`: the regions and masks that phrases describe in an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from sa1b.arguments import BadValue, check_arguments
from sa1b.grounding.alignment import region_features
from sa1b.grounding.model import Grounding
from sa1b.masks import geometry
from sa1b.masks.grid import framed_size
from sa1b.masks.raster import rasterize_frame
from sa1b.masks.runs import Runs
from sa1b.sam.prediction import at_source, framed, rgb_pixels
from sa1b.stream.text import open_tokenizer, texts_of


@dataclass(frozen=True, slots=True, eq=False)
class Grounded:
    """The masks and regions that N phrases describe in an image.

    Attributes:
        masks: bool [N, height, width], the predicted masks, at the resolution of the image.
        logits: float32 [N, 4 * side, 4 * side], of the padded square.
        similarity: float32 [N, M], cosine of each phrase with each of the M regions; M is 0 without regions.
    """

    masks: npt.NDArray[np.bool_]
    logits: npt.NDArray[np.float32]
    similarity: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.masks)

    def regions(self) -> npt.NDArray[np.int64]:
        """The most similar region of each phrase: int64 [N]. ValueError: there are no regions."""
        if not self.similarity.shape[1]:
            raise BadValue("regions(): there are no regions; pass regions= to sa1b.ground")
        return np.asarray(self.similarity.argmax(axis=1), np.int64)


@check_arguments
@torch.no_grad()
def ground(
    model: Grounding, image: Any, phrases: Sequence[str] | npt.ArrayLike, *, regions: Runs | None = None
) -> Grounded:
    """Find the masks and regions that phrases describe in an image.

    Args:
        model: the result of `sa1b.load_grounding`, on any device.
        image: uint8 RGB [height, width, 3], or a PIL image of any mode; any size.
        phrases: N strings; for a model that was trained with precomputed embeddings, numbers [N, D].
        regions: masks of the image to choose from, such as `sample.annotations.runs()` or those of
            `sa1b.generate_masks`.

    Raises:
        ValueError: an argument has a wrong type or shape; the message names it.
    """
    if not isinstance(model, Grounding):
        raise BadValue("model: must be a grounding model; pass sa1b.load_grounding(run)")
    pixels = rgb_pixels(image)
    height, width = pixels.shape[:2]
    if regions is not None and (regions.height, regions.width) != (height, width):
        found = f"{regions.width} x {regions.height}"
        raise BadValue(f"regions: must have the size of the image, {width} x {height} pixels, not {found}")
    size, side, device = model.config.image_size, model.config.side, model.pixel_mean.device
    images, sizes = framed(pixels, size, device)
    rows, columns = framed_size(height, width, size)
    embedding = model.embed(images, sizes, torch.zeros(1, dtype=torch.int64, device=device))
    read = _read(model, phrases, device)
    texts = functional.normalize(model.text_head(read).float(), dim=-1)
    logits = model.mask_logits(embedding, read, texts, (len(read),))
    similarity = np.zeros((len(read), 0), np.float32)
    if regions is not None and len(regions):
        inside = geometry.uniform_point(regions, np.zeros(len(regions), np.uint64))
        coarse = rasterize_frame(regions, size, side, taken=(rows, columns))
        pooled = region_features(
            embedding,
            torch.from_numpy(coarse).to(device),
            torch.from_numpy((inside + 0.5) * (columns / width, rows / height)).float().to(device),
            (len(regions),),
            size,
        )
        of_regions = functional.normalize(model.region_head(pooled).float(), dim=-1)
        similarity = (texts @ of_regions.T).cpu().numpy()
    masks = at_source(logits, (height, width), (rows, columns), size)
    return Grounded(masks.cpu().numpy(), logits.cpu().numpy(), similarity)


def _read(model: Grounding, phrases: Any, device: torch.device) -> Tensor:
    if model.text_encoder is None:
        vectors = np.asarray(phrases)
        if vectors.dtype.kind not in "fiu" or vectors.shape[1:] != (model.vectors,):
            raise BadValue(f"phrases: must be embeddings, numbers [N, {model.vectors}], for this model")
        return torch.from_numpy(vectors.astype(np.float32)).to(device)
    if isinstance(phrases, str) or not all(isinstance(phrase, str) for phrase in phrases):
        raise BadValue(f"phrases={phrases!r}: must be a list of strings")
    tokenizer = open_tokenizer(model.tokenizer)
    tokens, belongs = texts_of(list(phrases), tokenizer, model.length, "mask_id").padded()
    encoded: Tensor = model.text_encoder(tokens.to(device), belongs.to(device))
    return encoded
