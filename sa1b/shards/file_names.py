"""Images by the names of their files, in sources whose image ids are hashes of these names.

Such sources are those of `sa1b reshard --images-only` and of `--image-ids hash`. A name is the path in the
source, `cats/1.jpg`; folders above it may be given if one of them is the source: `data/photos/cats/1.jpg`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sa1b.names import parse_member_path, unicode_forms
from sa1b.shards.manifest import READING
from sa1b.sources.image_names import hashed_id, is_image_name

if TYPE_CHECKING:
    from sa1b.shards.dataset import Dataset

_MOST_SOURCES = 1000  # sources that are tried for a name that names no source; each takes 3 us


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
            of_name = hashed_ids(name or "", self.sources)
            candidates += of_name
            rows += [row] * len(of_name)
        ids = np.array(candidates, np.uint64)
        at = np.minimum(np.searchsorted(self.known, ids), max(len(self.known) - 1, 0))
        is_known = self.known[at] == ids if len(self.known) else np.zeros(len(ids), np.bool_)
        of_row, matches = np.array(rows, np.int64)[is_known], ids[is_known].astype(np.int64)
        values = np.zeros(len(names), np.int64)
        values[of_row] = matches
        return pa.chunked_array([pa.array(values, mask=np.bincount(of_row, minlength=len(names)) != 1)])


@dataclass(slots=True, eq=False)
class SoughtNames:
    """Names of files in sources that are not read yet, so that a name has an id for each possible source.

    The first of them represents the name. `sources`: source of each id.
    """

    names_of_sources: frozenset[str]
    names: dict[int, str] = field(default_factory=dict)  # representative -> name
    sources: dict[int, str] = field(default_factory=dict)
    represented: dict[int, int] = field(default_factory=dict)  # id -> representative

    def ids(self, names: pa.ChunkedArray) -> pa.ChunkedArray:
        """The representatives, int64; null for what is no name of an image, or is sa_<id>."""
        representatives: list[int | None] = []
        for name in names.to_pylist():
            is_own = name and is_image_name(name) and parse_member_path(name.rpartition("/")[2]) is None
            ids = hashed_ids(name, self.names_of_sources) if is_own else {}
            known = (self.represented[image_id] for image_id in ids if image_id in self.represented)
            representatives.append(first := next(known, next(iter(ids), None)))
            if first is not None:
                self.names.setdefault(first, name)
                self.sources |= ids
                self.represented |= dict.fromkeys(ids, first)
        return pa.chunked_array([pa.array(representatives, pa.int64())])

    def all_ids(self, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Ascending: these ids and all ids of the names."""
        return np.union1d(ids, np.fromiter(self.represented, np.uint64, len(self.represented)))

    def of_source(self, ids: npt.NDArray[np.uint64], source: str) -> npt.NDArray[np.uint64]:
        """The ids without those of other sources."""
        others = [image_id for image_id, name in self.sources.items() if name != source]
        return np.setdiff1d(ids, np.array(others, np.uint64), assume_unique=True)

    def representatives(self, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Ascending, each once: the ids, of names their representatives."""
        return np.unique(
            np.array([self.represented.get(image_id, image_id) for image_id in ids.tolist()], np.uint64)
        )


def hashed_ids(name: str, sources: frozenset[str]) -> dict[int, str]:
    """The ids that a file of this name may have, and the source of each."""
    candidates: dict[tuple[str, str], None] = {}
    for spelling in unicode_forms(name) | unicode_forms(name.replace("\\", "/")):
        parts = spelling.strip().removeprefix("./").split("/")
        places = [i for i, part in enumerate(parts[:-1]) if part in sources]
        candidates |= {(parts[i], "/".join(parts[i + 1 :])): None for i in places}
        if len(sources) <= _MOST_SOURCES:
            candidates |= dict.fromkeys((source, "/".join(parts)) for source in sorted(sources))
    return {hashed_id(*candidate): candidate[0] for candidate in candidates}


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
