"""Shards for the training of EdgeSAM, in place of its `SA1BDataset` and the extracted files."""

from collections.abc import Sequence
from math import inf
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.arguments import BadValue, number, numbers, of_type, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, position_of, takes_view
from sa1b.masks.raster import painted, rasterize_read
from sa1b.names import image_name
from sa1b.shards.annotation_columns import BBOX_IS_INT


class SplitShards:
    """The images of a view by position: EdgeSAM's `SA1BDataset`, whose arguments it takes.

    Args:
        data_root: folder that `sa1b reshard` made, or its URL. Images must have a mask.
        split: the view, if `view` is not given.
        options: `view`, the name of a view, and arguments of `sa1b.open`.
    """

    @takes_view
    def __init__(
        self,
        data_root: str,
        img_size: int = 1024,
        split: str = "train",
        num_samples: int = -1,
        sort_by_area: bool = False,
        filter_by_area: Sequence[float | None] | None = None,
        pixel_mean: Sequence[float] = (123.675, 116.28, 103.53),
        pixel_std: Sequence[float] = (58.395, 57.12, 57.375),
        load_gt_mask: bool = False,
        max_allowed_prompts: int = -1,
        fix_seed: bool = False,
        mask_nms_thresh: float = -1.0,
        box_jitter: bool = False,
        **options: Unpack[ViewOptions],
    ) -> None:
        self.img_size = whole_number("img_size", img_size, 1)
        self.sort_by_area = of_type("sort_by_area", sort_by_area, bool)
        self.box_jitter = of_type("box_jitter", box_jitter, bool)
        self.pixel_mean = torch.tensor(numbers("pixel_mean", pixel_mean, 3)).view(-1, 1, 1)
        self.pixel_std = torch.tensor(numbers("pixel_std", pixel_std, 3, above=0)).view(-1, 1, 1)
        self.areas = _areas((None, None) if filter_by_area is None else filter_by_area)
        self.load_gt_mask = of_type("load_gt_mask", load_gt_mask, bool)
        self.mask_nms_thresh = number("mask_nms_thresh", mask_nms_thresh, -inf)
        self.max_allowed_prompts = whole_number("max_allowed_prompts", max_allowed_prompts, None)
        self.fix_seed = of_type("fix_seed", fix_seed, bool)
        first = whole_number("num_samples", num_samples, None)
        options.setdefault("view", split)
        self.samples = ViewSamples(data_root, **options)
        self.count = min(len(self.samples), first if first > 0 else len(self.samples))

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
        position = position_of(idx, self.count)
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
            boxes = _jittered(boxes, width, height)
        if self.sort_by_area:
            order = torch.argsort(boxes[:, 2] * boxes[:, 3], descending=True)
            boxes, points, masks = boxes[order], points[order], masks[order.numpy()]
        scale = self.img_size / max(height, width)
        size = int(height * scale + 0.5), int(width * scale + 0.5)
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
        annotation = {
            "prompt_box": _corners(boxes[chosen]),
            "prompt_point": points[chosen],
            "info": annotations.keep(np.zeros(len(annotations), np.bool_)).to_json()["image"],
            "img_size_before_pad": torch.tensor(image.shape),
        }
        if self.load_gt_mask:  # only these masks are rasterised, at the rows and columns that are read
            read = (
                F.interpolate(torch.arange(side).float()[None, None], low)[0, 0].long().numpy()
                for side, low in zip((height, width), size, strict=True)
            )
            small = rasterize_read(annotations.runs(masks[chosen.numpy()]), *read)
            annotation["gt_mask"] = self._padded(torch.from_numpy(small))
        return self._padded((image - self.pixel_mean) / self.pixel_std), annotation

    def _padded(self, pixels: Tensor) -> Tensor:
        return F.pad(pixels, (0, self.img_size - pixels.shape[-1], 0, self.img_size - pixels.shape[-2]))


def _areas(given: Sequence[float | None]) -> tuple[float, float]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise BadValue(f"filter_by_area={given!r}: must be the least and the largest area, or None")
    limits = zip(given, (-inf, inf), strict=True)
    least, most = (open_end if one is None else number("filter_by_area", one) for one, open_end in limits)
    if least > most:
        raise BadValue(f"filter_by_area={given!r}: the first area must be the smaller one; exchange them")
    return least, most


def _corners(boxes: Tensor) -> Tensor:
    return torch.cat((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), dim=1)


def _jittered(boxes: Tensor, width: int, height: int) -> Tensor:
    """Boxes x, y, width, height with moved sides, from two random values for each pair of sides."""
    corners = _corners(boxes)
    sizes = corners[:, 2:] - corners[:, :2]
    for axis, limit in enumerate((width, height)):
        by = (sizes[:, axis, None] * 0.1 * torch.randn(len(boxes), 2)).clip(min=-20, max=20)
        corners[:, axis::2] = (corners[:, axis::2] + by).clip(min=0, max=limit)
    return torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), dim=1)
