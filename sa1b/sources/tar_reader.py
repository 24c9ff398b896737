"""Strict reader of downloaded tar archives: nothing is dropped silently.

Python's tarfile, and every reader built on it, silently ends at the first damaged header and loses the rest
of the archive. This reader yields `Damage` for every stretch that is no member, finds the next header after
it and continues. The next header may start at any byte offset, so a lost or added byte also costs one member.

Formats: POSIX.1-1988 ustar, GNU and pax headers, V7. One pass, front to back, and a second one for hard
links: GNU tar stores further names of a file as links to its first name.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sa1b.errors import SourceError
from sa1b.sources.source import Progress, Source, SourceFormat, SourceReading
from sa1b.sources.tar_stream import (
    BLOCK,
    HARD_LINK,
    MAX_KEPT_BYTES,
    MAX_MEMBER_BYTES,
    Damage,
    Member,
    StoredStream,
    parse_extended,
    parse_header,
)

MAX_EXTENDED_BYTES = 1 << 20  # size limit of the pax and long-name headers of a member
# Zeros that end an archive: two blocks, and padding up to a complete record. The default is 20 blocks.
MAX_END_BYTES = 1 << 16
_RECORDS = [BLOCK << n for n in range(7, 15)] + [BLOCK * d * 10**n for d in range(1, 10) for n in (2, 3)]
_WINDOW = 1 << 20
_ZEROS = bytes(BLOCK)
_MAGIC = 257  # offset of "ustar" in a header
_PAIR_NAME = re.compile(rb"sa_[0-9]+\.[a-z]+")
_FILE_TYPES = b"0\x007"
_KINDS = {
    b"1": HARD_LINK,
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "folder",
    b"6": "fifo",
    b"S": "sparse file",
}


@dataclass(frozen=True, slots=True)
class Extension:
    """Extended headers before a member: the fields they set, and their bytes at `offset` of the archive."""

    offset: int
    values: dict[str, str]
    stored: bytes


def members(stream: StoredStream) -> Iterator[Member | Damage]:
    """All members in order, and damage for every stretch that is none; never an error of the content."""
    extension: Extension | None = None
    damaged = False
    while True:
        offset = stream.position
        header = stream.peek(BLOCK)
        if len(header) < BLOCK:
            yield from _dangling(extension)
            yield from _end_of_stream(stream, offset, header, damaged)
            return
        item: Member | Damage | Extension | None
        if header == _ZEROS:
            item = _skip_zeros(stream, offset)
            if item is None:
                yield from _dangling(extension)
                yield from _stream_damage(stream)
                return
        else:
            item = _next_item(stream, offset, header, extension.values if extension else {})
        if isinstance(item, Extension):
            damaged = False
            if extension is not None and (
                extension.values.keys() & item.values.keys()
                or len(extension.stored) + len(item.stored) > MAX_EXTENDED_BYTES
            ):  # they cannot describe the same member
                yield from _dangling(extension)
                extension = None
            if extension is not None:
                values, stored = extension.values | item.values, extension.stored + item.stored
                item = Extension(extension.offset, values, stored)
            extension = item if item.stored else None
            continue
        damaged = isinstance(item, Damage)
        if extension is not None and isinstance(item, Damage):
            # Two adjacent stretches of damage are the remains of one member. Damage without bytes is a
            # stretch of zeros.
            data = extension.stored + (item.data or bytes(min(item.length, MAX_KEPT_BYTES)))
            length = len(extension.stored) + item.length
            item = replace(item, offset=extension.offset, length=length, data=data[:MAX_KEPT_BYTES])
        extension = None
        yield item


def _dangling(extension: Extension | None) -> Iterator[Damage]:
    """Damage for extended headers without a following member: their member is lost."""
    if extension is not None:
        length = len(extension.stored)
        named = f" of {extension.values['path'][-200:]!r}" if "path" in extension.values else ""
        why = f"{length:,} bytes of extended headers{named} that no member follows"
        yield Damage("dangling_extended_header", why, extension.offset, length, extension.stored)


def _next_item(
    stream: StoredStream, offset: int, header: bytes, extended: dict[str, str]
) -> Member | Damage | Extension:
    """The member or damage at this position, or the fields that an extended header sets."""
    parsed = parse_header(header)
    if parsed is None:
        named = _PAIR_NAME.search(header, 0, 100)
        why = f"damaged header, perhaps of {named[0].decode()}" if named else "no valid member header"
        return _resync(stream, offset, "bad_header", why)
    size, limit = parsed.size, MAX_MEMBER_BYTES
    if parsed.is_metadata:
        limit = MAX_EXTENDED_BYTES
    elif "size" in extended:
        size = int(extended["size"])
    if not 0 <= size <= limit:
        why = f"header of {parsed.name!r} claims {size:,} bytes"
        return _resync(stream, offset, "bad_size", why)
    if parsed.type in b"123456":  # links, devices and folders have no content, even if their size is set
        size = 0
    # A header inside the content: the size in this header is wrong, or bytes of the content are lost.
    inner = _inner_header(stream.window(2 * BLOCK + size + -size % BLOCK), size) if size else None
    if inner is not None:
        why = f"{parsed.name!r} claims {size:,} bytes, but the next member begins {inner - BLOCK:,} bytes on"
        return _resync(stream, offset, "bad_size", why)
    stream.read(BLOCK)
    data = stream.read(size)
    if len(data) < size:
        why = f"the archive ends inside {parsed.name!r}, after {len(data):,} of {size:,} bytes"
        return Damage("member_truncated", why, offset, BLOCK + len(data), header + data)
    padding = stream.read(-size % BLOCK)
    if parsed.is_metadata:
        stored = header + data + padding
        values = parse_extended(parsed.type, data)
        if values is None:
            why = f"malformed extended header {parsed.name!r}"
            return Damage("bad_extended_header", why, offset, len(stored), stored)
        # A global header applies to all later members, so no member has to follow it.
        return Extension(offset, values, b"" if parsed.type == b"g" else stored)
    if parsed.type == b"V" and not data:
        return Extension(offset, {}, b"")  # a volume label: the name of the archive
    name, kind = extended.get("path", parsed.name), _KINDS.get(parsed.type, f"member of type {parsed.type!r}")
    if parsed.type in _FILE_TYPES:
        kind = "sparse file" if "sparse" in extended else "file"
    link = extended.get("link", parsed.link) if kind == HARD_LINK else ""
    return Member(name, kind, offset, data, link)


def _resync(stream: StoredStream, offset: int, reason: str, why: str) -> Damage:
    """Skip to the next valid header, wherever it begins, or to the end of the stream."""
    kept = bytearray(stream.read(1))  # skips the damaged header at this position
    start = None
    while start is None:
        available = min(len(stream.window(_WINDOW)), _WINDOW)
        start = _next_header(stream.window(_WINDOW), 0, available)
        # A header that crosses the end of this window is complete in the next window.
        last = available < _WINDOW
        skipped = stream.read(start if start is not None else available - (0 if last else BLOCK - 1))
        kept += skipped[: max(0, MAX_KEPT_BYTES - len(kept))]
        if last:
            break
    length = stream.position - offset
    return Damage(reason, f"{why}; {length:,} bytes skipped", offset, length, bytes(kept))


def _next_header(buffer: bytes | bytearray, start: int, stop: int) -> int | None:
    """Offset of the first valid header with ustar's magic that lies completely between start and stop."""
    magic = start + _MAGIC
    while (magic := buffer.find(b"ustar", magic, stop)) >= 0:
        begin = magic - _MAGIC
        header = bytes(buffer[begin : min(begin + BLOCK, stop)])
        if len(header) < BLOCK:
            return None
        if parse_header(header):
            return begin
        magic += 1
    return None


def _inner_header(window: bytes | bytearray, size: int) -> int | None:
    """Offset of a header inside a member of this size; the window includes the next header."""
    padded = BLOCK + size + -size % BLOCK
    # If a member contains other complete members, these start at multiples of a block.
    blocks = window[BLOCK + _MAGIC : padded : BLOCK]
    at = -1
    while (at := blocks.find(b"u", at + 1)) >= 0:
        begin = (at + 1) * BLOCK
        if _next_header(window, begin, begin + BLOCK) == begin:
            return begin
    # If bytes are lost or added, headers may start at any offset, and none follows this member.
    following = bytes(window[padded : padded + BLOCK])
    if len(following) == BLOCK and parse_header(following):
        return None
    return _next_header(window, 1, padded - 1 + BLOCK)


def _skip_zeros(stream: StoredStream, offset: int) -> Damage | None:
    """Skip zero blocks; None if they are the end marker of the archive, otherwise damage."""
    while True:
        block = stream.peek(BLOCK)
        if block.strip(b"\0"):
            length = stream.position - offset
            return Damage("zero_blocks", f"{length:,} zero bytes inside the archive", offset, length)
        if len(block) < BLOCK:
            stream.read(BLOCK)
            length = stream.position - offset
            if length <= MAX_END_BYTES or _pads_record(length, stream.position):
                return None
            why = f"{length:,} zero bytes at the end, more than an end marker has: is the file complete?"
            return Damage("zero_tail", why, offset, length)
        stream.read(BLOCK)


def _pads_record(zeros: int, total: int) -> bool:
    """Whether large records can explain the number of zeros at the end of an archive of `total` bytes."""
    # `tar --blocking-factor=512` pads to 256 KiB. The length of such an archive is a multiple of a usual
    # record size (powers of two and round numbers of blocks), that of a partial download into a preallocated
    # file any.
    return any(zeros < record + 2 * BLOCK and total % record == 0 for record in _RECORDS)


def _end_of_stream(stream: StoredStream, offset: int, rest: bytes, damaged: bool) -> Iterator[Damage]:
    """Damage for a stream ending where a header is expected: members may be missing without zero blocks."""
    # None if damage reaches to the end of the stream: the skipped bytes then include the end marker.
    stream.read(len(rest))
    if rest:
        yield Damage("header_truncated", "the archive ends inside a member header", offset, len(rest), rest)
    elif stream.damage is None and not damaged:
        yield Damage(
            "no_end_marker",
            "the archive ends without the zero blocks that close a tar: it was cut between two members; "
            "download it again",
            offset,
        )
    yield from _stream_damage(stream)


def _stream_damage(stream: StoredStream) -> Iterator[Damage]:
    """Damage of the stream itself, after the rest of it has been read."""
    while stream.read(1 << 20):
        pass
    if stream.damage is not None:
        yield replace(stream.damage, offset=stream.position)


def is_tar_name(name: str) -> bool:
    """Whether a file name is that of a tar: x.tar, x.tar.gz or x.tgz."""
    return name.lower().endswith(_TAR_ENDINGS)


def tar_name(name: str) -> str:
    ending = next((ending for ending in _TAR_ENDINGS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)]


def holds_tar(path: Path) -> bool:
    """Whether the content is a tar, plain or gzip; the first headers may be damaged."""
    stream = StoredStream(path)
    try:
        head = stream.peek(_WINDOW)
    finally:
        stream.close()
    whole = len(head) >= BLOCK
    return whole and (parse_header(head[:BLOCK]) is not None or _next_header(head, 0, len(head)) is not None)


_TAR_ENDINGS = (".tar.gz", ".tar", ".tgz")
MAX_LINKS = 1 << 16  # links kept for the second pass; all further links are yielded unchanged


def resolve_links(
    items: Iterable[Member | Damage], reopen: Callable[[], StoredStream]
) -> Iterator[Member | Damage]:
    """Replace hard links to an earlier file of the same archive by files.

    The files come last and are read in a second pass over the archive, so that memory is bounded by one
    member. If two files have one name, the first is used. A link to its own name is left out. Other links are
    yielded unchanged.
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


class TarPass(SourceReading):
    """One pass over a tar: a file, or an object at a link."""

    def __init__(self, source: Source, *, md5: bool, progress: Progress | None) -> None:
        self._source, self._progress = source, progress
        self._stream = StoredStream(source.link or source.path, md5=md5, progress=progress)

    def items(self) -> Iterator[Member | Damage]:
        """Members and damage in their order; hard links come last."""
        return resolve_links(members(self._stream), self._again)

    def digests(self) -> dict[str, str]:
        return self._stream.digests()

    def check_unchanged(self) -> None:
        self._stream.check_unchanged()
        if self._source.link is None:
            state = self._source.path.stat()
            if (state.st_size, state.st_mtime_ns) != (self._source.size, self._source.mtime_ns):
                path = self._source.path
                raise SourceError(f"{path}: changed before it was read; run the same command again")

    def close(self) -> None:
        self._stream.close()

    def _again(self) -> StoredStream:
        # The second pass reports progress of 0 bytes: the bytes were counted in the first pass.
        progress = self._progress
        origin = self._source.link or self._source.path
        return StoredStream(origin, progress=None if progress is None else lambda _: progress(0))


class TarFormat(SourceFormat):
    """Tars as downloaded, gzip or plain."""

    kind = "tar"
    ending = ".tar"
    has_links = True

    def takes(self, path: Path) -> bool:
        """A gzip file without a tar fails when it is read: the error names it, and other sources are kept."""
        return True

    def name_of(self, path: Path) -> str:
        return tar_name(path.name)

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return TarPass(source, md5=md5, progress=progress)


TAR = TarFormat()
