"""What limits a loader or a training step, and the one remedy that costs least.

`sa1b bench` names the limit of a loader, a training run the limit of the rank that waits longest for data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from sa1b.console import command, counted
from sa1b.stream.loader import Loader
from sa1b.stream.stats import STAGES, limiting
from sa1b.workers import available_cpus

STORAGE_MARGIN = 1.2  # below this ratio of storage rate to loader rate, storage limits the loader
DATA_WAIT = 0.2  # share of the time spent waiting for data, above which data limit a run

BUSY = tuple(f"busy_{name}" for name in STAGES)  # names of the numbers that ranks exchange


@dataclass(frozen=True, slots=True)
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
    def of(cls, loader: Loader) -> Self:
        """The settings of a loader of a training run."""
        stream, datasets = loader.stream, [source.dataset for source in loader.stream.sources()]
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
    flags, cpus = "--data." if settings.trains else "--", counted(settings.cpus, "processor")
    is_larger = settings.stored is None or settings.stored > settings.image_size
    reshard = (
        f"reshard to {settings.image_size} px: {command('reshard')} ... --image-size {settings.image_size}"
    )
    now = f"now {settings.processes} x {settings.threads} for {cpus}"
    more = f"add processes or threads ({flags}processes, {flags}threads, {now})"
    has_idle_cpus = settings.processes * settings.threads < settings.cpus
    if limit in ("storage", "read") and not settings.is_local:
        if settings.cached:
            return f"raise {flags}cache-bytes if the cache does not hold all shards"
        return f"cache the data on a local disk with {flags}cache"
    if limit == "storage":
        return reshard if is_larger else "use faster storage"
    if limit == "read" and settings.trains:
        return "raise --data.prefetch, or pass --data.block-size 16 to a new run"
    if has_idle_cpus and not (limit in ("collate", "device") and settings.on_gpu):
        also = limit == "decode" and is_larger and settings.trains  # the CPUs of a rank may not be enough
        return f"{more} or {reshard}" if also else more
    if limit == "decode" and is_larger:
        return reshard
    if limit == "decode" and settings.on_gpu and not settings.decodes_on_gpu:
        return f"decode on the GPU: {flags}decode gpu"
    if limit == "device":
        return f"lower {'--data.target-size' if settings.trains else '--dense'}"
    if limit in ("pick", "collate"):
        return f"lower {flags}masks"
    return f"give {'each rank' if settings.trains else 'the loader'} more than {cpus}"


def limit_of(storage: float, loader: float, busy: Mapping[str, float]) -> str:
    """The stage with the most `busy` seconds, or "storage". The rates are images per second."""
    return "storage" if storage < STORAGE_MARGIN * loader else limiting(busy)[0] or "storage"
