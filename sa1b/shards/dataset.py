"""Reading a root back, sample by sample, for people and for tests; training reads through the stream."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from sa1b.masks.runs import Runs
from sa1b.shards import jpeg, manifest, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.record import RecordError
from sa1b.shards.shard import ShardError
from sa1b.shards.table import SampleTable, open_table


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One image with its masks, as stored.

    Attributes:
        jpeg: the bytes of `sa_<id>.jpg`.
        annotations: all masks with all their numbers, in pixels of the source image.
        shard: name of the shard; offset: of the jpg's content in it, in bytes.
    """

    image_id: int
    jpeg: bytes
    annotations: Annotations
    shard: str
    offset: int

    @property
    def image(self) -> npt.NDArray[np.uint8]:
        """The decoded image, RGB uint8 [height, width, 3]; decoded on every use.

        Smaller than the masks' frame if the shards were made with --image-size.
        """
        return jpeg.decode(self.jpeg)

    @property
    def runs(self) -> Runs:
        """All masks as runs at source resolution; decoded on every use."""
        return self.annotations.runs()


class Dataset:
    """The samples of a root, sorted by image id. Opening reads the manifest and maps the sample table.

    `ds[i]`, `ds.by_id(image_id)`, `len(ds)`, iteration. Safe to share between threads.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = manifest.read_dataset(root)
        self.shards: list[str] = [shard["name"] for shard in self.manifest["shards"]]
        self.table: SampleTable = open_table(root / manifest.SAMPLES)
        if self.table.digest != self.manifest["samples"]["columns_sha256"]:
            raise manifest.ManifestError(
                f"{root / manifest.SAMPLES} is not the one {manifest.DATASET} was written with; "
                "run tools/index.py to make both again"
            )

    def __reduce__(self) -> tuple[type["Dataset"], tuple[Path]]:
        # Another process maps the table itself; it is not copied.
        return Dataset, (self.root,)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Sample:
        """The i-th sample in order of image ids.

        Raises:
            IndexError: no such row.
            ShardError: the bytes do not fit their checksum.
        """
        count = len(self)
        if not -count <= i < count:
            raise IndexError(f"sample {i} of {count}")
        i %= count
        table = self.table
        shard, start, size = int(table.shard[i]), int(table.offset[i]), int(table.jpg_bytes[i])
        masks_start = table.masks_offset(i)
        data = self._read(shard, start, masks_start + int(table.masks_bytes[i]) - start)
        image_id = int(table.image_id[i])
        jpg, masks = data[:size], data[masks_start - start :]
        for kind, part, crc, offset in (
            ("jpg", jpg, table.jpg_crc32c[i], start),
            ("masks", masks, table.masks_crc32c[i], masks_start),
        ):
            if google_crc32c.value(part) != crc:
                raise ShardError(
                    f"{self.root / self.shards[shard]}: sa_{image_id}.{kind} at offset {offset:,} "
                    "does not fit its checksum; tools/verify.py lists all damage"
                )
        return Sample(image_id, jpg, self._annotations(masks, shard, masks_start), self.shards[shard], start)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def row(self, image_id: int) -> int:
        """The row of an image.

        Raises:
            KeyError: the root does not hold it.
        """
        possible = 0 <= image_id < 2**64
        i = int(np.searchsorted(self.table.image_id, np.uint64(image_id))) if possible else len(self)
        if i == len(self) or int(self.table.image_id[i]) != image_id:
            raise KeyError(f"image {image_id} is not in {self.root}")
        return i

    def by_id(self, image_id: int) -> Sample:
        """The sample of an image; KeyError if the root does not hold it."""
        return self[self.row(image_id)]

    def annotations(self, i: int) -> Any:
        """The original annotation file of sample i, as `json.loads` gives it."""
        return self[i].annotations.to_json()

    def _annotations(self, masks: bytes, shard: int, offset: int) -> Annotations:
        try:
            return record.decode(masks)
        except RecordError as error:
            raise ShardError(
                f"{self.root / self.shards[shard]}: record at offset {offset:,}: {error}"
            ) from None

    def _read(self, shard: int, start: int, length: int) -> bytes:
        path = self.root / self.shards[shard]
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), length, start)
        if len(data) != length:
            raise ShardError(
                f"{path}: {len(data):,} bytes at offset {start:,} where {length:,} belong: cut off"
            )
        return data


def open_dataset(root: str | Path) -> Dataset:
    """Open the root that tools/reshard.py made.

    Raises:
        sa1b.shards.manifest.ManifestError: no dataset there, or its files do not belong together.
    """
    return Dataset(Path(root))
