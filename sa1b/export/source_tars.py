"""Back to source tars: gzip, `./sa_<id>.jpg` beside `./sa_<id>.json`, named as the sources were.

The JPEG is the original's bytes; the annotation file says the same, and in SA-1B's usual form it has the same
bytes. The order inside a tar is that of the shards. The same shards give the same bytes (with the same
version of isal, which compresses).
"""

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from isal import igzip

from sa1b.errors import ManifestError, UsageError
from sa1b.names import member_name, shard_order, source_stem
from sa1b.progress import Bar, bar
from sa1b.shards.dataset import Dataset, Sample, open_dataset
from sa1b.shards.manifest import DATASET
from sa1b.storage.publish import flush, lock, naming, publish

_GZIP_LEVEL = 2  # of isal's 0 to 3; JPEGs hardly shrink at any
_SHOWN = 5

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class Summary:
    """What was written. Bytes of tars as stored; seconds in all."""

    out: str
    seconds: float = 0.0
    tars: list[str] = field(default_factory=list)
    images: int = 0
    masks: int = 0
    bytes: int = 0

    def document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def table(self) -> str:
        """For people."""
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        return "\n".join(
            [
                f"  tars    {len(self.tars):,}",
                f"  images  {self.images:,}",
                f"  masks   {self.masks:,}",
                f"  bytes   {self.bytes:,} ({rate:,.1f} MB/s, {self.seconds:,.1f} s)",
                f"Complete: {self.out}",
            ]
        )


def export_sa1b(
    root: Path,
    out: Path,
    *,
    images_per_tar: int | None = None,
    ids: Path | None = None,
    plain: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Summary:
    """Write the images of `root` as source tars into `out`, made if need be. Memory: one image.

    Args:
        images_per_tar: split a source into `<source>-0000.tar`, ... of so many images; None: one tar each.
        ids: file with an image id a line: only these images. A source without any of them gives no tar.
        plain: plain tars instead of gzip.
        overwrite: replace tars that exist.

    Raises:
        UsageError: shards made with an image size, an unknown id, a tar that exists; nothing was written.
        ShardError: a sample is damaged; finished tars stay.
        ManifestError: no dataset there.
    """
    began = time.monotonic()
    dataset = open_dataset(root)
    _refuse_scaled(dataset)
    chosen = _chosen(dataset, ids)
    tars = {out / name: rows for name, rows in _tars(dataset, chosen, images_per_tar)}
    existing = [path.name for path in tars if path.exists()]
    if existing and not overwrite:
        more = f" and {len(existing) - _SHOWN} more" if len(existing) > _SHOWN else ""
        raise UsageError(
            f"{out} holds {', '.join(existing[:_SHOWN])}{more} already: name another --out, or replace "
            "them with --overwrite"
        )
    out.mkdir(parents=True, exist_ok=True)
    summary = Summary(str(out))
    total = int(dataset.table.jpg_bytes[chosen].sum(dtype=np.int64))
    with lock(out), bar(total, "export", "B", quiet) as progress:
        for path, rows in tars.items():
            _write(path, dataset, rows, plain, summary, progress)
            summary.tars.append(path.name)
            summary.bytes += path.stat().st_size
    summary.seconds = time.monotonic() - began
    return summary


def annotation_text(sample: Sample) -> bytes:
    """The annotation file of a sample: the original's bytes where it was in SA-1B's usual form or odd enough
    to have been kept, else (other white space, other escapes) the same values in the usual form."""
    kept = sample.annotations.text
    return json.dumps(sample.annotations.to_json()).encode() if kept is None else kept


def _refuse_scaled(dataset: Dataset) -> None:
    size = dataset.manifest["options"]["image_size"]
    if size is not None:
        raise UsageError(
            f"{dataset.root} was made with --image-size {size}: its JPEGs are re-encoded, and no longer of "
            "the size their annotations and masks say. Export from shards made without --image-size"
        )


def _chosen(dataset: Dataset, ids: Path | None) -> Rows:
    """Rows of the sample table to export."""
    if ids is None:
        return np.arange(len(dataset))
    wanted = set()
    for number, line in enumerate(ids.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            if not line.strip().isdecimal():
                raise UsageError(f"{ids}, line {number}: expected an image id, found {line[:80]!r}")
            wanted.add(int(line))
    known = dataset.table.image_id
    unknown = sorted(wanted - set(known[np.isin(known, np.fromiter(wanted, np.uint64))].tolist()))
    if unknown:
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"{ids}: {', '.join(map(str, unknown[:_SHOWN]))}{more}: not in {dataset.root}; "
            "take them out of the list"
        )
    if not wanted:
        raise UsageError(f"{ids}: holds no image id")
    return np.flatnonzero(np.isin(known, np.fromiter(wanted, np.uint64)))


def _tars(dataset: Dataset, chosen: Rows, images_per_tar: int | None) -> Iterator[tuple[str, Rows]]:
    """Name and rows of each tar, in the order of the shards."""
    sources = {source_stem(name): name for name in dataset.manifest["sources"]}
    stems = [shard_order(shard).stem for shard in dataset.shards]
    strange = [stem for stem in stems if stem not in sources]
    if strange:
        raise ManifestError(
            f"{dataset.reader.url(DATASET)}: names no source for shards of {strange[0]!r}; "
            "run tools/index.py to make it again"
        )
    names = [sources[stem] for stem in stems]
    table = dataset.table
    rows = chosen[np.lexsort((table.offset[chosen], table.shard[chosen]))]
    of_source = np.array([sorted(sources.values()).index(name) for name in names])[table.shard[rows]]
    for number, name in enumerate(sorted(sources.values())):
        own = rows[of_source == number]
        if images_per_tar is None:
            if len(own):
                yield f"{name}.tar", own
            continue
        for part, start in enumerate(range(0, len(own), images_per_tar)):
            yield f"{name}-{part:04d}.tar", own[start : start + images_per_tar]


def _write(path: Path, dataset: Dataset, rows: Rows, plain: bool, summary: Summary, progress: Bar) -> None:
    aside = path.with_name(f".{path.name}.partial")
    try:
        with (
            naming(path),
            aside.open("wb") as file,
            _compressed(file, plain) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for row in rows.tolist():
                sample = dataset[row]
                _member(tar, f"./{member_name(sample.image_id, 'jpg')}", sample.jpeg)
                _member(tar, f"./{member_name(sample.image_id, 'json')}", annotation_text(sample))
                summary.images += 1
                summary.masks += len(sample.annotations)
                progress.update(len(sample.jpeg))
        with naming(path):
            flush(aside)
            publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _compressed(file: BinaryIO, plain: bool) -> Iterator[Any]:
    if plain:
        yield file
        return
    gzip_file: Any = igzip.IGzipFile
    with gzip_file("", "wb", _GZIP_LEVEL, file, mtime=0) as stream:
        yield stream


def _member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
