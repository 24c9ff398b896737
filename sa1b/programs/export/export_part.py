"""The work of one worker of an export: read the samples of a part, and write and commit its files."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sa1b.programs.export.export_format import Format, PartFiles, Rows
from sa1b.programs.export.export_record import Written
from sa1b.shards.dataset import Dataset, open_dataset
from sa1b.shards.sample import Sample
from sa1b.shards.sample_table import SampleTable

_REPORT_BYTES = 8 << 20


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
    report: Callable[[int], object]
    masks: int = 0
    without_masks: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sample]:
        done = 0
        sizes = sample_bytes(self.dataset.table, self.rows).tolist()
        for sample, size in zip(self.dataset.samples(self.rows.tolist()), sizes, strict=True):
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
    report: Callable[[int], object],
) -> Written:
    """Write one part, and commit its files when all are complete.

    Memory: 16 samples, unless the format needs more.

    Args:
        root: folder or URL of the dataset directory.
        out: folder of the export.
        form: its format.
        name: name of the part.
        rows: rows of the sample table, int64 [N], in the order of the part.
        link_from: folder of an earlier export, see PartFiles.
        report: called with the bytes of the samples that were read since the last call.

    Raises:
        ShardError: a sample is damaged, or cannot be written in this format.
    """
    dataset = open_dataset(root)
    samples = _Samples(dataset, rows, report)
    try:
        with PartFiles(out, name, link_from) as files:
            form.write(name, samples, files)
            size = files.commit(form.paths(name, dataset.table.image_id[rows]))
    finally:
        dataset.reader.close()
    return Written(len(rows), samples.masks, size, tuple(samples.without_masks), files.linked)
