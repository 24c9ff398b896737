"""Pipeline statistics: items, bytes, busy seconds and waiting work of each stage, and the limiting stage."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sa1b.limit import ForkLock
from sa1b.storage.range_cache import RangeCache

STAGES = ("read", "pick", "decode", "collate", "device")


class Busy(dict[tuple[str, str], Any]):
    """Counters by stage and unit, and of reads from the local cache: "items", samples for read, pick and
    decode, batches for collate and device; "bytes", of files, of images for device; "seconds" of all threads.
    """

    def __missing__(self, key: tuple[str, str]) -> int:
        return 0

    def add(self, name: str, size: int, seconds: float, *, items: int = 1) -> None:
        """Count `items` items with `size` bytes in total."""
        self.merge({(name, "items"): items, (name, "bytes"): size, (name, "seconds"): seconds})

    def merge(self, other: Mapping[tuple[str, str], Any]) -> None:
        for key, value in other.items():
            self[key] += value


class Snapshot(dict[str, Any]):
    """The result of `PipelineStats.snapshot`: a dict of JSON values that prints as a table."""

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
        if (cache := self["cache"]) is not None:
            lines.append("cache: {hits:,} hits, {misses:,} misses, {outside:,} reads outside".format(**cache))
        return "\n".join([*lines, limiting, waited])


@dataclass(slots=True, eq=False)
class PipelineStats:
    """All stages of one stream or loader; safe to share between threads."""

    busy: Busy = field(default_factory=Busy)  # also of processes of a loader, with their reads from the cache
    waited_seconds: float = 0.0  # that the caller waited for batches
    requests: int = 0  # for a batch
    depths: Counter[str] = field(default_factory=Counter)  # see `requested`, the sum over all requests
    cache: RangeCache | None = None  # the local cache of the dataset directory, which counts its reads
    _lock: ForkLock = field(default_factory=ForkLock)

    def count(self, busy: Busy) -> None:
        with self._lock:
            self.busy.merge(busy)

    def add(self, name: str, size: int, seconds: float, *, items: int = 1) -> None:
        with self._lock:
            self.busy.add(name, size, seconds, items=items)

    def requested(self, depths: Mapping[str, int], seconds: float) -> None:
        """Count a request for a batch, and what waited for each stage: samples, for "device" batches."""
        with self._lock:
            self.requests += 1
            self.waited_seconds += seconds
            self.depths.update(depths)

    def busy_seconds(self) -> dict[str, float]:
        with self._lock:
            return {name: float(self.busy[name, "seconds"]) for name in STAGES}

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def snapshot(self) -> Snapshot:
        """The statistics of all stages, and the limiting stage.

        Of each stage: items, bytes, busy seconds, waiting work. `limiting`: the stage with the most busy
        seconds, and `limiting_share`, its share of all, 0 to 1. `waited_seconds`: that the caller of a Loader
        waited, about 0 if the caller is the bottleneck. `ready_batches`: complete batches at a request for a
        batch, mean. `cache`: reads from the local cache (`hits`), from the store (`misses`), and from the
        store of shards that the limit of the cache leaves out (`outside`); None without a cache.
        """
        with self._lock:
            busy, depths, waited = Busy(self.busy), self.depths.copy(), self.waited_seconds
            requests = max(self.requests, 1)
        seconds = {name: float(busy[name, "seconds"]) for name in STAGES}
        snapshot = Snapshot()
        for name in STAGES:
            counts = {unit: busy[name, unit] for unit in ("items", "bytes")}
            snapshot[name] = {**counts, "seconds": seconds[name], "depth": depths[name] / requests}
        snapshot |= {"waited_seconds": waited, "ready_batches": depths["device"] / requests, "cache": None}
        if self.cache is not None:
            own = asdict(self.cache.counts())
            snapshot["cache"] = {name: count + busy["cache", name] for name, count in own.items()}
        snapshot["limiting"], shares = limiting(seconds)
        snapshot["limiting_share"] = max(shares.values())
        return snapshot


def limiting(busy: Mapping[str, float]) -> tuple[str | None, dict[str, float]]:
    """The stage with the most busy seconds and the share of each, 0 to 1; None and 0 if all have none."""
    total = sum(busy.values())
    shares = {name: seconds / total if total > 0 else 0.0 for name, seconds in busy.items()}
    return max(shares, key=lambda name: shares[name]) if total > 0 else None, shares
