"""The grounding model: SAM's image encoder, a text encoder, and two ways to compare a phrase with an image.

A region is a mask; its feature is computed from the mean of the image embedding over the mask, and the phrase
whose feature is nearest describes it. The model also predicts a mask for a phrase: the logit of a pixel is
the similarity of its token's feature with the phrase's, plus a product of its upscaled embedding and the
phrase.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from sa1b.errors import UsageError
from sa1b.grounding.alignment import (
    GroundingRecipe,
    Phrased,
    TextConfig,
    TextEncoder,
    contrastive_loss,
    phrased,
    region_features,
)
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD, inside_image, normalised
from sa1b.masks.runs import Runs
from sa1b.sam.image_encoder import ChannelNorm, ImageEncoder, WithImageEncoder
from sa1b.sam.model import ModelConfig
from sa1b.sam.protocol import UNIT, Size, prediction_lines
from sa1b.sam.published import fit_weights, read_tensors
from sa1b.sam.recipe import encoder_flops, is_frozen
from sa1b.sam.targets import overlaps
from sa1b.stream.batch import Batch
from sa1b.stream.text import open_tokenizer

PIXEL_FEATURES = 32  # numbers of each pixel of the predicted masks
SIMILARITY_GAIN, BACKGROUND = 10.0, -3.0  # initial factor of the similarities, and logit of background
_ENCODER = "image_encoder."
MEANS = ("recall_at_1", "recall_at_5", "chance_at_1", "miou_region", "miou_mask")
AT = (1, 5)


class Grounding(WithImageEncoder):
    """The model in training, with its losses; it fulfils the contract of `sa1b.engine.model`.

    Of the sizes of the image encoder, `pixel_features` has no effect. `length`: largest number of tokens of a
    phrase. `vectors`: numbers of a precomputed embedding, which replaces the text encoder; 0: phrases are
    tokens. `capacity`: largest number of masks of a micro-batch of any rank. UsageError: the number of
    different tokens is not known.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    figures = ("loss", "mask_loss", "contrastive_loss", "retrieved", "temperature")
    shown: Mapping[str, str] = {"retrieved": "retrieved"}

    def __init__(
        self,
        config: ModelConfig,
        text: TextConfig,
        recipe: GroundingRecipe,
        *,
        tokenizer: str,
        length: int,
        vectors: int = 0,
        capacity: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.text, self.recipe = config, text, recipe
        self.tokenizer, self.length, self.vectors, self.capacity = tokenizer, length, vectors, capacity
        channels, features = config.channels, recipe.features
        self.image_encoder, self.text_encoder = ImageEncoder(config), None
        if not vectors:
            vocabulary = text.vocabulary or open_tokenizer(tokenizer).vocabulary
            if vocabulary is None:
                raise UsageError(
                    f"--data.tokenizer {tokenizer}: does not state its number of tokens; pass "
                    "--text.vocabulary"
                )
            self.text_encoder = TextEncoder(text, vocabulary, length)
        width = vectors or text.width
        hidden = max(channels // 4, PIXEL_FEATURES)
        self.upscale = nn.Sequential(
            nn.ConvTranspose2d(channels, hidden, kernel_size=2, stride=2),
            ChannelNorm(hidden),
            nn.GELU(),
            nn.ConvTranspose2d(hidden, PIXEL_FEATURES, kernel_size=2, stride=2),
        )
        self.pixel_query = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, PIXEL_FEATURES))
        self.region_head = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 2 * features), nn.GELU(),
            nn.Linear(2 * features, features),
        )  # fmt: skip
        self.text_head = nn.Linear(width, features)
        self.similarity_gain = nn.Parameter(torch.full((1,), SIMILARITY_GAIN))
        self.background = nn.Parameter(torch.full((1,), BACKGROUND))
        self.log_scale = nn.Parameter(torch.full((1,), -math.log(recipe.temperature)))
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    def inputs(self, batch: Batch, seed: int) -> tuple[Tensor, Phrased, Tensor]:
        """Images, masks with phrases, and image keys; see `phrased`."""
        return phrased(batch, seed, self.config.side, self.vectors)

    def weights(self) -> "Grounding":
        return self

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a grounding model, a SAM or a plain ViT."""
        return read_tensors(path)

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Load weights of this model, or of a SAM or a ViT for the image encoder."""
        own, line, fitted = self.state_dict(), f"{len(weights)} tensors of a grounding model", dict(weights)
        if not is_grounding(weights):
            features = len(weights.get("similarity.pixels.last.bias", ()))
            tensors = fit_weights(weights, replace(self.config, pixel_features=features))[0]
            fitted = {name: tensor for name, tensor in tensors.items() if name.startswith(_ENCODER)}
            parts = dict.fromkeys(name.split(".")[0] for name in own if name not in fitted)
            line = f"{len(fitted)} tensors for the image encoder; initial values: {', '.join(parts)}"
            fitted = own | fitted  # a ViT has no relative positions and no neck
        try:
            self.load_state_dict(fitted)
        except RuntimeError as error:
            last = str(error).splitlines()[-1].strip()
            raise UsageError(f"weights of other sizes ({last}): must fit --model, --text, --recipe") from None
        return line

    def flops(self, images: float, masks: float) -> float:
        """The products of pixels and phrases are included, small operations are not."""
        pixels = 16 * self.config.side**2
        phrase = 2.0 * pixels * PIXEL_FEATURES
        if self.text_encoder is not None:
            length, width = len(self.text_encoder.position), self.text.width
            phrase += 2.0 * length * width * (12 * width + 2 * length) * self.text.depth
        passes = 1 if is_frozen(self.image_encoder) else 3
        return passes * images * encoder_flops(self.config) + 3 * masks * phrase

    def forward(
        self, images: Tensor, masks: Phrased, image_keys: Tensor, *, evaluate: bool = False
    ) -> dict[str, Tensor]:
        """Sums over the counted masks, on all ranks together: losses before their weights, phrases most
        similar to their own region, temperatures. To `evaluate`, the features of regions and texts, [M, D] of
        length 1, the inverse temperature, and logits [M, 4 * side, 4 * side] of the padded square.

        Images are uint8 [B, 3, S, S]; keys int64 [B], on which drop path depends. B and M may be 0.
        """
        kept = slice(0, len(masks.image))
        if len(images) == 0 or len(masks.image) == 0:
            # Compute one blank image or phrase and discard it: every parameter gets a gradient (of zeros).
            images, masks, image_keys = _with_blank(images, masks, image_keys)
        embeddings = self.embed(images, masks.sizes, image_keys)
        encoder = self.text_encoder
        phrases = masks.vectors if encoder is None else encoder(masks.tokens, masks.belongs)
        pooled = region_features(embeddings, masks.coarse, masks.points, masks.counts, self.config.image_size)
        regions = functional.normalize(self.region_head(pooled).float(), dim=-1)[kept]
        texts = functional.normalize(self.text_head(phrases).float(), dim=-1)
        logits = self.mask_logits(embeddings, phrases, texts, masks.counts)[kept]
        texts = texts[kept]
        # Without the gradient of a clamp, which is 0 beyond the limit: the parameter would stay there.
        excess = functional.relu(self.log_scale + math.log(self.recipe.least_temperature)).detach()
        scale = (self.log_scale - excess).exp()
        if evaluate:
            return {"regions": regions, "texts": texts, "scale": scale, "logits": logits}
        counted, keys, dense = masks.counted[kept], masks.keys[kept], masks.dense[kept]
        weights = counted.float()
        if dense.shape[-1] > logits.shape[-1]:
            size = dense.shape[-2:]
            logits = functional.interpolate(logits[:, None], size, mode="bilinear", align_corners=False)[:, 0]
        with torch.autocast(logits.device.type, enabled=False):
            errors = functional.binary_cross_entropy_with_logits(logits, dense.float(), reduction="none")
            mask_loss = (errors.mean(dim=(1, 2)) * weights).sum()
        losses, hits = contrastive_loss(regions, texts, keys, counted, scale=scale, capacity=self.capacity)
        aligned, count = losses.sum(), weights.sum()
        recipe = self.recipe
        return {
            "loss": recipe.mask_weight * mask_loss + recipe.contrastive_weight * aligned,
            "mask_loss": mask_loss.detach(),
            "contrastive_loss": aligned.detach(),
            "retrieved": hits.sum(),
            "temperature": count / scale.detach()[0],
            "count": count,
        }

    def embed(self, images: Tensor, sizes: Tensor, image_keys: Tensor) -> Tensor:
        """The embedding of each image: float [B, channels, side, side]."""
        pixels = normalised(images, sizes, self.pixel_mean, self.pixel_std)
        embeddings: Tensor = self.image_encoder(pixels, self.kept(image_keys, self.config))
        return embeddings

    def mask_logits(
        self, embeddings: Tensor, phrases: Tensor, texts: Tensor, counts: tuple[int, ...]
    ) -> Tensor:
        """The logits of the masks that phrases describe: float32 [M, 4 * side, 4 * side]; from the result of
        `embed`, vectors of the phrases [M, width], their features, and the number of phrases of each image.
        """
        pixels, query = self.upscale(embeddings), self.pixel_query(phrases)
        tokens = self.region_head(embeddings.flatten(2).transpose(1, 2)).float()
        tokens = functional.normalize(tokens, dim=-1)
        each, size = list(counts), pixels.shape[2:]
        fine = list(map(torch.matmul, torch.split(query, each), pixels.flatten(2)))
        coarse = list(map(torch.matmul, torch.split(texts, each), tokens.transpose(1, 2)))
        similar = torch.cat(coarse).float().view(-1, 1, *embeddings.shape[2:])
        similar = functional.interpolate(similar, size, mode="bilinear", align_corners=False)[:, 0]
        logits: Tensor = torch.cat(fine).float().view(-1, *size) + self.background
        return logits + self.similarity_gain * similar


def is_grounding(weights: Mapping[str, Tensor]) -> bool:
    """Whether tensors are those of a grounding model, not those of a SAM."""
    return "log_scale" in weights


def _with_blank(images: Tensor, masks: Phrased, image_keys: Tensor) -> tuple[Tensor, Phrased, Tensor]:
    """The inputs with a blank image and a phrase for it at the end."""

    def longer(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_zeros(1, *x.shape[1:])))

    values = {item.name: getattr(masks, item.name) for item in fields(masks)}
    padded = {name: longer(value) for name, value in values.items() if isinstance(value, Tensor)}
    padded["image"][-1] = len(images)
    return longer(images), replace(masks, **padded, counts=(*masks.counts, 1)), longer(image_keys)


class GroundingScore:
    """Sums over the phrases of an evaluation, as integers: they do not depend on order or world size.

    For each phrase, the regions of its image are ordered by similarity:

        recall_at_1, recall_at_5   part of the phrases whose region is the first, or among the first five
        chance_at_1                the same for a region chosen at random
        miou_region                mean IoU of the first region with that of the phrase; 1 for equal phrases
        miou_mask                  mean IoU of the mask that the model predicts for the phrase

    Any region with the same phrase counts as a region of the phrase.
    """

    def __init__(self, device: torch.device) -> None:
        # One for each of MEANS in units of 1 / UNIT, the phrases, and masks without a pixel, not scored.
        self.sums = torch.zeros(len(MEANS) + 2, dtype=torch.int64, device=device)
        self._found: dict[str, Tensor] = {}

    def add(self, module: nn.Module, inputs: tuple[Tensor, Phrased, Tensor], batch: Batch) -> None:
        """Evaluate the model on a micro-batch and add its phrases."""
        masks = inputs[1]
        outputs = module(*inputs, evaluate=True)
        present = batch.valid[masks.image] & masks.dense.flatten(1).any(dim=1).bool()
        same_image = masks.image[:, None] == masks.image[None]
        candidate = same_image & present[None]
        similarity = (outputs["texts"] @ outputs["regions"].T).masked_fill(~candidate, -torch.inf)
        described = candidate & (masks.keys[:, None] == masks.keys[None])
        rows = torch.nonzero(masks.counted).flatten()
        similarity, candidate, described = similarity[rows], candidate[rows], described[rows]
        phrases = (masks.keys >= 0) & batch.valid[masks.image]
        self.sums[-2] += len(rows)
        self.sums[-1] += (phrases & ~masks.counted).sum()
        if not len(rows):
            self._found = dict.fromkeys(("rows", "first", "iou", "chance"), rows)
            return
        best = similarity.masked_fill(~described, -torch.inf).amax(dim=1, keepdim=True)
        before = (similarity > best).sum(dim=1)
        first = similarity.argmax(dim=1)
        size, image_size = masks.dense.shape[-1], batch.images.shape[-1]
        inside = inside_image(masks.sizes, image_size, size)[masks.image]
        true = masks.dense.bool() & inside
        logits = outputs["logits"][rows]
        if size > logits.shape[-1]:
            logits = functional.interpolate(logits[:, None], (size, size), mode="bilinear")[:, 0]
        of_region = overlaps(true[first], true[rows])
        of_mask = overlaps((logits > 0) & inside[rows], true[rows])
        hits = [(before < at).long() * UNIT for at in AT]
        chance = described.sum(dim=1) * UNIT // candidate.sum(dim=1)
        ious = [both * UNIT // either.clamp(min=1) for both, either in (of_region, of_mask)]
        ious[0] = torch.where(before < 1, UNIT, ious[0])
        self.sums[:-2] += torch.stack([*hits, chance, *ious]).sum(dim=1)
        probability = (similarity * outputs["scale"]).softmax(dim=1).amax(dim=1)
        self._found = {"rows": rows, "first": first, "iou": ious[0] / UNIT, "chance": probability}

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        """Position and line of predictions.jsonl for each image of the micro-batch that was added last."""
        found = self._found
        texts = [*batch.extra.values()][-1]  # `Stream` adds the texts after the joined columns
        rows, first = found["rows"], found["first"].cpu().numpy()
        phrases = [x if isinstance(x := texts[row], str) else "(an embedding)" for row in rows.tolist()]
        offsets, counts = batch.masks.offsets.cpu().numpy(), batch.masks.runs.cpu().numpy().view(np.uint32)

        def runs_of(masks: npt.NDArray[np.int64], source: Size, _: Size) -> Runs:
            return Runs(counts, offsets, *source).select(first[masks])

        return prediction_lines(
            batch, rows, batch.points[rows], found["iou"], found["chance"], runs_of, phrases
        )

    def all_reduce(self) -> None:
        dist.all_reduce(self.sums)

    def result(self) -> dict[str, float]:
        """The means by name, from 0 to 1; "phrases", the number of phrases; and "empty"."""
        *sums, count, empty = self.sums.tolist()
        means: dict[str, float] = {"phrases": count}
        if count:
            means |= {name: total / (UNIT * count) for name, total in zip(MEANS, sums, strict=True)}
        return means | {"empty": empty}
