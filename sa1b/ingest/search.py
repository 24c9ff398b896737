"""The search for images in source tars whose contents are not known in advance.

The tars of SA-1B contain contiguous blocks of ids in the order of their numbers. The first tar to read for an
image is the estimated one. Each tar that was read, also in part, shows the range of its ids. So an image that
was not in it is before or after it, and the next tar to read is the nearest one on that side:

    image 167810: the estimate is tar 15, whose ids begin at 167811, so tar 14 is next
    image 167805 between the images of tar 14, but not among them: no tar contains it

Sources whose names have no number may contain any image.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sa1b.console import command, counted
from sa1b.errors import NoPairError, SourceError, TableError
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.ingest.source_pass import Counts
from sa1b.shards.commit import task_rows
from sa1b.shards.documents import Options, Task
from sa1b.shards.manifest import TASKS, task_name
from sa1b.shards.sample_table import open_table
from sa1b.shards.stored import Ids, images_of, no_ids, stored_shards
from sa1b.sources.pairing import IDS_PER_TAR, WantedPairs, estimated_numbers, tar_number
from sa1b.sources.source import Source
from sa1b.storage.atomic import json_bytes
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
        self._known.update({name: one for name, one in known.items() if name in set(self.names)})

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
        return self._read | {name for name, one in self._known.items() if one.has_all}

    def _by_range(self, missing: Ids) -> set[str]:
        """Sources among the numbered ones, by the ranges known so far."""
        done = self._done()
        waiting = np.array([i for i, name in enumerate(self._ordered) if name not in done], np.int64)
        if not len(waiting) or not len(missing):
            return set()
        ranges = [
            (i, one.first, one.last, name)
            for i, name in enumerate(self._ordered)
            if (one := self._known.get(name)) is not None and one.first is not None and one.last is not None
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
        """For each id: of the waiting sources between two positions the one nearest to its estimate. `last`:
        last id of the source at position `low`.
        """
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


_ENDING = ".searched"
_END = 1 << 16  # bytes at each end of a tar: a gzip stream ends with the CRC-32 of its content


def ingest_wanted(
    source: Source,
    root: Store,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None],
    check: Callable[[Task], None],
    stored: Ids,
) -> tuple[Task | None, Searched]:
    """Convert the wanted pairs of a source, and those of it that the dataset directory has already, `stored`.

    What was found is stored also if the source is damaged and lacks others; the error comes after that.
    Returns the task, None if the source has none of the pairs, and the ids that were found, read and absent.
    SourceError: the source lacks a stored image, or see `ingest`.
    """
    # `ingest_wanted` makes a source of the dataset with only the wanted images of a source. Its task file has
    # no size and time of the source, so `sa1b reshard` with this source converts it completely. The digest is
    # recorded if the source was read to its end. Then tasks/<source>.searched records what the source does
    # not contain, so that the next run does not read it again for the same images. It has the size, the time
    # and a digest of the ends of the source: another download of it is read again. There is none for a source
    # with damage, which may contain what was not found.
    assert source.wanted is not None
    part = WantedPairs(np.union1d(source.wanted.ids, stored), is_block=source.wanted.is_block)

    def check_stored() -> None:
        lost = np.setdiff1d(stored, part.found(), assume_unique=True)
        if len(lost):
            raise SourceError(
                f"{source.label}: {root} has image {int(lost[0])} of a source named {source.name!r}, and "
                "this source lacks it: its content differs; use another --out, or remove the finished source "
                f"with `{command('reshard')} --out {root} --drop {source.name}`"
            )

    def check_all(task: Task) -> None:
        check_stored()
        check(task)

    task: Task | None = None
    try:
        task = ingest(replace(source, wanted=part), root, options, policy, report, check_all)
    except NoPairError:
        check_stored()
        root.remove(task_name(source.name, "failed"))
    searched = Searched(part.first, part.last, part.found(), part.absent())
    name = f"{TASKS}/{source.name}{_ENDING}"
    if part.is_whole and not part.damage:
        record = {**state_of(source), "first": part.first, "last": part.last}
        root.put(name, json_bytes({**record, "absent": searched.absent.tolist()}))
    else:
        root.remove(name)
    if part.damage and (lost := len(part.ids) - len(searched.found)):
        first = part.damage[0]
        raise SourceError(
            f"{source.label}: damaged at byte {first.offset:,} ({first.message}), and the rest lacks "
            f"{counted(lost, 'wanted image')}; download it again, then run the same command"
        )
    return task, searched


def stored_ids(root: Store, task: Task | None) -> Ids:
    """The image ids of a finished source, ascending."""
    return np.empty(0, np.uint64) if task is None else task_rows(root, task)[1].image_id


def known_ids(root: Store, name: str) -> Ids:
    """The image ids of a source whose task file is not used: from its rows or else from its shards."""
    with contextlib.suppress(OSError, TableError), root.files(task_name(name, "samples")) as (path,):
        return open_table(path, check=True).image_id.copy()
    return np.unique(np.concatenate([no_ids(), *(images_of(root, one) for one in stored_shards(root, name))]))


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
    found = {}
    for name in root.names(TASKS, _ENDING):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, OSError):
            document = json.loads(root.read(f"{TASKS}/{name}"))
            source = sources(name.removesuffix(_ENDING))
            if source is None or not state_of(source).items() <= document.items():
                continue
            absent = np.array(document["absent"], np.uint64)
            found[name.removesuffix(_ENDING)] = Searched(
                document["first"], document["last"], np.empty(0, np.uint64), absent
            )
    return found
