"""Export to tars for the library webdataset: `sa_<id>.jpg`, `sa_<id>.json` and joined columns.

    sa1b-000000.tar   sa_1.jpg, sa_1.json, sa_1.caption.txt, sa_5.jpg, ...

The JPEG has the stored bytes, the JSON is that of source_tars.annotation_text. A joined column is
a member `sa_<id>.<name>.txt` if the value is text, else `sa_<id>.<name>.json`, which webdataset decodes. A
column by mask_id is a JSON list with a value or null for each mask, in the order of the annotations. An
image without a value has no such member. The members of an image follow each other, as webdataset needs;
images are in the order of the shards, so shuffle the tars and the samples when you read them.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sa1b.errors import ShardError
from sa1b.names import image_name
from sa1b.programs.export.export_format import (
    Format,
    Ids,
    JoinedColumn,
    PartFiles,
    Rows,
    by_source,
    check_joined,
    joined_identity,
    joined_value,
)
from sa1b.programs.export.source_tars import add_member, annotation_text
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample

IMAGES_PER_TAR = 1000


@dataclass(frozen=True)
class WebDataset(Format):
    """Tars of `images_per_tar` images with joined columns and, with `texts`, the texts of the sources."""

    images_per_tar: int = IMAGES_PER_TAR
    columns: tuple[JoinedColumn, ...] = ()
    texts: bool = False

    def check(self, dataset: Dataset) -> None:
        """Refuse scaled images, and a column that belongs to other images."""
        super().check(dataset)
        check_joined(self.columns, dataset)

    @property
    def takes_all_files(self) -> bool:
        return True

    @property
    def unit(self) -> str:
        return "tar"

    @property
    def identity(self) -> str:
        return f"webdataset {joined_identity(self.columns)}" + ", texts" * self.texts

    def parts(self, dataset: Dataset, rows: Rows) -> Iterator[tuple[str, Rows]]:
        ordered = np.concatenate([own for _, own in by_source(dataset, rows)])
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
                        ending, data = _encoded(column, sample, value)
                        add_member(tar, f"{key}.{column.name}.{ending}", data)


def _encoded(column: JoinedColumn, sample: Sample, value: Any) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "txt", value.encode()
    try:
        return "json", json.dumps(value, ensure_ascii=False).encode()
    except TypeError as error:
        raise ShardError(
            f"{image_name(sample.image_id)}: the value of column {column.name!r} has no JSON form ({error}); "
            "export without this column, or convert it to text or numbers"
        ) from None
