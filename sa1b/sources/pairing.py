"""Pairs of an image and its annotation file from members in any order; other members are refused."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sa1b.names import ID_END, member_name, parse_member_path, source_name
from sa1b.sources.tar_stream import HARD_LINK, OVERSIZED, UNREADABLE, Damage, Member

_NAMES = "not of the form sa_<id>.jpg or sa_<id>.json, and no neighbours with an image id in their JSON"
_TEXT = (
    "texts beside pairs are not stored; pass --accept unexpected_name, and join them as a table of image_id"
)
_REASONS = {OVERSIZED: "member_oversized", UNREADABLE: "member_unreadable"}


@dataclass(frozen=True, slots=True)
class MemberPair:
    """Both members of one image, as stored in the source."""

    image_id: int
    image: Member
    text: Member


@dataclass(frozen=True, slots=True)
class Refusal:
    """A member that cannot be part of a pair; `reason` is a snake_case word."""

    reason: str
    message: str
    member: Member


class Spill:
    """Store of bytes by name: in memory up to a limit, then one file for each name.

    Each name is stored once and retrieved once; retrieving it frees its space.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._left = memory_bytes
        self._memory: dict[str, bytes] = {}
        self._files: set[str] = set()

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`, a plain file name."""
        if len(data) <= self._left:
            self._left -= len(data)
            self._memory[name] = data
            return
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(data)
        self._files.add(name)

    def take(self, name: str) -> bytes | None:
        """Remove and return the bytes stored under `name`; None if there are none."""
        data = self._memory.pop(name, None)
        if data is not None:
            self._left += len(data)
        elif name in self._files:
            path = self._folder / name
            data = path.read_bytes()
            path.unlink()
            self._files.remove(name)
        return data

    def names(self) -> list[str]:
        """Names that are still stored, sorted."""
        return sorted(self._memory.keys() | self._files)


def pair_up(items: Iterable[Member | Damage], spill: Spill) -> Iterator[MemberPair | Refusal | Damage]:
    """Yield pairs as they complete and other items as they arrive; members without a partner come last.

    Members of other names than sa_<id>, such as 000017.jpg and 000017.json of a webdataset, are a pair if one
    follows the other and the JSON file has an image id.
    """
    # The first member of a pair is kept in the spill until its partner comes. Folders are skipped.
    waiting: dict[int, tuple[str, Member]] = {}  # image id -> ending and header of the first member
    done: set[int] = set()
    damaged, neighbour = False, None  # of another name, whose partner must be the next member
    for item in items:
        if neighbour is not None and (isinstance(item, Damage) or _key(item) != _key(neighbour)):
            yield Refusal("unexpected_name", _NAMES, neighbour)
            neighbour = None
        if isinstance(item, Damage):
            damaged = True
            yield item
            continue
        if item.reason:
            yield Refusal(item.reason, item.detail, item)
            continue
        if item.kind != "file":
            if item.kind != "folder":
                yield Refusal(_REASONS.get(item.kind, "not_a_file"), _why_no_file(item), item)
            continue
        named = parse_member_path(item.name)
        if named is None or named.ending == "masks":
            if neighbour is None and _key(item):
                neighbour = item
                continue
            pair = None if neighbour is None else _named_by_json(neighbour, item)
            if pair is not None and pair.image_id not in done and pair.image_id not in waiting:
                done.add(pair.image_id)
                yield pair
            else:
                reason = "unexpected_name" if pair is None else "duplicate"
                unknown = _TEXT if item.name.lower().endswith(".txt") else _NAMES
                message = unknown if pair is None else f"a second pair of image {pair.image_id}"
                for member in (neighbour, item):
                    if member is not None:
                        yield Refusal(reason, message, member)
            neighbour = None
            continue
        image_id, ending = named
        first = waiting.get(image_id)
        if image_id in done or (first is not None and first[0] == ending):
            yield Refusal("duplicate", f"a second .{ending} of image {image_id}", item)
        elif first is None:
            waiting[image_id] = ending, replace(item, data=b"")
            spill.put(member_name(image_id, ending), item.data)
        else:
            done.add(image_id)
            other = _take(image_id, *waiting.pop(image_id), spill)
            yield MemberPair(image_id, item, other) if ending == "jpg" else MemberPair(image_id, other, item)
    if neighbour is not None:
        yield Refusal("unexpected_name", _NAMES, neighbour)
    for image_id in sorted(waiting):
        ending, first_member = waiting.pop(image_id)
        other_ending = "json" if ending == "jpg" else "jpg"
        # If part of the source is lost, the partner was probably in that part.
        reason = f"{ending}_partner_lost" if damaged else f"{ending}_unpaired"
        message = f"no .{other_ending} of image {image_id} in the source"
        yield Refusal(reason, message, _take(image_id, ending, first_member, spill))


def _key(member: Member) -> str:
    """What the two members of a pair of another name than sa_<id> have in common; "" for other members."""
    stem, _, ending = member.name.rpartition(".")
    whole = member.kind == "file" and not member.reason and parse_member_path(member.name) is None
    return stem if whole and ending.lower() in ("jpg", "jpeg", "json") else ""


def _named_by_json(*members: Member) -> MemberPair | None:
    """The pair of two neighbours with the image id of their JSON file; None if they are no pair."""
    texts = [member for member in members if member.name.lower().endswith(".json")]
    images = [member for member in members if member not in texts]
    if not texts or not images:
        return None
    with suppress(ValueError, TypeError, KeyError):
        image_id = json.loads(texts[0].data)["image"]["image_id"]
        if type(image_id) is int and 0 <= image_id < ID_END:
            return MemberPair(image_id, images[0], texts[0])
    return None


def _why_no_file(member: Member) -> str:
    if member.kind == HARD_LINK:
        return f"hard link to {member.detail!r}, which is not an earlier file of the archive"
    if member.kind in _REASONS:
        return member.detail
    return f"{member.kind}; only plain files belong in a source"


def _take(image_id: int, ending: str, member: Member, spill: Spill) -> Member:
    data = spill.take(member_name(image_id, ending))
    assert data is not None
    return replace(member, data=data)


_FIRST_SAMPLE = 1024  # members; the range is checked after twice this number
_CHECK_EVERY = 64
_GAPS = 32  # the largest id is at most this number of mean gaps above the largest one of a random sample
_ENDINGS = {"jpg": 1, "json": 2}
_BOTH = 3


class WantedPairs:
    """Filters the members of one source.

    Attributes:
        ids: image ids, ascending, each once.
        is_block: the source contains a contiguous block of ids in random order, so that an id far outside of
            the range of the members read so far is not in the source.
        first, last: smallest and largest image id read so far; None before the first member of a pair.
        is_whole: the source was read to its end.
        damage: what could not be read of it.
    """

    # If only some pairs are wanted, all other members are skipped, and reading ends when nothing wanted is
    # left. The members of a tar are in random order and gzip has no random access, so that a tar is read from
    # its start up to the last wanted member. The ids of each tar of SA-1B are a contiguous block, in the
    # order of the tars. Their range is known soon, because the order is random: of a tar with 22,372 members,
    # 4,096 members suffice to exclude an image whose id is 1 % of the block outside of the range.
    #
    # The blocks that were measured on real tars:
    #
    #     sa_000014  156625 to 167810        sa_000017  190188 to 201375
    #     sa_000016  179000 to 190187        sa_000019  212562 to 223749, and sa_000020 begins at 223750
    #
    # So image i is in tar i // 11187 or in the one before. This is an estimate: no list of the images of each
    # tar is published.

    def __init__(self, ids: npt.NDArray[np.uint64], *, is_block: bool) -> None:
        self.ids = ids
        self.first: int | None = None
        self.last: int | None = None
        self.is_whole = False
        self.damage: list[Damage] = []
        self.is_block = is_block
        self._seen = np.zeros(len(ids), np.uint8)  # bits of _ENDINGS
        self._left = len(ids)
        self._members = 0
        self._samples = [(0, 0, 0), (0, 0, 0)]  # members, first and last at the last two powers of two

    def found(self) -> npt.NDArray[np.uint64]:
        """The wanted ids whose two members have been read."""
        ids: npt.NDArray[np.uint64] = self.ids[self._seen == _BOTH]
        return ids

    def absent(self) -> npt.NDArray[np.uint64]:
        """Wanted ids inside the range of a source that was read to its end, without two members in it."""
        if not self.is_whole or self.first is None or self.last is None:
            return self.ids[:0]
        inside = (self.ids >= np.uint64(self.first)) & (self.ids <= np.uint64(self.last))
        absent: npt.NDArray[np.uint64] = self.ids[inside & (self._seen != _BOTH)]
        return absent

    def filter(self, items: Iterable[Member | Damage]) -> Iterator[Member | Damage]:
        """The wanted members and all damage, until nothing wanted can follow."""
        for item in items:
            if isinstance(item, Damage):
                self.damage.append(item)
                yield item
                continue
            named = parse_member_path(item.name)
            if named is None or named.ending not in _ENDINGS:
                continue
            if self._see(named.image_id, _ENDINGS[named.ending]):
                yield item
            if not self._left or (self._members % _CHECK_EVERY == 0 and self._is_complete()):
                return
        self.is_whole = True

    def _see(self, image_id: int, bit: int) -> bool:
        """Record a member. Return whether it is wanted."""
        self._members += 1
        self.first = image_id if self.first is None else min(self.first, image_id)
        self.last = image_id if self.last is None else max(self.last, image_id)
        if self._members >= _FIRST_SAMPLE and self._members.bit_count() == 1:
            self._samples = [self._samples[1], (self._members, self.first, self.last)]
        row = int(np.searchsorted(self.ids, np.uint64(image_id)))
        if row == len(self.ids) or int(self.ids[row]) != image_id:
            return False
        self._left -= int(self._seen[row] | bit) == _BOTH and int(self._seen[row]) != _BOTH
        self._seen[row] |= bit
        return True

    def _is_complete(self) -> bool:
        """Whether every pair that is left lies far outside of the range of the ids read so far."""
        if not self.is_block or self.first is None or self.last is None:
            return False
        members, first, last = self._samples[0]
        if not members:
            return False
        # In random order, the first members determine the range. Otherwise, it is not known before the end.
        margin = _GAPS * (last - first + 1) // members
        if self.first < first - margin or self.last > last + margin:
            return False
        margin = _GAPS * (self.last - self.first + 1) // self._members
        left = self.ids[self._seen != _BOTH]
        low, high = max(0, self.first - margin), self.last + margin
        return not ((left >= np.uint64(low)) & (left <= np.uint64(high))).any()


IDS_PER_TAR = 11187
TARS = 1000
_NUMBERED = re.compile(r"sa_([0-9]{1,9})")


def tar_number(source: str) -> int | None:
    """The number in the name of a source, such as 20 of sa_000020; None if the name has another form."""
    match = _NUMBERED.fullmatch(source)
    return int(match[1]) if match else None


def estimated_numbers(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The estimated number of each image's tar."""
    return (ids // np.uint64(IDS_PER_TAR)).astype(np.int64)


def estimated_source(number: int) -> str:
    """The name of the tar with a number."""
    return source_name(f"{number:06d}")
