"""Images by the names of their files, in sources whose image ids are hashes of these names.

Such sources are those of `sa1b reshard --images-only` and of `--image-ids hash`. A name is the path in the
source, `cats/1.jpg`; folders above it may be given if one of them is the source: `data/photos/cats/1.jpg`.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sa1b.shards.manifest import READING
from sa1b.sources.coco_file import hashed_id

if TYPE_CHECKING:
    from sa1b.shards.dataset import Dataset

_MOST_SOURCES = 1000  # that are tried for a name without the name of a source: 3 us for each


@dataclass(frozen=True, slots=True, eq=False)
class FileNames:
    """The sources with such ids, and all image ids of the dataset, uint64 [N], ascending."""

    sources: frozenset[str]
    known: npt.NDArray[np.uint64]
    digest: str  # of both

    def ids(self, names: pa.ChunkedArray) -> pa.ChunkedArray:
        """The ids of images by name, int64; null where no image, or more than one, has the name."""
        candidates: list[int] = []
        rows: list[int] = []
        for row, name in enumerate(names.to_pylist()):
            found = self._hashed(name or "")
            candidates += found
            rows += [row] * len(found)
        ids = np.array(candidates, np.uint64)
        at = np.minimum(np.searchsorted(self.known, ids), max(len(self.known) - 1, 0))
        is_known = self.known[at] == ids if len(self.known) else np.zeros(len(ids), np.bool_)
        of_row, matches = np.array(rows, np.int64)[is_known], ids[is_known].astype(np.int64)
        values = np.zeros(len(names), np.int64)
        values[of_row] = matches
        return pa.chunked_array([pa.array(values, mask=np.bincount(of_row, minlength=len(names)) != 1)])

    def _hashed(self, name: str) -> list[int]:
        parts = name.strip().removeprefix("./").split("/")
        places = [i for i, part in enumerate(parts[:-1]) if part in self.sources]
        found = {(parts[i], "/".join(parts[i + 1 :])) for i in places}
        if len(self.sources) <= _MOST_SOURCES:
            found |= {(source, "/".join(parts)) for source in self.sources}
        return [hashed_id(*one) for one in found]


def names_of(dataset: "Dataset") -> FileNames | None:
    """The images of a dataset by the names of their files; None if no ids are hashes of names."""
    readings: dict[str, dict[str, Any]] = dataset.manifest.get(READING, {})
    sources = {
        name for name, how in readings.items() if how.get("images_only") or how.get("image_ids") == "hash"
    }
    if not sources:
        return None
    text = " ".join([dataset.table.ids_digest, *sorted(sources)])
    return FileNames(frozenset(sources), dataset.table.image_id, hashlib.sha256(text.encode()).hexdigest())
