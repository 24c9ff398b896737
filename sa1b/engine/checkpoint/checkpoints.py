"""Checkpoints of a run: written asynchronously, committed atomically, verified before use.

    checkpoints = Checkpoints(run, CheckpointConfig())          # all ranks, after wrapping
    state = checkpoints.resume(module, optimizer)               # None: a fresh start
    for step in ...:
        ...
        checkpoints.poll()
        if step % config.every == 0:
            checkpoints.save(step, module, optimizer, {"position": position, ...})
    checkpoints.close()

    RUN/checkpoints/step-00000100/          RUN is a folder or a URL
        __0_0.distcp ...   model and optimizer state, by torch.distributed.checkpoint, one file a rank
        .metadata          which tensor is in which file
        state.json         all other values: the caller's state, step, world size, versions
        manifest.json      bytes and sha256 of every file, written last

Rank 0 commits a checkpoint when all ranks have written and described their files. So every committed one was
complete once; if it does not match its manifest, it was damaged later. `folder.py` and
`bucket_checkpoints.py` have the two forms of a commit. No content of a checkpoint is run as code: see
`sealed_folder.py`.

Measured for ViT-B with AdamW, 1.13 GB, in one process on two cores: training stops for 0.3 s, for the copy to
host memory. The asynchronous write takes 10 s on a disk of 120 MB/s, verifying digests 0.8 s, loading 2 s.
"""

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from sa1b.engine.checkpoint import folder as checkpoint_files
from sa1b.engine.checkpoint import tensors
from sa1b.engine.checkpoint.bucket_checkpoints import BucketLocation
from sa1b.engine.checkpoint.folder import STATE, FolderLocation, Found, Location, RetrievalError
from sa1b.engine.checkpoint.remote_run import RemoteRun
from sa1b.engine.checkpoint.sealed_folder import METADATA, SealedFile, measure, read_metadata
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.ranks.rank_info import ranks
from sa1b.engine.settings import CheckpointConfig
from sa1b.errors import CheckpointError
from sa1b.storage.atomic import write_whole
from sa1b.storage.errors import StorageError

_LOG = logging.getLogger(__name__)
# A stager of torch 2.11 and 2.12 closes itself after its first copy.
_REUSES_STAGER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Checkpoints:
    """Writes the checkpoints of one run and finds the one to resume from; created by all ranks together.

    All ranks must call the methods in the same order; all except `poll` are collective. A thread of each rank
    writes. These threads have a separate process group, in which they agree that all ranks have written.
    Training only waits for the copy to host memory, and for the previous save if that is still being written.

    Creating an instance removes incomplete checkpoints of killed runs and locks the folder: CheckpointError
    if it cannot be written, or another run uses it. A run in a bucket is closed by `close` too, and has its
    own limit. `seconds`: from the call of `save` until the newest checkpoint was complete; 0.0 before the
    first.
    """

    def __init__(self, run: Path | RemoteRun, config: CheckpointConfig, limit: float = 1800.0) -> None:
        self.config = config
        self.seconds = 0.0
        self.best: int | None = None  # step of a checkpoint that is kept
        self._began = 0.0  # when the newest save began
        self._location: Location
        if isinstance(run, Path):
            self._location = FolderLocation(run / "checkpoints", ranks(limit))
        else:
            self._location = BucketLocation(run)
        self._ranks = self._location.ranks
        self._ranks.on_first(self._location.begin)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._stager: DefaultStager | None = None
        self._writing: Future[int] | None = None
        self._failures: list[str] = []  # failed writes since the last successful write
        self._good: set[int] = set()  # steps of checkpoints that this run has written or resumed from

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write a checkpoint after `step` steps; the tensors may change once this returns.

        This method waits for the previous write, for a limited time. A failed write is logged as an error
        that names the path, and the run continues; the older checkpoint is kept. CheckpointError: more than
        `tolerate` consecutive writes have failed, or a write does not end. The state is JSON values, the same
        on all ranks; rank 0 writes them.
        """
        self._settle()
        if len(self._failures) > self.config.tolerate:
            raise self._failed()
        self._began = time.perf_counter()
        document = {
            "step": step,
            "world_size": self._ranks.world_size,
            "torch": torch.__version__,
            "state": state,
        }
        text = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
        gathered = tensors.gather(model, optimizer)
        rank_tensors = tensors.share(gathered, self._ranks.rank, self._ranks.world_size)
        copy = self._copied(rank_tensors) if self.config.asynchronous else rank_tensors
        self._writing = self._writer.submit(self._write, step, copy, text)
        if not self.config.asynchronous:
            self._settle()

    def _copied(self, rank_tensors: dict[str, Tensor]) -> dict[str, Tensor] | CheckpointError:
        """A copy of the tensors in host memory, or why there is none: the write then fails on all ranks."""
        cuda = any(tensor.is_cuda for tensor in rank_tensors.values())
        try:
            if self._stager is None or not _REUSES_STAGER:
                # The copy in host memory is kept and reused; it is pinned if that makes it faster.
                options = StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
                self._stager = DefaultStager(options)
            staged = self._stager.stage(rank_tensors)
            return staged.result() if isinstance(staged, Future) else staged
        except (RuntimeError, MemoryError, OSError) as error:
            self._stager = None
            return CheckpointError(f"the tensors cannot be copied to host memory: {error}")

    @property
    def in_flight(self) -> bool:
        """Whether a write is in flight, for which the next save waits."""
        return self._writing is not None

    def poll(self) -> None:
        """Log a write that has ended; call this once per step. It does not wait or communicate."""
        # Ranks may see the end of a write at different steps, so a failed write raises no error here. `save`
        # and `close` raise it, because all ranks call them at the same step.
        if self._writing is not None and self._writing.done():
            self._settle()

    def close(self) -> None:
        """Wait for the write in flight and unlock the folder; call it before the process group is destroyed.
        CheckpointError: the last write has failed, or, in a bucket, the upload of another file.
        """
        self._settle()
        self._writer.shutdown(wait=False)  # a thread that still writes waits for the disk without limit
        if self._stager is not None:
            self._stager.close()
        self._location.close()
        if self._failures:
            raise self._failed()

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, good or damaged, oldest first."""
        self._settle()
        return self._ranks.on_first(self._location.steps)

    def load(self, checkpoint: Found, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """Fill model and optimizer in place and return the state; any mode and world size.

        Raises:
            MismatchError: the checkpoint has another model or other trained parameters.
            CheckpointError: tensors cannot be read; model and optimizer may be partly filled.
        """
        self._settle()
        try:
            tensors.load(checkpoint.folder, checkpoint.metadata, model, optimizer, self._ranks)
        except MismatchError as error:
            error.state = checkpoint.state
            raise
        return checkpoint.state

    def resume(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Resume from the newest good checkpoint: fill model and optimizer and return the state.

        Falls back to older checkpoints, each time with a warning that names the damaged file and the reason.
        None if there are no checkpoints; CheckpointError if none of them is good. RetrievalError: one that
        may be good cannot be read now. MismatchError: see `load`.
        """
        refused: list[str] = []
        for step in reversed(self.steps()):
            try:
                checkpoint = self._location.fetch(step)
                try:
                    state = self.load(checkpoint, model, optimizer)
                finally:
                    self._location.drop(checkpoint)
                self._good = {step}
                return state
            except (MismatchError, RetrievalError):
                raise
            except CheckpointError as error:
                refused.append(str(error))
                if self._ranks.rank == 0:
                    _LOG.warning("skipping checkpoint %s: %s", self._location.name(step), error)
        if refused:
            raise checkpoint_files.none_good(self._location.root, refused)
        return None

    def _write(self, step: int, rank_tensors: dict[str, Tensor] | CheckpointError, state: bytes) -> int:
        """Write and commit a checkpoint; collective, in the writing thread. Fails on all ranks or on none."""
        location = self._location
        try:
            self._ranks.on_all(lambda: _raise_error(rank_tensors))
            assert isinstance(rank_tensors, dict)
            temporary = location.prepare(step)
            self._ranks.on_all(lambda: tensors.write(temporary, rank_tensors, self._ranks))
            parts = self._ranks.on_all(lambda: self._describe(temporary, state))
            self._ranks.on_first(lambda: self._commit(temporary, step, parts))
        except CheckpointError as error:
            raise CheckpointError(f"{location.target(step)}: {error}") from None
        finally:
            location.discard(step)
        self.seconds = time.perf_counter() - self._began
        return step

    def _describe(self, temporary: Path, state: bytes) -> dict[str, SealedFile]:
        paths = sorted(temporary.glob(f"__{self._ranks.rank}_*"))
        if self._ranks.rank == 0:
            write_whole(temporary / STATE, state)
            paths += [temporary / METADATA, temporary / STATE]
        self._location.keep(temporary, paths)
        return {path.name: measure(path) for path in paths}

    def _commit(self, temporary: Path, step: int, parts: list[dict[str, SealedFile]]) -> None:
        files = {name: file for part in parts for name, file in part.items()}
        # Verify the table of tensors now, so that an invalid one is not found at the next start only.
        read_metadata(temporary, {name: file.bytes for name, file in files.items()})
        self._location.commit(temporary, step, files)
        self._good.add(step)
        keep_last, keep_every = self.config.keep_last, self.config.keep_every
        for old in checkpoint_files.outdated(self._location.steps(), self._good, keep_last, keep_every):
            if old == self.best:
                continue
            self._good.discard(old)
            try:
                self._location.remove(old)
            except (OSError, StorageError) as error:
                _LOG.warning("an old checkpoint cannot be removed: %s", error)

    def _settle(self) -> None:
        """Wait for the write in flight and return its outcome, which is the same on all ranks."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            # Ranks that wait for the thread of another one end before that rank, which has the reason.
            step = writing.result(1.1 * self._ranks.limit)
        except TimeoutError:
            raise CheckpointError(
                f"{self._location.root}: the write of a checkpoint has not ended within "
                f"{self._ranks.limit:g} s (--parallel.timeout-first); check the disk or the server of its "
                "mount, then start the same command again: it resumes from the newest checkpoint"
            ) from None
        except CheckpointError as error:
            self._failures.append(str(error))
            if self._ranks.rank == 0:
                _LOG.error("checkpoint failed: %s", error)
            return
        self._failures.clear()
        if self._ranks.rank == 0:
            _LOG.info("checkpoint written: %s", self._location.name(step))

    def _failed(self) -> CheckpointError:
        return CheckpointError(
            f"{self._failures[-1]}: {len(self._failures)} failed in a row; {self._location.remedy}, then "
            "start the same command again: it resumes from the newest checkpoint"
        )


def _raise_error(outcome: dict[str, Tensor] | CheckpointError) -> None:
    if isinstance(outcome, CheckpointError):
        raise outcome
