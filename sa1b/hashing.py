"""Counter-based random values: each value is a hash of the seed and of a key.

There is no state to save, to split between workers or to restore. The random value for (seed, purpose,
position or image id, iteration, ...) is the same in any process, at any world size and in any order of calls.

    random_word(7, Purpose.FLIP, 4711) & 1                                 whether image 4711 is flipped
    below(random_words(7, Purpose.POINT, 4711, np.arange(64)), areas)      a pixel for each of its 64 masks
    permutation(102, 7, Purpose.MASKS, 223750, 0)[:64]              64 different masks of an image with 102

The hash: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) as a
function. `random_word(seed, a)` is output number a of its sequence that starts at `seed`, counted from 0, and
`random_word(seed, a, b)` is output number b of the sequence that starts at `random_word(seed, a)`. Arithmetic
is modulo 2**64, so that negative numbers may be passed. An array of a million words takes 2 ns a word and key
number (`pytest benchmarks/test_order.py -s`).
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel

Words = npt.NDArray[np.uint64]

# SplitMix64: increment and the two multipliers of its finalizer.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA, _FIRST, _SECOND = np.uint64(GAMMA), np.uint64(FIRST), np.uint64(SECOND)
_1, _27, _30, _31 = (np.uint64(n) for n in (1, 27, 30, 31))
_WORD = (1 << 64) - 1


class Purpose(IntEnum):
    """The first number of each key, so that different purposes never share random values."""

    # The results for a seed depend on these numbers: add new ones, but never change a number.
    SUBSTITUTE = 1  # the substitute of a damaged sample
    MASKS = 2  # which masks of an image are chosen
    COVERAGE = 3  # the order in which successive visits of an image use its masks
    FLIP = 4  # whether an image is flipped
    TRANSFORM = 5  # the window and the scale of an image, and random values of user transforms
    POINT = 6  # a foreground pixel of a mask
    PROMPT = 7  # kinds of prompts and their noise
    SUBSET = 8  # which images are in a subset; the key's only other number is the image id
    VISIT = 9  # random values of one visit of an image in training
    FIRST_PROMPT = 17  # point or box
    BOX_NOISE = 18
    REST = 19  # which iterations have no new prompt
    CLICK = 20  # a pixel of the error region
    DROP_PATH = 21  # which residual branches are dropped for an image
    GALLERY = 22  # which images a gallery shows; the key's only other number is the image id
    CACHE = 23  # which shards a local cache holds; the key's other numbers are the bytes of the name
    TEXT = 24  # which of an image's or mask's texts a visit takes
    MASK_ID = 25  # ids of masks that a model found; the numbers of the key are image id and index
    GENERATOR = 26  # torch's generators; the key's other numbers are step, rank and micro-batch


@kernel
def _mix(states: Words, numbers: Words, out: Words) -> None:
    for index in range(len(out)):
        word = states[index] + _GAMMA * (numbers[index] + _1)
        word = (word ^ (word >> _30)) * _FIRST
        word = (word ^ (word >> _27)) * _SECOND
        out[index] = word ^ (word >> _31)


@kernel
def _mix_one(state: Words, numbers: Words, out: Words) -> None:
    # A single state for all numbers.
    for index in range(len(out)):
        word = state[()] + _GAMMA * (numbers[index] + _1)
        word = (word ^ (word >> _30)) * _FIRST
        word = (word ^ (word >> _27)) * _SECOND
        out[index] = word ^ (word >> _31)


def random_word(seed: int, *key: int) -> int:
    """One random value: an integer from 0 to 2**64 - 1."""
    # For seed 1234567, numbers 0, 1, 2 as keys give 6457827717110365317, 3203168211198807973,
    # 9817491932198370423, which are SplitMix64's published first outputs for that seed.
    word = seed & _WORD
    for number in key:
        word = (word + GAMMA * (int(number) + 1)) & _WORD
        word = ((word ^ (word >> 30)) * FIRST) & _WORD
        word = ((word ^ (word >> 27)) * SECOND) & _WORD
        word ^= word >> 31
    return word


def random_words(seed: int, *key: int | npt.NDArray[np.integer]) -> Words:
    """Many random values at once: uint64 of the broadcast shape of the numbers and arrays in the key.

    `random_words(s, a, np.array([b0, b1]))` contains `random_word(s, a, b0)` and `random_word(s, a, b1)`.
    """
    head = next((i for i, number in enumerate(key) if isinstance(number, np.ndarray)), len(key))
    words = np.array(random_word(seed, *map(int, key[:head])), np.uint64)
    for number in key[head:]:
        numbers = np.asarray(number if isinstance(number, np.ndarray) else int(number) & _WORD)
        if words.ndim == 0 and numbers.ndim == 1:  # the usual case, with fewer array functions
            state, words = words, np.empty(len(numbers), np.uint64)
            _mix_one(state, numbers.astype(np.uint64), words)
            continue
        shape = np.broadcast_shapes(words.shape, numbers.shape)
        states = np.array(np.broadcast_to(words, shape))
        words = np.empty(shape, np.uint64)
        keys = np.broadcast_to(numbers, shape).astype(np.uint64)
        _mix(states.reshape(-1), keys.reshape(-1), words.reshape(-1))
    return words


def below(words: Words, bound: int | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Random words reduced to int64 from 0 to bound - 1; `bound` is at least 1, one number or one per word.

    The result is the remainder of a division. The probabilities of any two results differ by at most a factor
    of 1 + bound / 2**64.
    """
    return (words % np.asarray(bound).astype(np.uint64)).astype(np.int64)


def uniforms(seed: int, *key: int | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Random float64 values in the open interval (0, 1), odd multiples of 2**-53, with finite logarithms."""
    return as_uniforms(random_words(seed, *key))


def as_uniforms(words: Words) -> npt.NDArray[np.float64]:
    """Random words as the values of `uniforms`, in the order of their 52 highest bits."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def permutation(count: int, seed: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of 0 to count - 1, int64 [count]; its first k entries have no repeats."""
    return np.argsort(random_words(seed, *key, np.arange(count)), kind="stable")
