"""Shards for the training of EdgeSAM, in place of its `SA1BDataset` and the extracted files."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.integrations import ViewSamples
from sa1b.masks.raster import painted, rasterize_read
from sa1b.names import image_name
from sa1b.shards.annotation_columns import BBOX_IS_INT

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class SplitShards:
    """EdgeSAM's `SA1BDataset` of a view, by default the one named `split`: see docs/export.md, "EdgeSAM"."""

    def __init__(
        self, data_root: str, img_size: int = 1024, split: str = "train", num_samples: int = -1,
        sort_by_area: bool = False, filter_by_area: Sequence[float | None] | None = None,
        pixel_mean: Sequence[float] = _MEAN, pixel_std: Sequence[float] = _STD, load_gt_mask: bool = False,
        max_allowed_prompts: int = -1, fix_seed: bool = False, mask_nms_thresh: float = -1.0,
        box_jitter: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.samples, self.img_size = ViewSamples(data_root, **{"view": split} | options), img_size
        self.count = min(len(self.samples), num_samples if num_samples > 0 else len(self.samples))
        self.mean, self.std = (torch.tensor(of).view(-1, 1, 1) for of in (pixel_mean, pixel_std))
        least, most = filter_by_area or (None, None)
        self.areas = -inf if least is None else least, inf if most is None else most
        self.sort_by_area, self.box_jitter, self.fix_seed = sort_by_area, box_jitter, fix_seed
        self.load_gt_mask, self.mask_nms_thresh = load_gt_mask, mask_nms_thresh
        self.max_allowed_prompts = max_allowed_prompts

    def __len__(self) -> int:
        return self.count

    def get_keys(self) -> list[str]:
        """The names of the images, such as "sa_223750", by position."""
        return list(map(image_name, self.samples.image_ids[: self.count].tolist()))

    def __getitem__(self, idx: int) -> tuple[Tensor, dict[str, Any]]:
        """The image, float32 [3, S, S], and with P prompts: prompt_box [P, 4], x0, y0, x1, y1, and
        prompt_point [P, 1, 2] float32, in pixels of the resized image; info, the entry of the image in its
        annotation file; img_size_before_pad int64 [3]; gt_mask uint8 [P, S, S].
        """
        position = range(self.count)[idx]
        sample, masks = self.samples.with_masks(position, smallest=0)
        annotations = sample.annotations
        height, width = annotations.height, annotations.width
        if self.load_gt_mask and self.mask_nms_thresh > 0:
            masks = masks[np.argsort(-annotations.area[masks])]
            masks = masks[painted(annotations.runs(masks), self.mask_nms_thresh)[1]]
        whole = (annotations.number_types[masks] & BBOX_IS_INT).all()  # numbers of the file
        boxes = torch.from_numpy(annotations.bbox[masks].astype(np.int64 if whole else np.float64))
        points = torch.from_numpy(annotations.point_coords[masks])[:, None]
        if self.box_jitter:
            corners = _corners(boxes)
            for axis, limit in enumerate((width, height)):
                by = (corners[:, axis + 2, None] - corners[:, axis, None]) * 0.1
                by = (by * torch.randn(len(boxes), 2)).clip(min=-20, max=20)
                corners[:, axis::2] = (corners[:, axis::2] + by).clip(min=0, max=limit)
            boxes = torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), dim=1)
        if self.sort_by_area:
            order = torch.argsort(boxes[:, 2] * boxes[:, 3], descending=True)
            boxes, points, masks = boxes[order], points[order], masks[order.numpy()]
        size = [int(side * (self.img_size / max(height, width)) + 0.5) for side in (height, width)]
        by = torch.tensor([size[1] / width, size[0] / height])
        boxes, points = (boxes.float().reshape(-1, 2, 2) * by).reshape(-1, 4), points.float() * by

        area = boxes[:, 2] * boxes[:, 3]
        inside = (area >= self.areas[0]) & (area <= self.areas[1])
        chosen = torch.nonzero(inside if inside.any() else inside | True)[:, 0]
        if len(chosen) > self.max_allowed_prompts > 0:
            if self.fix_seed:
                torch.manual_seed(position)
            chosen = chosen[torch.randint(0, len(chosen), (self.max_allowed_prompts,))]
        pixels = torch.from_numpy(sample.image).permute(2, 0, 1)[None].float()
        image = F.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)[0]
        info = annotations.keep(np.zeros(len(annotations), np.bool_)).to_json()["image"]
        found: dict[str, Any] = {"prompt_box": _corners(boxes[chosen]), "prompt_point": points[chosen]}
        found |= {"info": info, "img_size_before_pad": torch.tensor(image.shape)}
        if self.load_gt_mask:  # only these masks are rasterised, at the rows and columns that are read
            numbers = (torch.arange(side).float()[None, None] for side in (height, width))
            read = (
                F.interpolate(of, low)[0, 0].long().numpy() for of, low in zip(numbers, size, strict=True)
            )
            small = rasterize_read(annotations.runs(masks[chosen.numpy()]), *read)
            found["gt_mask"] = self._padded(torch.from_numpy(small))
        return self._padded((image - self.mean) / self.std), found

    def _padded(self, pixels: Tensor) -> Tensor:
        return F.pad(pixels, (0, self.img_size - pixels.shape[-1], 0, self.img_size - pixels.shape[-2]))


def _corners(boxes: Tensor) -> Tensor:
    return torch.cat((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), dim=1)
