"""The mean IoU of an evaluation, summed in integers: it does not depend on order or world size."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

PROMPTS = ("1_click", "3_clicks", "5_clicks", "box")
SIZES = ("small", "medium", "large")
MEDIUM, LARGE = 32**2, 96**2  # smallest areas of medium and of large masks in source pixels, as in COCO
UNIT = 1 << 32  # the integer for an IoU of 1; sums fit 2**31 masks, products 2**31 pixels per mask


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Sums over masks by size and prompt.

    An IoU counts as floor(UNIT * intersection / union), so that sums are exact; the rounding is 2**-32.
    `sums` is int64 [3, P + 1]: a row for each of SIZES; the IoU of each prompt, then the number of masks.
    Only IoU at source resolution has a meaningful result `by_size`.
    """

    sums: Tensor
    prompts: tuple[str, ...] = PROMPTS
    by_size: bool = True

    @classmethod
    def empty(
        cls,
        device: torch.device | str = "cpu",
        prompts: tuple[str, ...] = PROMPTS,
        *,
        by_size: bool = True,
    ) -> "Score":
        sums = torch.zeros((len(SIZES), len(prompts) + 1), dtype=torch.int64, device=device)
        return cls(sums, prompts, by_size)

    def add(self, intersections: Tensor, unions: Tensor, areas: Tensor, weights: Tensor) -> None:
        """Add the masks of a batch; the host does not wait for the device.

        Args:
            intersections, unions: int64 [M, P], pixels; a union of 0 is an IoU of 0, as in training.
            areas: int64 [M], source pixels.
            weights: [M]; 0 excludes a mask, any other weight counts it once.
        """
        ious = intersections * UNIT // unions.clamp(min=1)
        row = (areas >= MEDIUM).long() + (areas >= LARGE).long()
        belongs = (row[:, None] == torch.arange(len(SIZES), device=row.device)) & (weights != 0)[:, None]
        entries = torch.cat((ious, torch.ones_like(ious[:, :1])), dim=1)
        self.sums.add_((belongs[:, :, None] * entries[:, None, :]).sum(dim=0))

    def merge(self, other: "Score") -> None:
        """Add the sums of another score."""
        self.sums.add_(other.sums)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Add the sums of all ranks, in one collective that every rank of the group must call."""
        dist.all_reduce(self.sums, group=group)

    def result(self) -> dict[str, float]:
        """Mean IoU, 0 to 1, and counts: "miou_1_click", "miou_1_click_small", ..., "masks", "masks_small".

        A size without masks has the count 0 and no mean.
        """
        rows = self.sums.tolist()
        by_size = {"": [sum(column) for column in zip(*rows, strict=True)]}
        if self.by_size:
            by_size |= {f"_{size}": row for size, row in zip(SIZES, rows, strict=True)}
        means_and_counts: dict[str, float] = {}
        for suffix, (*ious, masks) in by_size.items():
            means_and_counts[f"masks{suffix}"] = masks
            if masks:
                means = zip(self.prompts, ious, strict=True)
                means_and_counts |= {
                    f"miou_{prompt}{suffix}": total / (UNIT * masks) for prompt, total in means
                }
        return means_and_counts
