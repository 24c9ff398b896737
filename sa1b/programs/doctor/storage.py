"""The dataset directory and the folders of a run: readable, fast enough, with free space."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sa1b.arguments import was_url
from sa1b.console import counted
from sa1b.engine.watch.hardware import peak_flops
from sa1b.errors import Sa1bError
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, State
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.report import memory_text
from sa1b.sam.recipe import step_flops
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.manifest import DATASET
from sa1b.storage.errors import UnavailableError
from sa1b.storage.reader import Reader, pieces_of
from sa1b.stream.dataset import Stream
from sa1b.stream.throughput import storage_reads
from sa1b.workers import available_cpus

# A checkpoint of ViT-H has 7.7 GB: weights and two moments in float32. Two are kept while a third is written.
SPACE = 25 * 10**9  # bytes
SPACE_LEAST = 10**9
SPACE_TEMPORARY = 10**9
INODES = 10_000  # a checkpoint of 1,000 ranks has 1,000 files
MFU = 0.4  # share of the peak that a good training reaches
MASKS = 64  # of an image
_UNKNOWN_GPU = 100.0  # images per second
_CPU = 1.0
_MARGIN = 2.0  # required ratio; with less, the GPUs wait when other jobs use the disk


def dataset(process: RankProcess) -> Iterator[Finding]:
    """Open ROOT and read one verified sample; the ranks compare its digest."""
    if process.root is None:
        yield Finding("dataset", *_no_root())
        return
    try:
        with _opened(process) as opened:
            values = {
                "images": len(opened),
                "shards": len(opened.shards),
                "digest": opened.table.digest,
                "failed_sources": sorted(opened.failed),
                "pending_sources": opened.pending,
            }
            if len(opened) == 0:
                yield Finding("dataset", "failed", f"{process.root} has no images", "Convert sources into it")
                return
            check_images(opened, "training")
            sample = opened[process.rank * 7919 % len(opened)]  # any image, a different one on each rank
            figure = (
                f"{len(opened):,} images in {len(opened.shards):,} shards, digest {opened.table.digest[:12]}"
            )
            values["bytes"] = len(sample.jpeg)
    except (Sa1bError, OSError, ValueError) as error:
        figure, remedy = split(error, process)
        if (
            process.world_size > 1
            and "://" not in process.root
            and not (Path(process.root) / DATASET).exists()
        ):
            remedy = (
                f"If other machines have this dataset: mount their file system on {process.host}, copy it "
                f"there (sa1b copy), or name a URL. If none has: {remedy[:1].lower()}{remedy[1:]}"
            )
        yield Finding("dataset", "failed", figure, remedy)
        return
    if values["failed_sources"] or values["pending_sources"]:
        lacks = f"{figure}; failed sources: {len(opened.failed)}, pending: {len(opened.pending)}"
        yield Finding("dataset", "warning", lacks, "Run reshard again, or train without them", values=values)
    else:
        yield Finding("dataset", "ok", figure, values=values)


def read_rate(process: RankProcess) -> Iterator[Finding]:
    """Random samples per second and sequential bytes per second of ROOT, while all ranks read."""
    if process.root is None:
        yield Finding("read rate", *_no_root())
        return
    try:
        with _opened(process) as opened:
            yield rate_finding(_measured(process, opened), process.rate or needed_rate(process))
    except (Sa1bError, OSError, ValueError) as error:
        yield Finding("read rate", "skipped", *split(error, process))


class Rates(NamedTuple):
    """Random samples per second, verified, their mean size, and sequential bytes per second of a shard."""

    samples: float
    sample_bytes: float
    sequential: float


def _rate(rate: float) -> str:
    """A rate with its unit; in MB/s, the small rates that a CPU needs would be 0.0."""
    return f"{rate / 1e6:,.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:,.1f} kB/s"


def rate_finding(rates: Rates, needed: float) -> Finding:
    """The finding for measured rates, of a rank that trains `needed` samples per second."""
    random = rates.samples * rates.sample_bytes
    figure = (
        f"{rates.samples:,.0f} random samples/s ({random / 1e6:,.1f} MB/s), "
        f"{rates.sequential / 1e6:,.0f} MB/s sequential; a rank trains "
        f"{counted(round(needed), 'sample')}/s ({_rate(needed * rates.sample_bytes)})"
    )
    values = {
        "samples_per_second": rates.samples,
        "random_bytes_per_second": random,
        "sequential_bytes_per_second": rates.sequential,
        "needed_samples_per_second": needed,
        "sample_bytes": rates.sample_bytes,
    }
    if rates.samples >= _MARGIN * needed:
        return Finding("read rate", "ok", figure, values=values)
    state: State = "failed" if rates.samples < needed else "warning"
    return Finding(
        "read rate",
        state,
        figure,
        "Use faster storage, a local copy (sa1b copy) or --data.cache; `sa1b bench` measures the "
        "complete loader; --rate N sets what a rank trains",
        values=values,
    )


def needed_rate(process: RankProcess) -> float:
    """Images per second that a rank trains: ViT-B, the smallest model, at 40 % of the GPU's peak."""
    if process.device.type != "cuda":
        return _CPU
    peak = peak_flops(process.device, "bf16")
    return _UNKNOWN_GPU if peak is None else rate_of_peak(peak)


def rate_of_peak(peak: float) -> float:
    """Images per second of ViT-B on a GPU with `peak` operations per second."""
    vit_b = PRESETS["vit_b"]
    assert isinstance(vit_b, SamConfig)
    return MFU * peak / step_flops(vit_b.model, vit_b.recipe, 1, MASKS)


def space(process: RankProcess) -> Iterator[Finding]:
    """Free bytes and files of --out, and of the folder for temporary files."""
    if process.out is None:
        yield Finding("space", "skipped", "no --out was named", "Name the folder of the run: --out FOLDER")
    elif was_url(process.out):
        yield Finding(
            "space", "skipped", f"--out {process.out}: the free space of a store is unknown", "Nothing to do"
        )
    else:
        yield space_of("--out ", process.out, SPACE_LEAST, SPACE)
    yield space_of("temporary files in ", Path(tempfile.gettempdir()), SPACE_TEMPORARY // 10, SPACE_TEMPORARY)


def space_of(what: str, folder: Path, least: int, advised: int) -> Finding:
    """Free space of a folder, which need not exist; fails below `least` bytes, warns below `advised`."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
            file.flush()
        stats = os.statvfs(existing)
    except OSError as error:
        remedy = "Name a folder that this user can write, or free space"
        return Finding("space", "failed", f"{what}{folder}: cannot be written ({error.strerror})", remedy)
    free, files = stats.f_frsize * stats.f_bavail, stats.f_favail
    limited = stats.f_files > 0  # some file systems count no files
    figure = f"{what}{folder}: {memory_text(free)} free" + (f", {files:,} more files" if limited else "")
    values = {"folder": str(folder), "free_bytes": free, "free_files": files if limited else None}
    if free < least or (limited and files < INODES // 10):
        state: State = "failed"
    elif free < advised or (limited and files < INODES):
        state = "warning"
    else:
        return Finding("space", "ok", figure, values=values)
    return Finding(
        "space",
        state,
        f"{figure}; {memory_text(advised)} are advised" + (f" and {INODES:,} files" if limited else ""),
        "Free space, or name a folder on another disk" + (" (TMPDIR)" if not what.startswith("--") else ""),
        values=values,
    )


def split(error: Exception, process: RankProcess) -> tuple[str, str]:
    """Figure and remedy of an error; messages of this package end with the remedy."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or process.root}: {error.strerror}", "Check the path and its permissions"
    if isinstance(error, UnavailableError):
        return (
            f"{error.url or process.root}: unavailable for {process.deadline:g} s: {error.last_error}",
            f"Check on {process.host} that the store runs, its endpoint (AWS_ENDPOINT_URL), proxies and "
            "firewall",
        )
    what, separator, remedy = str(error).replace("\n", " ").partition("; ")
    return what, (
        remedy[:1].upper() + remedy[1:]
    ) if separator else "Check ROOT, the network and the credentials"


def _no_root() -> tuple[State, str, str]:
    return "skipped", "no ROOT was named", "Name the dataset directory: sa1b doctor ROOT"


@contextmanager
def _opened(process: RankProcess) -> Iterator[Dataset]:
    assert process.root is not None
    directory = Dataset(process.root, deadline=process.deadline)
    with closing(directory.reader):
        yield directory


def _measured(process: RankProcess, dataset: Dataset) -> Rates:
    threads = available_cpus()
    stream = Stream(
        dataset,
        global_batch=min(8, len(dataset)),
        epochs=None,
        seed=process.rank,
        rank=0,
        world_size=1,
        damage_log=os.devnull,
    )
    sizes: list[int] = []
    samples, passed = 0, 0.0
    with ThreadPoolExecutor(threads) as pool:
        reads = storage_reads(stream, pool, threads, sizes)
        next(reads)  # loads compiled kernels and opens connections
        began = time.perf_counter()
        for number in reads:
            samples += number
            passed = time.perf_counter() - began
            if passed >= process.seconds / 2:
                break
    return Rates(samples / passed, sum(sizes) / max(len(sizes), 1), _sequential(process, dataset))


def _sequential(process: RankProcess, dataset: Dataset) -> float:
    name = dataset.shards[process.rank % len(dataset.shards)]
    reader: Reader = dataset.reader
    length = reader.size(name)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < process.seconds / 2:
        if reader.is_local:
            _drop_cached(Path(reader.url(name)))
        for piece in reader.read_ranges(pieces_of(name, length)):
            count += len(piece)
            if time.perf_counter() - began > process.seconds / 2:
                break
    return count / (time.perf_counter() - began)


def _drop_cached(path: Path) -> None:
    """Drop a file from the page cache, so that the disk is measured."""
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
