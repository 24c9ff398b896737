"""Distillation of the image encoder: a small student learns the embeddings of a frozen teacher.

The teacher runs in the training loop, because its embeddings of SA-1B would take 23 TB; those of a small
subset can be cached, see `EmbeddingCache`. The student gets the teacher's prompt encoder and mask
decoder, frozen, so that it predicts masks from the first step on.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.sam.clicks import random_words
from sa1b.sam.interactive import EvaluationProtocol, Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe, encoder_flops
from sa1b.sam.targets import Targets

_ENCODER = "image_encoder."


_ENDING = ".safetensors"
_NAME = "embedding"
_CRC = "crc32c"


class EmbeddingCache:
    """The embeddings of one teacher in an existing folder; this process may write `limit` bytes.

        FOLDER/float32/3f/3f0c96a71b2e58d4.safetensors    NUMBER FORMAT of matrix products/HASH of the pixels

    A file has a float16 embedding, 2 MB for SAM, and its crc32c; a truncated or damaged file counts as
    missing. Nothing is evicted, since every epoch reads all images. Embeddings are computed one image at a
    time and rounded to float16 before use, so that results do not depend on what the cache contains.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = self._left = limit
        self._words = torch.empty(0, dtype=torch.int64)

    def embeddings(
        self, images: Tensor, sizes: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The embeddings of B >= 1 images, float32 [B, C, h, w] on their device; waits for the device.
        `sizes`: rows and columns in the padded square. `compute` is called for each missing image alone.
        """
        self._words = _words_of(images, self._words)
        keys = pixel_keys(images, sizes, self._words).tolist()
        halves = [self._embedding(key, images[[i]], sizes[[i]], compute) for i, key in enumerate(keys)]
        return torch.stack([half.float() for half in halves])  # autocast stacks no float16 on a CPU

    def _embedding(
        self, key: int, image: Tensor, size: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The embedding of an image, float16 [C, h, w] on its device."""
        name = f"{key % (1 << 64):016x}"
        path = self.folder / _number_format(image.device) / name[:2] / f"{name}{_ENDING}"
        cached = _read(path)
        if cached is not None:
            return cached.to(image.device)
        embedding = compute(image, size)[0].half()
        self._write(path, embedding)
        return embedding

    def _write(self, path: Path, embedding: Tensor) -> None:
        if not self._left:
            return
        values = embedding.cpu().contiguous()
        if not values.isfinite().all():  # the run's check of losses reports it; it is not repeated from here
            return
        data = save({_NAME: values, _CRC: torch.tensor(_crc(values))})
        if len(data) > self._left:
            self._left = 0
            return
        self._left -= len(data)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        except OSError as error:
            self._left = 0
            sys.stderr.write(
                f"--distill.cache {self.folder}: cannot be written ({error.strerror}); embeddings that are "
                "missing are computed in every epoch\n"
            )


def pixel_keys(images: Tensor, sizes: Tensor, words: Tensor) -> Tensor:
    """A hash of the pixels and the size of each image, int64 [B], from random words int64 [3, S, S]."""
    # The sum of all pixel values, each times a random word, modulo 2**64: the sums of two different images
    # are equal with a probability of at most 2**-56 (Carter and Wegman, "Universal classes of hash
    # functions", 1979). Integer sums have the same bits in any order, on any device.
    sums = torch.stack([(image * words).sum() for image in images])  # uint8 * int64 is int64
    return random_words(sums, Purpose.CACHE, sizes[:, 0], sizes[:, 1])


def _words_of(images: Tensor, last: Tensor) -> Tensor:
    """Random words for the pixels of an image; `last` if they fit."""
    shape = images.shape[1:]
    if last.shape == shape and last.device == images.device:
        return last
    key = torch.zeros((), dtype=torch.int64, device=images.device)
    numbers = torch.arange(shape.numel(), device=images.device)
    return random_words(key, Purpose.CACHE, numbers).view(shape)


def _number_format(device: torch.device) -> str:
    """Name of the dtype of the teacher's matrix products."""
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else torch.float32
    return str(dtype).removeprefix("torch.")


def _read(path: Path) -> Tensor | None:
    """The embedding in a file; None if there is no file, or a damaged one."""
    try:
        tensors = load(path.read_bytes())
        values, crc = tensors[_NAME], tensors[_CRC]
    except (OSError, SafetensorError, KeyError):
        return None
    return values if int(crc) == _crc(values) else None


def _crc(values: Tensor) -> int:
    return int(google_crc32c.value(values.numpy().tobytes()))


class Distillation(Interactive):
    """A student in training together with its teacher, of the same image size, patch size and channels.

    The loss of an image is the mean squared difference of both embeddings over channels and over the tokens
    that contain a part of the image. Only an evaluation uses the targets. The teacher is not a submodule: it
    is not saved, trained or sharded, and every rank has a copy. Without a `cache`, its embeddings are
    computed for every visit of an image.
    """

    figures = ("loss", "cosine")
    shown: Mapping[str, str] = {"cosine": "cosine"}

    def __init__(self, model: Sam, recipe: Recipe, teacher: Sam, cache: EmbeddingCache | None = None) -> None:
        super().__init__(model, recipe)
        check_sizes(model.config, teacher.config)
        self._cache = cache
        self._frozen = (teacher.eval().requires_grad_(False),)
        model.requires_grad_(False)
        model.image_encoder.requires_grad_(True)
        if not teacher.pixel_mean.is_meta:  # a meta model has no values, only sizes
            others = {
                name: tensor for name, tensor in teacher.state_dict().items() if not name.startswith(_ENCODER)
            }
            model.load_state_dict(others, strict=False)

    @property
    def teacher(self) -> Sam:
        """The frozen model."""
        return self._frozen[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # nn.Module's method has no types.
        of_teacher: Callable[..., Any] = self.teacher._apply
        of_student: Callable[..., Any] = super()._apply
        of_teacher(fn, recurse)
        return of_student(fn, recurse)

    def flops(self, images: float, masks: float) -> float:
        """Forward and backward pass of the student, and without a cache a forward pass of the teacher."""
        teacher = encoder_flops(self.teacher.config) if self._cache is None else 0.0
        return images * (3 * encoder_flops(self.model.config) + teacher)

    def end(self, stream: Tensor, images: Tensor, targets: Targets, image_keys: Tensor) -> dict[str, Tensor]:
        return self._learn(self.model.image_encoder.embedding(stream), images, targets.sizes)

    def forward(
        self,
        images: Tensor,
        targets: Targets,
        image_keys: Tensor,
        *,
        evaluate: bool = False,
        protocol: EvaluationProtocol | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a micro-batch, or its scores as those of `Interactive`.

        In training, sums over images, float32 scalars: "loss", with the gradient; "cosine", the mean cosine
        similarity of the tokens of both embeddings; "count", the number of images.
        """
        if evaluate or protocol is not None:
            return super().forward(images, targets, image_keys, evaluate=evaluate, protocol=protocol)
        embeddings = self.model.embed(images, self._kept(image_keys), targets.sizes)
        return self._learn(embeddings[:, : self.model.config.channels], images, targets.sizes)

    def _learn(self, embeddings: Tensor, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        if self.teacher.pixel_mean.device != images.device:
            self.teacher.to(images.device)
        goal = self._wanted(images, sizes)
        learned = embeddings.float()
        inside = _inside(sizes, self.model.config)
        weights = inside / inside.sum(dim=(1, 2), keepdim=True)
        errors = (learned - goal).square().mean(dim=1)
        similarity = functional.cosine_similarity(learned.detach(), goal, dim=1)
        return {
            "loss": (weights * errors).sum(),
            "cosine": (weights * similarity).sum(),
            "count": weights.new_tensor(float(len(images))),
        }

    @torch.no_grad()
    def _wanted(self, images: Tensor, sizes: Tensor) -> Tensor:
        """The teacher's embeddings: float32 [B, channels, side, side]."""
        if self._cache is None or len(images) == 0:
            return self._computed(images, sizes).float()
        return self._cache.embeddings(images, sizes, self._computed)

    def _computed(self, images: Tensor, sizes: Tensor) -> Tensor:
        return self.teacher.embed(images, None, sizes)[:, : self.model.config.channels]


def check_sizes(student: ModelConfig, teacher: ModelConfig) -> None:
    """Refuse a student whose embeddings or decoder have other sizes than the teacher's, with a UsageError."""
    for name in ("patch_size", "channels", "pixel_features"):
        if getattr(student, name) != getattr(teacher, name):
            flag = f"--model.{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {getattr(student, name)}: the teacher has {getattr(teacher, name)}, and the student "
                f"takes over its mask decoder; pass {flag} {getattr(teacher, name)}"
            )


def _inside(sizes: Tensor, model: ModelConfig) -> Tensor:
    """Whether a token contains a part of the image: float32 [B, side, side]."""
    starts = torch.arange(model.side, device=sizes.device) * model.patch_size
    rows, columns = (starts < sizes[:, :, None]).unbind(1)
    return (rows[:, :, None] & columns[:, None, :]).float()
