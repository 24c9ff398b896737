"""Export to source tars with the names of the sources: gzip, members `./sa_<id>.jpg` and `./sa_<id>.json`.

The JPEG has the bytes of the source. The annotation file has the same values, and the same bytes if the
source file has SA-1B's usual JSON format. The order in a tar is the order in the shards. The same shards give
the same bytes with any number of workers and the same version of isal, the compression library.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isal import igzip

from sa1b.names import member_name
from sa1b.programs.export.export_format import Format, Ids, PartFiles, Rows, blocks, by_source
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample

_GZIP_LEVEL = 2  # isal has levels 0 to 3; no level makes JPEGs much smaller


@dataclass(frozen=True)
class SourceTars(Format):
    """Source tars as in the download."""

    images_per_tar: int | None = None  # tars of a source, `<source>-0000.tar`, ...; None: one
    plain: bool = False  # plain tars instead of gzip

    @property
    def kind(self) -> str:
        number = self.images_per_tar
        return "sa1b" if number is None else f"sa1b --images-per-tar {number}"

    @property
    def unit(self) -> str:
        return "tar"

    @property
    def identity(self) -> str:
        return "plain" if self.plain else "gzip"

    def parts(self, dataset: Dataset, rows: Rows) -> Iterator[tuple[str, Rows]]:
        sources: Iterable[tuple[str, Rows]] = by_source(dataset, rows)
        if self.images_per_tar is not None:
            sources = blocks(sources, self.images_per_tar)
        return ((f"{name}.tar", own) for name, own in sources)

    def paths(self, part: str, ids: Ids) -> list[str]:
        return [part]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        with (
            files.open(part) as file,
            _compressed(file, self.plain) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for sample in samples:
                add_member(tar, f"./{member_name(sample.image_id, 'jpg')}", sample.jpeg)
                add_member(tar, f"./{member_name(sample.image_id, 'json')}", annotation_text(sample))


def annotation_text(sample: Sample) -> bytes:
    """The annotation file of a sample, in UTF-8.

    The bytes equal those of the source if the source file has SA-1B's usual JSON format, or if ingest stored
    its text. Otherwise (other white space, other escapes) the file has the same values in the usual format.
    """
    kept = sample.annotations.text
    return json.dumps(sample.annotations.to_json()).encode() if kept is None else kept


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a file to a tar, without time or owner, so that equal files give equal bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


@contextmanager
def _compressed(file: Any, plain: bool) -> Iterator[Any]:
    if plain:
        yield file
        return
    gzip_file: Any = igzip.IGzipFile
    with gzip_file("", "wb", _GZIP_LEVEL, file, mtime=0) as stream:
        yield stream
