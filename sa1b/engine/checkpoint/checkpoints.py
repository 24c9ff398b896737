"""Checkpoints of a run: written asynchronously, committed whole, checked before they are used.

    checkpoints = Checkpoints(run, CheckpointConfig())          # all ranks, after wrapping
    state = checkpoints.resume(module, optimizer)               # None: a fresh start
    for step in ...:
        ...
        checkpoints.poll()
        if step % config.every == 0:
            checkpoints.save(step, module, optimizer, {"position": position, ...})
    checkpoints.close()

    RUN/checkpoints/step-00000100/
        __0_0.distcp ...   model and optimizer state, by torch.distributed.checkpoint, one file a rank
        .metadata          which tensor is in which file
        state.json         everything else: what the caller gave, step, world size, versions
        manifest.json      bytes and sha256 of every file, written last

A folder is written as step-00000100.partial, flushed, and renamed by rank 0 when all ranks have written and
described their files. So a folder that has its name was complete; one whose manifest does not agree with it
was damaged since. Nothing that a checkpoint holds is run as code: see `torch_metadata.py`.

ViT-B with AdamW, 1.13 GB, one process on two cores: training stands still for 0.3 s, the copy; the write
beside it takes 10 s on a disk of 120 MB/s; checking digests takes 0.8 s, loading 2 s.
"""

import contextlib
import json
import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from sa1b.engine.checkpoint import files as checkpoint_files
from sa1b.engine.checkpoint import tensors
from sa1b.engine.checkpoint.files import STATE, Found, SealedFile, measure, seal
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.checkpoint.torch_metadata import METADATA, read_metadata
from sa1b.engine.ranks import ranks
from sa1b.errors import CheckpointError, LockedError, UsageError
from sa1b.storage.atomic import commit, flush, lock, write_whole

_LOCK_PATIENCE = 60.0  # seconds: the processes of a killed run may outlive it a moment
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept.

    Attributes:
        every: Steps from one checkpoint to the next.
        keep_last: Newest checkpoints that are kept; two, so that a damaged one costs little. The disk needs
            room for one more.
        keep_every: Also keep the checkpoints whose step is a multiple of this; 0: none.
        asynchronous: Whether training goes on while a checkpoint is written (the default), at the cost of
            host memory for a copy of each rank's tensors; with --checkpoint.no-asynchronous it waits.
        tolerate: Failed writes in a row that the run survives, going on with the older checkpoint.
    """

    every: int = 1000
    keep_last: int = 2
    keep_every: int = 0
    asynchronous: bool = True
    tolerate: int = 2

    def __post_init__(self) -> None:
        for flag, least in (("every", 1), ("keep_last", 1), ("keep_every", 0), ("tolerate", 0)):
            if getattr(self, flag) < least:
                raise UsageError(
                    f"--checkpoint.{flag.replace('_', '-')} {getattr(self, flag)}: must be at least {least}"
                )


class Checkpoints:
    """Writes the checkpoints of one run and finds the one to go on with; created by all ranks together.

    A rank's methods are called in the same order as the other ranks'; all but `poll` and `close` are
    collective. A thread of each rank writes, with a process group of its own, so the ranks agree there that
    all have written, and training never waits for that, except for the copy to host memory and when a save
    begins before the last one has ended.

    Making one removes what killed runs have left in the folder, and holds a lock on it.

    Args:
        run: folder of the run; checkpoints are in its folder `checkpoints`.

    Raises:
        CheckpointError: the folder cannot be written, or another run uses it.
    """

    def __init__(self, run: Path, config: CheckpointConfig) -> None:
        self.folder = run / "checkpoints"
        self.config = config
        self._ranks = ranks()
        self._held = contextlib.ExitStack()
        self._ranks.on_first(self._begin)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._stager: DefaultStager | None = None
        self._writing: Future[int] | None = None
        self._failures: list[str] = []  # since the last write that went well
        self._good: set[int] = set()  # steps of checkpoints that this run has written or gone on from

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write a checkpoint of `step` steps done; asynchronously, the tensors may change once it returns.

        Waits for the write before this one. A failed write is logged as an error that names the path, and the
        run goes on with the older checkpoint.

        Args:
            model: see `sa1b.engine.checkpoint.tensors.gather`.
            state: JSON; the same on all ranks, rank 0's is written.

        Raises:
            CheckpointError: more writes in a row have failed than `tolerate` says.
            TypeError, ValueError: the state is not JSON.
        """
        self._settle()
        if len(self._failures) > self.config.tolerate:
            raise self._failed()
        document = {
            "step": step,
            "world_size": self._ranks.world_size,
            "torch": torch.__version__,
            "state": state,
        }
        text = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
        own = tensors.share(tensors.gather(model, optimizer), self._ranks.rank, self._ranks.world_size)
        if self.config.asynchronous:
            if self._stager is None:
                # Its copy in host memory stays and is filled again, pinned where that makes it faster.
                cuda = any(tensor.is_cuda for tensor in own.values())
                self._stager = DefaultStager(
                    StagingOptions(
                        use_pinned_memory=cuda,
                        use_shared_memory=False,
                        use_async_staging=False,
                        use_non_blocking_copy=cuda,
                    )
                )
            staged = self._stager.stage(own)
            own = staged.result() if isinstance(staged, Future) else staged
            self._writing = self._writer.submit(self._write, step, own, text)
        else:
            self._writing = Future()
            try:
                self._writing.set_result(self._write(step, own, text))
            except CheckpointError as error:
                self._writing.set_exception(error)
            self._settle()

    def poll(self) -> None:
        """Once a step: log a write that has ended. Waits for nothing and talks to no other rank.

        Ranks may see the end at different steps, so a failed write raises nothing here. `save` and `close`
        raise, which all ranks call at the same step.
        """
        if self._writing is not None and self._writing.done():
            self._settle()

    def close(self) -> None:
        """Wait for the write in flight and release the folder; before the process group is destroyed.

        Raises:
            CheckpointError: the last write has failed.
        """
        self._settle()
        self._writer.shutdown()
        if self._stager is not None:
            self._stager.close()
        self._held.close()
        if self._failures:
            raise self._failed()

    def newest(self) -> Found | None:
        """The newest good checkpoint, the same on all ranks; rank 0 looks. See `checkpoint_files.newest`."""
        self._settle()
        return self._ranks.on_first(lambda: checkpoint_files.newest(self.folder))

    def load(self, found: Found, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """Fill model and optimizer in place and return the state; any mode and world size.

        Raises:
            MismatchError: it is of another model, or other parameters were trained.
            CheckpointError: tensors cannot be read; model and optimizer may be filled in part.
        """
        self._settle()
        tensors.load(found.folder, found.metadata, model, optimizer, self._ranks)
        if found.folder.parent == self.folder:
            self._good = {found.step}
        return found.state

    def resume(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Go on from the newest good checkpoint: fill model and optimizer and return the state.

        Falls back to older ones, each time with a warning that names the file and what is wrong with it.

        Returns:
            None where there are no checkpoints: a fresh start. Nothing was changed then.

        Raises:
            MismatchError: as in `load`.
            CheckpointError: there are checkpoints, and none is good.
        """
        self._settle()
        refused: list[str] = []
        for step in reversed(self._ranks.on_first(lambda: checkpoint_files.steps(self.folder))):
            folder = self.folder / checkpoint_files.folder_name(step)
            try:
                found = self._ranks.on_first(partial(checkpoint_files.read, folder))
                return self.load(found, model, optimizer)
            except MismatchError:
                raise
            except CheckpointError as error:
                refused.append(str(error))
                if self._ranks.rank == 0:
                    _LOG.warning("skipping checkpoint %s: %s", folder, error)
        if refused:
            raise checkpoint_files.none_good(self.folder, refused)
        return None

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                self._held.enter_context(lock(self.folder))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        checkpoint_files.sweep(self.folder)

    def _write(self, step: int, own: dict[str, Tensor], state: bytes) -> int:
        """Write and commit; collective, in the writing thread. Fails on all ranks or on none."""
        temporary = self.folder / f"{checkpoint_files.folder_name(step)}.partial"
        try:
            self._ranks.on_first(lambda: checkpoint_files.make_empty(temporary))
            self._ranks.on_all(lambda: tensors.write(temporary, own, self._ranks))
            parts = self._ranks.on_all(lambda: self._describe(temporary, state))
            self._ranks.on_first(lambda: self._commit(temporary, step, parts))
        except CheckpointError as error:
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk gets its space back
            raise CheckpointError(f"{temporary}: {error}") from None
        return step

    def _describe(self, temporary: Path, state: bytes) -> dict[str, SealedFile]:
        """Flush and measure the files that this rank wrote."""
        paths = sorted(temporary.glob(f"__{self._ranks.rank}_*"))
        if self._ranks.rank == 0:
            write_whole(temporary / STATE, state)
            paths += [temporary / METADATA, temporary / STATE]
        for path in paths:
            flush(path)
        return {path.name: measure(path) for path in paths}

    def _commit(self, temporary: Path, step: int, parts: list[dict[str, SealedFile]]) -> None:
        files = {name: file for part in parts for name, file in part.items()}
        # A table that this program would refuse is better known now than at the next start.
        read_metadata(temporary, {name: file.bytes for name, file in files.items()})
        seal(temporary, step, files)
        flush(temporary)
        final = self.folder / checkpoint_files.folder_name(step)
        if final.exists():
            checkpoint_files.remove(final)  # damaged, or of this step once more
        commit(temporary, final)
        self._good.add(step)
        checkpoint_files.prune(self.folder, self._good, self.config.keep_last, self.config.keep_every)

    def _settle(self) -> None:
        """Wait for the write in flight and take its outcome, which all ranks agree on."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            step = writing.result()
        except CheckpointError as error:
            self._failures.append(str(error))
            if self._ranks.rank == 0:
                _LOG.error("checkpoint failed: %s", error)
            return
        self._failures.clear()
        if self._ranks.rank == 0:
            _LOG.info("checkpoint written: %s", self.folder / checkpoint_files.folder_name(step))

    def _failed(self) -> CheckpointError:
        return CheckpointError(
            f"{self._failures[-1]}: {len(self._failures)} failed in a row; free space or repair the disk, "
            "then start the same command again: it resumes from the newest checkpoint"
        )
