"""Hard links in an archive: GNU tar stores further names of a file as links to its first name."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import HARD_LINK, Damage, Member, StoredStream

MAX_LINKS = 1 << 16  # links kept for the second pass; all further links are yielded unchanged


def resolve_links(
    items: Iterable[Member | Damage], reopen: Callable[[], StoredStream]
) -> Iterator[Member | Damage]:
    """Replace hard links to an earlier file of the same archive by files.

    The files come last and are read in a second pass over the archive, so that memory is bounded by one
    member. If two files have one name, the first is used. A link to its own name is left out. Other links are
    yielded unchanged.

    Args:
        items: members and damage from the first pass over the archive.
        reopen: opens the archive again, at its start.
    """
    waiting: dict[str, list[Member]] = {}  # target -> links to it
    count = 0
    for item in items:
        if isinstance(item, Damage) or item.kind != HARD_LINK or count == MAX_LINKS:
            yield item
        else:
            count += 1
            waiting.setdefault(item.detail, []).append(item)
    if not waiting:
        return
    stream = reopen()
    try:
        for item in members(stream):
            if isinstance(item, Member) and item.kind == "file":
                yield from _links_to(item, waiting)
            if not waiting:
                break
    finally:
        stream.close()
    yield from sorted((link for links in waiting.values() for link in links), key=lambda link: link.offset)


def _links_to(file: Member, waiting: dict[str, list[Member]]) -> Iterator[Member]:
    """Remove and return the pending links to a file, direct or through other links."""
    targets = [file]
    while targets:
        target = targets.pop()
        links = waiting.pop(target.name, [])
        if earlier := [link for link in links if link.offset < target.offset]:
            waiting[target.name] = earlier
        for link in links[len(earlier) :]:
            if link.name != target.name:
                targets.append(link)
                yield replace(link, kind="file", data=file.data, detail="")
