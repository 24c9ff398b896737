"""What comes out of a source: members, and damage where something is no member."""

from dataclasses import dataclass

MAX_KEPT_BYTES = 32 << 20  # of a damaged region, for quarantine; the source stays the copy of the rest


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
