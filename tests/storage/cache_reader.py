"""Reads all ranges in random order through a cache, in a process of its own, and checks every byte.

`python -m tests.storage.cache_reader FOLDER LIMIT SEED` reads a range for every line of its standard input, or
all that are left when it ends with the line `all`. It writes a line after each read that was right.
"""

import random
import sys
from concurrent.futures import Future
from pathlib import Path

import google_crc32c

from sa1b.storage.range_cache import RangeCache, StoredObject, open_cache
from sa1b.storage.retry import Crc, Part

ROOT = "s3://bucket/root"
RANGE = 20_000  # bytes; not a multiple of a block
RANGES = 12  # in an object
NAMES = [f"sa1b-{number:06d}-0000.tar" for number in range(12)]
CONTENT = {name: random.Random(name).randbytes(RANGE * RANGES) for name in NAMES}


class Memory:
    """An origin that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "Future[bytes]":
        self.reads += 1
        future: Future[bytes] = Future()
        future.set_result(CONTENT[name][start : start + length])
        return future


def objects(digest: str = "0") -> list[StoredObject]:
    return [StoredObject(name, len(content), digest * 64) for name, content in CONTENT.items()]


def opened(folder: Path, limit: int) -> RangeCache:
    cache = open_cache(folder, limit, ROOT, objects())
    assert cache is not None
    return cache


def parts(name: str, start: int, length: int) -> tuple[Part, Part]:
    """The checksums of two thirds of a range and of its rest, as those of an image and of its masks."""
    middle = 2 * length // 3
    data = CONTENT[name][start : start + length]
    return (
        Part(0, middle, int(google_crc32c.value(data[:middle]))),
        Part(middle, length - middle, int(google_crc32c.value(data[middle:]))),
    )


def read(cache: RangeCache, origin: Memory, name: str, number: int) -> bytes:
    start = RANGE * number
    return cache.submit(origin, name, start, RANGE, parts(name, start, RANGE)).result()


def check_all(cache: RangeCache, origin: Memory) -> None:
    for name in NAMES:
        for number in range(RANGES):
            assert read(cache, origin, name, number) == CONTENT[name][RANGE * number :][:RANGE]


def main() -> None:
    folder, limit, seed = sys.argv[1:]
    cache, origin = opened(Path(folder), int(limit)), Memory()
    every = [(name, number) for name in NAMES for number in range(RANGES)]
    random.Random(int(seed)).shuffle(every)
    waits = True
    for name, number in every:
        waits = waits and sys.stdin.readline() != "all\n"
        assert read(cache, origin, name, number) == CONTENT[name][RANGE * number :][:RANGE]
        print(name, number, flush=True)


if __name__ == "__main__":
    main()
