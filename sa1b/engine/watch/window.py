"""Windows of steps: the ranks that wait longest for data and compute longest, and what limits the loaders."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sa1b.engine.watch.metrics import Metrics
from sa1b.stream.bottleneck import LoaderSettings, LoaderWindow


class Window:
    """The ranks that waited longest for data, and computed longest, in each `size` steps; on rank 0.

    The first step of the process also fills the loaders and is in no window. A wait for data above
    `sa1b.stream.bottleneck.DATA_WAIT` of the time is printed once, with the stage of the loader that limits.
    """

    def __init__(self, hosts: Sequence[str], size: int, metrics: Metrics, loader: LoaderSettings) -> None:
        self._hosts, self._size, self._metrics = hosts, size, metrics
        self._loader = LoaderWindow(loader)
        self._steps, self._seconds = -1, 0.0
        self._waits, self._forward = [0.0] * len(hosts), [0.0] * len(hosts)

    def add(self, step: int, ranks: Mapping[str, Sequence[float]], seconds: float) -> None:
        """Add a step of so many seconds, with the numbers of the ranks; see `Run.numbers`."""
        self._steps += 1
        if self._steps == 0:
            self._loader.start(ranks)
            return
        self._seconds += seconds
        for rank, (wait, forward) in enumerate(zip(ranks["data_wait"], ranks["forward"], strict=True)):
            self._waits[rank] += wait
            self._forward[rank] += forward
        if self._steps < self._size:
            return
        summary: dict[str, Any] = {"steps": self._steps, "data_wait": self._longest(self._waits)}
        summary["forward"] = self._longest(self._forward)
        clocks = [math.inf if math.isnan(clock) else clock for clock in ranks.get("gpu_clock_mhz", ())]
        if clocks and min(clocks) < math.inf:
            rank = clocks.index(min(clocks))
            summary["gpu_clock"] = {"rank": rank, "host": self._hosts[rank], "mhz": clocks[rank]}
        self._metrics.window(step, "ranks", summary)
        line, message = self._loader.end(ranks, [wait / max(self._seconds, 1e-9) for wait in self._waits])
        self._metrics.window(step, "loader", line)
        if message is not None:
            self._metrics.say(message)
        self._steps, self._seconds = 0, 0.0
        self._waits, self._forward = [0.0] * len(self._hosts), [0.0] * len(self._hosts)

    def _longest(self, seconds: Sequence[float]) -> dict[str, Any]:
        rank = seconds.index(max(seconds))
        return {"rank": rank, "host": self._hosts[rank], "seconds": round(seconds[rank] / self._steps, 6)}
