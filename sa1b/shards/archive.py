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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

BLOCK = 512
MAX_MEMBER_BYTES = 32 << 20  # real files: 1 MB on average
MAX_EXTENDED_BYTES = 1 << 20  # of a pax or long-name header
MAX_KEPT_BYTES = 32 << 20  # of a damaged region, for quarantine; the source stays the copy of the rest
MAX_END_BYTES = 1 << 16  # of the zeros that end an archive: two blocks, padded to a record of 10 KB or more
_CHUNK = 1 << 16  # an error in a deflate stream loses at most what one chunk inflates to,
_MAX_INFLATED = 1 << 20  # or this much: a chunk of zeros could become 64 MB
_WINDOW = 1 << 20
_GZIP = b"\x1f\x8b"
_TRAILER = 8
# The library's stub types this exception class as an instance.
_INFLATE_ERROR: type[Exception] = vars(isal_zlib)["error"]
_ZEROS = bytes(BLOCK)
_MAGIC = 257  # where a header says "ustar"
_PAIR_NAME = re.compile(rb"sa_[0-9]+\.[a-z]+")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=\n]+)=")
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
        self._inflating = False  # the last call of the decompressor stopped at its limit
        head = self._read_stored()
        # A plain tar's first name may begin with any bytes, gzip's among them.
        gzip = head[:2] == _GZIP and _parse(head[:BLOCK].ljust(BLOCK, b"\0")) is None
        self._gzip: Any = isal_zlib.decompressobj(31) if gzip else None
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

    def window(self, length: int) -> bytearray:
        """At least the next `length` bytes if there are so many, not copied and not to be changed."""
        self._fill(length)
        return self._buffer

    def _fill(self, length: int) -> None:
        while len(self._buffer) < length and not self._ended:
            self._buffer += self._next()

    def _read_stored(self) -> bytes:
        # The last 8 bytes come alone: they are gzip's checksum, and an error there must not cost data.
        left = self._size - self._stored
        try:
            data = self._file.read(min(_CHUNK, left - _TRAILER) if left > _TRAILER else _CHUNK)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._stored += len(data)
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        if self._progress is not None:
            self._progress(len(data))
        return data

    def _next(self) -> bytes:
        stored = self._waiting
        if not stored and not self._inflating:
            stored = self._read_stored()
        self._waiting = b""
        if self._gzip is None:
            self._ended = not stored
            return stored
        if not stored and not self._inflating:
            self._end("gzip_truncated", "gzip stream ends in the middle: the file is cut off, get it again")
            return b""
        try:
            data: bytes = self._gzip.decompress(stored, _MAX_INFLATED)
        except _INFLATE_ERROR as error:
            checksum = "checksum" in str(error).lower()
            self._end(
                "gzip_checksum" if checksum else "gzip_corrupt",
                "the checksum at the end of the gzip stream does not fit its content: some member is wrong"
                if checksum
                else f"gzip stream is corrupt ({error}); nothing behind can be read, get the file again",
            )
            return b""
        self._waiting = self._gzip.unconsumed_tail
        self._inflating = len(data) == _MAX_INFLATED and not self._gzip.eof
        if self._gzip.eof:
            self._next_gzip_member()
        return data

    def _next_gzip_member(self) -> None:
        rest = self._gzip.unused_data.lstrip(b"\0")
        while len(rest) < 2 and (stored := self._read_stored()):
            rest = (rest + stored).lstrip(b"\0")
        if not rest:
            self._ended = True
            return
        if rest[:2] != _GZIP:
            self._end("gzip_trailing_bytes", "bytes behind the end of the gzip stream")
            return
        self._gzip = isal_zlib.decompressobj(31)
        self._waiting = rest

    def _end(self, reason: str, message: str) -> None:
        self._ended = True
        where = f"{message} (near byte {self._stored:,} of the file)"
        self.damage = Damage(reason, where, self.position)


def members(stream: Stream) -> Iterator[Member | Damage]:
    """Everything in the archive, in order: members, and damage where something is no member.

    Never raises for the content of the archive. Pax and GNU long-name headers are applied, not yielded.
    """
    extended: dict[str, str] = {}
    damaged = False
    while True:
        offset = stream.position
        header = stream.peek(BLOCK)
        if len(header) < BLOCK:
            yield from _end_of_stream(stream, offset, header, damaged)
            return
        found: Member | Damage | dict[str, str] | None
        if header == _ZEROS:
            found = _skip_zeros(stream, offset)
            if found is None:
                yield from _stream_damage(stream)
                return
        else:
            found = _next_item(stream, offset, header, extended)
        if isinstance(found, dict):
            extended |= found
            damaged = False
            continue
        extended = {}
        damaged = isinstance(found, Damage)
        yield found


def _next_item(
    stream: Stream, offset: int, header: bytes, extended: dict[str, str]
) -> Member | Damage | dict[str, str]:
    """The member that begins here, the damage that does, or what an extended header says of the next one."""
    parsed = _parse(header)
    if parsed is None:
        named = _PAIR_NAME.search(header, 0, 100)
        why = f"damaged header, perhaps of {named[0].decode()}" if named else "no valid member header"
        return _resync(stream, offset, "bad_header", why)
    size, limit = parsed.size, MAX_MEMBER_BYTES
    if parsed.describes_next:
        limit = MAX_EXTENDED_BYTES
    elif "size" in extended:
        size = int(extended["size"])
    if not 0 <= size <= limit:
        why = f"header of {parsed.name!r} claims {size:,} bytes"
        return _resync(stream, offset, "bad_size", why)
    if not parsed.has_data:
        size = 0
    # A header inside the content: this one's size is wrong, or bytes of the content are lost.
    inner = _inner_header(stream.window(2 * BLOCK + size + -size % BLOCK), size) if size else None
    if inner is not None:
        why = f"{parsed.name!r} claims {size:,} bytes, but the next member begins {inner - BLOCK:,} bytes on"
        return _resync(stream, offset, "bad_size", why)
    stream.read(BLOCK)
    data = stream.read(size)
    if len(data) < size:
        why = f"the archive ends inside {parsed.name!r}, after {len(data):,} of {size:,} bytes"
        return Damage("member_truncated", why, offset, BLOCK + len(data), header + data)
    stream.read(-size % BLOCK)
    if parsed.describes_next:
        said = _extended(parsed.type, data)
        why = f"malformed extended header {parsed.name!r}"
        length = stream.position - offset
        return Damage("bad_extended_header", why, offset, length, header + data) if said is None else said
    kind = (
        "file" if parsed.type in _FILE_TYPES else _KINDS.get(parsed.type, f"member of type {parsed.type!r}")
    )
    return Member(extended.get("path", parsed.name), kind, offset, data)


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    size: int
    type: bytes

    @property
    def has_data(self) -> bool:
        return self.type not in b"123456"

    @property
    def describes_next(self) -> bool:
        return self.type in b"xgLK"


def _parse(header: bytes) -> _Header | None:
    """The header block, or None if it is none."""
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


def _extended(kind: bytes, data: bytes) -> dict[str, str] | None:
    """What a GNU long-name (L, K) or pax (x, g) header says of the next member; None if it is malformed."""
    if kind == b"L":
        return {"path": data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")}
    found: dict[str, str] = {}
    position = 0
    while kind == b"x" and position < len(data):
        match = _PAX_RECORD.match(data, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            return None
        if match[2] in (b"path", b"size"):
            found[match[2].decode()] = data[match.end() : end - 1].decode("utf-8", "backslashreplace")
        position = end
    return found if re.fullmatch(r"[0-9]{1,20}", found.get("size", "0")) else None


def _resync(stream: Stream, offset: int, reason: str, why: str) -> Damage:
    """Skip to the next valid header, wherever it begins, or to the end of the stream."""
    kept = bytearray(stream.read(1))  # the header that begins here is the one that is no good
    start = None
    while start is None:
        available = min(len(stream.window(_WINDOW)), _WINDOW)
        start = _next_header(stream.window(_WINDOW), 0, available)
        # A header that is cut by the end of this window is seen whole in the next one.
        last = available < _WINDOW
        skipped = stream.read(start if start is not None else available - (0 if last else BLOCK - 1))
        kept += skipped[: max(0, MAX_KEPT_BYTES - len(kept))]
        if last:
            break
    length = stream.position - offset
    return Damage(reason, f"{why}; {length:,} bytes skipped", offset, length, bytes(kept))


def _next_header(buffer: bytes | bytearray, start: int, stop: int) -> int | None:
    """Where the first valid header with ustar's magic begins, all of it between start and stop."""
    magic = start + _MAGIC
    while (magic := buffer.find(b"ustar", magic, stop)) >= 0:
        begin = magic - _MAGIC
        header = bytes(buffer[begin : min(begin + BLOCK, stop)])
        if len(header) < BLOCK:
            return None
        if _parse(header):
            return begin
        magic += 1
    return None


def _inner_header(window: bytes | bytearray, size: int) -> int | None:
    """Where a header begins inside a member of this size; the window holds its header and the next one."""
    padded = BLOCK + size + -size % BLOCK
    # Swallowed whole, other members begin at multiples of a block.
    blocks = window[BLOCK + _MAGIC : padded : BLOCK]
    at = -1
    while (at := blocks.find(b"u", at + 1)) >= 0:
        begin = (at + 1) * BLOCK
        if _next_header(window, begin, begin + BLOCK) == begin:
            return begin
    # With bytes lost or added they begin anywhere, and no header follows this member.
    following = bytes(window[padded : padded + BLOCK])
    if len(following) == BLOCK and _parse(following):
        return None
    return _next_header(window, 1, padded - 1 + BLOCK)


def _skip_zeros(stream: Stream, offset: int) -> Damage | None:
    """Pass zero blocks. None for the end marker of the archive, else the damage they are."""
    while True:
        block = stream.peek(BLOCK)
        if block.strip(b"\0"):
            length = stream.position - offset
            return Damage("zero_blocks", f"{length:,} zero bytes inside the archive", offset, length)
        if len(block) < BLOCK:
            stream.read(BLOCK)
            length = stream.position - offset
            if length <= MAX_END_BYTES:
                return None
            why = f"{length:,} zero bytes at the end, more than an end marker has: is the file complete?"
            return Damage("zero_tail", why, offset, length)
        stream.read(BLOCK)


def _end_of_stream(stream: Stream, offset: int, rest: bytes, damaged: bool) -> Iterator[Damage]:
    """The stream ended where a header belongs: no zero blocks, so something may be missing.

    Unless it was damaged up to here: then the end marker lies in what was skipped.
    """
    stream.read(len(rest))
    if rest:
        yield Damage("header_truncated", "the archive ends inside a member header", offset, len(rest), rest)
    elif stream.damage is None and not damaged:
        yield Damage(
            "no_end_marker",
            "the archive ends without the zero blocks that close a tar: it was cut between two members, "
            "get it again",
            offset,
        )
    yield from _stream_damage(stream)


def _stream_damage(stream: Stream) -> Iterator[Damage]:
    """What happened to the stream itself, once the rest of it has been read."""
    while stream.read(1 << 20):
        pass
    if stream.damage is not None:
        yield replace(stream.damage, offset=stream.position)


def is_tar(path: Path) -> bool:
    """By content: a gzip file, or a plain tar, whose first headers may be damaged."""
    with path.open("rb") as file:
        head = file.read(_WINDOW)
    if head[:2] == _GZIP:
        return True
    whole = len(head) >= BLOCK
    return whole and (_parse(head[:BLOCK]) is not None or _next_header(head, 0, len(head)) is not None)
