"""Statistics of the stages of a stream or loader, the stage that limits, and the one remedy that costs least.

`sa1b bench` names the limit of a loader, a training run the limit of the rank that waits longest for data.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from sa1b.console import command, counted
from sa1b.limit import ForkLock
from sa1b.storage.range_cache import RangeCache
from sa1b.workers import available_cpus

STAGES = ("read", "pick", "decode", "collate", "device")
STORAGE_MARGIN = 1.2  # below this ratio of storage rate to loader rate, storage limits the loader
DATA_WAIT = 0.2  # share of the time spent waiting for data, above which data limit a run

BUSY = tuple(f"busy_{name}" for name in STAGES)  # names of the numbers that ranks exchange


class Busy(Counter[tuple[str, str]]):
    """Counters by stage and unit, and of reads from the local cache: "items", samples for read, pick and
    decode, batches for collate and device; "bytes", of files, of images for device; "seconds" of all threads.
    """

    def add(self, name: str, size: int, seconds: float, *, items: int = 1) -> None:
        counts: dict[tuple[str, str], Any] = {(name, "items"): items, (name, "bytes"): size}
        self.update(counts | {(name, "seconds"): seconds})


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
            self.busy.update(busy)

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


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of a loader that its remedy depends on."""

    threads: int  # of each process
    cpus: int  # processors that the rank may use
    is_local: bool  # the dataset directory is a local folder
    cached: bool  # reads from a URL are kept on a local disk
    stored: int | None  # longer side of the stored images, pixels; None: original size
    image_size: int  # longer side of the loaded images, pixels
    on_gpu: bool  # masks are rasterised on a GPU
    decodes_on_gpu: bool = False  # JPEG files are decoded there
    trains: bool = True  # the loader feeds a training run: its flags begin with `--data.`
    processes: int = 1

    @classmethod
    def of(cls, loader: Any) -> Self:
        stream, datasets = loader.stream, [source.dataset for source in loader.stream.sources().values()]
        stored = [dataset.manifest["options"].get("image_size") for dataset in datasets]
        return cls(
            threads=loader.threads,
            cpus=available_cpus(),
            is_local=all(dataset.reader.is_local for dataset in datasets),
            cached=stream.stats.cache is not None,
            stored=None if None in stored else max(stored),
            image_size=stream.options.image_size,
            on_gpu=loader.device.type == "cuda",
            decodes_on_gpu=stream.decoder.device.type != "cpu",
            processes=loader.processes,
        )


def remedy(limit: str, settings: LoaderSettings) -> str:
    """What to change if a stage of a loader limits, or measured storage ("storage")."""
    of_run, on_gpu, cpus = settings.trains, settings.on_gpu, counted(settings.cpus, "processor")
    flags, size = "--data." if of_run else "--", settings.image_size
    is_larger = settings.stored is None or settings.stored > size
    reshard = f"reshard to {size} px: {command('reshard')} ... --image-size {size}"
    now = f"now {settings.processes} x {settings.threads} for {cpus}"
    more = f"add processes or threads ({flags}processes, {flags}threads, {now})"
    if limit == "decode" and is_larger and of_run:
        more += f" or {reshard}"  # the CPUs of a rank may not be enough
    is_away = limit in ("storage", "read") and not settings.is_local
    has_idle_cpus = settings.processes * settings.threads < settings.cpus
    remedies = (  # the first one that fits
        (is_away and settings.cached, f"raise {flags}cache-bytes if the cache does not hold all shards"),
        (is_away, f"cache the data on a local disk with {flags}cache"),
        (limit == "storage" and is_larger, reshard),
        (limit == "storage", "use faster storage"),
        (limit == "read" and of_run, "raise --data.prefetch, or pass --data.block-size 16 to a new run"),
        (has_idle_cpus and not (limit in ("collate", "device") and on_gpu), more),
        (limit == "decode" and is_larger, reshard),
        (limit == "decode" and on_gpu > settings.decodes_on_gpu, f"decode on the GPU: {flags}decode gpu"),
        (limit == "device", f"lower {'--data.target-size' if of_run else '--dense'}"),
        (limit in ("pick", "collate"), f"lower {flags}masks"),
        (True, f"give {'each rank' if of_run else 'the loader'} more than {cpus}"),
    )
    return next(text for fits, text in remedies if fits)


def limit_of(storage: float, loader: float, busy: Mapping[str, float]) -> str:
    """The stage with the most `busy` seconds, or "storage". The rates are images per second."""
    return "storage" if storage < STORAGE_MARGIN * loader else limiting(busy)[0] or "storage"
