"""Which stage of the loaders limits a run whose ranks wait for data, and what to change.

Each rank sends the busy seconds of its loader's stages with the figures of each step. At the end of a window,
the rank with the largest wait is examined. A stage limits if it has the largest share of the busy time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sa1b.console import command, counted
from sa1b.engine.step.feed import Feed
from sa1b.stream.stats import STAGES
from sa1b.workers import available_cpus

LIMIT = 0.05  # share of the time spent waiting for data, above which the run prints a line
BUSY = tuple(f"busy_{name}" for name in STAGES)  # names of the numbers that ranks exchange


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The settings that the advice depends on.

    Attributes:
        threads, cpus: threads of the loader, and processors that the rank may use.
        is_local: whether the dataset directory is a local folder.
        cached: whether reads from a URL are kept on a local disk.
        stored: longer side of the stored images in pixels; None: original size.
        image_size: longer side that the model takes, pixels.
        on_gpu: whether masks are rasterised on a GPU.
    """

    threads: int
    cpus: int
    is_local: bool
    cached: bool
    stored: int | None
    image_size: int
    on_gpu: bool

    @classmethod
    def of(cls, feed: Feed) -> "LoaderSettings":
        """The settings of a feed."""
        loader, stream = feed.loader, feed.stream
        return cls(
            loader.threads,
            available_cpus(),
            stream.dataset.reader.is_local,
            stream.stats.cache is not None,
            stream.dataset.manifest["options"].get("image_size"),
            stream.options.image_size,
            loader.device.type == "cuda",
        )


def advice(stage: str, settings: LoaderSettings) -> str:
    """What to change if a stage limits, in one line."""
    threads = (
        f"add threads (--data.threads, now {settings.threads} for {counted(settings.cpus, 'processor')})"
        if settings.threads < settings.cpus
        else f"give each rank more than {counted(settings.cpus, 'processor')}"
    )
    if stage == "read":
        if settings.is_local:
            return (
                "raise --data.prefetch, pass --data.block-size 16 to a new run if the disk is slow at random "
                "reads, or use faster storage"
            )
        if settings.cached:
            return "raise --data.prefetch, or --data.cache-bytes if the cache does not hold all shards"
        return "raise --data.prefetch, or cache the data on a local disk with --data.cache"
    if stage == "decode":
        if settings.stored is None or settings.stored > settings.image_size:
            size = settings.image_size
            return f"{threads} or reshard to {size} px: {command('reshard')} ... --image-size {size}"
        return threads
    if stage == "pick":
        return f"{threads} or lower --data.masks"
    if settings.on_gpu:
        return "lower --data.masks, --data.target-size or --data.prefetch: the GPU is busy with the model"
    return f"{threads}, lower --data.target-size or --data.masks"


class LoaderWindow:
    """The loaders' statistics over windows of steps.

    Args:
        settings: settings of rank 0's loader; those of the other ranks are the same.
    """

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._before: dict[str, list[float]] | None = None
        self._said: str | None = None

    def start(self, ranks: Mapping[str, Sequence[float]]) -> None:
        """Begin a window with the busy seconds so far, one of each rank for each name in `BUSY`."""
        self._before = {name: list(ranks[name]) for name in BUSY}

    def end(
        self, ranks: Mapping[str, Sequence[float]], waits: Sequence[float]
    ) -> tuple[dict[str, Any], str | None]:
        """End a window: its line of metrics.jsonl, and a message if data limit the run, once per incident.

        Args:
            waits: share of each rank's time in which it waited for data.
        """
        rank = max(range(len(waits)), key=lambda one: waits[one])
        before = self._before or {name: [0.0] * len(waits) for name in BUSY}
        busy = {
            stage: ranks[name][rank] - before[name][rank] for stage, name in zip(STAGES, BUSY, strict=True)
        }
        self.start(ranks)
        total = sum(busy.values())
        limiting = max(busy, key=lambda stage: busy[stage]) if total > 0 else None
        shares = {stage: round(seconds / total, 3) if total > 0 else 0.0 for stage, seconds in busy.items()}
        line = {"rank": rank, "data_wait": round(waits[rank], 4), "limiting": limiting, "busy": shares}
        if waits[rank] <= LIMIT or limiting is None:
            self._said = None
            return line, None
        if limiting == self._said:
            return line, None
        self._said = limiting
        where = f" on rank {rank}" if len(waits) > 1 else ""
        way_out = advice(limiting, self._settings)
        return line, f"data wait {waits[rank] * 100:.0f} %{where}: {limiting} limits; {way_out}"
