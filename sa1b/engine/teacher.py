"""The teacher of a distillation, from its weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from sa1b.engine.checkpoint.weights import find_weights
from sa1b.errors import Sa1bError, UsageError
from sa1b.grounding.model import is_grounding
from sa1b.sam.initial_weights import fit_weights
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import config_of, weights_digest


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """The teacher of a distillation.

    Attributes:
        teacher: Weights of the teacher, a SAM: a published file (.safetensors, .pth), a checkpoint, the
            folder of a run, or the URL of one of these. For --dry-run and `sa1b plan train`, the name of a
            model is enough: vit_b, vit_l, vit_h.
        digest: Digest of the teacher's weights, which is recorded in checkpoints.
    """

    teacher: str = ""
    digest: Annotated[str, tyro.conf.Suppress] = ""


def open_teacher(source: str, student: ModelConfig, scratch: Path | None) -> Sam:
    """The teacher with the student's image size; position embeddings are resized to it.

    Args:
        source: see `TeacherConfig`; the name of a model gives a teacher without weights.

    Raises:
        UsageError: the weights cannot be read, or are not those of a SAM.
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


def teacher_digest(source: str, scratch: Path | None) -> str:
    """A digest of the names, shapes and values of the teacher's weights.

    Raises:
        UsageError: as for `open_teacher`; or `source` is the name of a model.
    """
    if _is_name(source):
        raise UsageError(
            f"--distill.teacher {source}: is the name of a model; pass the file of its weights to train"
        )
    return weights_digest(_weights(source, scratch))[:16]


def _is_name(source: str) -> bool:
    return source in PRESETS and not Path(source).exists()


def _weights(source: str, scratch: Path | None) -> dict[str, Tensor]:
    try:
        with torch.device("cpu"):  # a model that is built only for its sizes is on the meta device
            where, weights = find_weights(source, scratch=scratch)
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--distill.teacher: {error}") from None
    if is_grounding(weights):
        raise UsageError(f"--distill.teacher {where}: a grounding model has no mask decoder; pass a SAM")
    return weights
