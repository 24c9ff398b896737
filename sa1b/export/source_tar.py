"""Writer of one source tar: `./sa_<id>.jpg` and `./sa_<id>.json` in turn; equal images give equal bytes."""

import glob
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from isal import igzip

from sa1b.names import member_name
from sa1b.shards.dataset import open_dataset
from sa1b.shards.sample import Sample
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import commit, flush, naming_path
from sa1b.storage.store import temporary_path

_GZIP_LEVEL = 2  # isal has levels 0 to 3; JPEGs hardly shrink at any level
_REPORT_BYTES = 8 << 20

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of a complete tar, and its size in bytes."""

    images: int
    masks: int
    bytes: int


def content_digest(table: SampleTable, rows: Rows, plain: bool) -> str:
    """Digest of the content of a tar: ids and checksums of its images in order, and the compression."""
    columns = (table.image_id[rows], table.jpg_crc32c[rows], table.masks_crc32c[rows])
    digest = hashlib.sha256(b"plain" if plain else b"gzip")
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def remove_partial(out: Path, names: Iterable[str]) -> None:
    """Remove the temporary files of these tars, which processes that were killed have left."""
    for name in names:
        for path in out.glob(f".{glob.escape(name)}.*partial"):
            path.unlink(missing_ok=True)


def write_source_tar(
    root: Path | str, path: Path, rows: Rows, plain: bool, report: Callable[[int], object]
) -> Written:
    """Write one tar and commit it when it is complete. Memory: one image.

    Args:
        root: folder or URL of the dataset directory.
        path: final path of the tar.
        rows: rows of the sample table, int64 [N], in the order of the tar.
        plain: write a plain tar instead of gzip.
        report: called with the bytes of images written since the last call.

    Raises:
        ShardError: a sample is damaged.
    """
    dataset = open_dataset(root)
    partial = temporary_path(path)  # of this process only: a lost worker may still write
    masks = done = 0
    try:
        with (
            naming_path(path),
            partial.open("wb") as file,
            _compressed(file, plain) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for row in rows.tolist():
                sample = dataset[row]
                _member(tar, sample.image_id, "jpg", sample.jpeg)
                _member(tar, sample.image_id, "json", annotation_text(sample))
                masks += len(sample.annotations)
                done += len(sample.jpeg)
                if done >= _REPORT_BYTES:
                    report(done)
                    done = 0
        report(done)
        with naming_path(path):
            flush(partial)
            size = partial.stat().st_size
            commit(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        dataset.reader.close()
    return Written(len(rows), masks, size)


def annotation_text(sample: Sample) -> bytes:
    """The annotation file of a sample, in UTF-8.

    The bytes equal those of the source if the source file has SA-1B's usual JSON format, or if ingest stored
    its text. Otherwise (other white space, other escapes) the file has the same values in the usual format.
    """
    kept = sample.annotations.text
    return json.dumps(sample.annotations.to_json()).encode() if kept is None else kept


@contextmanager
def _compressed(file: BinaryIO, plain: bool) -> Iterator[Any]:
    if plain:
        yield file
        return
    gzip_file: Any = igzip.IGzipFile
    with gzip_file("", "wb", _GZIP_LEVEL, file, mtime=0) as stream:
        yield stream


def _member(tar: tarfile.TarFile, image_id: int, ending: str, data: bytes) -> None:
    member = tarfile.TarInfo(f"./{member_name(image_id, ending)}")
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
