"""Weights from checkpoints and files, as a start for training and for export."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from sa1b.engine.checkpoint import bucket, tensors
from sa1b.engine.checkpoint.checkpoints import newest_good
from sa1b.engine.checkpoint.folder import CHECKPOINTS, checked, folder_name, read_state, step_of, steps
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


def find_weights(
    source: str | PathLike[str],
    read_file: Callable[[Path], dict[str, Tensor]],
    scratch: Path | None = None,
    *,
    mean: bool = True,
) -> tuple[str, dict[str, Tensor]]:
    """Weights by published names, float32, on the CPU, and their path or URL; `mean`: their running mean."""
    text = os.fspath(source).rstrip("/")
    folder, _, last = text.rpartition("/")
    step, is_url = step_of(last), bool(protocol_of(text))
    with contextlib.ExitStack() as stack:
        if last.endswith(FILES) if is_url else not Path(text).is_dir():
            files = open_store(folder, scratch=scratch).files(last) if is_url else None
            path = Path(text) if files is None else stack.enter_context(files)[0]
            try:
                return text, read_file(path)
            except FileNotFoundError:
                raise CheckpointError(f"{text}: no such file or folder; pass {KINDS}") from None
        proved: Callable[[int], Path]
        if is_url:
            store = open_store(text if step is None else folder.rpartition("/")[0], scratch=scratch)
            root, there = store.url(CHECKPOINTS), bucket.committed(store) if step is None else [step]
            store.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
            copies = temporary_path(store.scratch / "weights")
            stack.enter_context(clean_scratch(store))
            stack.callback(shutil.rmtree, copies, ignore_errors=True)
            proved = partial(bucket.download, store, copies)
        else:
            checkpoints = Path(text, CHECKPOINTS) if step is None else Path(folder)
            root, there = str(checkpoints), steps(checkpoints) if step is None else [step]
            proved = partial(checked, checkpoints)
        if not there:
            raise CheckpointError(f"{text}: a folder without weights; pass {KINDS}")

        def read(number: int) -> tuple[str, dict[str, Tensor]]:
            copy = proved(number)
            read_state(copy)
            return f"{root}/{copy.name}", tensors.read_weights(copy, mean=mean)

        return read(there[0]) if step is not None else newest_good(root, there, read)[0]


def nearest_checkpoint(source: str, step: int) -> tuple[str, int | None]:
    """The checkpoint of a run that is nearest to `step`, and its step; another source as it is."""
    source = source.rstrip("/")
    number = step_of(source.rpartition("/")[2])
    if number is not None or source.endswith(FILES) or not (there := bucket.saved(source)):
        return source, number
    nearest = min(there, key=lambda saved: (abs(saved - step), saved))
    return f"{source}/{CHECKPOINTS}/{folder_name(nearest)}", nearest


def state_digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def load_weights(model: Model, source: str | PathLike[str], scratch: Path | None = None) -> str:
    try:
        where, weights = find_weights(source, model.read_weights, scratch)
        try:
            return f"{where}: {model.load_weights(weights)}"
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--init: {error}") from None
