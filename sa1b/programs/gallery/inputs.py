"""Input of the gallery: reads the distributions and the chosen images of a dataset, shard, tar or folder.

The images of a dataset directory are chosen from its sample table and read by their offsets. By default the
distributions come from the indexes of at most SURVEYED_SHARDS shards, evenly spaced, because the indexes of
11,000 shards take minutes and the rest of the page takes a second. Other inputs are read completely, once.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.errors import ShardError, UsageError
from sa1b.names import image_name
from sa1b.programs.gallery.chart import Survey
from sa1b.programs.gallery.members import Choice, Exhibit, Gathered, Skipped, read_members
from sa1b.report import Bar, first_names
from sa1b.shards import manifest, quarantine
from sa1b.shards.commit import shard_files
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.index import IndexFormatError, index_file
from sa1b.shards.manifest import dataset_around
from sa1b.shards.sample import location_in_shard, submit
from sa1b.shards.shard import index_path
from sa1b.sources.discovery import discover
from sa1b.sources.source import Source
from sa1b.sources.tar_reader import TAR, is_tar
from sa1b.storage.reader import Reader
from sa1b.storage.store import Root
from sa1b.views.index_scan import naming_index

SURVEYED_SHARDS = 64
_BATCH_IMAGES = 1024
_LOCATIONS = ("jpg_offset", "jpg_bytes", "jpg_crc32c", "masks_offset", "masks_bytes", "masks_crc32c")
_NUMBERS = ("area", "predicted_iou", "stability_score", "runs_count")


def gather(path: Path | str, choice: Choice, progress: Bar, *, survey_all: bool = False) -> Gathered:
    """Read an input: a dataset directory (also a URL), shard, source tar, folder of pairs or of tars.

    `progress` is a bar of bytes, whose total this function sets. `survey_all` reads all indexes. SourceError,
    ManifestError or ShardError: the input has nothing to show. UsageError: it does not contain a requested
    image, or has no views.
    """
    root, path = path, Path(path)
    if path.name == manifest.DATASET:
        raise manifest.no_dataset(root)
    if is_dataset(root):
        gathered = _dataset(root, choice, progress, survey_all)
    elif choice.images is not None:
        raise UsageError(f"{path}: not a dataset directory; pass one, or omit --view and --warnings")
    elif path.is_file() and index_path(path).exists():
        gathered = _indexed_shard(path, choice, progress)
    else:
        tars = sources(path)
        progress.total = sum(source.size for source in tars)
        gathered = Gathered("Source tar" if path.is_file() else "Folder", path.resolve().name)
        if read_members(tars, choice, gathered, _advance(progress)) and path.is_file():
            gathered.kind = "Shard without index"
    missing = [image_id for image_id in choice.ids if image_id not in gathered.found]
    if missing:
        part = ", or not in the chosen part of it" if choice.images is not None else ""
        file, names = choice.predictions, first_names(missing, 10)
        if file is not None:
            raise UsageError(
                f"--predictions {file}: its images {names} are not in {root}{part}; pass the dataset "
                "directory of their evaluation"
            )
        raise UsageError(
            f"--id {names}: not in {root}{part}; choose other ids, the input has {gathered.images:,} images"
        )
    return gathered


def is_dataset(path: Path | str) -> bool:
    """Whether a path is a dataset directory, complete or not. Every URL counts as one."""
    if "://" in str(path):
        return True
    path = Path(path)
    return path.is_dir() and ((path / manifest.DATASET).exists() or (path / manifest.TASKS).is_dir())


def sources(path: Path) -> list[Source]:
    """The tars and folders at a path; unlike in ingest, a single tar may have any name."""
    if path.is_file() and is_tar(path):
        stat = path.stat()
        return [Source(name=path.name, path=path, format=TAR, size=stat.st_size, mtime_ns=stat.st_mtime_ns)]
    return discover([path]).sources


def _advance(progress: Bar) -> Callable[[int], None]:
    def advance(done: int) -> None:
        progress.update(done)

    return advance


def _dataset(root: Path | str, choice: Choice, progress: Bar, survey_all: bool) -> Gathered:
    dataset = Dataset(root, layers=choice.layers)
    dataset.check_table()
    check_images(dataset, "a gallery")
    table, document = dataset.table, dataset.manifest
    totals, options = document["totals"], document["options"]
    part = np.arange(len(table)) if choice.images is None else _rows(table.image_id, choice.images)
    if not len(part):
        raise UsageError(f"{root}: contains none of the chosen images; omit --view or --warnings")
    gathered = Gathered("Dataset directory", _last_part(root), known_images=len(part), part_noun="shard")
    ids = table.image_id[part]
    rows = part[choice.best(ids)]
    gathered.found = set(table.image_id[rows].tolist())
    gathered.exhibits = _read_rows(dataset, rows, gathered.skipped)

    shards = np.unique(table.shard[part])
    if len(shards) > SURVEYED_SHARDS and not survey_all:
        spaced = np.linspace(0, len(shards) - 1, SURVEYED_SHARDS).round().astype(np.int64)
        gathered.surveyed = [dataset.shards[shard] for shard in shards[spaced].tolist()], len(shards)
        shards = shards[spaced]
        gathered.known_masks = totals["masks"] if choice.images is None else None
    infos = document["shards"]
    progress.total = sum(int(infos[shard]["index_bytes"]) for shard in shards.tolist())
    keep = None if choice.images is None else ids
    for shard in shards.tolist():
        _survey(dataset.reader, dataset.shards[shard], gathered.survey, keep)
        progress.update(int(infos[shard]["index_bytes"]))

    gathered.parts = [
        (str(info["name"]), info["images"], info["masks"], info["bytes"] + info["index_bytes"])
        for info in infos
    ]
    if choice.images is not None:
        gathered.facts.append(("Images in the dataset", f"{len(table):,}"))
    for info in (layer.info for layer in dataset.layers):
        shown = f"{info.name} ({info.digest[:12]}); the distributions are those of the shards"
        gathered.facts.append(("Layer", shown))
    made_from = [*document["sources"]]
    gathered.facts.append(("Sources", f"{len(made_from):,} ({first_names(made_from, 6)})"))
    if options["image_size"] is not None:
        gathered.facts.append(("Stored images", f"longer side at most {options['image_size']:,} px"))
    gathered.facts.append(("Quarantined", f"{totals['refused']:,}"))
    gathered.facts.append(("Kept with warnings", f"{totals['doubtful']:,}"))
    return gathered


def _last_part(root: Path | str) -> str:
    return str(root).rstrip("/").rpartition("/")[2] if "://" in str(root) else Path(root).resolve().name


def _rows(known: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.isin(known, ids, assume_unique=True))


def _read_rows(dataset: Dataset, rows: npt.NDArray[np.int64], skipped: Skipped) -> Iterator[Exhibit]:
    for row in rows.tolist():
        try:
            sample = dataset[row]
        except ShardError as error:
            shard, offset = dataset.shards[int(dataset.table.shard[row])], int(dataset.table.offset[row])
            where = f"{image_name(int(dataset.table.image_id[row]))} in {shard} at offset {offset:,}"
            skipped.add("damaged", f"{where}: {error}")
            continue
        yield Exhibit(sample.jpeg, sample.annotations, sample.shard)


def _survey(reader: Reader, shard: str, survey: Survey, keep: npt.NDArray[np.uint64] | None) -> None:
    """Count the images of a shard from its index; `keep`: ids of the images to count, None: all."""
    for batch in _batches(reader, shard, ("image_id", "width", "height", *_NUMBERS)):
        if keep is not None:
            rows = batch.filter(pa.array(np.isin(batch["image_id"].to_numpy(), keep)))
        else:
            rows = batch
        flat = {name: rows[name].flatten().to_numpy(zero_copy_only=False) for name in _NUMBERS}
        counts = rows["area"].value_lengths().to_numpy(zero_copy_only=False)
        survey.add(rows["width"].to_numpy(), rows["height"].to_numpy(), counts.astype(np.int64), **flat)


def _batches(reader: Reader, shard: str, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    name = shard_files(shard)[1]
    with naming_index(reader, name), pq.ParquetFile(index_file(reader, name), pre_buffer=True) as file:
        if lost := {*columns}.difference(file.schema_arrow.names):
            raise IndexFormatError(f"has no column {min(lost)}")
        yield from file.iter_batches(_BATCH_IMAGES, columns=list(columns))


def _indexed_shard(shard: Path, choice: Choice, progress: Bar) -> Gathered:
    index_bytes = index_path(shard).stat().st_size
    progress.total = index_bytes
    gathered = Gathered("Shard", shard.name)
    reader = Reader(shard.parent)
    _survey(reader, shard.name, gathered.survey, None)
    batches = _batches(reader, shard.name, ("image_id", *_LOCATIONS))
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    located = pa.concat_tables(tables) if tables else pa.table({"image_id": pa.array([], pa.uint64())})
    ids = located["image_id"].to_numpy()
    best = choice.best(ids)
    gathered.found = set(ids[best].tolist())
    gathered.exhibits = _read_located(shard, located.take(pa.array(best)).to_pylist(), gathered.skipped)
    gathered.parts = [(shard.name, None, None, shard.stat().st_size + index_bytes)]
    progress.update(index_bytes)
    return gathered


def _read_located(shard: Path, rows: list[dict[str, Any]], skipped: Skipped) -> Iterator[Exhibit]:
    reader = Reader(shard.parent)
    for row in rows:
        try:
            (reading,) = submit(reader, [location_in_shard(reader, shard.name, row)])
            jpeg, annotations = reading.result()
        except ShardError as error:
            skipped.add("damaged", str(error))
            continue
        yield Exhibit(bytes(jpeg), annotations, shard.name)


Warnings = dict[int, list[tuple[str, str]]]  # image id -> reasons with their messages


def read_warnings(root: Root) -> Warnings:
    """All warnings of a dataset directory, by image; without warnings, UsageError."""
    warnings: Warnings = {}
    for _, entry in quarantine.read_warnings(root):
        warnings.setdefault(entry["image_id"], []).append((entry["reason"], str(entry.get("message"))))
    if not warnings:
        raise UsageError(f"{root}: no image has a warning; omit --warnings")
    return warnings


@dataclass(frozen=True, slots=True)
class GallerySummary:
    """The result of writing a gallery."""

    page: Path
    bytes: int
    images: int  # total of the input
    masks: int | None  # total of the input; None: they were not counted
    shown: list[int]  # ids of the images, in the order of the page
    longer_side: int
    quality: int
    left_out: int  # chosen images that did not fit
    skipped: dict[str, int]  # reason -> number of members that cannot be used
    surveyed: tuple[int, int] | None  # number of surveyed shards, and of all shards; None: the whole input

    def document(self) -> dict[str, Any]:
        names = (
            "bytes",
            "images",
            "masks",
            "shown",
            "longer_side",
            "quality",
            "left_out",
            "skipped",
            "surveyed",
        )
        return {"page": str(self.page)} | {name: getattr(self, name) for name in names}

    def table(self) -> str:
        masks = f", {self.masks:,} masks in total" if self.masks is not None else ""
        lines = [
            f"  shown      {len(self.shown):,} of {self.images:,} images{masks}",
            f"  drawn at   at most {self.longer_side:,} px, JPEG quality {self.quality}",
        ]
        if self.left_out:
            lines.append(f"  left out   {self.left_out:,} images that do not fit into 20 MB")
        if self.surveyed is not None:
            some, of = self.surveyed
            lines.append(
                f"  survey     distributions over {some:,} of {of:,} shards; --survey all reads every index"
            )
        if self.skipped:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in self.skipped.items())
            lines.append(f"  skipped    {reasons}")
        lines.append(f"{self.page}: {self.bytes / 1e6:.1f} MB; open it in a browser")
        return "\n".join(lines)


_HEAD = 4096  # bytes; the mark is in the first lines of a page


def origin_mark(source: Path | str, out: Path) -> str:
    """The mark in the head of a page: a digest of the path of its input, relative to the page's folder."""
    # The path itself may contain private names, and pages are sent to others.
    is_url = "://" in str(source)
    relative = str(source) if is_url else os.path.relpath(Path(source).resolve(), out.resolve().parent)
    return f"sa1b gallery {hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"


def check_replaceable(source: Path | str, out: Path, *, overwrite: bool) -> None:
    """UsageError for a file that is no gallery page of this input, unless `overwrite`."""
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; pass the path of a file")
    if "://" not in str(source) and out.exists() and out.samefile(source):
        raise UsageError(f"--out {out}: is the input; choose another --out")
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    if b'content="sa1b gallery ' not in head and (root := dataset_around(out)) is not None:
        raise UsageError(f"--out {out}: is a file of the dataset directory {root}; choose another --out")
    if overwrite:
        return
    if origin_mark(source, out).encode() not in head:
        what = (
            "a page of another input" if b'content="sa1b gallery ' in head else "not written by this command"
        )
        raise UsageError(
            f"--out {out}: exists and is {what}; choose another --out, or replace it with --overwrite"
        )
