"""Embeddings of images on a local disk, which several epochs and runs read.

An image encoder that is not trained (the encoder of a teacher, or one that --optim.freeze names) gives an
image the same embedding in each epoch. For a subset of SA-1B or a dataset of one's own, the embeddings fit on
a disk.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from crc32c import crc32c
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sa1b.hashing import Purpose
from sa1b.sam.clicks import random_words

_ENDING = ".safetensors"
_NAME = "embedding"
_CRC = "crc32c"


class EmbeddingCache:
    """The embeddings of one image encoder in an existing folder; this process may write `limit` bytes.

        FOLDER/float32/3f/3f0c96a71b2e58d4.safetensors    NUMBER FORMAT of matrix products/HASH of the pixels

    A file has a float16 embedding, 2 MB for SAM, and its crc32c; a truncated or damaged file counts as
    missing. Nothing is evicted, since every epoch reads all images. Embeddings are computed one image at a
    time and rounded to float16 before use, so that results do not depend on what the cache contains.
    """

    def __init__(self, folder: Path, limit: int, flag: str = "--distill.cache") -> None:
        self.folder, self._flag = folder, flag
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
        if not values.isfinite().all():  # not stored; the run's check of losses reports it
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
                f"{self._flag} {self.folder}: cannot be written ({error.strerror}); embeddings that are "
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
    """Name of the dtype of matrix products."""
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
    return crc32c(values.numpy().tobytes())
