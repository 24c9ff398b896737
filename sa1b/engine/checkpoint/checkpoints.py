"""Checkpoints of a run: written while training goes on, committed by one rename, proved by digests.

RUN/checkpoints has a folder for each, see `folder.py`; `bucket.py` has those of a run at a URL. For 1.13 GB
of ViT-B with AdamW, training stops for 0.3 s; the write takes 10 s on a disk of 120 MB/s.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim import Optimizer

from sa1b.engine.checkpoint import folder as folders
from sa1b.engine.checkpoint import tensors
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.folder import CommitWriter, Folder, remove
from sa1b.engine.settings import CheckpointConfig
from sa1b.errors import CheckpointError, UsageError
from sa1b.storage.errors import StorageError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpoints:
    """Writes the checkpoints of one run in a thread of each rank, and resumes; all methods are collective."""

    def __init__(self, run: Path | RemoteRun, config: CheckpointConfig, limit: float = 1800.0) -> None:
        self.config = config
        self.seconds = 0.0  # from the call of `save` until the newest checkpoint was complete
        self.best: int | None = None  # step of a checkpoint that is kept
        self._place = Folder(run, limit) if isinstance(run, Path) else run
        self._ranks = self._place.ranks
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._stager: Any = None  # torch's DefaultStager closes itself after its first copy in some releases
        self._writing: Future[str | None] | None = None
        self._failures: list[str] = []  # failed writes since the last successful write

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write a checkpoint after `step` steps; the tensors may change once this returns. `state`: JSON."""
        self._settle()
        if len(self._failures) > self.config.tolerate:
            raise self._failed()
        ranks, began = self._ranks, time.perf_counter()
        document = {"step": step, "world_size": ranks.world_size, "torch": torch.__version__, "state": state}
        data = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
        writer = CommitWriter(self._place, step, data)
        own = tensors.share(tensors.gather(model, optimizer), ranks.rank, ranks.world_size)
        if self.config.asynchronous:
            try:
                ranks.on_all(lambda: self._copy(own))
            except CheckpointError as error:
                self._failures.append(self._report(writer, error))
                return
        self._writing = self._writer.submit(self._write, writer, own, began)
        if not self.config.asynchronous:
            self._settle()

    @property
    def in_flight(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def close(self) -> None:
        self._settle()
        self._writer.shutdown(wait=False)  # a thread that still writes waits for the disk without limit
        if self._stager is not None:
            self._stager.close()
        self._place.close()
        if self._failures:
            raise self._failed()

    def steps(self) -> list[int]:
        self._settle()
        return self._ranks.on_first(self._place.steps)

    def resume(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Fill model and optimizer from the newest good checkpoint; its state, or None if there is none."""
        place, ranks = self._place, self._ranks
        if isinstance(place, RemoteRun):
            place.check_space(tensors.bytes_of(model))

        def load(step: int) -> dict[str, Any]:
            with place.proved(step) as folder:
                if folders.is_old(folder):
                    out = place.root.removesuffix(f"/{folders.CHECKPOINTS}")
                    way = f"pass --init {out} and another --out"
                    raise UsageError(f"--out {out}: of an earlier version of this program; {way}")
                state = ranks.on_all(lambda: folders.read_state(folder))[0]
                try:
                    tensors.load(folder, model, optimizer, ranks)
                except tensors.MismatchError as error:
                    error.state = state
                    raise
                return state

        if not (there := self.steps()):
            return None
        level = logging.DEBUG if ranks.rank else logging.WARNING
        state, refused = newest_good(place.root, there, load, level)
        for step in refused:  # only now: a run without a good checkpoint must not start anew
            _LOG.log(level, "damaged checkpoint renamed: %s", ranks.on_first(partial(place.set_aside, step)))
        return state

    def _copy(self, own: dict[str, Tensor]) -> None:
        cuda = any(tensor.is_cuda for tensor in own.values())
        self._stager = self._stager or StateDictStager(pin_memory=cuda)
        own |= self._stager.stage(own, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize()

    def _write(self, writer: CommitWriter, own: dict[str, Tensor], began: float) -> str | None:
        """Write and commit a checkpoint, in the writing thread; why it failed, on all ranks."""
        group = self._ranks.group
        try:
            self._ranks.on_first(lambda: self._place.sweep(writer.step))
            self._ranks.on_all(
                lambda: state_dict_saver.save(
                    dict(own), storage_writer=writer, process_group=group, no_dist=group is None
                )
            )
        except CheckpointError as error:
            return self._report(writer, error)
        self.seconds = time.perf_counter() - began
        if self._ranks.rank == 0:
            _LOG.info("checkpoint written: %s", f"{self._place.root}/{writer.final.name}")
            self._rotate()
        return None

    def _report(self, writer: CommitWriter, error: CheckpointError) -> str:
        with contextlib.suppress(OSError):
            if self._place.leads and writer.partial.exists():
                remove(writer.partial)
        failed = f"{self._place.root}/{writer.final.name}: {error}"
        if self._ranks.rank == 0:
            _LOG.error("checkpoint failed: %s", failed)
        return failed

    def _rotate(self) -> None:
        every = self.config.keep_every
        try:
            for step in self._place.steps()[: -self.config.keep_last]:
                if step != self.best and not (every and step % every == 0):
                    self._place.remove(step)
        except (OSError, StorageError) as error:
            _LOG.warning("an old checkpoint cannot be removed: %s", error)

    def _settle(self) -> None:
        """Wait for the write in flight and take its outcome, which is the same on all ranks."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            # Ranks that wait for the thread of another one end before that rank, which has the reason.
            failed = writing.result(1.1 * self._ranks.limit)
        except TimeoutError:
            raise CheckpointError(
                f"{self._place.root}: the write of a checkpoint has not ended within {self._ranks.limit:g} s "
                f"(--parallel.timeout-first); check the disk, {folders.AGAIN}"
            ) from None
        self._failures = [*self._failures, failed] if failed else []

    def _failed(self) -> CheckpointError:
        last, way = self._failures[-1], f"{self._place.remedy}, {folders.AGAIN}"
        return CheckpointError(f"{last}: {len(self._failures)} failed in a row; {way}")


def newest_good(
    root: str, there: list[int], use: Callable[[int], T], level: int = logging.WARNING
) -> tuple[T, list[int]]:
    """What `use` returns for the newest good checkpoint, and the newer, damaged steps, which are logged."""
    refused: dict[int, str] = {}
    for step in reversed(there):
        try:
            return use(step), [*refused]
        except (folders.RetrievalError, tensors.MismatchError):
            raise
        except CheckpointError as error:
            refused[step] = str(error)
            _LOG.log(level, "skipping checkpoint %s: %s", f"{root}/{folders.folder_name(step)}", error)
    way = "restore one from a copy, or move the folder away to start again from step 0"
    listed = "\n  ".join(refused.values())
    raise CheckpointError(f"{root}: none of its {len(refused)} checkpoints can be used; {way}:\n  {listed}")
