"""COCO's compressed strings in plain numpy; sa1b.masks.coco uses this module if numba is missing."""

import numpy as np
import numpy.typing as npt

from sa1b.masks.compiled.strings import MAX_CHARACTERS

Parsed = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


def parse(text: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], pixels: int) -> Parsed | None:
    """Runs and offsets if every mask decodes; otherwise None, and the slow parser finds the reasons."""
    if (lengths == 0).any() or ((text < 48) | (text > 111)).any():
        return None
    if len(lengths) == 0:
        return np.empty(0, np.uint32), np.zeros(1, np.int64)
    codes = text.astype(np.int64) - 48
    ends = np.flatnonzero(codes < 32) + 1
    stops = np.cumsum(lengths)
    if not (codes[stops - 1] < 32).all():
        return None
    starts = np.concatenate(([0], ends[:-1]))
    characters = ends - starts
    if characters.max() > MAX_CHARACTERS:
        return None
    places = np.arange(len(codes)) - np.repeat(starts, characters)
    values = np.add.reduceat((codes & 0x1F) << (5 * places), starts)
    values -= np.where(codes[ends - 1] & 0x10, np.int64(1) << (5 * characters), 0)
    if np.abs(values).max() > 2**33:  # no difference of runs is so large; keeps the sums below in int64
        return None

    offsets = np.concatenate(([0], np.searchsorted(ends, stops, side="right")))
    counts = np.diff(offsets)
    masks = np.repeat(np.arange(len(lengths)), counts)
    index = np.arange(len(values)) - offsets[masks]
    # Odd and even runs are two separate cumulative sums over the mask; run 0 belongs to neither.
    chains = 3 * masks + np.where(index == 0, 0, 1 + (index + 1) % 2)
    order = np.argsort(chains, kind="stable")
    sums = np.cumsum(values[order])
    first = np.flatnonzero(np.diff(chains[order], prepend=-1))
    before = np.where(first > 0, sums[first - 1], 0)
    runs = np.empty_like(values)
    runs[order] = sums - np.repeat(before, np.diff(first, append=len(values)))
    if runs.min() < 0 or runs.max() > pixels or (np.add.reduceat(runs, offsets[:-1]) != pixels).any():
        return None
    return runs.astype(np.uint32), offsets


def write(
    runs: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The concatenated strings of all masks, and the bytes of each."""
    values = runs.astype(np.int64)
    index = np.arange(len(values)) - np.repeat(offsets[:-1], np.diff(offsets))
    later = np.flatnonzero(index > 2)
    values[later] -= runs[later - 2]
    characters = np.ones(len(values), np.int64)
    rest = values.copy()
    while len(more := np.flatnonzero((rest < -16) | (rest > 15))):
        rest[more] >>= 5
        characters[more] += 1
    ends = np.concatenate(([0], np.cumsum(characters)))
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], characters)
    text = ((np.repeat(values, characters) >> (5 * places)) & 0x1F) + 48
    continued = np.ones(len(text), np.bool_)
    continued[ends[1:] - 1] = False
    return (text + 32 * continued).astype(np.uint8), np.diff(ends[offsets])
