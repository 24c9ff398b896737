"""COCO's compressed strings: the parser and the writer."""

import numpy as np

from sa1b.kernel import Int64s, Uint8s, Uint32s, kernel

# Codes of verdicts; sa1b.masks.coco.REASONS contains their names.
VALID = 0
BAD_CHARACTER = 1
CUT_NUMBER = 2
NUMBER_TOO_LONG = 3
NEGATIVE_RUN = 4
RUN_OVERFLOW = 5
SUM_MISMATCH = 6

MAX_CHARACTERS = 12  # largest number of characters of a number: 60 bits, so that sums fit int64


@kernel
def count_numbers(text: Uint8s) -> int:
    """Number of characters that end a number: an upper bound for the number of runs."""
    count = 0
    for character in text:
        count += (np.int64(character) - 48) & 0x20 == 0
    return count


@kernel
def judge(text: Uint8s, pixels: int) -> int:
    """The verdict on one string: its first error from left to right."""
    left = np.int64(pixels)
    last, before_last = np.int64(0), np.int64(0)
    value, shift, count = np.int64(0), np.int64(0), 0
    for character in text:
        code = np.int64(character) - 48
        if code < 0 or code > 63:
            return BAD_CHARACTER
        if shift == 5 * MAX_CHARACTERS:
            return NUMBER_TOO_LONG
        value |= (code & 0x1F) << shift
        shift += 5
        if code < 32:
            if code & 0x10:
                value -= np.int64(1) << shift
            if count > 2:
                value += before_last
            if value < 0:
                return NEGATIVE_RUN
            if value > left:
                return RUN_OVERFLOW
            left -= value
            before_last, last = last, value
            value, shift = np.int64(0), np.int64(0)
            count += 1
    if shift > 0:
        return CUT_NUMBER
    return SUM_MISMATCH if left > 0 else VALID


@kernel
def parse(
    text: Uint8s, starts: Int64s, lengths: Int64s, pixels: int, runs: Uint32s, offsets: Int64s,
    verdicts: Uint8s,
) -> None:  # fmt: skip
    """Parse the strings text[starts[i] : starts[i] + lengths[i]] of N masks; a mask that fails has no runs.

    Writes runs[:offsets[N]], offsets [N + 1] and verdicts [N]. The fast loop detects only that a mask fails;
    `judge` finds the reason.
    """
    one = np.uint64(1)  # unsigned indices: compiled without the test for negative ones
    written = np.uint64(0)
    offsets[0] = 0
    for mask in range(len(lengths)):
        start = np.uint64(starts[mask])
        stop = start + np.uint64(lengths[mask])
        position = start
        first = written
        left = np.int64(pixels)
        last, before_last = np.int64(0), np.int64(0)
        while position < stop:
            code = np.int64(text[position]) - 48
            position += one
            if code >= 0 and code < 32:  # one character, as for six of seven runs
                value = code - ((code & 0x10) << 1)
            else:
                value = np.int64(0)
                shift = np.int64(0)
                while code >= 32 and code < 64 and shift < 5 * MAX_CHARACTERS - 5 and position < stop:
                    value |= (code & 0x1F) << shift
                    shift += 5
                    code = np.int64(text[position]) - 48
                    position += one
                if code < 0 or code >= 32:
                    left = np.int64(-1)
                    break
                value |= (code & 0x1F) << shift
                value -= (code & 0x10) << (shift + 1)
            value += before_last
            if value < 0 or value > pixels:
                left = np.int64(-1)
                break
            left -= value
            before_last = last
            last = np.int64(0) if written == first else value  # run 2 is not a difference to run 0
            runs[written] = value
            written += one
        if left != 0:
            written = first
            verdicts[mask] = judge(text[start:stop], pixels)
        else:
            verdicts[mask] = VALID
        offsets[mask + 1] = written


@kernel
def count_characters(runs: Uint32s, offsets: Int64s, lengths: Int64s) -> None:
    """Write the number of characters of each mask's string into lengths [N]."""
    for mask in range(len(lengths)):
        count = 0
        for index in range(offsets[mask], offsets[mask + 1]):
            value = np.int64(runs[index])
            if index - offsets[mask] > 2:
                value -= np.int64(runs[index - 2])
            count += 1
            while value < -16 or value > 15:
                value >>= 5
                count += 1
        lengths[mask] = count


@kernel
def write(runs: Uint32s, offsets: Int64s, text: Uint8s) -> None:
    """Write the strings of all masks, one after the other."""
    position = 0
    for mask in range(len(offsets) - 1):
        for index in range(offsets[mask], offsets[mask + 1]):
            value = np.int64(runs[index])
            if index - offsets[mask] > 2:
                value -= np.int64(runs[index - 2])
            while value < -16 or value > 15:
                text[position] = (value & 0x1F) + (0x20 + 48)
                position += 1
                value >>= 5
            text[position] = (value & 0x1F) + 48
            position += 1


def encode_joined(runs: Uint32s, offsets: Int64s) -> tuple[Uint8s, Int64s]:
    """See `sa1b.masks.coco.encode_joined`."""
    lengths = np.empty(len(offsets) - 1, np.int64)
    count_characters(runs, offsets, lengths)
    text = np.empty(int(lengths.sum()), np.uint8)
    write(runs, offsets, text)
    return text, lengths


def encode(runs: Uint32s, offsets: Int64s) -> list[bytes]:
    """See `sa1b.masks.coco.encode`."""
    text, lengths = encode_joined(runs, offsets)
    joined = text.tobytes()
    stops = np.cumsum(lengths).tolist()
    return [joined[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)] if stops else []
