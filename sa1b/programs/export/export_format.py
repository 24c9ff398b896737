"""The interface of an export format: the parts of an export, the files of each part, and their content.

`export.export(root, out, format)` runs the workers and keeps the record for resuming; a format
only names and writes files. A *part* is the unit of a worker and of resuming: a name and rows of the sample
table, such as one tar or 1024 images with their annotation files. A format is a frozen dataclass, because it
is pickled to the workers; its fields are its options. The smallest one:

    @dataclass(frozen=True, slots=True)
    class Pictures(Format):
        def paths(self, part, ids):
            return [f"{part}/{image_id}.jpg" for image_id in ids.tolist()]

        def write(self, part, samples, files):
            for sample in samples:
                files.write(f"{part}/{sample.image_id}.jpg", sample.jpeg)

`write` puts every file of `paths` into `files`, a temporary folder that has the layout of the export. When
all files of the part are on the disk, they are renamed to their final paths. `samples` reads, verifies and
counts; a damaged sample raises ShardError, and the part is left out. `finish` writes the files about the
whole export, such as a list of ids, after all parts are complete.

To add a format: a module with its class here, a line in `verb_export.py`, a test that reads the export
with the format's own reader and compares every mask.
"""

import filecmp
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sa1b.console import command
from sa1b.errors import ManifestError, UsageError
from sa1b.names import shard_order, source_stem
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import DATASET
from sa1b.shards.sample import Sample
from sa1b.storage.atomic import flush, naming_path, process_of_temporary, temporary_path

Rows = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]
IMAGES_PER_PART = 1024


class PartFiles:
    """A temporary folder in the folder of an export. As a context manager it is removed at the end.

    A file that has the same path and the same bytes in `link_from`, an earlier export, becomes a hard link to
    it, if both folders are on one file system. `linked`: number of these files.
    """

    def __init__(self, out: Path, part: str, link_from: Path | None = None) -> None:
        self.out = out
        self.link_from = link_from
        self.linked = 0
        # The folder belongs to this process only, because a lost worker may still write.
        self.folder = temporary_path(out / TEMPORARY / part)

    def __enter__(self) -> "PartFiles":
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, path: str, data: bytes) -> None:
        """Write a file at a path relative to the export."""
        with self.open(path) as file:
            file.write(data)

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """Context of a file that is open for writing, at a path relative to the export."""
        temporary = self.folder / path
        with naming_path(self.out / path):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file

    def commit(self, paths: Sequence[str]) -> int:
        """Flush these files, then rename them to their final paths; their size in bytes."""
        size = 0
        for path in paths:
            temporary = self.folder / path
            with naming_path(self.out / path):
                size += temporary.stat().st_size
                if not self._link(path):
                    flush(temporary)
        folders = dict.fromkeys((self.out / path).parent for path in paths)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            (self.folder / path).replace(self.out / path)
        for folder in folders:
            flush(folder)
        return size

    def _link(self, path: str) -> bool:
        """Replace a file by a link to the equal file of the earlier export; False: there is none."""
        if self.link_from is None:
            return False
        earlier, temporary = self.link_from / path, self.folder / path
        try:
            if not filecmp.cmp(earlier, temporary, shallow=False):
                return False
            link = temporary.with_name(f".{temporary.name}.link")
            os.link(earlier, link)
        except OSError:  # no such file, another file system, too many links
            return False
        link.replace(temporary)
        self.linked += 1
        return True


class JoinedColumn(Protocol):
    """The part of a sa1b.stream.columns.Column that an export needs; it is pickled to the workers."""

    name: str
    key: str  # "image_id" or "mask_id"
    path: Path  # its file, whose name changes with the content

    @property
    def kind(self) -> Any:
        """Arrow's type of the values."""

    def lookup(self, ids: npt.NDArray[np.int64]) -> list[Any]:
        """The values of some ids; None where the table has no row."""
        ...

    def count(self, ids: npt.NDArray[np.int64]) -> int:
        """Number of these ids that have a row."""
        ...


def check_joined(
    columns: Sequence[JoinedColumn],
    dataset: Dataset,
    taken: Mapping[str, Collection[str]] | None = None,
    *,
    in_json: bool = True,
) -> None:
    """UsageError: a column of other images, with a name of the format (`taken`: names by key), or of values
    that have no form in JSON, if the format needs it.
    """
    ids = dataset.table.image_id.astype(np.int64)
    for column in columns:
        if column.key == "image_id" and not column.count(ids):
            raise UsageError(
                f"--join {column.name}: its table has a row for none of the {len(ids):,} images of "
                f"{dataset.root}; pass the table of this dataset, with image ids such as {ids[0]}"
            )
        if in_json and not _has_json(column.kind):
            raise UsageError(
                f"--join {column.name}: {column.kind} has no form in JSON; convert it to text or numbers, or "
                "export --to parquet"
            )
        if taken is not None and column.name in taken[column.key]:
            raise UsageError(
                f"--join {column.name}: the files have a field of this name; choose another name"
            )


def _has_json(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return all(_has_json(kind.field(number).type) for number in range(kind.num_fields))
    lacking = ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_decimal", "is_duration")
    return not any(getattr(pa.types, name)(kind) for name in lacking)


def joined_identity(columns: Sequence[JoinedColumn]) -> list[tuple[str, str, str]]:
    """What differs between exports with other columns."""
    return [(column.name, column.key, column.path.name) for column in columns]


def joined_value(column: JoinedColumn, sample: Sample) -> Any:
    """The value of an image, or the list of values of its masks; None if there is none."""
    if column.key == "image_id":
        return column.lookup(np.array([sample.image_id], np.int64))[0]
    values = column.lookup(sample.annotations.mask_id)
    return None if all(value is None for value in values) else values


@dataclass(frozen=True)
class Format:
    """A format of `sa1b export`; see the module."""

    unit: ClassVar[str] = "part"  # the word for a part in messages
    # whether readers take all files of the folder, so that it may not have parts of other images
    takes_all_files: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        """Text that differs between formats and options that write other bytes."""
        return repr(self)

    @property
    def kind(self) -> str:
        """The value of --to with the options that change the paths of files. A folder has one kind only."""
        return type(self).__name__.lower()

    @property
    def lists(self) -> tuple[str, ...]:
        """Paths of the files that `finish` writes, relative to the export."""
        return ()

    def check(self, dataset: Dataset) -> None:
        """UsageError if the format cannot contain the dataset; by default, if its images are scaled."""
        refuse_scaled(dataset)

    def without_images(self) -> "Format | None":
        """The format for a dataset directory without images; None: the format needs images."""
        return None

    def of(self, dataset: Dataset, rows: Rows) -> "Format":
        """The format with what it writes about the sources of these rows."""
        return self

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        """Names and ascending rows of the parts; by default at most 1024 images of one source each."""
        return blocks(by_source(dataset, rows), IMAGES_PER_PART)

    def paths(self, part: str, ids: Ids) -> list[str]:
        """Paths of all files of a part, relative to the export; ids, uint64 [N], have the order of rows."""
        raise NotImplementedError

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        """Write all files of a part, in a worker.

        Samples are in the order of its rows, and read while they are consumed, each once. ShardError, with
        the image: a sample cannot be written in this format.
        """
        raise NotImplementedError

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        """Write the files about the whole export, again in a rerun; `ids`: of the images with a mask."""


def refuse_scaled(dataset: Dataset) -> None:
    """UsageError for shards whose JPEGs have another size than their masks: made with --image-size."""
    size = dataset.manifest["options"]["image_size"]
    if size is not None:
        raise UsageError(
            f"{dataset.root}: was made with --image-size {size}, so the sizes of its JPEGs differ from the "
            "sizes in the annotations; export from shards made without --image-size, or only the JPEGs with "
            "--to images"
        )


def by_source(dataset: Dataset, rows: Rows) -> list[tuple[str, Rows]]:
    """Name and rows of each source that has any of the rows, in the order of the shards."""
    sources = {source_stem(name): name for name in dataset.manifest["sources"]}
    stems = [shard_order(shard).stem for shard in dataset.shards]
    strange = [stem for stem in stems if stem not in sources]
    if strange:
        raise ManifestError(
            f"{dataset.reader.url(DATASET)}: lists no source for the shards of {strange[0]!r}; "
            f"run `{command('index', dataset.root)}` to rebuild it"
        )
    names = sorted(sources.values())
    numbers = {name: number for number, name in enumerate(names)}
    table = dataset.table
    rows = rows[np.lexsort((table.offset[rows], table.shard[rows]))]
    of_source = np.array([numbers[sources[stem]] for stem in stems])[table.shard[rows]]
    rows = rows[np.argsort(of_source, kind="stable")]
    ends = np.cumsum(np.bincount(of_source, minlength=len(names)))
    parts = np.split(rows, ends[:-1])
    return [(name, part) for name, part in zip(names, parts, strict=True) if len(part)]


def joined(named: Iterable[tuple[str, Rows]], images: int) -> Iterator[tuple[str, Rows]]:
    """Join consecutive sources of few images, up to `images` images; the name is that of the first source."""
    # A list of ids has a few images of each source. A part for each source would cost more than its images.
    name, rows = "", np.empty(0, np.int64)
    for source_name, source_rows in named:
        if len(rows) and len(rows) + len(source_rows) > images:
            yield name, rows
            rows = rows[:0]
        name, rows = (
            (source_name, source_rows) if not len(rows) else (name, np.concatenate([rows, source_rows]))
        )
    if len(rows):
        yield name, rows


def blocks(named: Iterable[tuple[str, Rows]], images: int) -> Iterator[tuple[str, Rows]]:
    """Parts of at most `images` images: `<name>-0000`, `<name>-0001`, ..."""
    for name, rows in named:
        for number, start in enumerate(range(0, len(rows), images)):
            yield f"{name}-{number:04d}", rows[start : start + images]


TEMPORARY = ".export.partial"  # temporary folder in the folder of an export; it is removed at the end


def remove_temporary(out: Path) -> None:
    """Remove the temporary folders of the parts of an export, also those of workers that were killed."""
    for folder in (out / TEMPORARY).glob(".*"):
        if process_of_temporary(folder) is not None:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # there is none, or it holds files of others
        (out / TEMPORARY).rmdir()
