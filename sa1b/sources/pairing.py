"""Pairs of an image and its annotation file from members in any order; other members are refused."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sa1b.names import member_name, parse_member_path
from sa1b.sources.tar_stream import HARD_LINK, OVERSIZED, UNREADABLE, Damage, Member

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

    The first member of a pair is kept in the spill until its partner comes. Folders are skipped.
    """
    waiting: dict[int, tuple[str, Member]] = {}  # image id -> ending and header of the first member
    done: set[int] = set()
    damaged = False
    for item in items:
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
            yield Refusal("unexpected_name", "not of the form sa_<id>.jpg or sa_<id>.json", item)
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
    for image_id in sorted(waiting):
        ending, first_member = waiting.pop(image_id)
        other_ending = "json" if ending == "jpg" else "jpg"
        # If part of the source is lost, the partner was probably in that part.
        reason = f"{ending}_partner_lost" if damaged else f"{ending}_unpaired"
        message = f"no .{other_ending} of image {image_id} in the source"
        yield Refusal(reason, message, _take(image_id, ending, first_member, spill))


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
