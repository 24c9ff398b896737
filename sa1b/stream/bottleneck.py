"""What limits a loader or a training step, and what to change: one table of thresholds, one of remedies.

`sa1b bench` names the limit of a loader, a training run the limit of the rank that waits longest for data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sa1b.console import command, counted
from sa1b.stream.loader import Loader
from sa1b.stream.stats import STAGES, limiting
from sa1b.workers import available_cpus

STORAGE_MARGIN = 1.2  # below this ratio of storage rate to loader rate, storage limits the loader
DATA_WAIT = 0.2  # share of the time spent waiting for data, above which data limit a run

BUSY = tuple(f"busy_{name}" for name in STAGES)  # names of the numbers that ranks exchange


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The settings of a loader that its remedies depend on."""

    threads: int
    cpus: int  # processors that the rank may use
    is_local: bool  # the dataset directory is a local folder
    cached: bool  # reads from a URL are kept on a local disk
    stored: int | None  # longer side of the stored images, pixels; None: original size
    image_size: int  # longer side of the loaded images, pixels
    on_gpu: bool  # masks are rasterised on a GPU
    decodes_on_gpu: bool = False  # JPEG files are decoded there
    trains: bool = True  # the loader feeds a training run: its flags begin with `--data.`

    @classmethod
    def of(cls, loader: Loader, **changes: Any) -> Self:
        """The settings of a loader; `changes` replace some of them."""
        stream, datasets = loader.stream, [source.dataset for source in loader.stream.sources()]
        stored = [dataset.manifest["options"].get("image_size") for dataset in datasets]
        settings: dict[str, Any] = {
            "threads": loader.threads,
            "cpus": available_cpus(),
            "is_local": all(dataset.reader.is_local for dataset in datasets),
            "cached": stream.stats.cache is not None,
            "stored": None if None in stored else max(stored),
            "image_size": stream.options.image_size,
            "on_gpu": loader.device.type == "cuda",
            "decodes_on_gpu": stream.decoder.device.type != "cpu",
        }
        return cls(**settings | changes)

    @property
    def flags(self) -> str:
        """The beginning of the flags of `sa1b train` or `sa1b bench`."""
        return "--data." if self.trains else "--"

    @property
    def has_idle_cpus(self) -> bool:
        return self.threads < self.cpus

    @property
    def is_larger(self) -> bool:
        """Whether the stored images are larger than the loaded ones."""
        return self.stored is None or self.stored > self.image_size


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change if one of `limits`, stages of a loader, limits."""

    limits: tuple[str, ...]
    text: str  # {s.NAME} is a value of the settings; `remedies` has the other words
    applies: Callable[[Any], bool] = lambda settings: True  # whether it fits the settings


_READ, _DEVICE = ("read", "storage"), ("collate", "device")
_CPU = ("pick", "decode")
_THREADS = "add threads ({s.flags}threads, now {s.threads} for {cpus})"
_PROCESSORS = "give {whom} more than {cpus}"
REMEDIES = (
    # Of several that apply, the cheapest comes first.
    Remedy(_READ, "raise --data.prefetch", lambda s: s.trains),
    Remedy(
        _READ,
        "pass --data.block-size 16 to a new run if the disk is slow at random reads",
        lambda s: s.trains and s.is_local,
    ),
    Remedy(
        _READ,
        "raise {s.flags}cache-bytes if the cache does not hold all shards",
        lambda s: not s.is_local and s.cached,
    ),
    Remedy(
        _READ, "cache the data on a local disk with {s.flags}cache", lambda s: not s.is_local and not s.cached
    ),
    Remedy(("storage",), "use faster storage"),
    Remedy(("read",), "use faster storage", lambda s: s.is_local and s.trains),
    # `sa1b bench` has measured that storage delivers more than the loader takes.
    Remedy(("read",), _THREADS, lambda s: s.has_idle_cpus and not s.trains),
    Remedy(("read",), _PROCESSORS, lambda s: not s.has_idle_cpus and not s.trains),
    Remedy(_CPU, _THREADS, lambda s: s.has_idle_cpus),
    Remedy(_CPU, _PROCESSORS, lambda s: not s.has_idle_cpus),
    Remedy(_DEVICE, _THREADS, lambda s: s.has_idle_cpus and not s.on_gpu),
    Remedy(_DEVICE, _PROCESSORS, lambda s: not s.has_idle_cpus and not s.on_gpu),
    Remedy(("pick",), "lower {s.flags}masks"),
    Remedy(
        ("decode", "storage"),
        "reshard to {s.image_size} px: {reshard} ... --image-size {s.image_size}",
        lambda s: s.is_larger,
    ),
    Remedy(
        ("decode",), "decode on the GPU: {s.flags}decode gpu", lambda s: s.on_gpu and not s.decodes_on_gpu
    ),
    Remedy(_DEVICE, "lower {dense}"),
    Remedy(_DEVICE, "lower {s.flags}masks"),
    Remedy(
        _DEVICE,
        "lower --data.prefetch, because the GPU is busy with the model",
        lambda s: s.on_gpu and s.trains,
    ),
    Remedy(("device",), "rasterise masks on a GPU: --device cuda", lambda s: not s.on_gpu and not s.trains),
)


def remedies(limit: str, settings: LoaderSettings) -> list[str]:
    """What to change if a stage of a loader limits, or measured storage ("storage")."""
    words = {
        "reshard": command("reshard"),
        "cpus": counted(settings.cpus, "processor"),
        "dense": "--data.target-size" if settings.trains else "--dense",
        "whom": "each rank" if settings.trains else "the loader",
    }
    return [
        remedy.text.format(s=settings, **words)
        for remedy in REMEDIES
        if limit in remedy.limits and remedy.applies(settings)
    ]


def advice(limit: str, settings: LoaderSettings) -> str:
    """The remedies of a loader in one line."""
    *others, last = remedies(limit, settings)
    return f"{', '.join(others)} or {last}" if others else last


def limit_of(storage: float, loader: float, busy: Mapping[str, float]) -> str:
    """The stage with the most `busy` seconds, or "storage". The rates are images per second."""
    return "storage" if storage < STORAGE_MARGIN * loader else limiting(busy)[0] or "storage"


class LoaderWindow:
    """The loaders' statistics over windows of steps.

    Each rank sends the busy seconds of its loader's stages with the figures of each step. At the end of a
    window, the rank with the largest wait is examined, with rank 0's settings: all have the same.
    """

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._before: dict[str, list[float]] | None = None
        self._reported: str | None = None

    def start(self, ranks: Mapping[str, Sequence[float]]) -> None:
        """Begin a window with the busy seconds so far, one of each rank for each name in `BUSY`."""
        self._before = {name: list(ranks[name]) for name in BUSY}

    def end(
        self, ranks: Mapping[str, Sequence[float]], waits: Sequence[float]
    ) -> tuple[dict[str, Any], str | None]:
        """End a window: its line of metrics.jsonl, and a message if data limit the run, once per incident.
        `waits` are the shares of each rank's time in which it waited for data.
        """
        rank = max(range(len(waits)), key=lambda number: waits[number])
        before = self._before or {name: [0.0] * len(waits) for name in BUSY}
        busy = {
            stage: ranks[name][rank] - before[name][rank] for stage, name in zip(STAGES, BUSY, strict=True)
        }
        self.start(ranks)
        limit, shares = limiting(busy)
        rounded = {stage: round(share, 3) for stage, share in shares.items()}
        line = {"rank": rank, "data_wait": round(waits[rank], 4), "limiting": limit, "busy": rounded}
        if waits[rank] <= DATA_WAIT or limit is None:
            self._reported = None
            return line, None
        if limit == self._reported:
            return line, None
        self._reported = limit
        where = f" on rank {rank}" if len(waits) > 1 else ""
        return line, (
            f"data wait {waits[rank] * 100:.0f} %{where}: {limit} limits; {advice(limit, self._settings)}"
        )
