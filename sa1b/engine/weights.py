"""Weights from checkpoints and files, as a start for training and for export."""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from sa1b.engine.checkpoint import bucket, tensors
from sa1b.engine.checkpoint.folder import RetrievalError, check, folder_name, none_good, step_of, steps
from sa1b.engine.model import Model
from sa1b.errors import CheckpointError, Sa1bError, UsageError
from sa1b.shards.staging import clean_scratch
from sa1b.storage.atomic import temporary_path
from sa1b.storage.open import open_store
from sa1b.storage.protocols import protocol_of

FILES = (".pth", ".safetensors")
KINDS = (
    "the folder of a run (--out of `sa1b train`), a checkpoint in it (RUN/checkpoints/step-...), "
    "a .safetensors or a .pth, or the URL of one of these"
)
_LOG = logging.getLogger(__name__)


def find_weights(
    source: str | PathLike[str],
    read_file: Callable[[Path], dict[str, Tensor]],
    scratch: Path | None = None,
    *,
    mean: bool = True,
) -> tuple[str, dict[str, Tensor]]:
    """Initial weights for a run, by published names, float32, on the CPU; and their path or URL.

    `source` is a checkpoint, the folder of a run (its newest good checkpoint is taken), or a published file,
    which `read_file` reads; or the URL of one of these, which is copied to a temporary folder in `scratch`.
    `mean`: read the running mean of the weights (--optim.ema), if the run has one.
    CheckpointError: the checkpoint is damaged, or the folder has none. Sa1bError or OSError: the file is
    damaged or of another model, or cannot be read.
    """
    if protocol_of(str(source)):
        return _fetched_weights(str(source).rstrip("/"), read_file, scratch, mean=mean)
    source = Path(source)
    if not source.exists():
        with contextlib.suppress(FileNotFoundError):
            read_file(source)  # raises another error if it knows who publishes a file of this name
        raise CheckpointError(f"{source}: no such file or folder; pass {KINDS}")
    if not source.is_dir():
        return str(source), read_file(source)
    if (source / "checkpoints").is_dir():
        checkpoint = newest(source / "checkpoints")
        if checkpoint is None:
            raise CheckpointError(
                f"{source}: has no checkpoint yet; wait for the first one (--checkpoint.every), or pass "
                "other weights"
            )
    elif source.name == "checkpoints" and steps(source):
        raise CheckpointError(f"{source}: the folder of a run's checkpoints; pass {source.parent}")
    elif not is_checkpoint(source):
        tars = "; tars become shards by `sa1b reshard`" if any(source.glob("*.tar*")) else ""
        raise CheckpointError(f"{source}: a folder without weights; pass {KINDS}{tars}")
    else:
        check(source)
        checkpoint = source
    return str(checkpoint), tensors.read_weights(checkpoint, mean=mean)


def _fetched_weights(
    url: str, read_file: Callable[[Path], dict[str, Tensor]], scratch: Path | None, *, mean: bool
) -> tuple[str, dict[str, Tensor]]:
    parent, _, last = url.rpartition("/")
    if last.endswith(FILES):
        with open_store(parent, scratch=scratch).files(last) as [path]:
            if not path.exists():
                raise CheckpointError(f"{url}: no such object; pass {KINDS}")
            return url, read_file(path)
    step = step_of(last)
    store = open_store(url if step is None else parent.rpartition("/")[0], scratch=scratch)
    there = bucket.committed(store) if step is None else [step]
    if not there:
        raise CheckpointError(f"{url}: has no checkpoint; pass {KINDS}")
    store.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = temporary_path(store.scratch / "weights")
    with clean_scratch(store), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if step is not None:
            return url, tensors.read_weights(bucket.download(store, step, folder), mean=mean)
        checkpoint = _newest(url, there, lambda number: bucket.download(store, number, folder))
        where = store.url(f"checkpoints/{checkpoint.name}")
        return where, tensors.read_weights(checkpoint, mean=mean)


def nearest_checkpoint(source: str, step: int) -> tuple[str, int | None]:
    """The checkpoint of a run whose number of steps is nearest to `step`, the earlier one of two, and its
    step; `source` is the folder or URL of the run. Any other source is returned as it is, with its step if it
    is a checkpoint.
    """
    source = source.rstrip("/")
    number = step_of(source.rpartition("/")[2])
    if number is not None or source.endswith(FILES):
        return source, number
    there = (
        bucket.committed(open_store(source)) if protocol_of(source) else steps(Path(source, "checkpoints"))
    )
    if not there:
        return source, None
    nearest = min(there, key=lambda saved: (abs(saved - step), saved))
    return f"{source}/checkpoints/{folder_name(nearest)}", nearest


def state_digest(module: nn.Module) -> str:
    """SHA-256 of the names and values of a module's state; 16 characters of it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def load_weights(model: Model, source: str | PathLike[str], scratch: Path | None = None) -> str:
    """Load the weights of --init; a line that describes them. UsageError: unreadable, or they do not fit."""
    try:
        where, weights = find_weights(source, model.read_weights, scratch)
        try:
            return f"{where}: {model.load_weights(weights)}"
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--init: {error}") from None


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a folder with the name of a committed checkpoint, good or damaged."""
    return folder.is_dir() and step_of(folder.name) is not None


def newest(folder: Path) -> Path | None:
    """The newest good checkpoint in RUN/checkpoints; None if there is none. Call it in one process.

    Each damaged checkpoint is skipped with a logged warning. CheckpointError: none is good.
    """

    def proved(step: int) -> Path:
        check(folder / folder_name(step))
        return folder / folder_name(step)

    there = steps(folder)
    return _newest(str(folder), there, proved) if there else None


def _newest(where: str, there: list[int], prove: Callable[[int], Path]) -> Path:
    refused = []
    for step in reversed(there):
        try:
            return prove(step)
        except RetrievalError:
            raise
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            _LOG.warning("skipping checkpoint %s: %s", folder_name(step), error)
    raise none_good(where, refused)
