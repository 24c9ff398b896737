"""Mutated mask strings, through the package's parser and through the oracle: equal verdicts, equal masks.

    python -m tests.masks.fuzz --count 1000000 --seed 0 [--processes 2]

Each case damages a valid string (and sometimes the size) in one to three ways and decodes it with both.
"""

import argparse
import multiprocessing
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import sa1b.masks
from sa1b.masks import MaskError, SizeError, coco, raster
from tests.masks import oracle

ALPHABET = range(48, 112)
WRONG = (None, 7, 1.5, ["0"], bytearray(b"1"), memoryview(b"1"), {"counts": "1"}, True)


@dataclass
class Tally:
    cases: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # longest call in seconds


def valid_mask(rng: random.Random) -> tuple[list[int], int, int]:
    height = rng.choice((1, 2, 3, rng.randint(1, 30), rng.randint(1, 3000)))
    width = rng.choice((1, 2, 3, rng.randint(1, 30), rng.randint(1, 3000)))
    left = height * width
    longest = rng.choice((3, 40, 2 * height, left))
    runs = [rng.choice((0, rng.randint(0, min(longest, left))))]
    left -= runs[0]
    while left and len(runs) < 60:
        runs.append(rng.randint(0 if rng.random() < 0.02 else 1, min(longest, left)))
        left -= runs[-1]
    if left:
        runs.append(left)
    return runs, height, width


def mutate(string: bytes, other: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(string) + 1)
    match rng.randrange(10):
        case 0:  # another character of the alphabet
            return string[:place] + bytes([rng.choice(ALPHABET)]) + string[place + 1 :]
        case 1:  # any byte
            return string[:place] + bytes([rng.randrange(256)]) + string[place + 1 :]
        case 2:  # a flipped bit
            byte = string[place] ^ (1 << rng.randrange(8)) if place < len(string) else rng.randrange(256)
            return string[:place] + bytes([byte]) + string[place + 1 :]
        case 3:  # deletion
            return string[:place] + string[place + rng.randint(1, 4) :]
        case 4:  # insertion
            return string[:place] + bytes(rng.choices(ALPHABET, k=rng.randint(1, 15))) + string[place:]
        case 5:  # cut
            return string[:place]
        case 6:  # splice
            return string[:place] + other[rng.randrange(len(other) + 1) :]
        case 7:  # a huge number
            value = rng.choice((-1, 1)) * rng.choice((2**31, 2**32, 2**33, 2**59, 2**62, 2**63, 2**64))
            return string[:place] + oracle.number(value + rng.randint(-2, 2)) + string[place:]
        case 8:  # a small number with needless characters
            return string[:place] + oracle.number(rng.randint(-40, 40), rng.randint(0, 13)) + string[place:]
        case _:  # a repeated part
            return string[:place] + string[rng.randrange(len(string) + 1) :]


def resize(height: int, width: int, rng: random.Random) -> tuple[object, object]:
    match rng.randrange(8):
        case 0:
            return height + rng.choice((-1, 1)), width
        case 1:
            return height, width + rng.choice((-1, 1))
        case 2:
            return width, height  # the same sum
        case 3:
            return height * width, 1
        case 4:
            return rng.choice((0, -1, 2**16, 2**31, 2**32, 2**64, 10**30)), width
        case 5:
            return 2**16, rng.choice((2**16 - 1, 2**16))
        case 6:
            return rng.choice((None, 1.0, "3", True)), width
        case _:
            return rng.randint(1, 5), rng.randint(1, 5)


def package_decode(string: object, height: object, width: object) -> tuple[str, list[int]]:
    try:
        runs = sa1b.masks.decode([string], height, width)
    except MaskError as error:
        return (error.reason if error.mask == 0 else f"{error.reason} of mask {error.mask}"), []
    except SizeError as error:
        return error.reason, []
    return "valid", runs.runs.tolist()


def oracle_decode(string: object, height: object, width: object) -> tuple[str, list[int]]:
    try:
        return "valid", oracle.decode(string, height, width)
    except oracle.Refused as refused:
        return str(refused), []


def fuzz(count: int, seed: int) -> Tally:
    """`count` cases of this seed; AssertionError names the first one on which the two differ."""
    package_decode(b"9", 3, 3)  # compiles before calls are timed
    package_decode(b"", 3, 3)
    rng = random.Random(seed)
    tally = Tally()
    other = b"1"
    while tally.cases < count:
        runs, height, width = valid_mask(rng)
        original = oracle.encode(runs)
        batch = []
        for _ in range(min(20, count - tally.cases)):
            string: object = original
            for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
                string = mutate(string, other, rng)
            if rng.random() < 0.5:
                string = string.decode("latin-1")
                if rng.random() < 0.02:
                    string += rng.choice("äπ💥")
            if rng.random() < 0.01:
                string = rng.choice(WRONG)
            resized = rng.random() < 0.15
            size = resize(height, width, rng) if resized else (height, width)
            case = (string, *size)

            start = time.perf_counter()
            verdict, decoded = package_decode(*case)
            tally.slowest = max(tally.slowest, time.perf_counter() - start)
            expected, expected_runs = oracle_decode(*case)
            assert verdict == expected, f"seed {seed}: {case!r}: {verdict} instead of {expected}"
            assert decoded == expected_runs, f"seed {seed}: {case!r}: other runs"
            if verdict == "valid":
                check_valid(case, decoded)
            if not resized:
                batch.append((string, verdict))
            tally.cases += 1
            tally.verdicts[verdict] += 1
        check_batch(batch, height, width)
        other = original
    return tally


def check_valid(case: tuple[object, int, int], runs: list[int]) -> None:
    string, height, width = case
    image = sa1b.masks.decode([string], height, width)
    assert sa1b.masks.encode(image) == [oracle.encode(runs)], f"{case!r}: encoded otherwise"
    if height * width <= 400:
        pixels = raster.rasterize(image)[0].tolist()
        assert pixels == oracle.pixels(runs, height, width), f"{case!r}: other pixels"


def check_batch(batch: list[tuple[object, str]], height: int, width: int) -> None:
    """Joined strings have the same verdicts, and the error names the first one that fails."""
    strings = [string for string, _ in batch]
    verdicts = [verdict for _, verdict in batch]
    assert coco.reasons(strings, height, width) == verdicts, f"{strings!r} of {height} x {width}"
    failing = [i for i, verdict in enumerate(verdicts) if verdict != "valid"]
    named = None
    try:
        sa1b.masks.decode(strings, height, width)
    except MaskError as error:
        named = (error.mask, error.reason)
    assert named == ((failing[0], verdicts[failing[0]]) if failing else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    per_batch = 10_000
    counts = [min(per_batch, arguments.count - done) for done in range(0, arguments.count, per_batch)]
    seeds = range(arguments.seed, arguments.seed + len(counts))
    total = Tally()
    # An executor instead of a Pool: if a worker crashes, it raises an error instead of waiting forever.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        for tally in pool.map(fuzz, counts, seeds):
            total.cases += tally.cases
            total.verdicts += tally.verdicts
            total.slowest = max(total.slowest, tally.slowest)
    print(f"{total.cases} mutations, seeds {seeds.start}..{seeds.stop - 1}: all verdicts and masks equal")
    for verdict, number in total.verdicts.most_common():
        print(f"  {verdict:16} {number}")
    print(f"slowest call {1e3 * total.slowest:.1f} ms, {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
