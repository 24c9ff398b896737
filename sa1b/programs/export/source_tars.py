"""Export to tars: source tars, gzip, with the names of the sources, and tars for the library webdataset.

Source tars have the members `./sa_<id>.jpg` and `./sa_<id>.json`.

The JPEG has the bytes of the source. The annotation file has the same values, and the same bytes if the
source file has SA-1B's usual JSON format. The order in a tar is the order in the shards. The same shards give
the same bytes with any number of workers and the same version of isal, the compression library.

Tars for webdataset have a member for each joined column, and the members of an image follow each other:

    sa1b-000000.tar   sa_1.jpg, sa_1.json, sa_1.caption.txt, sa_5.jpg, ...

A text is stored as the member `sa_<id>.<name>.txt`, any other value as `sa_<id>.<name>.json`, which
webdataset decodes. A column by mask_id is a JSON list with a value or null for each mask, in the order of the
annotations. An image without a value has no such member. Images are in the order of the shards, so shuffle
the tars and the samples when you read them.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from isal import igzip

from sa1b.names import image_name, member_name
from sa1b.programs.export.export_format import (
    Format,
    Ids,
    JoinedColumn,
    PartFiles,
    Rows,
    blocks,
    by_source,
    check_joined,
    joined_identity,
    joined_value,
)
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample
from sa1b.sources.coco_pair import json_text

_GZIP_LEVEL = 2  # isal has levels 0 to 3; no level makes JPEGs much smaller


@dataclass(frozen=True)
class SourceTars(Format):
    unit = "tar"

    images_per_tar: int | None = None  # tars of a source, `<source>-0000.tar`, ...; None: one
    plain: bool = False  # plain tars instead of gzip

    @property
    def kind(self) -> str:
        number = self.images_per_tar
        return "sa1b" if number is None else f"sa1b --images-per-tar {number}"

    @property
    def identity(self) -> str:
        return "plain" if self.plain else "gzip"

    def parts(self, dataset: Dataset, rows: Rows) -> Iterator[tuple[str, Rows]]:
        sources: Iterable[tuple[str, Rows]] = by_source(dataset, rows)
        if self.images_per_tar is not None:
            sources = blocks(sources, self.images_per_tar)
        return ((f"{name}.tar", part) for name, part in sources)

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


IMAGES_PER_TAR = 1000


@dataclass(frozen=True)
class WebDataset(Format):
    """Tars of `images_per_tar` images with joined columns and, with `texts`, the texts of the sources."""

    unit = "tar"
    takes_all_files = True

    images_per_tar: int = IMAGES_PER_TAR
    columns: tuple[JoinedColumn, ...] = ()
    texts: bool = False

    def check(self, dataset: Dataset) -> None:
        """Refuse scaled images, and a column that belongs to other images."""
        super().check(dataset)
        check_joined(self.columns, dataset)

    @property
    def identity(self) -> str:
        return f"webdataset {joined_identity(self.columns)}" + ", texts" * self.texts

    def parts(self, dataset: Dataset, rows: Rows) -> Iterator[tuple[str, Rows]]:
        ordered = np.concatenate([part for _, part in by_source(dataset, rows)])
        for number, start in enumerate(range(0, len(ordered), self.images_per_tar)):
            yield f"sa1b-{number:06d}.tar", ordered[start : start + self.images_per_tar]

    def paths(self, part: str, ids: Ids) -> list[str]:
        return [part]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        with (
            files.open(part) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for sample in samples:
                key = image_name(sample.image_id)
                add_member(tar, f"{key}.jpg", sample.jpeg)
                add_member(tar, f"{key}.json", annotation_text(sample))
                if self.texts and (texts := sample.annotations.texts()):
                    add_member(tar, f"{key}.texts.json", json.dumps(texts, ensure_ascii=False).encode())
                for column in self.columns:
                    value = joined_value(column, sample)
                    if value is not None:
                        is_text = isinstance(value, str)
                        data = value if is_text else json_text(value, ensure_ascii=False)
                        ending = "txt" if is_text else "json"
                        add_member(tar, f"{key}.{column.name}.{ending}", data.encode())
