"""Hard links in an archive: GNU tar writes a file that it meets again as a link to the first one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import HARD_LINK, Damage, Member, StoredStream

MAX_LINKS = 1 << 16  # that wait for the second pass; more are yielded as links


def resolve_links(
    items: Iterable[Member | Damage], reopen: Callable[[], StoredStream]
) -> Iterator[Member | Damage]:
    """Hard links to an earlier file of the same archive, as GNU tar writes identical files, become files.

    They come last, read in a second pass over the archive, so that memory is bounded by one member. Of two
    files of one name the first counts. A link to its own name adds nothing and is left out. Links to
    anything else are yielded as they are.

    Args:
        items: of the first pass, from `members`.
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
    """The links that follow a file and name it, or name such a link; they wait no longer."""
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
