"""The search for images in source tars whose contents are not known in advance.

The tars of SA-1B contain contiguous blocks of ids in the order of their numbers. The first tar to read for an
image is the estimated one. A tar that was read, even partly, shows the range of its ids. So an image that
was not in it is before or after it, and the next tar to read is the nearest one on that side:

    image 167810: the estimate is tar 15, whose ids begin at 167811, so tar 14 is next
    image 167805 between the images of tar 14, but not among them: no tar contains it

Sources whose names have no number may contain any image.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sa1b.shards.manifest import TASKS
from sa1b.shards.stored import Ids, no_ids
from sa1b.sources.pairing import IDS_PER_TAR, estimated_numbers, tar_number
from sa1b.sources.source import Source
from sa1b.storage.reader import Reader
from sa1b.storage.store import Store

_NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What is known about the images of a source."""

    # smallest id that was read; None: none; an id of this run outside of the range is not in it
    first: int | None
    last: int | None  # largest id that was read
    found: Ids = field(default_factory=no_ids)  # ids of this run that are in it
    absent: Ids = field(default_factory=no_ids)  # ids in the range that are not in it
    has_all: bool = False  # every image of the source is in the dataset directory


class Search:
    """Chooses the sources to read. `homes` are image ids, ascending, and the position of each one's source in
    `names`, as far as it is known. `everywhere`: read the remaining sources, too, for images that are in none
    of the expected ones.
    """

    def __init__(
        self,
        names: Iterable[str],
        homes: tuple[Ids, npt.NDArray[np.int64]] | None = None,
        *,
        everywhere: bool = False,
    ) -> None:
        self.names = list(names)
        numbered = [(number, name) for name in self.names if (number := tar_number(name)) is not None]
        self._ordered = [name for _, name in sorted(numbered)]
        self._numbers = np.array(sorted(number for number, _ in numbered), np.int64)
        self._unordered = [name for name in self.names if tar_number(name) is None]
        self._homes = homes
        self._everywhere = everywhere
        self._known: dict[str, Searched] = {}
        self._read: set[str] = set()
        self._failed: set[str] = set()

    def learn(self, known: Mapping[str, Searched]) -> None:
        """Add what earlier runs have found in sources that they read to the end. They may be read again."""
        self._known.update({name: searched for name, searched in known.items() if name in set(self.names)})

    def record(self, name: str, searched: Searched | None) -> None:
        """Add the result for a source that was read for all missing images; None: it failed.

        The images of a failed source are not searched in other sources.
        """
        if searched is None:
            self._failed.add(name)
        else:
            self._read.add(name)
            self._known[name] = searched

    def next_sources(self, missing: Ids) -> list[str]:
        """The sources to read now, in order, for ascending ids; empty if the search is at its end."""
        chosen: set[str] = set()
        if not len(missing):
            return []
        left = missing
        if self._homes is not None:
            ids, positions = self._homes
            at = np.minimum(np.searchsorted(ids, missing), max(len(ids) - 1, 0))
            is_home = (ids[at] == missing) & (positions[at] != _NOWHERE) if len(ids) else np.zeros(0, bool)
            if len(ids):
                chosen.update(self.names[i] for i in np.unique(positions[at[is_home]]).tolist())
                left = missing[~is_home]
        chosen |= self._by_range(left)
        if len(left):
            chosen.update(self._unordered)
        chosen -= self._done() | self._failed
        if not chosen and self._everywhere:
            chosen = set(self.names) - self._done() - self._failed
        return [name for name in self.names if name in chosen]

    def _done(self) -> set[str]:
        return self._read | {name for name, searched in self._known.items() if searched.has_all}

    def _by_range(self, missing: Ids) -> set[str]:
        """Sources among the numbered ones, by the ranges known so far."""
        done = self._done()
        waiting = np.array([i for i, name in enumerate(self._ordered) if name not in done], np.int64)
        if not len(waiting) or not len(missing):
            return set()
        ranges = [
            (i, searched.first, searched.last, name)
            for i, name in enumerate(self._ordered)
            if (searched := self._known.get(name)) is not None
            and searched.first is not None
            and searched.last is not None
        ]
        if any(after[1] <= before[2] for before, after in pairwise(ranges)):
            return {self._ordered[i] for i in waiting.tolist()}  # the ids are not in the order of the numbers
        chosen = set()
        # Before, inside and after each range, from the lowest id on.
        edge, low = 0, -1
        for i, first, last, name in [*ranges, (len(self._ordered), None, None, "")]:
            before = _between(missing, edge, first)
            chosen |= self._nearest(before, waiting, low, i, edge - 1 if low >= 0 else None)
            if first is None or last is None:
                break
            if name not in done:  # an earlier run did not look for these images
                inside = _between(missing, first, last + 1)
                if len(np.setdiff1d(inside, self._known[name].absent, assume_unique=True)):
                    chosen.add(name)
            edge, low = last + 1, i
        return chosen

    def _nearest(
        self, ids: Ids, waiting: npt.NDArray[np.int64], low: int, high: int, last: int | None
    ) -> set[str]:
        """For each id, the waiting source nearest to its estimate; `last`: last id of the source at `low`."""
        waiting = waiting[(waiting > low) & (waiting < high)]
        if not len(ids) or not len(waiting):
            return set()
        if last is not None:
            blocks = np.unique((ids - np.uint64(last + 1)) // np.uint64(IDS_PER_TAR)).astype(np.int64)
            wanted = self._numbers[low] + 1 + blocks
        else:
            wanted = np.unique(estimated_numbers(ids))
        numbers = self._numbers[waiting]
        after = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        before = np.maximum(after - 1, 0)
        nearer = np.abs(numbers[before] - wanted) < np.abs(numbers[after] - wanted)
        return {self._ordered[i] for i in waiting[np.where(nearer, before, after)].tolist()}


def _between(ids: Ids, first: int, end: int | None) -> Ids:
    start = int(np.searchsorted(ids, np.uint64(first)))
    return ids[start:] if end is None else ids[start : int(np.searchsorted(ids, np.uint64(end)))]


def homes_of(
    names: Collection[str], ids: Ids, sources: npt.NDArray[np.object_]
) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The argument `homes` of Search, from the name of each image's source."""
    positions = {name: i for i, name in enumerate(names)}
    known, where = np.unique(sources.astype(str), return_inverse=True)
    return ids, np.array([positions.get(name, _NOWHERE) for name in known.tolist()], np.int64)[where]


SEARCHED = ".searched"
_END = 1 << 16  # bytes at each end of a tar: a gzip stream ends with the CRC-32 of its content


def state_of(source: Source) -> dict[str, object]:
    """Size in bytes, time in ns and sha256 of both ends of a source, which differ for another download."""
    digest = hashlib.sha256()
    if source.kind == "tar":
        root, name = (source.path.parent, source.path.name) if source.link is None else source.link.split()
        options = None if source.link is None else source.link.reader_options
        length = min(_END, source.size)
        with Reader(root, options=options) as reader:
            for start in sorted({0, source.size - length}):
                digest.update(reader.read_range(name, start, length))
    return {"size": source.size, "mtime_ns": source.mtime_ns, "ends_sha256": digest.hexdigest()}


def read_searched(root: Store, sources: Callable[[str], Source | None]) -> dict[str, Searched]:
    """The sources that earlier runs have read to the end, by name, if they have not changed since. `sources`:
    name -> source, measured now; None: unknown.
    """
    searches = {}
    for name in root.names(TASKS, SEARCHED):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, OSError):
            document = json.loads(root.read(f"{TASKS}/{name}"))
            source = sources(name.removesuffix(SEARCHED))
            if source is None or not state_of(source).items() <= document.items():
                continue
            absent = np.array(document["absent"], np.uint64)
            searches[name.removesuffix(SEARCHED)] = Searched(
                document["first"], document["last"], np.empty(0, np.uint64), absent
            )
    return searches
