"""Pipeline statistics: items, bytes, busy seconds and queue of each stage, and the stage that limits."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

STAGES = ("read", "pick", "decode", "collate", "device")


@dataclass(slots=True)
class Stage:
    """Counters of one stage over all threads.

    Attributes:
        items: samples of read, pick and decode; batches of collate and device.
        bytes: of files in read and decode, of images in device.
        seconds: busy.
        depth: jobs that waited for a thread, mean over the moments at which a batch was asked for. Those of
            pick are counted for read, as one job does both.
    """

    items: int = 0
    bytes: int = 0
    seconds: float = 0.0
    depth: float = 0.0


class Snapshot(dict[str, Any]):
    """What `PipelineStats.snapshot` returns: a plain dict, for JSON too, that prints as a table."""

    def __repr__(self) -> str:
        lines = [f"{'stage':<8}{'items':>10}{'MB':>12}{'busy s':>10}{'waiting':>9}"]
        lines += [
            f"{name:<8}{stage['items']:>10,}{stage['bytes'] / 1e6:>12,.1f}{stage['seconds']:>10,.2f}"
            f"{stage['depth']:>9.1f}"
            for name, stage in self.items()
            if name in STAGES
        ]
        if self["limiting"] is None:
            return "\n".join([*lines, "nothing was read yet"])
        limiting = f"{self['limiting']} limits: {self['limiting_share']:.0%} of the busy time"
        waited = (
            f"the caller waited {self['waited_seconds']:.2f} s, {self['ready_batches']:.1f} batches ready"
        )
        return "\n".join([*lines, limiting, waited])


@dataclass(slots=True)
class PipelineStats:
    """All stages of one stream or loader; safe to share between threads.

    Attributes:
        stages: by name.
        waited_seconds: that the caller waited for batches.
        ready: complete batches when one was asked for, mean.
        looks: how often one was asked for.
    """

    stages: dict[str, Stage] = field(default_factory=lambda: {name: Stage() for name in STAGES})
    waited_seconds: float = 0.0
    ready: float = 0.0
    looks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def busy(self, name: str, size: int = 0, *, items: int = 1) -> Iterator[None]:
        """Count so many items of `size` bytes together, and the time they take."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        with self._lock:
            stage = self.stages[name]
            stage.items += items
            stage.bytes += size
            stage.seconds += seconds

    def look(self, depths: Mapping[str, int], ready: int) -> None:
        """Note how many jobs wait before each stage, and how many batches are complete, at this moment."""
        with self._lock:
            self.looks += 1
            self.ready += (ready - self.ready) / self.looks
            for name, stage in self.stages.items():
                stage.depth += (depths.get(name, 0) - stage.depth) / self.looks

    def waited(self, seconds: float) -> None:
        """Note that the caller waited for a batch."""
        with self._lock:
            self.waited_seconds += seconds

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def __reduce__(self) -> tuple[type["PipelineStats"], tuple[()]]:
        return PipelineStats, ()

    def snapshot(self) -> Snapshot:
        """Stage -> items, bytes, busy seconds, queue depth; and which stage limits.

        `limiting`: the stage that keeps threads busy longest. `limiting_share`: its part of all busy seconds,
        from 0 to 1: without it, the rest would take 1 - share of the time. `waited_seconds`: how long the
        caller of a Loader waited: next to nothing where the caller, and not the loading, limits.
        `ready_batches`: complete batches when one was asked for, mean: `prefetch` where the caller limits.
        """
        with self._lock:
            found = Snapshot({name: asdict(stage) for name, stage in self.stages.items()})
            seconds = {name: stage.seconds for name, stage in self.stages.items()}
            found["waited_seconds"], found["ready_batches"] = self.waited_seconds, self.ready
        total = sum(seconds.values())
        limiting = max(seconds, key=lambda name: seconds[name])
        found["limiting"] = limiting if total else None
        found["limiting_share"] = seconds[limiting] / total if total else 0.0
        return found
