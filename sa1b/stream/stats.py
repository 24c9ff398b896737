"""What each stage of the loader did: items, bytes, busy seconds; which one limits the whole."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

STAGES = ("read", "pick", "decode", "collate", "device")


@dataclass(slots=True)
class Stage:
    """Counts of one stage over all threads.

    Attributes:
        items, bytes: that went through.
        seconds: busy.
        depth: items that waited before it, mean over the moments at which a batch was asked for.
    """

    items: int = 0
    bytes: int = 0
    seconds: float = 0.0
    depth: float = 0.0
    looked: int = field(default=0, repr=False)


@dataclass(slots=True)
class PipelineStats:
    """All stages of one stream or loader; safe to share between threads."""

    stages: dict[str, Stage] = field(default_factory=lambda: {name: Stage() for name in STAGES})
    waited_seconds: float = 0.0  # that the caller waited for batches
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

    def queued(self, name: str, depth: int) -> None:
        """Note that so many items wait before a stage now."""
        with self._lock:
            stage = self.stages[name]
            stage.looked += 1
            stage.depth += (depth - stage.depth) / stage.looked

    def waited(self, seconds: float) -> None:
        """Note that the caller waited for a batch."""
        with self._lock:
            self.waited_seconds += seconds

    def __reduce__(self) -> tuple[type["PipelineStats"], tuple[()]]:
        return PipelineStats, ()

    def snapshot(self) -> dict[str, Any]:
        """Stage -> items, bytes, busy seconds, queue depth; and which stage limits.

        `limiting`: the stage of the samples' work that takes most. `limiting_share`: its part of all busy
        seconds of reading, picking masks and decoding, from 0 to 1: without it, the rest would take
        1 - share of the time. `waited_seconds`: how long the caller of a Loader waited: next to nothing where
        the caller, and not the loading, limits.
        """
        with self._lock:
            found: dict[str, Any] = {name: asdict(stage) for name, stage in self.stages.items()}
            for stage in found.values():
                del stage["looked"]
        seconds = {name: found[name]["seconds"] for name in ("read", "pick", "decode")}
        total = sum(seconds.values())
        limiting = max(seconds, key=lambda name: seconds[name])
        found["waited_seconds"] = self.waited_seconds
        found["limiting"] = limiting if total else None
        found["limiting_share"] = seconds[limiting] / total if total else 0.0
        return found
