"""Shards for SAM 2's own training code, in place of its `SA1BRawDataset` and the extracted files."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Unpack

import torch

from sa1b.arguments import number, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, module_of, takes_view
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample


class ShardRawDataset:
    """The images of a view as "videos" of one frame: the contract of SAM 2's `VOSRawDataset`.

    Args:
        root: folder that `sa1b reshard` made, or its URL.
        num_frames: copies of the image in a video.
        mask_area_frac_thresh: masks of at least this fraction of the image are left out; above 1: none.
        options: `view`, the name of a view, and arguments of `sa1b.open`.
    """

    @takes_view
    def __init__(
        self,
        root: str,
        *,
        num_frames: int = 1,
        mask_area_frac_thresh: float = 1.1,
        **options: Unpack[ViewOptions],
    ) -> None:
        self.samples = ViewSamples(root, **options)
        self.num_frames = whole_number("num_frames", num_frames, 1)
        self.mask_area_frac_thresh = number("mask_area_frac_thresh", mask_area_frac_thresh)

    def __len__(self) -> int:
        return len(self.samples)

    def get_video(self, idx: int) -> tuple[Any, "Segments"]:
        """The image at a position of the view as SAM 2's `VOSVideo`, and the loader of its masks."""
        sample = self.samples.sample(idx)
        path = self.samples.path(sample)
        project = module_of("training.dataset.vos_raw_dataset", "SAM 2's training code")
        frames = [project.VOSFrame(index, image_path=path) for index in range(self.num_frames)]
        video = project.VOSVideo(str(sample.image_id), sample.image_id, frames)
        return video, Segments(sample, self.samples.kept(sample, largest=self.mask_area_frac_thresh).tolist())


@dataclass
class Segments:
    """SAM 2's segment loader of one image."""

    sample: Sample
    kept: list[int]

    def load(self, frame_idx: int) -> Any:
        """The masks by number, uint8 [height, width] each, as an object of SAM 2's `LazySegments`."""
        segments = _lazy_segments()()
        segments.sample = self.sample
        for index, mask in enumerate(self.kept):
            segments[index] = mask
        return segments


@cache
def _lazy_segments() -> Any:
    """A subclass of SAM 2's `LazySegments`, which its sampler recognises, that decodes runs on use."""

    def mask(self: Any, number: int) -> Any:
        if number not in self.cache:
            runs = self.sample.annotations.runs([self.segments[number]])
            self.cache[number] = torch.from_numpy(rasterize(runs)[0])
        return self.cache[number]

    base = module_of("training.dataset.vos_segment_loader", "SAM 2's training code").LazySegments
    return type("RunSegments", (base,), {"__getitem__": mask})
