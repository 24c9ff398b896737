"""A profile of some steps of a run: a Chrome trace and a table of the costliest operations of each rank."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from sa1b.console import counted
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.storage.atomic import write_whole


def step_profiler(
    steps: tuple[int, int] | None, step: int, run: Path, rank_info: RankInfo, control: Control,
    say: Callable[[str], None],
) -> profile | None:  # fmt: skip
    """Torch's profiler of `steps`, started before `step`, in which it warms up at the earliest, if any."""
    first, last = steps or (1, 0)
    first, is_gpu, rank = max(first, step + 1), rank_info.device.type == "cuda", rank_info.rank
    if first > last:
        return None
    trace, table = run / f"trace-{rank}.json", run / f"operations-{rank}.txt"

    def files(recorded: profile, count: int) -> None:
        try:
            recorded.export_chrome_trace(str(trace))
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error), str(trace)) from error
        write_whole(table, _costliest(recorded, count, rank, is_gpu).encode())
        say(f"profile: costliest operations in {table}, trace in {trace}; each rank has its own")

    def write(recorded: profile) -> None:
        if (count := recorded.step_num - (first - step)) > 0:  # else the run was stopped after the warm-up
            control.write(trace, lambda: files(recorded, count))

    profiler = profile(
        activities={ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])},
        schedule=schedule(wait=first - 1 - step, warmup=1, active=last - first + 1, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler


def _costliest(recorded: profile, steps: int, rank: int, is_gpu: bool) -> str:
    time, device = ("device_time_total", "GPU") if is_gpu else ("cpu_time_total", "CPU")
    # Rows of a GPU are its kernels. Their time is also the time of the operation that started them.
    rows: list[tuple[float, float, Any]] = [
        (getattr(one, f"self_{time}") / 1e3, getattr(one, time) / 1e3, one)
        for one in recorded.key_averages()
        if one.device_type.name == "CPU" and not one.key.startswith("ProfilerStep")
    ]
    rows.sort(key=lambda row: row[0], reverse=True)
    of_all = sum(own for own, _, _ in rows) or 1.0
    lines = [
        f"the 10 costliest operations in {counted(steps, 'step')} of rank {rank}, by their own time on the "
        f"{device}",
        f"{'operation':<60}{'calls':>10}{'own ms':>12}{'share':>8}{'total ms':>12}",
    ]
    for own, total, one in rows[:10]:
        share = own / of_all
        lines.append(f"{one.key[:59]:<60}{one.count:>10,}{own:>12,.2f}{share:>8.1%}{total:>12,.2f}")
    lines.append("own: without the operations that it calls; share: of the own time of all operations")
    return "\n".join(lines) + "\n"
