"""The parts of an export: a worker writes one at a time, and the file `.export.jsonl` records their state.

The file is a `ResumeRecord` whose key is the digest of a part's content, and whose value has the counts of a
complete part. A part is complete if the record has its digest and its size, and its files have that size
together. A part without counts was in progress when the export ended, and is written again.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.names import is_bare_name
from sa1b.programs.export.export_format import Format, PartFiles, Rows
from sa1b.shards.dataset import Dataset, open_dataset
from sa1b.shards.layer import reopen_layers
from sa1b.shards.sample import Sample
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import ResumeRecord, header
from sa1b.views.predicate import Predicate

RECORD = ".export.jsonl"
_REPORT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A complete part: its counts, and the bytes of its files."""

    images: int
    masks: int
    bytes: int
    without_masks: tuple[int, ...] = ()  # ids of its images that have no mask
    linked: int = 0  # files that are hard links


@dataclass(slots=True)
class ExportRecord:
    out: Path
    kind: str = ""  # see Format.kind; empty: no record
    # name of a part -> digest of its content, see content_digest
    contents: dict[str, str] = field(default_factory=dict)
    # name of a complete part -> its counts and size
    written: dict[str, Written] = field(default_factory=dict)
    file: ResumeRecord | None = None  # open between `begin` and `close`

    def owns(self, name: str, content: str) -> bool:
        """Whether this export wrote the part of this name, so that it may be skipped or replaced."""
        return self.contents.get(name) == content

    def complete(self, name: str, content: str, paths: Iterable[str]) -> bool:
        """Whether the part has this content, and all its files exist with their size."""
        known = self.written.get(name)
        if known is None or not self.owns(name, content):
            return False
        try:
            return sum((self.out / path).stat().st_size for path in paths) == known.bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    def begin(self, kind: str, contents: dict[str, str]) -> None:
        """Record the format and the names of parts before the first one is written."""
        self.kind = kind
        self.contents.update(contents)
        for name in contents:
            self.written.pop(name, None)
        self.file = ResumeRecord(self.out / RECORD, {"export": kind})
        self.file.add_all({name: (content, None) for name, content in contents.items()})

    def close(self) -> None:
        if self.file is not None:
            self.file.__exit__()

    def remove(self, name: str, paths: Iterable[str]) -> None:
        """Remove the files of a part that is not in the export any more, then its name."""
        for path in paths:
            (self.out / path).unlink(missing_ok=True)
        del self.contents[name]
        self.written.pop(name, None)
        if self.file is not None:
            self.file.add(name, None, None)

    def finish(self, name: str, written: Written) -> None:
        self.written[name] = written
        if self.file is not None:
            self.file.add(name, self.contents[name], asdict(written))


def read_record(out: Path) -> ExportRecord:
    """The record of a folder, empty if there is none; UsageError: it is damaged or has another format."""
    path = out / RECORD
    record = ExportRecord(out)
    try:
        with path.open("rb") as file:
            of = header(file.readline()) or {}
        record.kind = str(of["export"])
        for name, (content, counts) in ResumeRecord(path, of).known.items():
            if not is_bare_name(name):
                raise ValueError(f"a part named {name!r}")
            if content is not None:
                record.contents[name] = str(content)
            if counts is not None:
                written = Written(**counts)
                record.written[name] = replace(written, without_masks=tuple(written.without_masks))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: damaged ({error!r}); remove it, and export again with --overwrite"
        ) from None
    return record


def content_digest(table: SampleTable, rows: Rows, identity: str) -> str:
    """Digest of the content of a part: ids and checksums of its images in order, and the format."""
    columns = (table.image_id[rows], table.jpg_crc32c[rows], table.masks_crc32c[rows])
    digest = hashlib.sha256(identity.encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def sample_bytes(table: SampleTable, rows: Rows) -> npt.NDArray[np.int64]:
    """Stored bytes of the image and mask record of each row, int64 [N], the unit of progress of an export."""
    return table.jpg_bytes[rows].astype(np.int64) + table.masks_bytes[rows]


@dataclass(slots=True)
class _Samples:
    """The samples of a part, counted while they are read."""

    dataset: Dataset
    rows: Rows
    masks_where: Predicate | None
    report: Callable[[int], object]
    masks: int = 0
    without_masks: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sample]:
        done = 0
        sizes = sample_bytes(self.dataset.table, self.rows).tolist()
        for stored, size in zip(self.dataset.samples(self.rows.tolist()), sizes, strict=True):
            sample = stored
            if self.masks_where is not None:
                kept = stored.annotations.keep(self.masks_where.masks(stored.annotations))
                sample = replace(stored, annotations=kept)
            yield sample
            self.masks += len(sample.annotations)
            if not len(sample.annotations):
                self.without_masks.append(sample.image_id)
            done += size
            if done >= _REPORT_BYTES:
                self.report(done)
                done = 0
        self.report(done)


def write_part(
    root: Path | str,
    out: Path,
    form: Format,
    name: str,
    rows: Rows,
    link_from: Path | None,
    masks_where: Predicate | None,
    layers: Sequence[tuple[str, str]],
    report: Callable[[int], object],
) -> Written:
    """Write one part, and commit its files when all are complete; ShardError: see `export`.

    Memory: 16 samples, unless the format needs more. `rows` are int64 [N], in the order of the part. `report`
    is called with the bytes of the samples that were read since the last call. `layers`: names and digests.
    """
    dataset = open_dataset(root)
    dataset.layers = reopen_layers(dataset.reader, dataset.table, layers)
    samples = _Samples(dataset, rows, masks_where, report)
    try:
        with PartFiles(out, name, link_from) as files:
            form.write(name, samples, files)
            size = files.commit(form.paths(name, dataset.table.image_id[rows]))
    finally:
        dataset.reader.close()
    return Written(len(rows), samples.masks, size, tuple(samples.without_masks), files.linked)
