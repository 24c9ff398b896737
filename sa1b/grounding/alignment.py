"""Contrastive alignment of regions and texts over the global batch.

The loss of pair i is the mean of two cross entropies: its text among all texts for its region, and its
region among all regions for its text (symmetric InfoNCE: van den Oord et al., "Representation Learning with
Contrastive Predictive Coding", 2018; Radford et al., "Learning Transferable Visual Models From Natural
Language Supervision", 2021). A pair with the same text as pair i is neither its positive nor its negative.

The engine needs sums over the global batch whose gradients add up over the ranks. Let L = sum over i of L_i,
where L_i depends on the features of all ranks. Rank r computes the sum of L_i of its own pairs. Its backward
pass yields the derivative of that part with respect to the features of every rank; the backward pass of
`gather` adds these over the ranks and returns to each rank those of its own features. So the sum over the
ranks, which DDP and FSDP form, is the gradient of L in one process, for any division of the images among the
ranks. With several micro-batches, pairs are compared only with those of the same micro-batch of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        return _gathered(rows)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        total = incoming.contiguous().clone()
        dist.all_reduce(total)
        first = dist.get_rank() * int(ctx.count)
        return total[first : first + ctx.count]


_gather: Any = _Gather.apply


def _gathered(rows: Tensor) -> Tensor:
    all_rows = rows.new_empty(len(rows) * dist.get_world_size(), *rows.shape[1:])
    dist.all_gather_into_tensor(all_rows, rows.contiguous())
    return all_rows


def gather(rows: Tensor) -> Tensor:
    """The rows of all ranks, in the order of ranks, with gradient: [N, ...] -> [world size * N, ...].

    Collective, forward and backward; every rank has the same number of rows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    gathered: Tensor = _gather(rows) if rows.is_floating_point() else _gathered(rows)
    return gathered


def contrastive_loss(
    regions: Tensor, texts: Tensor, keys: Tensor, counted: Tensor, scale: Tensor, *, capacity: int
) -> tuple[Tensor, Tensor]:
    """The loss of each pair of this rank, against the pairs of all ranks.

    Args:
        regions, texts: float [M, D], of length 1.
        keys: int64 [M], equal for equal texts.
        counted: bool [M], False for rows without a pair, which are neither positives nor negatives.
        scale: the inverse of the temperature, one number.
        capacity: rows that are gathered from each rank, the same on all ranks, at least M.

    Returns:
        The losses, float32 [M], 0 for pairs that are not counted, and whether the region with the highest
        similarity to a text is its own, float32 [M].
    """
    count = len(regions)
    if count > capacity:
        raise ValueError(f"capacity={capacity} must be at least the {count} pairs of a micro-batch")
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rows = count if alone else capacity
    with torch.autocast(regions.device.type, enabled=False):
        regions, texts = regions.float(), texts.float()
        padding = (0, 0, 0, rows - count)
        all_regions = gather(functional.pad(regions, padding))
        all_texts = gather(functional.pad(texts, padding))
        # A text that is not counted has the key -1; keys of texts are not negative.
        all_keys = gather(functional.pad(torch.where(counted, keys, -1), (0, rows - count), value=-1))
        first = 0 if alone else dist.get_rank() * capacity
        targets = torch.arange(first, first + count, device=keys.device)
        columns = torch.arange(len(all_keys), device=keys.device)
        itself = columns == targets[:, None]
        compared = ((all_keys >= 0) & (all_keys != keys[:, None])) | itself
        by_region = (scale * regions @ all_texts.T).masked_fill(~compared, -torch.inf)
        by_text = (scale * texts @ all_regions.T).masked_fill(~compared, -torch.inf)
        losses = (functional.cross_entropy(by_region, targets, reduction="none")
                  + functional.cross_entropy(by_text, targets, reduction="none")) / 2  # fmt: skip
        hit = by_text.detach().argmax(dim=1) == targets if count else itself.any(dim=1)
        weights = counted.float()
        return losses * weights, hit * weights
