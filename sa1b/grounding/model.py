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

import torch
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
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD, normalised
from sa1b.sam.image_encoder import ChannelNorm, ImageEncoder, WithImageEncoder
from sa1b.sam.initial_weights import fit_weights, read_initial_weights
from sa1b.sam.model import ModelConfig
from sa1b.sam.published import config_of, read_tensors
from sa1b.sam.recipe import encoder_flops, is_frozen
from sa1b.stream.batch import Batch
from sa1b.stream.text import BYTES

PIXEL_FEATURES = 32  # numbers of each pixel of the predicted masks
SIMILARITY_GAIN, BACKGROUND = 10.0, -3.0  # initial factor of the similarities, and logit of background
_ENCODER = "image_encoder."


class Grounding(WithImageEncoder):
    """The model in training, with its losses; it fulfils the contract of `sa1b.engine.model`.

    Of the sizes of the image encoder, `pixel_features` has no effect. `length`:
    largest number of tokens of a phrase. `vectors`: numbers of a precomputed embedding, which replaces the
    text encoder; 0: phrases are tokens. `capacity`: largest number of masks of a micro-batch of any rank.
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
        vocabulary: int,
        length: int,
        vectors: int = 0,
        capacity: int = 1,
        tokenizer: str = BYTES,
    ) -> None:
        super().__init__()
        self.tokenizer, self.length = tokenizer, length
        self.config, self.text, self.recipe = config, text, recipe
        self.vectors, self.capacity = vectors, capacity
        channels, features = config.channels, recipe.features
        self.image_encoder = ImageEncoder(config)
        self.text_encoder = None if vectors else TextEncoder(text, vocabulary, length)
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
        if config.compile_blocks:
            self.image_encoder.compile_blocks()

    def inputs(self, batch: Batch, seed: int) -> tuple[Tensor, Phrased, Tensor]:
        """Images, masks with phrases, and image keys; see `phrased`."""
        return phrased(batch, seed, self.config.side, self.vectors)

    def weights(self) -> "Grounding":
        return self

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a grounding model, a SAM or a plain ViT."""
        tensors = read_tensors(path)
        return tensors if is_grounding(tensors) else read_initial_weights(path)

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Load weights of this model, or of a SAM or a ViT for the image encoder."""
        own, line, fitted = self.state_dict(), f"{len(weights)} tensors of a grounding model", dict(weights)
        if not is_grounding(weights):
            is_sam = f"{_ENCODER}pos_embed" in weights
            sizes = replace(config_of(weights), image_size=self.config.image_size) if is_sam else self.config
            tensors = fit_weights(weights, sizes)[0]
            fitted = {name: tensor for name, tensor in tensors.items() if name.startswith(_ENCODER)}
            kept = [name for name in own if name not in fitted]
            parts = dict.fromkeys(name.split(".")[0] for name in kept)
            line = f"{len(fitted)} tensors for the image encoder; initial values: {', '.join(parts)}"
            # A SAM has all of the image encoder, a ViT has no relative positions and no neck.
            fitted |= {name: own[name] for name in kept if not (is_sam and name.startswith(_ENCODER))}
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
        phrases = self.read(masks)
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

    def read(self, masks: Phrased) -> Tensor:
        """The vector of each phrase: float [M, width]."""
        encoder = self.text_encoder
        return masks.vectors if encoder is None else encoder(masks.tokens, masks.belongs)

    def mask_logits(
        self, embeddings: Tensor, phrases: Tensor, texts: Tensor, counts: tuple[int, ...]
    ) -> Tensor:
        """The logits of the masks that phrases describe: float32 [M, 4 * side, 4 * side]; from the results of
        `embed` and `read`, the features of the phrases, and the number of phrases of each image.
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
    padded = {
        item.name: torch.cat((value, value.new_zeros(1, *value.shape[1:])))
        for item in fields(masks)
        if isinstance(value := getattr(masks, item.name), Tensor)
    }
    padded["image"][-1] = len(images)
    blank = replace(masks, **padded, counts=(*masks.counts, 1))
    more = torch.cat((images, images.new_zeros(1, *images.shape[1:])))
    return more, blank, torch.cat((image_keys, image_keys.new_zeros(1)))
