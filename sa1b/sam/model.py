"""The model: SAM, "Segment Anything", Kirillov et al., 2023, with the published parameter names and shapes.

    torch.manual_seed(0)
    model = Sam(PRESETS["tiny"])
    embeddings = model.embed(images)  # (B, C, h, w): the slow part, once an image
    logits, iou = model.decode(embeddings, image, points, labels)  # (M, 4, 4h, 4w), (M, 4): once a prompt

All coordinates are in one frame: the padded square of S x S pixels (S = image_size), with the image at its
top left, x right and y down, and the centre of a pixel at integer coordinates. `load_state_dict` accepts the
published checkpoints of vit_b, vit_l and vit_h unchanged.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.arguments import BadValue, Range, check_fields
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD, normalised
from sa1b.sam.image_encoder import ImageEncoder, RelativeAttention
from sa1b.sam.image_tokens import SharedImage
from sa1b.sam.low_rank import adapt, is_low_rank
from sa1b.sam.mask_decoder import ALL, MaskDecoder, PromptEncoder
from sa1b.sam.similarity import ClickSimilarity
from sa1b.sam.transformer import ProjectedAttention

_RECOMPUTED = re.compile(r"none|all|every:[1-9]\d*")
PATCH_SIZE = 16  # of the published models, and of a model with a backbone
CHANNELS_MULTIPLE = 32  # the decoder halves its width and then splits it into heads of 16 numbers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model, by default those of vit_b.

    Attributes:
        image_size: Size of the padded square, pixels.
        patch_size: Pixels of a patch, which is a token of the encoder.
        width: Width of the encoder: size of a token's vector.
        depth: Blocks of the encoder; 0 only with a backbone.
        heads: Attention heads of a block; head dimension is width / heads.
        global_blocks: Blocks whose attention covers the complete image; the others use windows.
        window: Tokens of a window per axis.
        backbone: Model of the package timm that computes the tokens in place of the patch embedding, such as
            tiny_vit_5m_224 or repvit_m1_0. Its BatchNorm layers need --parallel.sync-batchnorm on several
            GPUs. With --model.depth 0, the neck follows it.
        channels: Width of the image embedding, the prompts and the decoder, a multiple of 32.
        pixel_features: Length of the feature vector of each mask pixel, for comparison with clicked pixels.
            This addition to the published model shortens training (sa1b.sam.similarity); 0: none.
        drop_path: Probability that an image skips the attention of the last block, and independently its
            MLP; linear over the blocks, from 0 at the first one.
        checkpoint_blocks: Encoder blocks whose activations are recomputed in the backward pass, to save
            memory: none, all, or every second one (every:2).
        compile_blocks: Compile (torch.compile) each block of the encoder.
        cuda_graphs: Record the iterations of training as CUDA graphs, one for each number of masks, so that
            one call of the host launches all kernels. Only on a CUDA device, for iterations that
            need no loss scale.
        kernels: Use Triton kernels on a CUDA device in place of torch's operators, which need more time and
            memory. auto: those that are right there, by a comparison before the first run. all: also others.
        lora_rank: Rank of the changes that fine-tuning learns for the weights of the attention (LoRA), such
            as 8; these weights and all others of their part are frozen. 0: the weights themselves are
            trained.
        lora_targets: With a rank: parts whose attention is adapted. A part that is not adapted is trained
            completely, unless --optim.freeze names it; the prompt encoder is always frozen.
    """

    image_size: Annotated[int, Range(1)] = 1024
    patch_size: Annotated[int, Range(1)] = 16
    width: Annotated[int, Range(1)] = 768
    depth: Annotated[int, Range(0)] = 12
    heads: Annotated[int, Range(1)] = 12
    global_blocks: tuple[int, ...] = (2, 5, 8, 11)
    window: Annotated[int, Range(1)] = 14
    backbone: str = ""
    channels: Annotated[int, Range(1)] = 256
    pixel_features: Annotated[int, Range(0)] = 0
    drop_path: Annotated[float, Range(0, below=1)] = 0.0
    checkpoint_blocks: str = "none"
    compile_blocks: bool = False
    cuda_graphs: bool = True
    kernels: Literal["auto", "none", "all"] = "auto"
    lora_rank: Annotated[int, Range(0)] = 0
    lora_targets: Literal["both", "image_encoder", "mask_decoder"] = "both"

    @classmethod
    def saved(cls, document: Mapping[str, Any]) -> "ModelConfig":
        """The sizes of a run, from its settings; those that only other versions know are left out."""
        known = {setting.name: document[setting.name] for setting in fields(cls) if setting.name in document}
        return cls(**{**known, "global_blocks": tuple(known["global_blocks"])})

    def __post_init__(self) -> None:
        check_fields(self, "model")
        for whole, part in (("image-size", "patch-size"), ("width", "heads")):
            size, of_part = (getattr(self, name.replace("-", "_")) for name in (whole, part))
            if size % of_part:
                raise BadValue(f"--model.{whole} {size}: must be a multiple of --model.{part} {of_part}")
        if self.channels % CHANNELS_MULTIPLE:
            raise BadValue(f"--model.channels {self.channels}: must be a multiple of {CHANNELS_MULTIPLE}")
        if self.pixel_features and self.patch_size % 4:
            raise BadValue(
                f"--model.pixel-features {self.pixel_features}: --model.patch-size {self.patch_size} must be "
                "a multiple of 4, the pixels of the masks for each token"
            )
        if self.depth == 0 and not self.backbone:
            raise BadValue("--model.depth 0: must be at least 1 without --model.backbone; pass one of them")
        if self.depth == 0 and self.lora_rank and self.lora_targets != "mask_decoder":
            raise BadValue(
                f"--model.lora-rank {self.lora_rank}: the image encoder has no attention to adapt; pass "
                "--model.lora-targets mask_decoder"
            )
        if self.backbone and (self.patch_size != PATCH_SIZE or self.image_size % (2 * PATCH_SIZE)):
            raise BadValue(
                f"--model.backbone {self.backbone}: --model.patch-size {self.patch_size} must be "
                f"{PATCH_SIZE}, and --model.image-size {self.image_size} a multiple of {2 * PATCH_SIZE}"
            )
        if self.depth and not all(0 <= block < self.depth for block in self.global_blocks):
            blocks = " ".join(map(str, self.global_blocks))
            raise BadValue(
                f"--model.global-blocks {blocks}: must be from 0 to {self.depth - 1} "
                f"(--model.depth {self.depth})"
            )
        if not _RECOMPUTED.fullmatch(self.checkpoint_blocks):
            raise BadValue(
                f"--model.checkpoint-blocks {self.checkpoint_blocks}: must be none, all or every:2 "
                "(3, 4, ...)"
            )

    @property
    def recomputed_blocks(self) -> range:
        """The encoder blocks whose activations are recomputed in the backward pass."""
        if self.checkpoint_blocks == "none":
            return range(0)
        every = 1 if self.checkpoint_blocks == "all" else int(self.checkpoint_blocks.removeprefix("every:"))
        return range(0, self.depth, every)

    @property
    def side(self) -> int:
        """Tokens of the image per axis: the size of the embedding, and a quarter of the size of masks."""
        return self.image_size // self.patch_size

    @property
    def drop_rates(self) -> tuple[float, ...]:
        """The rate at which an image skips the attention of each block, and independently its MLP."""
        return tuple(self.drop_path * index / max(self.depth - 1, 1) for index in range(self.depth))


_TINY_VIT = ModelConfig(width=256, depth=0, heads=1, global_blocks=(), backbone="tiny_vit_5m_224")
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        256, width=128, depth=2, heads=4, global_blocks=(1,), window=8, channels=32, pixel_features=24
    ),
    "vit_t": ModelConfig(width=192, heads=3),
    "tiny_vit": _TINY_VIT,
    "repvit": replace(_TINY_VIT, backbone="repvit_m1_0"),
    "vit_b": ModelConfig(),
    "vit_l": ModelConfig(width=1024, depth=24, heads=16, global_blocks=(5, 11, 17, 23)),
    "vit_h": ModelConfig(width=1280, depth=32, heads=16, global_blocks=(7, 15, 23, 31)),
}


class Sam(nn.Module):
    """Image encoder, prompt encoder and mask decoder.

    Initial weights come from torch's generator on the CPU, so they are the same after the same
    torch.manual_seed. checkpoint_blocks and compile_blocks do not change initial weights or
    names of parameters.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = ImageEncoder(config)
        self.prompt_encoder = PromptEncoder(config.channels, config.image_size, config.side)
        self.mask_decoder = MaskDecoder(config.channels)
        self.similarity: ClickSimilarity | None = None
        if config.pixel_features:
            self.similarity = ClickSimilarity(config.patch_size, config.channels, config.pixel_features)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)
        if config.lora_rank:
            trained = {name: self.get_submodule(name) for name in ("image_encoder", "mask_decoder")}
            for name in list(trained) if config.lora_targets == "both" else [config.lora_targets]:
                adapt(trained.pop(name), (RelativeAttention, ProjectedAttention), config.lora_rank)
            for name, parameter in self.named_parameters():  # others are frozen
                parameter.requires_grad_(is_low_rank(name) or name.partition(".")[0] in trained)

    def embed(self, images: Tensor, keep: Tensor | None = None, sizes: Tensor | None = None) -> Tensor:
        """The embedding of each image.

        Args:
            images: uint8 [B, 3, S, S], RGB, of any memory format; B may be 0.
            keep: bool [B, depth, 2], whether an image passes through attention and MLP of each block (drop
                path). The caller samples it with the probabilities 1 - config.drop_rates; outputs are divided
                by these. None: every image passes through every block, and nothing is divided.
            sizes: int64 [B, 2], rows and columns of each image in the square. Pixels outside the image are
                set to 0 after normalisation, as in the published code. None: all pixels belong to the image.

        Returns:
            float [B, channels, side, side]; with pixel features, 16 * pixel_features further channels, the
            features of the 4 x 4 mask pixels of each token.

        Raises:
            ValueError: shape or dtype of images, keep or sizes is wrong.
        """
        size = self.config.image_size
        if images.dtype != torch.uint8 or images.shape[1:] != (3, size, size):
            raise ValueError(
                f"images: must be uint8 [B, 3, {size}, {size}], got {images.dtype} {list(images.shape)}; "
                "pass the same image_size to the model and the stream"
            )
        if keep is not None and (keep.dtype, keep.shape) != (torch.bool, (len(images), self.config.depth, 2)):
            raise ValueError(f"keep: must be bool [B, depth, 2], got {keep.dtype} {list(keep.shape)}")
        if sizes is not None and sizes.shape != (len(images), 2):
            raise ValueError(f"sizes: must be [B, 2], got {list(sizes.shape)}")
        if len(images) == 0:
            # Encode one blank image and discard it. Kernels need not support empty batches, and every
            # parameter gets a gradient (of zeros), which the ranks with images wait for.
            blank = images.new_zeros(1, *images.shape[1:])
            keep = None if keep is None else F.pad(keep, (0, 0, 0, 0, 0, 1), value=True)
            return self.embed(blank, keep)[:0]
        pixels = self.pixels(images, sizes)
        return self.with_features(pixels, self.image_encoder(pixels, keep))

    def pixels(self, images: Tensor, sizes: Tensor | None) -> Tensor:
        """Normalised pixels, the input of the encoder: float32 [B, 3, S, S]; arguments as in `embed`."""
        return normalised(images, sizes, self.pixel_mean, self.pixel_std)

    def with_features(self, pixels: Tensor, embeddings: Tensor) -> Tensor:
        """The result of `embed`, from normalised pixels and the embeddings of the image encoder."""
        return embeddings if self.similarity is None else self.similarity.with_features(pixels, embeddings)

    def decode(
        self,
        embeddings: Tensor,
        image: Tensor,
        points: Tensor,
        labels: Tensor,
        low_res: Tensor | None = None,
        has_low_res: Tensor | None = None,
        *,
        counts: Sequence[int] | None = None,
        candidates: slice = ALL,
    ) -> tuple[Tensor, Tensor]:
        """Predict the masks of M prompts at once; each prompt may belong to any of the images.

        Args:
            embeddings: float [B, ..., side, side], from `embed`.
            image: int64 [M], index of the image of each mask; M may be 0, and then B too.
            points: float32 [M, P, 2], pixels of the padded square (see above); P may be 0.
            labels: int64 [M, P]: 1 foreground, 0 background, 2 and 3 first and second corner of a box, -1
                empty. The published code adds a point of label -1 to prompts without a box; here the caller
                must do this.
            low_res: float [M, 1, 4 * side, 4 * side], logits of an earlier iteration. None: no mask has
                logits.
            has_low_res: bool [M], whether each mask has logits. None: all masks have logits if low_res is
                passed.
            counts: number of masks of each image, B numbers with the sum M; `image` must be ascending. The
                masks of an image then share its embedding. None: `image` may have any order, and the
                embedding is copied for each mask.
            candidates: which of the four masks: ALL, SINGLE or AMBIGUOUS of sa1b.sam.mask_decoder.

        Returns:
            Logits float [M, K, 4 * side, 4 * side] of the K candidates, and their predicted IoU, float [M,
            K]. Mask 0 is for unambiguous prompts, masks 1 to 3 are for ambiguous ones. All parameters of
            prompt encoder and mask decoder are used for all prompts and candidates, so they always get a
            gradient.

        Raises:
            ValueError: counts do not add up.
        """
        if counts is not None and (len(counts), sum(counts)) != (len(embeddings), len(image)):
            raise ValueError(
                f"counts={counts}: must be the masks of {len(embeddings)} images, {len(image)} in all"
            )
        if len(image) == 0:  # as in `embed`: decode one mask without prompts and discard it
            blank = F.pad(embeddings[:0], (0, 0, 0, 0, 0, 0, 0, 1))
            points, labels = F.pad(points, (0, 0, 0, 0, 0, 1)), F.pad(labels, (0, 0, 0, 1), value=-1)
            logits, iou = self.decode(blank, image.new_zeros(1), points, labels, candidates=candidates)
            return logits[:0], iou[:0]
        if counts is None:
            embeddings, counts = embeddings.index_select(0, image), [1] * len(image)
            image = torch.arange(len(image), device=image.device)
        clicks = None
        if self.similarity is not None:
            embeddings, pixels = self.similarity.split(embeddings)
            clicks = self.similarity.clicks(pixels, image, points, labels, self.config.image_size)
        sparse, dense = self.prompt_encoder(points, labels, low_res, has_low_res)
        if self.similarity is not None and clicks is not None:
            sparse = sparse + self.similarity.embed(clicks)
        dtype = self.mask_decoder.mask_tokens.weight.dtype
        if torch.is_autocast_enabled(image.device.type):
            dtype = torch.get_autocast_dtype(image.device.type)
        tokens_of_images = embeddings.flatten(2).transpose(1, 2).to(dtype) + dense.constant.to(dtype)
        position = self.prompt_encoder.image_position()[0].flatten(1).T.to(dtype)
        features = None if dense.features is None else dense.features.to(dtype)
        placed = tokens_of_images + position
        shared = SharedImage(tokens_of_images, placed, counts, features, dense.basis.to(dtype))
        logits, iou, tokens = self.mask_decoder(shared, position, sparse, candidates)
        if self.similarity is not None and clicks is not None:
            logits = logits + self.similarity(clicks, counts, tokens).to(logits.dtype)
        return logits, iou
