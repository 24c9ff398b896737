"""Tar archives from outside, read strictly: nothing is dropped without a word.

Python's tarfile, and every reader built on it, silently ends at the first damaged header and loses the rest
of the archive. This reader yields `Damage` for every byte it cannot make sense of, finds the next header
behind it (at any byte offset, so a lost or added byte costs one member too) and goes on.

Formats: POSIX.1-1988 ustar, GNU and pax headers, V7; gzip (RFC 1952, several members) or plain, told apart
by content. One pass, front to back, with digests of the file as stored.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

BLOCK = 512
MAX_MEMBER_BYTES = 128 << 20
MAX_KEPT_BYTES = 64 << 20  # of a damaged region, for quarantine; the source stays the copy of the rest
_CHUNK = 1 << 16  # an error in a deflate stream loses at most what one chunk inflates to
_TRAILER = 8
# The library's stub types this exception class as an instance.
_INFLATE_ERROR: type[Exception] = vars(isal_zlib)["error"]
_ZEROS = bytes(BLOCK)
_NAMED = re.compile(rb"ustar[\0 ]")
_FILE_TYPES = b"0\x007"
_KINDS = {
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "folder",
    b"6": "fifo",
}


class SourceError(Exception):
    """A source that cannot be read at all; the message names it and the way out."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member as it stands in the archive.

    Attributes:
        name: as stored, not to be trusted.
        kind: "file", or what else it is.
        offset: bytes from the start of the tar (uncompressed) to the member's header.
        data: content of a file, else empty.
    """

    name: str
    kind: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of the archive that holds no readable member.

    Attributes:
        reason: snake_case word.
        message: what is wrong, for a person.
        offset, length: bytes of the tar (uncompressed). Length 0: what is missing lies behind the offset.
        data: the bytes, at most MAX_KEPT_BYTES.
    """

    reason: str
    message: str
    offset: int
    length: int = 0
    data: bytes = b""


class Stream:
    """The bytes of a tar, gunzipped if need be, digested as they are read.

    Attributes:
        position: bytes handed out so far.
        damage: why the stream ended before its proper end, else None.
    """

    def __init__(
        self, path: Path, *, md5: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        self.path = path
        self.position = 0
        self.damage: Damage | None = None
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._size = path.stat().st_size
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 else None
        self._progress = progress
        self._stored = 0  # bytes read from the file
        self._buffer = bytearray()
        self._ended = False
        head = self._read_stored()
        self._gzip: Any = isal_zlib.decompressobj(31) if head[:2] == b"\x1f\x8b" else None
        self._waiting = head

    def close(self) -> None:
        self._file.close()

    def digests(self) -> dict[str, str]:
        """sha256, and md5 if asked for, of the whole file as stored; reads what is left of it."""
        while self._read_stored():
            pass
        found = {"sha256": self._sha256.hexdigest()}
        if self._md5 is not None:
            found["md5"] = self._md5.hexdigest()
        return found

    def read(self, length: int) -> bytes:
        """The next `length` bytes; fewer only at the end of the stream."""
        self._fill(length)
        data = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        self.position += len(data)
        return data

    def peek(self, length: int) -> bytes:
        """Like read, but the bytes stay."""
        self._fill(length)
        return bytes(memoryview(self._buffer)[:length])

    def _fill(self, length: int) -> None:
        while len(self._buffer) < length and not self._ended:
            self._buffer += self._next()

    def _read_stored(self) -> bytes:
        # The last 8 bytes come alone: they are gzip's checksum, and an error there must not cost data.
        left = self._size - self._stored
        data = self._file.read(min(_CHUNK, left - _TRAILER) if left > _TRAILER else _CHUNK)
        self._stored += len(data)
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        if self._progress is not None:
            self._progress(len(data))
        return data

    def _next(self) -> bytes:
        stored = self._waiting or self._read_stored()
        self._waiting = b""
        if self._gzip is None:
            self._ended = not stored
            return stored
        if not stored:
            self._end("gzip_truncated", "gzip stream ends in the middle: the file is cut off")
            return b""
        try:
            data: bytes = self._gzip.decompress(stored)
        except _INFLATE_ERROR as error:
            checksum = "checksum" in str(error).lower()
            self._end(
                "gzip_checksum" if checksum else "gzip_corrupt",
                "the checksum at the end of the gzip stream does not fit its content: some member is wrong"
                if checksum
                else f"gzip stream is corrupt ({error}); nothing behind can be read",
            )
            return b""
        if self._gzip.eof:
            self._next_gzip_member()
        return data

    def _next_gzip_member(self) -> None:
        rest = self._gzip.unused_data.lstrip(b"\0")
        while not rest:
            stored = self._read_stored()
            if not stored:
                self._ended = True
                return
            rest = stored.lstrip(b"\0")
        if rest[:2] != b"\x1f\x8b":
            self._end("gzip_trailing_bytes", "bytes behind the end of the gzip stream")
            return
        self._gzip = isal_zlib.decompressobj(31)
        self._waiting = rest

    def _end(self, reason: str, message: str) -> None:
        self._ended = True
        where = f"{message} (near byte {self._stored:,} of the file)"
        self.damage = Damage(reason, where, self.position + len(self._buffer))


def members(stream: Stream) -> Iterator[Member | Damage]:
    """Everything in the archive, in order: members, and damage where something is no member.

    Never raises for the content of the archive. Pax and GNU long-name headers are applied, not yielded.
    """
    extended: dict[str, str] = {}
    while True:
        offset = stream.position
        header = stream.peek(BLOCK)
        if len(header) < BLOCK:
            yield from _end_of_stream(stream, offset, header)
            return
        if header == _ZEROS:
            damage = _skip_zeros(stream, offset)
            if damage is None:
                yield from _stream_damage(stream)
                return
            yield damage
            continue
        parsed = _parse(header, strict=False)
        size = parsed.size if parsed else 0
        if parsed and "size" in extended:
            size = int(extended["size"][:20]) if extended["size"].isdecimal() else -1
        if parsed is None or not 0 <= size <= MAX_MEMBER_BYTES:
            why = f"header of {parsed.name!r} claims {size:,} bytes" if parsed else "no valid member header"
            yield _resync(stream, offset, "bad_size" if parsed else "bad_header", why)
            if not stream.peek(1):
                yield from _stream_damage(stream)
                return
            extended = {}
            continue
        stream.read(BLOCK)
        data = stream.read(size if parsed.has_data else 0)
        if len(data) < size and parsed.has_data:
            yield Damage(
                "member_truncated",
                f"the archive ends inside {parsed.name!r}, after {len(data):,} of {size:,} bytes",
                offset,
                BLOCK + len(data),
                data,
            )
            yield from _stream_damage(stream)
            return
        if parsed.has_data:
            stream.read(-size % BLOCK)
        if parsed.type in b"xLKg":
            if parsed.type != b"g":
                extended |= _extended(parsed.type, data)
            continue
        name = extended.get("path", parsed.name)
        extended = {}
        kind = (
            "file"
            if parsed.type in _FILE_TYPES
            else _KINDS.get(parsed.type, f"member of type {parsed.type!r}")
        )
        yield Member(name, kind, offset, data)


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    size: int
    type: bytes

    @property
    def has_data(self) -> bool:
        return self.type not in b"123456"


def _parse(header: bytes, *, strict: bool) -> _Header | None:
    """The header block, or None if it is none. Strict: with ustar's magic, for the search behind damage."""
    named = header[257:262] == b"ustar"
    if strict and not named:
        return None
    stored = _number(header[148:156])
    unsigned = sum(header) - sum(header[148:156]) + 8 * 0x20
    if stored != unsigned:
        # Some old writers added the bytes up as signed numbers.
        signed = unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
        if stored is None or stored != signed:
            return None
    size = _number(header[124:136])
    if size is None:
        return None
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    path = prefix + b"/" + name if prefix else name
    return _Header(path.decode("utf-8", "backslashreplace"), size, header[156:157])


def _number(data: bytes) -> int | None:
    """A numeric field: octal, or GNU's base 256."""
    if data[0] in (0x80, 0xFF):
        value = int.from_bytes(data[1:], "big")
        return value if data[0] == 0x80 else value - (1 << (8 * (len(data) - 1)))
    text = data.split(b"\0", 1)[0].strip(b" ")
    try:
        return int(text or b"0", 8)
    except ValueError:
        return None


def _extended(kind: bytes, data: bytes) -> dict[str, str]:
    """What a GNU long-name (L, K) or pax (x) header says about the next member: path and size."""
    if kind in b"LK":
        return {"path": data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")} if kind == b"L" else {}
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length[:9]) <= len(data):
            break
        record, data = data[: int(length)], data[int(length) :]
        key, _, value = record[len(length) + 1 :].rstrip(b"\n").partition(b"=")
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode("utf-8", "backslashreplace")
    return found


def _resync(stream: Stream, offset: int, reason: str, why: str) -> Damage:
    """Skip to the next valid header, wherever it begins, or to the end of the stream."""
    kept = bytearray(stream.read(BLOCK))
    while True:
        # A header that begins in this window ends in it too, or is seen again in the next one.
        window = stream.peek(1 << 20)
        start = _next_header(window)
        keep = (
            start if start is not None else (len(window) - BLOCK if len(window) == 1 << 20 else len(window))
        )
        skipped = stream.read(keep)
        kept += skipped[: max(0, MAX_KEPT_BYTES - len(kept))]
        if start is not None or len(window) < 1 << 20:
            break
    length = stream.position - offset
    return Damage(reason, f"{why}; {length:,} bytes skipped", offset, length, bytes(kept))


def _next_header(window: bytes) -> int | None:
    for match in _NAMED.finditer(window):
        start = match.start() - 257
        header = window[start : start + BLOCK] if start >= 0 else b""
        if len(header) == BLOCK and _parse(header, strict=True):
            return start
    return None


def _skip_zeros(stream: Stream, offset: int) -> Damage | None:
    """Pass zero blocks. None at the end of the archive, else the damage they are."""
    while True:
        block = stream.peek(BLOCK)
        if block.strip(b"\0"):
            length = stream.position - offset
            return Damage("zero_blocks", f"{length:,} zero bytes inside the archive", offset, length)
        if len(block) < BLOCK:
            stream.read(BLOCK)
            return None
        stream.read(BLOCK)


def _end_of_stream(stream: Stream, offset: int, rest: bytes) -> Iterator[Damage]:
    """The stream ended where a header belongs: no zero blocks, so something may be missing."""
    stream.read(len(rest))
    if rest:
        yield Damage("header_truncated", "the archive ends inside a member header", offset, len(rest), rest)
    elif stream.damage is None:
        yield Damage(
            "no_end_marker",
            "the archive ends without the zero blocks that close a tar: it was cut between two members",
            offset,
        )
    yield from _stream_damage(stream)


def _stream_damage(stream: Stream) -> Iterator[Damage]:
    """What happened to the stream itself, once the rest of it has been read."""
    while stream.read(1 << 20):
        pass
    if stream.damage is not None:
        yield stream.damage


def is_tar(path: Path) -> bool:
    """By content: a gzip file, or a plain tar."""
    with path.open("rb") as file:
        head = file.read(BLOCK)
    if head[:2] == b"\x1f\x8b":
        return True
    return len(head) == BLOCK and (_parse(head, strict=False) is not None or head[257:262] == b"ustar")
