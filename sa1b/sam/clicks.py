"""Prompts for all masks of a batch ("Segment Anything", 2023, appendix A): points, boxes, clicks on errors.

Every choice is a function of the mask's key (sa1b.sam.clicks), so that a mask gets the same prompts in
any batch, on any device; the host does not wait. Points and boxes are in the frame of sa1b.masks.grid, where
the centre of a pixel is its index plus 0.5; prompts are in that of Sam.decode, where it is its integer index.
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
    """Words as int64 from 0 to bound - 1, for int64 bounds of at least 1; the bias is below bound / 2**63."""
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

    Attention (0) and MLP (1) of block i are skipped independently, with the probability drop_path * i /
    (depth - 1): stochastic depth (Huang et al. 2016), with the rule and branches of ViTDet (Li et al. 2022).
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


BACKGROUND, FOREGROUND, TOP_LEFT, BOTTOM_RIGHT, NOTHING = 0, 1, 2, 3, -1  # labels of Sam.decode


def point_prompts(points: Tensor) -> tuple[Tensor, Tensor]:
    """Points float32 [M, 2] (sa1b.masks.grid), each with an empty one -> [M, 2, 2], labels int64 [M, 2]."""
    labels = torch.full(points.shape, NOTHING, dtype=torch.int64, device=points.device)
    labels[:, 0] = FOREGROUND
    return torch.stack((points - 0.5, torch.zeros_like(points)), dim=1), labels


def box_prompts(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes float32 [M, 4] (sa1b.masks.grid) -> corners float32 [M, 2, 2] and labels int64 [M, 2]."""
    labels = torch.full((len(boxes), 2), TOP_LEFT, dtype=torch.int64, device=boxes.device)
    labels[:, 1] = BOTTOM_RIGHT
    return boxes.reshape(-1, 2, 2) - 0.5, labels


def noised_boxes(
    boxes: Tensor, keys: Tensor, sizes: Tensor, noise: float, limit: float, *, uniform: bool = False
) -> Tensor:
    """Boxes float32 [M, 4], each side moved at random by at most `limit` pixels, and clipped to the image.

    `sizes`: int64 [M, 2], rows and columns of each mask's image. `noise`: standard deviation, as a fraction
    of the box's size; for `uniform` noise the largest movement.
    """
    lengths = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    sides = torch.arange(4, device=boxes.device)
    words, scale = random_words(keys[:, None], Purpose.BOX_NOISE, sides), noise * lengths
    if uniform:
        moved = (2 * uniforms(words) - 1) * scale.clamp(max=limit)
    else:
        moved = (normals(words) * scale).clamp(-limit, limit)
    corners = boxes + moved
    corners = torch.minimum(corners.clamp(min=0), sizes.flip(1).repeat(1, 2))
    low, high = corners[:, :2], corners[:, 2:]
    return torch.cat((torch.minimum(low, high), torch.maximum(low, high)), dim=1)


def unprompted_iterations(keys: Tensor, clicks: int, unprompted: int) -> Tensor:
    """The iterations after the first in which a mask gets no new prompt: bool [M, clicks + unprompted]."""
    # The last iteration is unprompted for all masks. The key of each mask chooses the other unprompted - 1
    # from the earlier iterations; all sets are equally likely.
    if unprompted == 0:
        return torch.zeros((len(keys), clicks), dtype=torch.bool, device=keys.device)
    iterations = torch.arange(clicks + unprompted - 1, device=keys.device)
    words = random_words(keys[:, None], Purpose.REST, iterations)
    ranks = words.argsort(dim=1, stable=True).argsort(dim=1)
    last = torch.ones((len(keys), 1), dtype=torch.bool, device=keys.device)
    return torch.cat((ranks < unprompted - 1, last), dim=1)


def corrective_clicks(
    masks: Tensor, targets: Tensor, keys: Tensor, number: int, image_size: int
) -> tuple[Tensor, Tensor]:
    """A click for each mask, uniform over the pixels where it is wrong: foreground on a missing pixel,
    background on a surplus one. Without error it is on a pixel of the target, or NOTHING if that has none.

    Masks, which must be False outside the image, and targets are bool [M, R, R]. The random values depend on
    the `number` of the iteration.
    """
    errors = masks ^ targets
    regions = torch.where(errors.flatten(1).any(dim=1)[:, None, None], errors, targets)
    rows, columns, counts = uniform_pixels(regions, random_words(keys, Purpose.CLICK, number))
    labels = targets.flatten(1).gather(1, (rows * targets.shape[2] + columns)[:, None])[:, 0].long()
    size = targets.shape[1]
    points = (torch.stack((columns, rows), dim=1) + 0.5) * (image_size / size) - 0.5
    return points, torch.where(counts > 0, labels, NOTHING)


def uniform_pixels(regions: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform pixel of each region, bool [M, R, C]: rows, columns and pixel counts, int64 [M] each."""
    # The word selects pixel number k of the region in row-major order. Sums over rows give its row, then its
    # column. For a region without a pixel, row and column are the last ones. 64 masks of 256x256 take 1.6 ms
    # on one CPU thread; a cumulative sum over complete masks with a search takes 14 to 19 ms.
    in_row = regions.sum(dim=2, dtype=torch.int32).long()  # int32 is seven times as fast as int64 on the CPU
    through_row = in_row.cumsum(dim=1)
    counts = through_row[:, -1]
    picked = below(words, counts.clamp(min=1))
    rows = (through_row <= picked[:, None]).sum(dim=1).clamp(max=regions.shape[1] - 1)[:, None]
    rank_in_row = picked[:, None] - (through_row - in_row).gather(1, rows)
    line = regions.gather(1, rows[..., None].expand(-1, 1, regions.shape[2]))[:, 0]
    columns = (line.cumsum(dim=1) <= rank_in_row).sum(dim=1).clamp(max=regions.shape[2] - 1)
    return rows[:, 0], columns, counts
