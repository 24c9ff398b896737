"""The dataset directory and the folders of a run: readable, fast enough, with free space."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sa1b.arguments import was_url
from sa1b.console import counted
from sa1b.doctor.check import Subject
from sa1b.doctor.report import Finding, State
from sa1b.engine.hardware import peak_flops
from sa1b.engine.presets import PRESETS, SamConfig
from sa1b.errors import Sa1bError
from sa1b.report import memory_text
from sa1b.sam.flops import step_flops
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import DATASET
from sa1b.shards.without_images import check_images
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
_MARGIN = 2.0  # below it, a disk that other jobs use at times makes the GPUs wait


def dataset(subject: Subject) -> Iterator[Finding]:
    """Open ROOT and read one verified sample; the ranks compare its digest."""
    if subject.root is None:
        yield Finding("dataset", *_no_root())
        return
    try:
        with _opened(subject) as found:
            values = {
                "images": len(found),
                "shards": len(found.shards),
                "digest": found.table.digest,
                "failed_sources": sorted(found.failed),
                "pending_sources": found.pending,
            }
            if len(found) == 0:
                yield Finding("dataset", "failed", f"{subject.root} has no images", "Convert sources into it")
                return
            check_images(found, "training")
            sample = found[subject.rank * 7919 % len(found)]  # any image, a different one on each rank
            figure = (
                f"{len(found):,} images in {len(found.shards):,} shards, digest {found.table.digest[:12]}"
            )
            values["bytes"] = len(sample.jpeg)
    except (Sa1bError, OSError, ValueError) as error:
        figure, remedy = split(error, subject)
        if (
            subject.world_size > 1
            and "://" not in subject.root
            and not (Path(subject.root) / DATASET).exists()
        ):
            remedy = (
                f"If other machines have this dataset: mount their file system on {subject.host}, copy it "
                f"there (sa1b copy), or name a URL. If none has: {remedy[:1].lower()}{remedy[1:]}"
            )
        yield Finding("dataset", "failed", figure, remedy)
        return
    if values["failed_sources"] or values["pending_sources"]:
        lacks = f"{figure}; failed sources: {len(found.failed)}, pending: {len(found.pending)}"
        yield Finding("dataset", "warning", lacks, "Run reshard again, or train without them", values=values)
    else:
        yield Finding("dataset", "ok", figure, values=values)


def read_rate(subject: Subject) -> Iterator[Finding]:
    """Random samples per second and sequential bytes per second of ROOT, while all ranks read."""
    if subject.root is None:
        yield Finding("read rate", *_no_root())
        return
    try:
        with _opened(subject) as found:
            yield judged(_measured(subject, found), subject.rate or needed_rate(subject))
    except (Sa1bError, OSError, ValueError) as error:
        yield Finding("read rate", "skipped", *split(error, subject))


class Rates(NamedTuple):
    """Measured rates of a dataset directory.

    Attributes:
        samples: random samples per second, with verification.
        sample_bytes: mean size of a sample.
        sequential: bytes per second of one shard from start to end.
    """

    samples: float
    sample_bytes: float
    sequential: float


def _rate(rate: float) -> str:
    """A rate with its unit; in MB/s, the small rates that a CPU needs would be 0.0."""
    return f"{rate / 1e6:,.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:,.1f} kB/s"


def judged(rates: Rates, needed: float) -> Finding:
    """The finding for measured rates.

    Args:
        needed: samples per second that this rank trains.
    """
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


def needed_rate(subject: Subject) -> float:
    """Images per second that a rank trains.

    ViT-B, the smallest published model, at 40 % of the GPU's peak; a larger model needs fewer.
    """
    if subject.device.type != "cuda":
        return _CPU
    peak = peak_flops(subject.device, "bf16")
    return _UNKNOWN_GPU if peak is None else rate_of_peak(peak)


def rate_of_peak(peak: float) -> float:
    """Images per second of ViT-B on a GPU with `peak` operations per second."""
    vit_b = PRESETS["vit_b"]
    assert isinstance(vit_b, SamConfig)
    return MFU * peak / step_flops(vit_b.model, vit_b.recipe, 1, MASKS)


def space(subject: Subject) -> Iterator[Finding]:
    """Free bytes and files of --out, and of the folder for temporary files."""
    if subject.out is None:
        yield Finding("space", "skipped", "no --out was named", "Name the folder of the run: --out FOLDER")
    elif was_url(subject.out):
        yield Finding(
            "space", "skipped", f"--out {subject.out}: the free space of a store is unknown", "Nothing to do"
        )
    else:
        yield space_of("--out ", subject.out, SPACE_LEAST, SPACE)
    yield space_of("temporary files in ", Path(tempfile.gettempdir()), SPACE_TEMPORARY // 10, SPACE_TEMPORARY)


def space_of(what: str, folder: Path, least: int, advised: int) -> Finding:
    """Free space of a folder, which need not exist yet, and whether it can be written.

    Args:
        what: for the figure.
        least: bytes below which the check fails.
        advised: bytes below which it warns.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
            file.flush()
        found = os.statvfs(existing)
    except OSError as error:
        remedy = "Name a folder that this user can write, or free space"
        return Finding("space", "failed", f"{what}{folder}: cannot be written ({error.strerror})", remedy)
    free, files = found.f_frsize * found.f_bavail, found.f_favail
    limited = found.f_files > 0  # some file systems count no files
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


def split(error: Exception, subject: Subject) -> tuple[str, str]:
    """Figure and remedy of an error; messages of this package end with the remedy."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or subject.root}: {error.strerror}", "Check the path and its permissions"
    if isinstance(error, UnavailableError):
        return (
            f"{error.url or subject.root}: unavailable for {subject.deadline:g} s: {error.last_error}",
            f"Check on {subject.host} that the store runs, its endpoint (AWS_ENDPOINT_URL), proxies and "
            "firewall",
        )
    what, separator, remedy = str(error).replace("\n", " ").partition("; ")
    return what, (
        remedy[:1].upper() + remedy[1:]
    ) if separator else "Check ROOT, the network and the credentials"


def _no_root() -> tuple[State, str, str]:
    return "skipped", "no ROOT was named", "Name the dataset directory: sa1b doctor ROOT"


class _Opened:
    """An open dataset whose connections are closed at the end."""

    def __init__(self, found: Dataset) -> None:
        self.found = found

    def __enter__(self) -> Dataset:
        return self.found

    def __exit__(self, *_: object) -> None:
        self.found.reader.close()


def _opened(subject: Subject) -> _Opened:
    assert subject.root is not None
    return _Opened(Dataset(subject.root, deadline=subject.deadline))


def _measured(subject: Subject, found: Dataset) -> Rates:
    threads = available_cpus()
    stream = Stream(
        found,
        global_batch=min(8, len(found)),
        epochs=None,
        seed=subject.rank,
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
            if passed >= subject.seconds / 2:
                break
    return Rates(samples / passed, sum(sizes) / max(len(sizes), 1), _sequential(subject, found))


def _sequential(subject: Subject, found: Dataset) -> float:
    """Bytes per second of reading one shard, a different one on each rank."""
    name = found.shards[subject.rank % len(found.shards)]
    reader: Reader = found.reader
    length = reader.size(name)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < subject.seconds / 2:
        if reader.is_local:
            _drop_cached(Path(reader.url(name)))
        for piece in reader.read_ranges(pieces_of(name, length)):
            count += len(piece)
            if time.perf_counter() - began > subject.seconds / 2:
                break
    return count / (time.perf_counter() - began)


def _drop_cached(path: Path) -> None:
    """Drop a file from the page cache, so that the disk is measured."""
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
