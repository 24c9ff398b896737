"""A profile of some steps of a run: a Chrome trace and a table of the costliest operations of each rank.

    profiler = StepProfiler(config.logging.profile, config.folder, rank_info, control, metrics.say)
    for step in ...:
        profiler.before(step)
        ...
        profiler.after(step)
    profiler.close()

With `--logging.profile 20 22` torch's profiler waits until step 18, warms up in step 19, and records the
steps 20, 21 and 22. The first step after its start is slower than the others and is not recorded.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from sa1b.console import counted
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.storage.atomic import write_whole

WARM_UP = 1  # steps
_ROWS = 10
_NAME = 60  # characters of an operation's name


class StepProfiler:
    """Records steps and writes RUN/trace-<rank>.json and RUN/operations-<rank>.txt after the last one.

    `steps` are first and last, counted from 0; None: nothing is recorded. If training starts at `first` or
    later, its first step warms up, and the record starts after it. `say` prints a line on rank 0.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        run: Path,
        rank_info: RankInfo,
        control: Control,
        say: Callable[[str], None],
    ) -> None:
        self.trace = run / f"trace-{rank_info.rank}.json"
        self.table = run / f"operations-{rank_info.rank}.txt"
        self._steps = steps
        self._rank_info = rank_info
        self._control = control
        self._say = say
        self._profile: profile | None = None
        self._recorded = 0

    def before(self, step: int) -> None:
        """Call this before each step."""
        if self._steps is None or self._profile is not None:
            return
        first, last = max(self._steps[0], step + WARM_UP), self._steps[1]
        if first > last:
            self._steps = None
            return
        self._steps = first, last
        self._profile = profile(
            activities=[
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if self._rank_info.device.type == "cuda" else []),
            ],
            schedule=schedule(wait=first - WARM_UP - step, warmup=WARM_UP, active=last - first + 1, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def after(self, step: int) -> None:
        """Call this after each step."""
        if self._profile is not None and self._steps is not None:
            self._recorded += step >= self._steps[0]
            self._profile.step()  # calls _write after the last recorded step
            if step >= self._steps[1]:
                self.close()

    def close(self) -> None:
        """Write the steps recorded so far, unless they are written."""
        if self._profile is not None:
            self._profile.stop()
        self._profile, self._steps = None, None

    def _write(self, recorded: profile) -> None:
        if not self._recorded:  # the run was stopped after the warm-up
            return

        def files() -> None:
            try:
                recorded.export_chrome_trace(str(self.trace))
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error), str(self.trace)) from error
            if not _ends_as_json(self.trace):  # torch's writer does not report failed writes
                raise OSError(errno.EIO, "the trace was not written completely", str(self.trace))
            write_whole(self.table, self._table(recorded).encode())
            others = "; each rank has its own" if self._rank_info.world_size > 1 else ""
            self._say(f"profile: costliest operations in {self.table}, trace in {self.trace}{others}")

        self._control.write(self.trace, files)

    def _table(self, recorded: profile) -> str:
        device = "device" if self._rank_info.device.type == "cuda" else "cpu"
        # Rows of a GPU are its kernels. Their time is also the time of the operation that started them.
        operations: list[Any] = [
            operation for operation in recorded.key_averages() if operation.device_type.name == "CPU"
        ]
        rows = [
            (
                getattr(operation, f"self_{device}_time_total") / 1e3,
                getattr(operation, f"{device}_time_total") / 1e3,
                operation,
            )
            for operation in operations
            if not operation.key.startswith("ProfilerStep")
        ]
        rows.sort(key=lambda row: row[0], reverse=True)
        of_all = sum(own_ms for own_ms, _, _ in rows)
        lines = [
            f"the {_ROWS} costliest operations in {counted(self._recorded, 'step')} of rank "
            f"{self._rank_info.rank}, by their own time on the {'GPU' if device == 'device' else 'CPU'}",
            f"{'operation':<{_NAME}}{'calls':>10}{'own ms':>12}{'share':>8}{'total ms':>12}",
        ]
        lines += [
            f"{operation.key[: _NAME - 1]:<{_NAME}}{operation.count:>10,}{own_ms:>12,.2f}"
            f"{own_ms / of_all if of_all else 0:>8.1%}{total:>12,.2f}"
            for own_ms, total, operation in rows[:_ROWS]
        ]
        lines.append("own: without the operations that it calls; share: of the own time of all operations")
        return "\n".join(lines) + "\n"


def _ends_as_json(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")
