"""Random choices on the device without a generator: the hash of sa1b.hashing, on int64 tensors.

    random_words(keys, Purpose.CLICK, 3)                                   a word for each mask's third click
    random_words(keys[:, None], Purpose.DROP_PATH, torch.arange(depth))    a word for each image and block

Every word depends only on its key and numbers, not on the device, on other masks of the batch, or on earlier
random values. The hash is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014). It equals `sa1b.hashing.random_words` with the key as seed, bit for bit. torch does not support
arithmetic on unsigned words, so the same 64 bits are interpreted as int64.
"""

import torch
from torch import Tensor

from sa1b.hashing import FIRST, GAMMA, SECOND, Purpose


def random_words(keys: Tensor, *numbers: int | Tensor) -> Tensor:
    """Random words for int64 keys and ints or int64 tensors: int64 of their broadcast shape, 64 random bits.

    `random_words(k, a, b)` continues `random_words(k, a)`: each number selects an output of the sequence
    whose seed is the word of the numbers before it.
    """
    words = keys
    for number in numbers:
        if isinstance(number, Tensor):
            words = words + (number + 1) * _signed(GAMMA)
        else:
            words = words + _signed(GAMMA * (number + 1))
        words = (words ^ _shifted(words, 30)) * _signed(FIRST)
        words = (words ^ _shifted(words, 27)) * _signed(SECOND)
        words = words ^ _shifted(words, 31)
    return words


def uniforms(words: Tensor) -> Tensor:
    """Words as float32 in the open interval (0, 1): odd multiples of 2**-24, from the highest 23 bits."""
    return (_shifted(words, 41).float() + 0.5) * 2.0**-23


def below(words: Tensor, bounds: Tensor) -> Tensor:
    """Words as int64 from 0 to bound - 1, for int64 bounds of at least 1.

    The result is the remainder of the highest 63 bits; its bias is below bound / 2**63.
    """
    return _shifted(words, 1) % bounds


def normals(keys: Tensor, *numbers: int) -> Tensor:
    """Standard normal float32 values, at most 6: the sum of twelve uniform 16-bit numbers."""
    # All operations before the last division are on integers, so every device gives the same bits; a
    # logarithm and a cosine would not. The fourth moment is 2.9; that of the normal distribution is 3.
    total = torch.zeros_like(keys)
    for part in range(3):
        words = random_words(keys, *numbers, part)
        for shift in (0, 16, 32, 48):
            total = total + ((words >> shift) & 0xFFFF)
    return (total - 6 * 0xFFFF).float() / 2.0**16


def kept_branches(keys: Tensor, depth: int, drop_path: float) -> Tensor:
    """Residual branches that each image passes through: bool [B, depth, 2] for int64 keys [B].

    The attention (0) and the MLP (1) of block i are skipped independently, each with the probability
    drop_path * i / (depth - 1). This is stochastic depth (Huang et al. 2016) with the linear rule and the two
    branches of ViTDet (Li et al. 2022, detectron2/modeling/backbone/vit.py), the origin of SAM's encoder.
    """
    blocks = torch.arange(depth, device=keys.device)[:, None]
    branches = torch.arange(2, device=keys.device)
    rates = blocks * (drop_path / max(depth - 1, 1))
    return uniforms(random_words(keys[:, None, None], Purpose.DROP_PATH, blocks, branches)) >= rates


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's shift repeats the highest bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
