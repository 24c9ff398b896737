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

from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.sam.clicks import random_words

_ENDING = ".safetensors"


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
        device, shape = images.device, images.shape[1:]
        if (self._words.shape, self._words.device) != (shape, device):
            key = torch.zeros((), dtype=torch.int64, device=device)
            numbers = torch.arange(shape.numel(), device=device).view(shape)
            self._words = random_words(key, Purpose.CACHE, numbers)
        # The sum of all pixel values, each times a random word, modulo 2**64: the sums of two images that
        # differ are equal with a probability of at most 2**-56 (Carter and Wegman, "Universal classes of hash
        # functions", 1979). Integer sums have the same bits in any order, on any device.
        sums = torch.stack([(image * self._words).sum() for image in images])  # uint8 * int64 is int64
        keys = random_words(sums, Purpose.CACHE, sizes[:, 0], sizes[:, 1])
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else torch.float32
        folder, found = self.folder / str(dtype).removeprefix("torch."), []
        for i, key in enumerate(keys.tolist()):
            name = f"{key % (1 << 64):016x}"
            path = folder / name[:2] / f"{name}{_ENDING}"
            embedding = _read(path)
            if embedding is None:
                embedding = compute(images[[i]], sizes[[i]])[0].half()
                self._write(path, embedding)
            found.append(embedding.to(device).float())  # autocast stacks no float16 on a CPU
        return torch.stack(found)

    def _write(self, path: Path, embedding: Tensor) -> None:
        if not self._left or not embedding.isfinite().all():  # the run's check of losses reports the latter
            return
        values = embedding.cpu().contiguous()
        data = save({"embedding": values, "crc32c": torch.tensor(_crc(values))})
        if len(data) > self._left:
            self._left = 0
            return
        self._left -= len(data)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            self._left = 0
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            sys.stderr.write(
                f"{self._flag} {self.folder}: cannot be written ({error.strerror}); embeddings that are "
                "missing are computed in every epoch\n"
            )


def open_cache(flag: str, cache: str, cache_bytes: int, digest: str) -> EmbeddingCache:
    """The cache of the embeddings of an image encoder, whose weights have this digest.

    The files of all encoders count towards the limit. The ranks of a machine share what is left of it.
    UsageError: the folder cannot be created or read.
    """
    folder = Path(cache).expanduser() / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {path: path.stat().st_size for path in folder.parent.rglob(f"*{_ENDING}")}
    except OSError as error:
        raise UsageError(
            f"{flag} {cache}: {error.filename} cannot be created or read ({error.strerror}); "
            "pass another folder"
        ) from None
    left = max(cache_bytes - sum(sizes.values()), 0)
    if os.environ.get("RANK", "0") == "0":
        count = sum(folder in path.parents for path in sizes)
        line = f"{flag} {folder}: {count:,} embeddings; up to {left:,} more bytes will be written\n"
        sys.stderr.write(line)
    return EmbeddingCache(folder, left // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), flag)


def _read(path: Path) -> Tensor | None:
    """The embedding in a file; None if there is no file, or a damaged one."""
    try:
        tensors = load(path.read_bytes())
        values, crc = tensors["embedding"], tensors["crc32c"]
    except (OSError, SafetensorError, KeyError):
        return None
    return values if int(crc) == _crc(values) else None


def _crc(values: Tensor) -> int:
    return crc32c(values.numpy().tobytes())
