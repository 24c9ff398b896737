"""Weights from checkpoints and published files, as a start for training and for export."""

import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sa1b.engine.checkpoint import bucket_checkpoints, files, tensors
from sa1b.engine.checkpoint.files import Found, folder_name, none_good, read, step_of, steps
from sa1b.engine.model import Model
from sa1b.errors import CheckpointError, UsageError
from sa1b.grounding.model import is_grounding
from sa1b.sam.model import Sam
from sa1b.sam.published import (
    FORMATS,
    WeightsError,
    config_of,
    preset_of,
    read_weights,
    write_weights,
)
from sa1b.shards.staging import clean_scratch
from sa1b.storage.atomic import temporary_path
from sa1b.storage.open import open_store
from sa1b.storage.protocols import protocol_of

PUBLISHED = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name

_KINDS = (
    "the folder of a run (--out of `sa1b train`), a checkpoint in it (RUN/checkpoints/step-...), "
    "a .safetensors or a .pth, or the URL of one of these"
)
_LOG = logging.getLogger(__name__)


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
    source: str | PathLike[str],
    read_file: Callable[[Path], dict[str, Tensor]] = read_weights,
    scratch: Path | None = None,
) -> tuple[str, dict[str, Tensor]]:
    """Initial weights for a run, by published names, float32, on the CPU; and their path or URL.

    Args:
        source: a checkpoint, the folder of a run (its newest good checkpoint is taken), or a published file;
            or the URL of one of these, which is copied to a temporary folder.
        read_file: reads a published file.
        scratch: of a URL: folder that contains the temporary folder, see `sa1b.storage.open.open_store`.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder contains none.
        WeightsError: the file is damaged, or contains another model.
        OSError, StorageError: the source cannot be read.
    """
    if protocol_of(str(source)):
        return _fetched_weights(str(source).rstrip("/"), read_file, scratch)
    source = Path(source)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; pass {_KINDS}")
    if not source.is_dir():
        return str(source), read_file(source)
    if (source / "checkpoints").is_dir():
        found = newest(source / "checkpoints")
        if found is None:
            raise CheckpointError(
                f"{source}: has no checkpoint yet; wait for the first one (--checkpoint.every), or pass "
                "other weights"
            )
    elif source.name == "checkpoints" and files.steps(source):
        raise CheckpointError(f"{source}: the folder of a run's checkpoints; pass {source.parent}")
    elif not is_checkpoint(source):
        raise CheckpointError(f"{source}: a folder without weights; pass {_KINDS}")
    else:
        found = files.read(source)
    return str(found.folder), tensors.read_weights(found.folder, found.metadata)


def _fetched_weights(
    url: str, read_file: Callable[[Path], dict[str, Tensor]], scratch: Path | None
) -> tuple[str, dict[str, Tensor]]:
    parent, _, last = url.rpartition("/")
    if last.endswith(FORMATS):
        with open_store(parent, scratch=scratch).files(last) as [path]:
            if not path.exists():
                raise CheckpointError(f"{url}: no such object; pass {_KINDS}")
            return url, read_file(path)
    step = files.step_of(last)
    store = open_store(url if step is None else parent.rpartition("/")[0], scratch=scratch)
    steps = bucket_checkpoints.committed(store) if step is None else [step]
    if not steps:
        raise CheckpointError(f"{url}: has no checkpoint; pass {_KINDS}")
    store.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = temporary_path(store.scratch / "weights")
    refused: list[str] = []
    with clean_scratch(store), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for number in reversed(steps):
            try:
                found = bucket_checkpoints.download(store, number, folder)
            except files.RetrievalError:
                raise
            except CheckpointError as error:
                if step is not None:
                    raise
                refused.append(str(error))
                _LOG.warning("skipping checkpoint %s: %s", files.folder_name(number), error)
                continue
            where = store.url(f"checkpoints/{files.folder_name(number)}")
            return where, tensors.read_weights(found.folder, found.metadata)
    raise files.none_good(url, refused)


def load_weights(model: Model, source: str | PathLike[str], scratch: Path | None = None) -> str:
    """Load the weights that `find_weights` finds into a model; return a line that describes them.

    Raises:
        UsageError: the weights do not fit the model.
        CheckpointError, Sa1bError, OSError: see `find_weights`.
    """
    where, found = find_weights(source, model.read_weights, scratch)
    try:
        return f"{where}: {model.load_weights(found)}"
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


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
        raise UsageError(f"source {source!r}: not a path; pass {_KINDS}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(device)!r}: torch finds no GPU; pass device='cpu'")
    where, found = find_weights(source)
    if is_grounding(found):
        raise WeightsError(f"{where}: a grounding model; load its run with sa1b.load_grounding")
    try:
        model = Sam(config_of(found))
        model.load_state_dict(found)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise WeightsError(
            f"{where}: not the weights of a SAM ({type(error).__name__}: {first}); pass {_KINDS}"
        ) from None
    return model.to(device).eval()


def convert(
    source: str | PathLike[str], target: Path, *, overwrite: bool = False, scratch: Path | None = None
) -> Converted:
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
    where, weights = find_weights(source, scratch=scratch)
    if is_grounding(weights):
        raise UsageError(
            f"{where}: a grounding model, which needs the settings of its run; load the run with "
            "sa1b.load_grounding, or pass it as --init"
        )
    write_weights(target, weights)
    config = config_of(weights)
    return Converted(
        source=where,
        target=str(target),
        bytes=target.stat().st_size,
        model=preset_of(config),
        image_size=config.image_size,
        parameters=sum(tensor.numel() for tensor in weights.values()),
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a folder with the name of a committed checkpoint, good or damaged."""
    return folder.is_dir() and step_of(folder.name) is not None


def newest(folder: Path) -> Found | None:
    """The newest good checkpoint in RUN/checkpoints; None if there are no checkpoints.

    Each damaged checkpoint is skipped with a logged warning. Call it in one process of a run.

    Raises:
        CheckpointError: there are checkpoints, but none is good.
    """
    refused = []
    for step in reversed(steps(folder)):
        try:
            return read(folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            _LOG.warning("skipping checkpoint %s: %s", folder_name(step), error)
    if refused:
        raise none_good(folder, refused)
    return None
