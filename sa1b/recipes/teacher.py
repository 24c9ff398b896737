"""The teacher of a distillation, from its weights, and the cache of its embeddings."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from sa1b.arguments import Range, check_cache_flags, check_fields
from sa1b.errors import Sa1bError, UsageError
from sa1b.grounding.model import is_grounding
from sa1b.recipes.weights import find_weights
from sa1b.sam.distillation import EmbeddingCache
from sa1b.sam.initial_weights import fit_weights
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import config_of, weights_digest
from sa1b.storage.protocols import protocol_of


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """The teacher of a distillation.

    Attributes:
        teacher: Weights of the teacher, a SAM: a published file (.safetensors, .pth), a checkpoint, the
            folder of a run, or the URL of one of these. For --dry-run and `sa1b plan train`, the name of a
            model is enough: vit_b, vit_l, vit_h.
        cache: Folder on a local disk that keeps the teacher's embeddings, rounded to float16, so that later
            epochs read them; for subsets of some ten thousand images, 2 MB each. By default the teacher
            computes the embedding of every image in every epoch.
        cache_bytes: Limit of the cache on each machine, in bytes; required with a cache. When it is reached,
            further embeddings are computed and not kept.
        digest: Digest of the teacher's weights, which is recorded in checkpoints.
    """

    teacher: str = ""
    cache: str | None = None
    cache_bytes: Annotated[int | None, Range(1)] = None
    digest: Annotated[str, tyro.conf.Suppress] = ""

    def check(self) -> None:
        """UsageError names the flag of a setting that does not fit the others."""
        if not self.teacher:
            raise UsageError(
                "--distill.teacher: missing; pass the weights of a SAM: a run, a .safetensors or a .pth"
            )
        check_cache_flags("--distill.cache", self.cache, self.cache_bytes)
        check_fields(self, "distill")
        if protocol_of(self.cache or ""):
            raise UsageError(f"--distill.cache {self.cache}: must be a folder on a local disk, not a URL")


def open_teacher(source: str, student: ModelConfig, scratch: Path | None) -> Sam:
    """The teacher with the student's image size; position embeddings are resized to it. The name of a model
    gives a teacher without weights. UsageError: the weights cannot be read, or are not those of a SAM.
    """
    weights = None if _is_name(source) else _weights(source, scratch)
    config = PRESETS[source] if weights is None else config_of(weights)
    if student.image_size % config.patch_size:
        raise UsageError(
            f"--model.image-size {student.image_size}: must be a multiple of the teacher's patch size "
            f"{config.patch_size}"
        )
    config = replace(config, image_size=student.image_size, compile_blocks=student.compile_blocks)
    teacher = Sam(config)
    if weights is not None and not teacher.pixel_mean.is_meta:
        teacher.load_state_dict(fit_weights(weights, config).tensors)
    return teacher


def open_cache(config: TeacherConfig) -> EmbeddingCache | None:
    """The cache of the teacher's embeddings; None if there is none, or no digest of the teacher.

    The files of all teachers count towards the limit. The ranks of a machine share what is left of it.
    UsageError: the folder cannot be created or read.
    """
    if config.cache is None or config.cache_bytes is None or not config.digest:
        return None
    every = Path(config.cache).expanduser()
    folder = every / config.digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = dict(_sizes(every))
    except OSError as error:
        raise UsageError(
            f"--distill.cache {config.cache}: {error.filename} cannot be created or read ({error.strerror}); "
            "pass another folder"
        ) from None
    left = max(config.cache_bytes - sum(sizes.values()), 0)
    if os.environ.get("RANK", "0") == "0":
        found = sum(folder in path.parents for path in sizes)
        sys.stderr.write(
            f"--distill.cache {folder}: {found:,} embeddings; up to {left:,} more bytes will be written\n"
        )
    return EmbeddingCache(folder, left // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def teacher_digest(source: str, scratch: Path | None) -> str:
    """A digest of the names, shapes and values of the teacher's weights; errors as for `open_teacher`."""
    if _is_name(source):
        raise UsageError(
            f"--distill.teacher {source}: is the name of a model; to train, pass the file of its weights"
        )
    return weights_digest(_weights(source, scratch))[:16]


def _sizes(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files in a folder and their bytes, while other processes write and rename some."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size


def _is_name(source: str) -> bool:
    return source in PRESETS and not Path(source).exists()


def _weights(source: str, scratch: Path | None) -> dict[str, Tensor]:
    try:
        with torch.device("cpu"):  # a model that is built only for its sizes is on the meta device
            where, weights = find_weights(source, scratch)
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--distill.teacher: {error}") from None
    if is_grounding(weights):
        raise UsageError(f"--distill.teacher {where}: a grounding model has no mask decoder; pass a SAM")
    return weights
