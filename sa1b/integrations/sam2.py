"""Shards for SAM 2's own training code, in place of its `SA1BRawDataset` and the extracted files."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from sa1b.integrations import ViewSamples


class ShardRawDataset:
    """SAM 2's `VOSRawDataset` of a view: see docs/export.md, "SAM 2 without an export"."""

    def __init__(
        self, root: str, *, num_frames: int = 1, mask_area_frac_thresh: float = 1.1, **options: Any
    ) -> None:
        self.samples = ViewSamples(root, **options)
        self.num_frames, self.mask_area_frac_thresh = num_frames, mask_area_frac_thresh

    def __len__(self) -> int:
        return len(self.samples)

    def get_video(self, idx: int) -> tuple[Any, Any]:
        """The image at a position of the view as SAM 2's `VOSVideo`, and the loader of its masks, by number,
        uint8 [height, width] each, which SAM 2's `LazySegments` decodes on use.
        """
        sample = self.samples.sample(idx)
        path, project = self.samples.path(sample), import_module("training.dataset.vos_raw_dataset")
        frames = [project.VOSFrame(index, image_path=path) for index in range(self.num_frames)]
        video = project.VOSVideo(str(sample.image_id), sample.image_id, frames)
        segments = import_module("training.dataset.vos_segment_loader").LazySegments()
        kept = self.samples.kept(sample, largest=self.mask_area_frac_thresh)
        for number, mask in enumerate(sample.annotations.runs(kept).to_coco()):
            segments[number] = mask
        return video, SimpleNamespace(load=lambda frame_idx: segments)
