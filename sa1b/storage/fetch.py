"""Large objects and their digests: verified copies to local files."""

import hashlib
from collections.abc import Callable
from typing import BinaryIO

from sa1b.storage.errors import DamageError
from sa1b.storage.reader import PIECE, Reader, pieces_of

_PREFETCH = 8  # pieces in memory: 64 MiB


def digest(reader: Reader, name: str, progress: Callable[[int], object] | None = None) -> str:
    """sha256 of an object in hexadecimal, from one read. Memory: 64 MiB.

    Args:
        progress: called with the number of bytes after each piece. An exception ends the read.

    Raises:
        StorageError: as `Reader.read_range`.
    """
    sha256 = hashlib.sha256()
    for data in reader.read_ranges(pieces_of(name, reader.size(name)), prefetch=_PREFETCH):
        sha256.update(data)
        if progress is not None:
            progress(len(data))
    return sha256.hexdigest()


def fetch(
    reader: Reader,
    name: str,
    expected: str,
    file: BinaryIO,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Copy an object to a file and verify its digest while it is copied. Memory: 64 MiB.

    Args:
        reader: reads the object.
        name: name of the object, relative to the reader's root.
        expected: sha256 of the object, in hexadecimal.
        file: opened for reading and writing, empty.
        progress: called with the number of bytes after each piece. An exception ends the copy.

    Raises:
        DamageError: the object has another digest.
        StorageError: as `Reader.read_range`.
    """
    size = reader.size(name)
    sha256 = hashlib.sha256()
    for data in reader.read_ranges(pieces_of(name, size), prefetch=_PREFETCH):
        file.write(data)
        sha256.update(data)
        if progress is not None:
            progress(len(data))
    found = sha256.hexdigest()
    if found != expected:
        # The damage is in the store or in transit: accept a piece once two reads of it agree.
        sha256 = hashlib.sha256()
        for start in range(0, size, PIECE):
            file.seek(start)
            data = file.read(PIECE)
            data = reader.read_agreed(name, start, len(data), data)
            file.seek(start)
            file.write(data)
            sha256.update(data)
        found = sha256.hexdigest()
    if found != expected:
        raise DamageError(
            f"{reader.url(name)}: sha256 {found}, {expected} expected; restore the file "
            "from a copy, or open the dataset again if it was replaced",
            url=reader.url(name),
            length=size,
            expected=expected,
            found=found,
        )
