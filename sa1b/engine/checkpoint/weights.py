"""Weights from checkpoints and published files, as a start for training and for export."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sa1b.engine.checkpoint import files, tensors
from sa1b.engine.model import Model
from sa1b.errors import CheckpointError, UsageError
from sa1b.sam.model import Sam
from sa1b.sam.published import (
    FORMATS,
    WeightsError,
    config_of,
    preset_of,
    read_weights,
    write_weights,
)

PUBLISHED = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name

_KINDS = (
    "the folder of a run (--out of `sa1b train`), a checkpoint in it (RUN/checkpoints/step-...), "
    "a .safetensors or a .pth"
)


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of exporting weights.

    Attributes:
        source: the checkpoint or file that was read.
        target: the file that was written.
        bytes: length of the file.
        model: name of the preset with these sizes; None if no preset has them.
        image_size: image size of the model in pixels.
        parameters: number of parameters of the model.
    """

    source: str
    target: str
    bytes: int
    model: str | None
    image_size: int
    parameters: int

    def document(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {**asdict(self), "snippet": self.snippet()}

    def table(self) -> str:
        """The result as text."""
        model = self.model or "of no preset's sizes"
        return (
            f"{self.source}\n  model {model}, {self.image_size} pixels, {self.parameters:,} parameters\n"
            f"Complete: {self.target} ({self.bytes:,} bytes)\n\n{self.snippet()}"
        )

    def snippet(self) -> str:
        """Python code that loads the file with this package and, for published sizes, the original one."""
        path = repr(self.target)
        own = (
            "Load it with this package:\n\n"
            "    import sa1b\n\n"
            f"    model = sa1b.load_model({path})\n"
            "    # image: uint8 RGB [height, width, 3]; x, y: pixels of it\n"
            "    # masks = sa1b.predict(model, image, points=[[x, y]]).masks\n"
        )
        if self.model not in PUBLISHED:
            return f"{own}\nThe original package (segment_anything) has no model of these sizes."
        if self.target.endswith(".pth"):
            load = f"    model = sam_model_registry[{self.model!r}](checkpoint={path})"
        else:
            load = (
                "    from safetensors.torch import load_file\n\n"
                f"    model = sam_model_registry[{self.model!r}]()\n"
                f"    model.load_state_dict(load_file({path}))"
            )
        return (
            f"{own}\nLoad it with the original package:\n\n"
            f"    from segment_anything import sam_model_registry\n{load}"
        )


def find_weights(
    source: Path, read_file: Callable[[Path], dict[str, Tensor]] = read_weights
) -> tuple[Path, dict[str, Tensor]]:
    """Initial weights for a run, by published names, float32, on the CPU; and their path.

    Args:
        source: a checkpoint, the folder of a run (its newest good checkpoint is taken), or a published file.
        read_file: reads a published file.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder contains none.
        WeightsError: the file is damaged, or contains another model.
        OSError: the source cannot be read.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; pass {_KINDS}")
    if not source.is_dir():
        return source, read_file(source)
    if (source / "checkpoints").is_dir():
        found = files.newest(source / "checkpoints")
        if found is None:
            raise CheckpointError(
                f"{source}: has no checkpoint yet; wait for the first one (--checkpoint.every), or pass "
                "other weights"
            )
    elif source.name == "checkpoints" and files.steps(source):
        raise CheckpointError(f"{source}: the folder of a run's checkpoints; pass {source.parent}")
    elif not files.is_checkpoint(source):
        raise CheckpointError(f"{source}: a folder without weights; pass {_KINDS}")
    else:
        found = files.read(source)
    return found.folder, tensors.read_weights(found.folder, found.metadata)


def load_weights(model: Model, source: Path) -> str:
    """Load the weights that `find_weights` finds into a model; return a line that describes them.

    Raises:
        UsageError: the weights do not fit the model.
        CheckpointError, Sa1bError, OSError: see `find_weights`.
    """
    where, found = find_weights(source, model.read_weights)
    try:
        return f"{where}: {model.load_weights(found)}"
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def load_model(source: str | Path, device: torch.device | str = "cpu") -> Sam:
    """The model in a run, a checkpoint or a file of weights, ready for `sa1b.predict`.

    Args:
        source: the folder of a run (--out of `sa1b train`; its newest good checkpoint is taken), a
            checkpoint in it, or a .pth or .safetensors with the published names.

    Raises:
        UsageError: the source is not a path.
        CheckpointError: the file or folder does not exist, or the checkpoint is damaged.
        WeightsError: the file is damaged, or does not contain a SAM.
        OSError: the source cannot be read.
    """
    if not isinstance(source, str | PathLike):
        raise UsageError(f"source {source!r}: not a path; pass {_KINDS}")
    where, found = find_weights(Path(source))
    try:
        model = Sam(config_of(found))
        model.load_state_dict(found)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise WeightsError(
            f"{where}: not the weights of a SAM ({type(error).__name__}: {first}); pass {_KINDS}"
        ) from None
    return model.to(device).eval()


def convert(source: Path, target: Path, *, overwrite: bool = False) -> Converted:
    """Write the weights of a checkpoint or published file to one file.

    Raises:
        UsageError: the target exists, or its name has an unknown ending.
        CheckpointError, WeightsError, OSError: see `find_weights`.
    """
    if target.suffix not in FORMATS:
        raise UsageError(f"--out {target}: must end with .safetensors or .pth")
    if target.is_dir():
        raise UsageError(f"--out {target}: is a folder; name a file that ends with .safetensors or .pth")
    if target.exists() and not overwrite:
        raise UsageError(f"--out {target}: exists; pass --overwrite to replace it")
    where, weights = find_weights(source)
    write_weights(target, weights)
    config = config_of(weights)
    return Converted(
        source=str(where),
        target=str(target),
        bytes=target.stat().st_size,
        model=preset_of(config),
        image_size=config.image_size,
        parameters=sum(tensor.numel() for tensor in weights.values()),
    )
