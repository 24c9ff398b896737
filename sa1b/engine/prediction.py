"""Masks that the model drew in an evaluation, for tools/gallery.py to show beside the true ones."""

import numpy as np
import torch
from torch import Tensor

from sa1b.engine.feed import Micro
from sa1b.gallery.predictions import Predicted
from sa1b.masks import geometry
from sa1b.masks.dense import runs_of
from sa1b.masks.grid import framed, framed_size


def lines(micro: Micro, found: dict[str, Tensor]) -> list[tuple[int, str]]:
    """Position of an image and its line of the file, for each image of a micro-batch that has masks.

    Args:
        found: of `Interactive` in an evaluation.
    """
    image = micro.targets.image.cpu()
    drawn, image_size = found["masks"].cpu().numpy(), micro.images.shape[-1]
    unions = found["unions"][:, 0].clamp(min=1)
    iou = (found["intersections"][:, 0] / unions).double().cpu().numpy()
    predicted = found["predicted_iou"].double().cpu().numpy()
    points, mask_ids = micro.targets.points.double().cpu().numpy(), micro.mask_ids.cpu().numpy()
    counts = (micro.targets.weights > 0).cpu()
    made = []
    for i, (image_id, position) in enumerate(zip(micro.ids.tolist(), micro.positions.tolist(), strict=True)):
        own = torch.nonzero((image == i) & counts).flatten().numpy()
        if not len(own):
            continue
        size = (int(micro.source_sizes[i, 0]), int(micro.source_sizes[i, 1]))
        # The part of the raster that the image takes, stretched to its source.
        rows, columns = (
            max(1, int((axis.sources() >= 0).sum())) for axis in framed(size, image_size, drawn.shape[-1])
        )
        runs = geometry.resize(runs_of(drawn[own][:, :rows, :columns]), *size)
        scale = np.array(size[::-1]) / framed_size(*size, image_size)[::-1]
        some = Predicted(mask_ids[own], points[own] * scale, iou[own], predicted[own], runs)
        made.append((position, some.line(image_id)))
    return made
