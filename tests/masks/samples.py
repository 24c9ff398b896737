"""Masks for tests: pixels from hypothesis, their runs, and other runs of the same pixels."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from sa1b.masks import Runs

examples = settings(max_examples=120, deadline=None, derandomize=True)

counts = st.integers(0, 5)
sides = st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 40))


def fill(mask: np.ndarray, kind: str, random: np.random.Generator) -> None:
    """Set pixels of an empty mask, bool [H, W]; the kind "empty" sets none."""
    height, width = mask.shape
    match kind:
        case "noise":
            mask[:] = random.random(mask.shape) < random.choice([0.03, 0.3, 0.5, 0.97])
        case "boxes":
            for _ in range(random.integers(1, 4)):
                y, x = random.integers(height), random.integers(width)
                mask[y : y + random.integers(1, height + 1), x : x + random.integers(1, width + 1)] ^= True
        case "columns":
            line = np.zeros(height * width, np.bool_)
            start = random.integers(len(line))
            line[start : start + random.integers(1, 3 * height + 1)] = True
            mask[:] = line.reshape(width, height).T
        case "stripes":
            mask[random.integers(2) :: 2] = True
        case "full":
            mask[:] = True
        case "corner":
            mask[random.choice([0, -1]), random.choice([0, -1])] = True


@st.composite
def pixel_masks(draw, height=sides, width=sides, count=counts):
    """bool [N, H, W]: noise, rectangles, runs over columns, empty and full."""
    height, width, count = draw(height), draw(width), draw(count)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masks = np.zeros((count, height, width), np.bool_)
    kinds = st.sampled_from(["noise", "boxes", "boxes", "columns", "empty", "full", "corner"])
    for mask in masks:
        fill(mask, draw(kinds), random)
    return masks


def to_runs(masks: np.ndarray, extra_zeros: int | None = None) -> Runs:
    """Canonical runs of bool [N, H, W]; extra_zeros: seed of random runs of length zero to insert."""
    _, height, width = masks.shape
    random = np.random.default_rng(extra_zeros)
    lists = []
    for mask in masks:
        line = mask.T.reshape(-1).astype(np.int8)
        changes = np.flatnonzero(np.diff(line, prepend=0))
        runs = np.diff(changes, prepend=0, append=len(line)).tolist()
        if extra_zeros is not None:
            for _ in range(random.integers(4)):
                place = random.integers(len(runs))
                part = int(random.integers(runs[place] + 1))
                runs[place : place + 1] = [part, 0, runs[place] - part]
            if random.random() < 0.3:
                runs.append(0)
        lists.append(np.array(runs, np.uint32))
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Runs(np.concatenate([np.empty(0, np.uint32), *lists]), offsets, height, width)


def to_pixels(runs: Runs) -> np.ndarray:
    """Pixels, bool [N, H, W], of runs."""
    masks = np.empty((len(runs), runs.height, runs.width), np.bool_)
    for mask, lengths in zip(masks, runs, strict=True):
        line = np.repeat(np.arange(len(lengths)) % 2, lengths)
        mask[:] = line.reshape(runs.width, runs.height).T
    return masks


def assert_canonical(runs: Runs) -> None:
    """Assert that the runs are the canonical runs of their pixels."""
    runs.check()
    expected = to_runs(to_pixels(runs))
    np.testing.assert_array_equal(runs.offsets, expected.offsets)
    np.testing.assert_array_equal(runs.runs, expected.runs)


def assert_same(runs: Runs, other: Runs) -> None:
    assert (runs.height, runs.width) == (other.height, other.width)
    np.testing.assert_array_equal(runs.offsets, other.offsets)
    np.testing.assert_array_equal(runs.runs, other.runs)
    assert runs.runs.dtype == other.runs.dtype == np.uint32
    assert runs.offsets.dtype == other.offsets.dtype == np.int64


masks_and_runs = st.tuples(pixel_masks(), st.one_of(st.none(), st.integers(0, 2**16))).map(
    lambda drawn: (drawn[0], to_runs(*drawn))
)
