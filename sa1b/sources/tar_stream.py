"""A source tar as a stream: its bytes (decompressed if it is gzip), header blocks, members and damage.

The format is detected by content. The stored bytes are digested as they are read.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal import isal_zlib

from sa1b.sources.stored_file import Link, open_stored

BLOCK = 512
GZIP = b"\x1f\x8b"
HARD_LINK = "hard link"
OVERSIZED, UNREADABLE = "oversized file", "unreadable file"
MAX_MEMBER_BYTES = 32 << 20  # real files: 1 MB on average
MAX_KEPT_BYTES = 32 << 20  # bytes of a damaged region that quarantine keeps; the source keeps the rest
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=\n]+)=")
_CONTROL = re.compile(rb"[\x00-\x1f]")  # names in an archive of images never contain these characters
_PAX_KEYS = {b"path": "path", b"size": "size", b"linkpath": "link"}
_TRAILER = 8
_CHUNK = 1 << 16  # an error in a deflate stream loses at most the output of one chunk,
_MAX_INFLATED = 1 << 20  # or this many bytes: a chunk of zeros could inflate to 64 MB
# The type stub of the library declares this exception class as an instance.
_INFLATE_ERROR: type[Exception] = vars(isal_zlib)["error"]


@dataclass(frozen=True, slots=True)
class Member:
    """One member as stored in the source."""

    name: str  # as stored; untrusted
    kind: str  # "file", or the kind of the other entry
    offset: int  # from the start of the tar (uncompressed) to the header, bytes; 0 in a folder
    data: bytes  # content of a file, else empty
    # target of a hard link as stored; for OVERSIZED and UNREADABLE why `data` is empty; with `reason` the
    # message
    detail: str = ""
    reason: str = ""  # snake_case word: why the reader of the source refuses the member, or empty
    origin: str = ""  # the user's name of the image, if the source names it otherwise than the member


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of the archive that holds no readable member; `reason` is a snake_case word."""

    reason: str
    message: str
    offset: int  # bytes of the tar (uncompressed), as the length
    length: int = 0  # 0: bytes are missing after the offset
    data: bytes = b""  # the bytes, at most MAX_KEPT_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """One header block: ustar, GNU or V7."""

    name: str
    size: int
    type: bytes
    link: str

    @property
    def is_metadata(self) -> bool:
        """Whether its content describes the next member: a pax or GNU long-name header."""
        return self.type in b"xgLK"


def parse_header(block: bytes) -> Header | None:
    """The header in a block of 512 bytes, or None if it holds none."""
    stored = _number(block[148:156])
    unsigned = sum(block) - sum(block[148:156]) + 8 * 0x20
    if stored != unsigned:
        # Some old writers summed the bytes as signed numbers.
        signed = unsigned - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
        if stored is None or stored != signed:
            return None
    size = _number(block[124:136])
    if size is None:
        return None
    name, link = (field.split(b"\0", 1)[0] for field in (block[:100], block[157:257]))
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    path = prefix + b"/" + name if prefix else name
    return Header(_text(path), size, block[156:157], _text(link))


def parse_extended(kind: bytes, data: bytes) -> dict[str, str] | None:
    """Fields that a GNU long-name (L, K) or pax (x, g) header sets for the next member; None if malformed."""
    # Keys: path, size, link, sparse. A malformed header may be a member with a damaged type, so the content
    # is always checked.
    if kind in b"LK":
        name = data[:-1]
        # GNU tar, Python, Go and libarchive all write the name and one zero byte.
        if data[-1:] != b"\0" or not name or _CONTROL.search(name):
            return None
        return {"path" if kind == b"L" else "link": _text(name)}
    records: dict[str, str] = {}
    position = 0
    while position < len(data):
        match = _PAX_RECORD.match(data, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            return None
        key = "sparse" if match[2].startswith(b"GNU.sparse.") else _PAX_KEYS.get(match[2])
        if kind == b"x" and key is not None:
            records[key] = _text(data[match.end() : end - 1])
        position = end
    return records if re.fullmatch(r"[0-9]{1,20}", records.get("size", "0")) else None


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


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


class StoredStream:
    """The bytes of a tar, decompressed if the file is gzip. The stored bytes are digested during reading.
    `position` is the bytes returned so far; `damage` why the stream ended early, else None.
    """

    def __init__(
        self, origin: Path | Link, *, md5: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        self.position = 0
        self.damage: Damage | None = None
        self._file = open_stored(origin)
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 else None
        self._progress = progress
        self._stored = 0  # bytes read from the file
        self._buffer = bytearray()
        self._ended = False
        self._inflating = False  # the last call of the decompressor stopped at its limit
        head = self._read_stored()
        # The first name of a plain tar may begin with any bytes, also with gzip's magic.
        gzip = head[:2] == GZIP and parse_header(head[:BLOCK].ljust(BLOCK, b"\0")) is None
        self._gzip: Any = isal_zlib.decompressobj(31) if gzip else None
        self._waiting = head

    def close(self) -> None:
        self._file.close()

    def digests(self) -> dict[str, str]:
        """sha256, and md5 if requested, of the complete file as stored; reads the rest of the file."""
        while self._read_stored():
            pass
        digests = {"sha256": self._sha256.hexdigest()}
        if self._md5 is not None:
            digests["md5"] = self._md5.hexdigest()
        return digests

    def check_unchanged(self) -> None:
        """Raise SourceError if the file was changed, replaced or removed since it was opened."""
        self._file.check_unchanged()

    def read(self, length: int) -> bytes:
        """The next `length` bytes; fewer only at the end of the stream."""
        self._fill(length)
        data = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        self.position += len(data)
        return data

    def peek(self, length: int) -> bytes:
        """Like `read`, but the bytes stay in the stream."""
        self._fill(length)
        return bytes(memoryview(self._buffer)[:length])

    def window(self, length: int) -> bytearray:
        """At least the next `length` bytes, or fewer at the end of the stream; not copied, do not modify."""
        self._fill(length)
        return self._buffer

    def _fill(self, length: int) -> None:
        while len(self._buffer) < length and not self._ended:
            self._buffer += self._next()

    def _read_stored(self) -> bytes:
        # The last 8 bytes, gzip's checksum, are decompressed separately: an error there must not lose data.
        left = self._file.size - self._stored
        data = self._file.read(min(_CHUNK, left - _TRAILER) if left > _TRAILER else _CHUNK)
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
            self._end("gzip_truncated", "the gzip stream is truncated: download the file again")
            return b""
        try:
            data: bytes = self._gzip.decompress(stored, _MAX_INFLATED)
        except _INFLATE_ERROR as error:
            checksum = "checksum" in str(error).lower()
            self._end(
                "gzip_checksum" if checksum else "gzip_corrupt",
                "the checksum of the gzip stream does not match its content: some member is wrong; "
                "download the file again"
                if checksum
                else f"the gzip stream is corrupt ({error}) and nothing after it can be read; download the "
                "file again",
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
        if rest[:2] != GZIP:
            self._end(
                "gzip_trailing_bytes", "bytes after the end of the gzip stream: download the file again"
            )
            return
        self._gzip = isal_zlib.decompressobj(31)
        self._waiting = rest

    def _end(self, reason: str, message: str) -> None:
        self._ended = True
        where = f"{message} (near byte {self._stored:,} of the file)"
        self.damage = Damage(reason, where, self.position)
