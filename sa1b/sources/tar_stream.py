"""A source tar's bytes, gunzipped if need be, told apart by content; digested as they are read."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

from sa1b.sources.member import Damage
from sa1b.sources.tar_header import BLOCK, parse

GZIP = b"\x1f\x8b"
_TRAILER = 8
_CHUNK = 1 << 16  # an error in a deflate stream loses at most what one chunk inflates to,
_MAX_INFLATED = 1 << 20  # or this much: a chunk of zeros could become 64 MB
# The library's stub types this exception class as an instance.
_INFLATE_ERROR: type[Exception] = vars(isal_zlib)["error"]


class StoredStream:
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
        gzip = head[:2] == GZIP and parse(head[:BLOCK].ljust(BLOCK, b"\0")) is None
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
                "the checksum at the end of the gzip stream does not fit its content: some member, "
                "anywhere in it, is wrong; get the file again"
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
        if rest[:2] != GZIP:
            self._end("gzip_trailing_bytes", "bytes behind the end of the gzip stream; get the file again")
            return
        self._gzip = isal_zlib.decompressobj(31)
        self._waiting = rest

    def _end(self, reason: str, message: str) -> None:
        self._ended = True
        where = f"{message} (near byte {self._stored:,} of the file)"
        self.damage = Damage(reason, where, self.position)
