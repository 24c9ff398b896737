"""Members in any order, as pairs: an image and its annotation file, or the reason why there is no pair."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sa1b.names import member_name, parse_member_path
from sa1b.sources.member import Damage, Member
from sa1b.sources.spill import Spill


@dataclass(frozen=True, slots=True)
class MemberPair:
    """Both members of one image, as they stand in the source."""

    image_id: int
    image: Member
    text: Member


@dataclass(frozen=True, slots=True)
class Refusal:
    """A member that is no half of a pair; `reason` is a snake_case word."""

    reason: str
    message: str
    member: Member


def pair_up(items: Iterable[Member | Damage], spill: Spill) -> Iterator[MemberPair | Refusal | Damage]:
    """Pairs in the order they complete, everything else in the order it comes, the unpaired last.

    The half that comes first waits in the spill. Folders hold nothing of their own and are passed over.
    """
    waiting: dict[int, Member] = {}  # without their bytes, which the spill holds
    done: set[int] = set()
    damaged = False
    for item in items:
        if isinstance(item, Damage):
            damaged = True
            yield item
            continue
        if item.kind != "file":
            if item.kind != "folder":
                yield Refusal("not_a_file", f"{item.kind}; only plain files belong in the archive", item)
            continue
        named = parse_member_path(item.name)
        if named is None or named.ending == "masks":
            yield Refusal("unexpected_name", "not of the form sa_<id>.jpg or sa_<id>.json", item)
            continue
        image_id, ending = named
        first = waiting.get(image_id)
        if image_id in done or (first is not None and first.name.endswith(ending)):
            yield Refusal("duplicate", f"a second .{ending} of image {image_id}", item)
        elif first is None:
            waiting[image_id] = Member(item.name, item.kind, item.offset, b"")
            spill.put(member_name(image_id, ending), item.data)
        else:
            done.add(image_id)
            other = _take(waiting.pop(image_id), image_id, spill)
            yield MemberPair(image_id, item, other) if ending == "jpg" else MemberPair(image_id, other, item)
    for image_id in sorted(waiting):
        member = _take(waiting.pop(image_id), image_id, spill)
        ending, other_ending = ("jpg", "json") if member.name.endswith("jpg") else ("json", "jpg")
        # Where part of the source is lost, that is where the partner was.
        reason = f"{ending}_partner_lost" if damaged else f"{ending}_unpaired"
        yield Refusal(reason, f"no .{other_ending} of image {image_id} in the source", member)


def _take(waiting: Member, image_id: int, spill: Spill) -> Member:
    data = spill.take(member_name(image_id, waiting.name.rsplit(".", 1)[1]))
    assert data is not None
    return Member(waiting.name, waiting.kind, waiting.offset, data)
