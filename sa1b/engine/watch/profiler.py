"""A profile of some steps of a run: a Chrome trace and a table of the costliest operations of each rank.

    profiler = StepProfiler(config.logging, step, config.folder, rank_info, control, metrics.say)
    for step in ...:
        ...
        profiler.after(step)
    profiler.close()

With `--logging.profile 20 22` torch's profiler waits until step 18, warms up in step 19, and records the
steps 20, 21 and 22. The first step after its start is slower than the others and is not recorded.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from sa1b.console import counted
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.metrics import LoggingConfig
from sa1b.storage.atomic import write_whole


class StepProfiler:
    """Records steps and writes RUN/trace-<rank>.json and RUN/operations-<rank>.txt after the last one.

    `step`: the next step. If it is the first one of --logging.profile or later, it warms up, and the record
    starts after it. `say` prints a line on rank 0.
    """

    def __init__(
        self,
        config: LoggingConfig,
        step: int,
        run: Path,
        rank_info: RankInfo,
        control: Control,
        say: Callable[[str], None],
    ) -> None:
        self._trace, self._table = (
            run / name for name in (f"trace-{rank_info.rank}.json", f"operations-{rank_info.rank}.txt")
        )
        self._recorded, self._rank_info, self._control, self._say = 0, rank_info, control, say
        self._is_gpu = rank_info.device.type == "cuda"
        self._profile: profile | None = None
        first, self._last = config.profile or (1, 0)
        self._first = max(first, step + 1)
        if self._first <= self._last:
            active = self._last - self._first + 1
            self._profile = profile(
                activities={ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])},
                schedule=schedule(wait=self._first - 1 - step, warmup=1, active=active, repeat=1),
                on_trace_ready=self._write,
            )
            self._profile.start()

    def after(self, step: int) -> None:
        """Call this after each step."""
        if self._profile is not None:
            self._recorded += step >= self._first
            self._profile.step()  # calls _write after the last recorded step
            if step >= self._last:
                self.close()

    def close(self) -> None:
        """Write the steps recorded so far, unless they are written."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = None

    def _write(self, recorded: profile) -> None:
        if self._recorded:  # else the run was stopped after the warm-up
            self._control.write(self._trace, lambda: self._files(recorded))

    def _files(self, recorded: profile) -> None:
        try:
            recorded.export_chrome_trace(str(self._trace))
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error), str(self._trace)) from error
        if not self._trace.exists() or not self._trace.read_bytes()[-64:].rstrip().endswith(b"}"):
            # torch's writer does not report failed writes
            raise OSError(errno.EIO, "the trace was not written completely", str(self._trace))
        write_whole(self._table, self._costliest(recorded).encode())
        others = "; each rank has its own" if self._rank_info.world_size > 1 else ""
        self._say(f"profile: costliest operations in {self._table}, trace in {self._trace}{others}")

    def _costliest(self, recorded: profile) -> str:
        time, device = ("device_time_total", "GPU") if self._is_gpu else ("cpu_time_total", "CPU")
        # Rows of a GPU are its kernels. Their time is also the time of the operation that started them.
        rows: list[tuple[float, float, Any]] = [
            (getattr(one, f"self_{time}") / 1e3, getattr(one, time) / 1e3, one)
            for one in recorded.key_averages()
            if one.device_type.name == "CPU" and not one.key.startswith("ProfilerStep")
        ]
        rows.sort(key=lambda row: row[0], reverse=True)
        of_all = sum(own for own, _, _ in rows) or 1.0
        lines = [
            f"the 10 costliest operations in {counted(self._recorded, 'step')} of rank "
            f"{self._rank_info.rank}, by their own time on the {device}",
            f"{'operation':<60}{'calls':>10}{'own ms':>12}{'share':>8}{'total ms':>12}",
        ]
        for own, total, one in rows[:10]:
            share = own / of_all
            lines.append(f"{one.key[:59]:<60}{one.count:>10,}{own:>12,.2f}{share:>8.1%}{total:>12,.2f}")
        lines.append("own: without the operations that it calls; share: of the own time of all operations")
        return "\n".join(lines) + "\n"
