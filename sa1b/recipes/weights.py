"""Weights in: the model in a run or a file, and the teacher of a distillation."""

import json
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from sa1b.arguments import check_arguments
from sa1b.console import counted
from sa1b.engine import weights
from sa1b.errors import Sa1bError, UsageError
from sa1b.grounding.alignment import GroundingRecipe, TextConfig
from sa1b.grounding.model import Grounding, is_grounding
from sa1b.sam.low_rank import merged
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import WeightsError, check_weights, config_of, read_tensors


def find_weights(source: str | PathLike[str], scratch: Path | None = None) -> tuple[str, dict[str, Tensor]]:
    """The weights of a SAM in a run, a checkpoint or a file, with low-rank changes added to the weights that
    they change, see `sa1b.engine.weights.find_weights`. WeightsError: they are not those of a SAM.
    """
    where, tensors = weights.find_weights(source, read_tensors, scratch)
    if is_grounding(tensors):
        raise WeightsError(
            f"{where}: a grounding model, not a SAM; pass its run to sa1b.load_grounding, or as --init"
        )
    tensors = merged(tensors)
    check_weights(where, tensors)
    return where, tensors


@check_arguments
def load_model(source: str | Path, device: torch.device | str = "cpu") -> Sam:
    """The model in a run, a checkpoint or a file of weights, ready for `sa1b.predict`.

    Args:
        source: the folder of a run (--out of `sa1b train`; its newest good checkpoint is taken), a
            checkpoint in it, or a .pth or .safetensors with the published names; or the URL of one of these.

    Raises:
        UsageError: the source is not a path, or the device is a GPU and torch finds none.
        CheckpointError: the file or folder does not exist, or the checkpoint is damaged.
        WeightsError: the file is damaged, or does not contain a SAM.
        OSError: the source cannot be read.
    """
    if not isinstance(source, str | PathLike):
        raise UsageError(f"source {source!r}: not a path; pass {weights.KINDS}")
    _check_device(device)
    tensors = find_weights(source)[1]
    model = Sam(config_of(tensors))
    model.load_state_dict(tensors)
    return model.to(device).eval()


def _check_device(device: torch.device | str) -> None:
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r}: must be 'cpu', 'cuda' or 'cuda:N'") from None
    if target.type == "cuda" and (target.index or 0) >= (count := torch.cuda.device_count()):
        gpus = f"only {counted(count, 'GPU')}" if count else "no GPU"
        raise UsageError(f"device {str(device)!r}: torch finds {gpus}; pass device='cpu'")


@check_arguments
def load_grounding(source: str | PathLike[str], device: torch.device | str = "cpu") -> Grounding:
    """The model of a run with `--preset grounding`, ready for `sa1b.ground`.

    Args:
        source: the folder of a run (--out of `sa1b train`; its newest good checkpoint is taken), or a
            checkpoint in it. The sizes of the model are in the run's config.json.

    Raises:
        UsageError: the source is not the run of a grounding model.
        CheckpointError: the checkpoint is damaged, or there is none.
        OSError: the source cannot be read.
    """
    _check_device(device)
    path = Path(source)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    try:
        document = json.loads((run / "config.json").read_bytes())
        text, recipe = TextConfig(**document["text"]), GroundingRecipe(**document["recipe"])
        sizes, data = ModelConfig.saved({**document["model"], "kernels": "auto"}), document["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{source}: not the run of a grounding model ({type(error).__name__}: {error}); pass the --out "
            "of `sa1b train --preset grounding`"
        ) from None
    length, vectors = data["text_tokens"], data["text_width"]
    model = Grounding(sizes, text, recipe, tokenizer=data["tokenizer"], length=length, vectors=vectors)
    model.load_weights(weights.find_weights(path, read_tensors)[1])
    return model.to(device).eval()


def teacher_weights(source: str, scratch: Path | None) -> dict[str, Tensor] | None:
    """The weights of a teacher; None: the name of a model. UsageError: no SAM."""
    if source in PRESETS and not Path(source).exists():
        return None
    try:
        with torch.device("cpu"):  # a model that is built only for its sizes is on the meta device
            return find_weights(source, scratch)[1]
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--distill.teacher: {error}") from None
