"""One header block of a tar: ustar, GNU or V7, and the extended headers that describe the next member."""

import re
from dataclasses import dataclass

BLOCK = 512
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=\n]+)=")
_CONTROL = re.compile(rb"[\x00-\x1f]")  # no name in an archive of images holds one


@dataclass(frozen=True, slots=True)
class Header:
    name: str
    size: int
    type: bytes

    @property
    def has_data(self) -> bool:
        return self.type not in b"123456"

    @property
    def describes_next(self) -> bool:
        return self.type in b"xgLK"


def parse(header: bytes) -> Header | None:
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
    return Header(path.decode("utf-8", "backslashreplace"), size, header[156:157])


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


def parse_extended(kind: bytes, data: bytes) -> dict[str, str] | None:
    """What a GNU long-name (L, K) or pax (x, g) header says of the next member; None if it is malformed.

    A malformed one is perhaps a member whose type is damaged: its content is checked whatever it is used for.
    """
    if kind in b"LK":
        path = data[:-1]
        # GNU tar, Python, Go and libarchive all write the name and one zero byte.
        if data[-1:] != b"\0" or not path or _CONTROL.search(path):
            return None
        return {"path": path.decode("utf-8", "backslashreplace")} if kind == b"L" else {}
    found: dict[str, str] = {}
    position = 0
    while position < len(data):
        match = _PAX_RECORD.match(data, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            return None
        if kind == b"x" and match[2] in (b"path", b"size"):
            found[match[2].decode()] = data[match.end() : end - 1].decode("utf-8", "backslashreplace")
        position = end
    return found if re.fullmatch(r"[0-9]{1,20}", found.get("size", "0")) else None
