"""Shards for SAM 2's own training code, in place of its `SA1BRawDataset` and the extracted files.

In a training configuration of SAM 2 (`sam2/configs/sam2.1_training/...yaml`):

    video_dataset:
      _target_: sa1b.integrations.sam2.ShardRawDataset
      root: shards                  # or a URL
      view: train

The images are the stored JPEG files, opened by SAM 2's code through iopath. Masks are decoded when they are
used, from runs. Both equal those of `SA1BRawDataset` on the exported files, bit for bit.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from io import BytesIO
from typing import Any

import torch

from sa1b.arguments import check_arguments
from sa1b.errors import UsageError
from sa1b.integrations import ViewSamples
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample

_PREFIX = "sa1b-shard://"
_KEPT = 4  # images that this process has read last, by their paths
_read: OrderedDict[str, bytes] = OrderedDict()


class ShardRawDataset:
    """The images of a view as "videos" of one frame: the contract of SAM 2's `VOSRawDataset`.

    Args:
        root: folder that `sa1b reshard` made, or its URL.
        view: name of a view; None: all images. Its condition on masks applies.
        layers: of masks, see `sa1b.open`.
        num_frames: copies of the image in a video.
        mask_area_frac_thresh: masks of at least this fraction of the image are left out; above 1: none.
        storage_options: see `sa1b.open`.
        cache: see `sa1b.open`.
        cache_bytes: see `sa1b.open`.
    """

    @check_arguments
    def __init__(
        self,
        root: str,
        *,
        view: str | None = None,
        layers: Sequence[str] = (),
        num_frames: int = 1,
        mask_area_frac_thresh: float = 1.1,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.samples = ViewSamples(root, view, layers, storage_options, cache, cache_bytes)
        self.num_frames = num_frames
        self.mask_area_frac_thresh = mask_area_frac_thresh

    def __len__(self) -> int:
        return len(self.samples)

    def get_video(self, idx: int) -> tuple[Any, "Segments"]:
        """The image at a position of the view as SAM 2's `VOSVideo`, and the loader of its masks."""
        sample = self.samples.sample(idx)
        path = f"{_PREFIX}{self.samples.dataset.root}#{sample.image_id}"
        _read[path] = sample.jpeg
        while len(_read) > _KEPT:
            _read.popitem(last=False)
        _register()
        project = import_module("training.dataset.vos_raw_dataset")
        frames = [project.VOSFrame(index, image_path=path) for index in range(self.num_frames)]
        video = project.VOSVideo(str(sample.image_id), sample.image_id, frames)
        return video, Segments(sample, self.samples.kept(sample, self.mask_area_frac_thresh).tolist())


class Segments:
    """SAM 2's segment loader of one image: `load` gives a mapping from number to mask."""

    def __init__(self, sample: Sample, kept: list[int]) -> None:
        self.sample, self.kept = sample, kept

    def load(self, frame_idx: int) -> Any:
        """The masks by number, uint8 [height, width] each, as an object of SAM 2's `LazySegments`."""
        segments = _lazy_segments()()
        segments.sample = self.sample
        for number, mask in enumerate(self.kept):
            segments[number] = mask
        return segments


@cache
def _lazy_segments() -> Any:
    """A subclass of SAM 2's `LazySegments`, which its sampler recognises, that decodes runs."""
    base: Any = import_module("training.dataset.vos_segment_loader").LazySegments

    def mask(self: Any, number: int) -> torch.Tensor:
        if number not in self.cache:
            runs = self.sample.annotations.runs([self.segments[number]])
            self.cache[number] = torch.from_numpy(rasterize(runs)[0])
        found: torch.Tensor = self.cache[number]
        return found

    return type("RunSegments", (base,), {"__getitem__": mask})


@cache
def _register() -> None:
    """Let iopath, with which SAM 2 opens images, open those that `get_video` has read in this process."""
    files: Any = import_module("iopath.common.file_io")

    def open_image(self: Any, path: str, mode: str = "r", buffering: int = -1, **_: Any) -> BytesIO:
        try:
            return BytesIO(_read[path])
        except KeyError:
            raise UsageError(f"{path}: not read in this process; call get_video before the image") from None

    handler = type(
        "ShardImages",
        (files.PathHandler,),
        {"_get_supported_prefixes": lambda self: [_PREFIX], "_open": open_image},
    )
    files.g_pathmgr.register_handler(handler(), allow_override=True)
