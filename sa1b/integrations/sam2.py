"""Shards for SAM 2's own training code, in place of its `SA1BRawDataset` and the extracted files."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from sa1b.integrations import ViewSamples
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample


class ShardRawDataset:
    """SAM 2's `VOSRawDataset` of a view: see docs/export.md, "SAM 2 without an export"."""

    def __init__(
        self, root: str, *, num_frames: int = 1, mask_area_frac_thresh: float = 1.1, **options: Any
    ) -> None:
        self.samples = ViewSamples(root, **options)
        self.num_frames, self.mask_area_frac_thresh = num_frames, mask_area_frac_thresh

    def __len__(self) -> int:
        return len(self.samples)

    def get_video(self, idx: int) -> tuple[Any, "Segments"]:
        """The image at a position of the view as SAM 2's `VOSVideo`, and the loader of its masks."""
        sample = self.samples.sample(idx)
        path, project = self.samples.path(sample), import_module("training.dataset.vos_raw_dataset")
        frames = [project.VOSFrame(index, image_path=path) for index in range(self.num_frames)]
        video = project.VOSVideo(str(sample.image_id), sample.image_id, frames)
        return video, Segments(sample, self.samples.kept(sample, largest=self.mask_area_frac_thresh).tolist())


@dataclass
class Segments:
    """SAM 2's segment loader of one image."""

    sample: Sample
    kept: list[int]

    def load(self, frame_idx: int) -> Any:
        """The masks by number, uint8 [height, width] each, decoded on use, as SAM 2's `LazySegments`."""
        segments = _lazy_segments()()
        segments.sample, segments.segments = self.sample, dict(enumerate(self.kept))
        return segments


@cache
def _lazy_segments() -> Any:
    def mask(self: Any, number: int) -> Any:
        if number not in self.cache:
            runs = self.sample.annotations.runs([self.segments[number]])
            self.cache[number] = torch.from_numpy(rasterize(runs)[0])
        return self.cache[number]

    base = import_module("training.dataset.vos_segment_loader").LazySegments  # SAM 2's sampler recognises it
    return type("RunSegments", (base,), {"__getitem__": mask})
