"""Figures of a step from the sums of its images: those of each source of a mixture, and the worst image."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

HALF = 32  # bits of an image id in each of two numbers, which float64 represents exactly


def by_source(
    of_images: Tensor, source: Tensor, names: Sequence[str], figures: Sequence[str]
) -> dict[str, Tensor]:
    """The sums of each source of a mixture, such as "loss/NAME" and "count/NAME", from those of images.

    Args:
        of_images: float32 [B, F], the sums of each image; see `sa1b.engine.model.Model`.
        source: int64 [B], the number of each image's source.
        names: of the sources.
        figures: names of the F sums, "count" among them.
    """
    belongs = source == torch.arange(len(names), device=source.device)[:, None]
    sums = torch.where(belongs[:, :, None], of_images, 0).sum(dim=1)
    return {f"{kind}/{name}": sums[i, j] for i, name in enumerate(names) for j, kind in enumerate(figures)}


def worst_image(parts: Sequence[tuple[Tensor, Tensor, Tensor]], figures: Sequence[str]) -> dict[str, Tensor]:
    """The image of this rank with the highest mean loss in a step, as float64 scalars: the loss, the position
    of the image, and its id as two halves; without a mask, the loss is -inf. The host does not wait for the
    device.

    Args:
        parts: of each micro-batch, the sums of its images, float32 [B, F], ids and positions, int64 [B]; none
            if the model has no sums of images, then the result is empty.
        figures: names of the F sums, "loss" and "count" among them.
    """
    if not parts:
        return {}
    sums, ids, positions = map(torch.cat, zip(*parts, strict=True))
    loss, count = sums[:, figures.index("loss")].double(), sums[:, figures.index("count")]
    mean = functional.pad(torch.where(count > 0, loss / count, -torch.inf), (0, 1), value=-torch.inf)
    of_images = functional.pad(
        torch.stack((positions, ids >> HALF, ids & ((1 << HALF) - 1))), (0, 1), value=-1
    )
    # The maximum of numbers with a NaN is the NaN.
    found = torch.cat((mean[None], of_images.double())).index_select(1, mean.argmax()[None])
    names = ("worst_loss", "worst_position", "worst_id_high", "worst_id_low")
    return dict(zip(names, found[:, 0].unbind(), strict=True))
