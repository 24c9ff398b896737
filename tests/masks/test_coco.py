"""COCO's strings to runs and back."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from pycocotools import mask as pycocotools

import sa1b.masks
from sa1b.masks import MAX_PIXELS, MaskError, Runs, SizeError, coco
from tests.masks import oracle
from tests.masks.samples import assert_same, examples, masks_and_runs, pixel_masks, to_runs


def reason(strings, height=3, width=3):
    with pytest.raises(MaskError) as caught:
        sa1b.masks.decode(strings, height, width)
    return caught.value.mask, caught.value.reason


@examples
@given(pixel_masks())
def test_strings_of_pycocotools_decode_to_the_runs_of_the_pixels_and_back_to_the_same_bytes(masks):
    expected = to_runs(masks)
    strings = [
        pycocotools.encode(np.asfortranarray(mask, np.uint8))["counts"] for mask in masks.view(np.uint8)
    ]
    runs = sa1b.masks.decode(strings, *masks.shape[1:])
    assert_same(runs, expected)
    assert sa1b.masks.encode(runs) == strings
    assert_same(sa1b.masks.decode([string.decode() for string in strings], *masks.shape[1:]), expected)


@examples
@given(masks_and_runs)
def test_runs_of_length_zero_are_kept(drawn):
    _, runs = drawn
    strings = sa1b.masks.encode(runs)
    assert strings == [oracle.encode(lengths.tolist()) for lengths in runs]
    assert_same(sa1b.masks.decode(strings, runs.height, runs.width), runs)


@examples
@given(masks_and_runs)
def test_joined_strings_decode_alike(drawn):
    _, runs = drawn
    text, lengths = sa1b.masks.encode_joined(runs)
    assert text.tobytes() == b"".join(sa1b.masks.encode(runs))
    for buffer in (text, text.tobytes(), memoryview(text.tobytes()), bytearray(text)):
        for kind in (np.int64, np.uint16, np.int32):
            assert_same(sa1b.masks.decode_joined(buffer, lengths.astype(kind), runs.height, runs.width), runs)


@pytest.mark.parametrize(
    ("string", "expected"),
    [
        (b"", "sum_mismatch"),
        (b"8", "sum_mismatch"),
        (b"9", "valid"),
        (b":", "run_overflow"),
        (b"90", "valid"),
        (b"900000000", "valid"),
        (b"O", "negative_run"),
        (b"4/", "bad_character"),
        (b"4p", "bad_character"),
        (b"4\x00", "bad_character"),
        (b"9P", "cut_number"),
        (b"9P0", "valid"),
        (b"Y" + b"P" * 10 + b"0", "valid"),
        (b"Y" + b"P" * 11 + b"0", "number_too_long"),
        (oracle.number(2**32 + 9), "run_overflow"),
        (oracle.number(-(2**58)), "negative_run"),
        ("9ä", "bad_character"),
        ("9π", "bad_character"),
        (None, "wrong_type"),
        (9, "wrong_type"),
        (bytearray(b"9"), "wrong_type"),
    ],
)
def test_a_string_of_nine_pixels(string, expected):
    assert coco.reasons([string], 3, 3) == [expected]
    if expected != "valid":
        assert reason([b"9", string, b""]) == (1, expected)


def test_the_error_names_the_first_mask_that_fails_and_why():
    assert reason([b"9", b"O", b"", None]) == (1, "negative_run")
    assert reason([b"9", b"9", None, b""]) == (2, "wrong_type")
    with pytest.raises(MaskError, match=r"mask 1: its runs end before the last of 3 x 3 pixels"):
        sa1b.masks.decode([b"9", b"1"], 3, 3)
    assert coco.reasons([b"9", None, b"O", 3, b"9"], 3, 3) == [
        "valid",
        "wrong_type",
        "negative_run",
        "wrong_type",
        "valid",
    ]
    assert set(coco.reasons([b"9", None, b"O", 3, b"9"], 3, 3)) <= set(coco.REASONS)


def test_errors_survive_the_way_between_processes():
    error = pickle.loads(pickle.dumps(MaskError(3, "cut_number", "its string ends inside a number")))
    assert (error.mask, error.reason) == (3, "cut_number")
    assert str(error) == "mask 3: its string ends inside a number"


@pytest.mark.parametrize(
    "size", [(0, 3), (3, 0), (-3, -3), (3.0, 3), ("3", 3), (None, 3), (True, 9), (2**16, 2**16), (10**30, 1)]
)
def test_an_impossible_size_is_refused(size):
    with pytest.raises(SizeError) as caught:
        sa1b.masks.decode([b"9"], *size)
    assert caught.value.reason == "bad_size"


def test_the_largest_size_is_decoded_without_its_pixels():
    runs = sa1b.masks.decode([oracle.encode([0, MAX_PIXELS]), oracle.encode([MAX_PIXELS])], 65535, 65537)
    assert runs.runs.tolist() == [0, MAX_PIXELS, MAX_PIXELS]
    assert sa1b.masks.encode(runs) == [oracle.encode([0, MAX_PIXELS]), oracle.encode([MAX_PIXELS])]


def test_no_masks():
    runs = sa1b.masks.decode([], 3, 3)
    assert len(runs) == 0
    assert runs.offsets.tolist() == [0]
    assert sa1b.masks.encode(runs) == []
    assert coco.reasons([], 3, 3) == []


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([2]),
        np.array([1, 1]),
        np.array([-1, 2]),
        np.array([0]),
        np.array([2**63, 2**63], np.uint64),
        np.array([1.0]),
        np.array([[1]]),
    ],
)
def test_lengths_that_do_not_fit_the_buffer_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        sa1b.masks.decode_joined(b"9", lengths, 3, 3)


def test_a_buffer_of_another_type_is_refused():
    for buffer in (np.zeros(4, np.int8), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="buffer"):
            sa1b.masks.decode_joined(buffer, np.array([4]), 3, 3)


def runs_of(*values):
    """Decode one mask of an image of one column."""
    return Runs(np.array(values, np.uint32), np.array([0, len(values)]), sum(values), 1)


@pytest.mark.parametrize(
    "runs",
    [
        # From the third run on, differences to the run two before are stored. One character holds -16 to 15,
        # two hold -512 to 511, and so on.
        *(runs_of(0, 60_000, 60_000, 60_000 + difference) for limit in (16, 512, 16_384)
          for difference in (-limit - 1, -limit, limit - 1, limit)),
        runs_of(70_000, 1, 2_000_000, 3, 4_000_000),
    ],
)  # fmt: skip
def test_numbers_at_the_limits_of_a_character_are_written_and_parsed(runs):
    expected = oracle.encode(runs.runs.tolist())
    assert sa1b.masks.encode(runs) == [expected]
    assert sa1b.masks.decode([expected], runs.height, runs.width).runs.tolist() == runs.runs.tolist()


def test_arrays_refuse_characters_that_are_none():
    """`p` would be a character with the bits 0 and the continuation bit."""
    with pytest.raises(MaskError):
        sa1b.masks.decode([b"p09"], 9, 1)


def test_a_joined_string_that_does_not_decode_is_an_error():
    with pytest.raises(MaskError) as caught:
        sa1b.masks.decode_joined(b"0909", np.array([2, 2]), 3, 2)
    assert caught.value.mask == 0


def test_chosen_strings_decode_as_all_do():
    pixels = np.stack([np.eye(4), np.ones((4, 4)), np.zeros((4, 4))]).astype(np.bool_)
    strings = sa1b.masks.encode(to_runs(pixels))
    text, lengths, _ = coco.join(strings)
    every = sa1b.masks.decode(strings, 4, 4)
    for chosen in ([2, 0, 0], [1], [0, 1, 2], []):
        found = coco.decode_selected(text, lengths, np.array(chosen, np.int64), 4, 4)
        expected = every.select(chosen)
        assert found.runs.tolist() == expected.runs.tolist()
        assert found.offsets.tolist() == expected.offsets.tolist()
    for wrong in ([0, 3], [-4, 0]):
        with pytest.raises(IndexError, match="from -3 to 2"):
            coco.decode_selected(text, lengths, np.array(wrong), 4, 4)
    with pytest.raises(ValueError, match="lengths must add up to the"):
        coco.decode_selected(text, lengths[:2], np.array([0]), 4, 4)
    damaged = text.copy()
    damaged[lengths[0]] = 0
    assert coco.decode_selected(damaged, lengths, np.array([0, 2]), 4, 4).runs.tolist()
    with pytest.raises(MaskError) as caught:
        coco.decode_selected(damaged, lengths, np.array([2, 1]), 4, 4)
    assert (caught.value.mask, caught.value.reason) == (1, "bad_character")
