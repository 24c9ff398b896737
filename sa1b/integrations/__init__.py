"""Datasets for the training code of other projects, fed from shards."""

from functools import cache
from importlib import import_module
from io import BytesIO
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.shards.dataset import check_images, open_dataset
from sa1b.shards.sample import Sample
from sa1b.views.view import open_view

PREFIX = "sa1b-shard://"  # of the paths of images that iopath opens
_KEPT = 4  # images that this process has read last, by their paths
_read: dict[str, bytes] = {}


class ViewSamples:
    """The images of a view, by default all. `options`: arguments of `sa1b.open`. Picklable."""

    def __init__(self, root: str, view: str | None = None, **options: Any) -> None:
        self.dataset = open_dataset(root, **options)
        check_images(self.dataset, "training of another project")
        self.view = open_view(self.dataset.reader, self.dataset.table, view)
        self._last: tuple[int, Sample] | None = None

    def __len__(self) -> int:
        return self.view.count

    @property
    def image_ids(self) -> npt.NDArray[np.uint64]:
        """The ids of the images by position, uint64 [N]."""
        ids = self.dataset.table.image_id
        return ids if self.view.rows is None else ids[self.view.rows]

    def sample(self, position: int) -> Sample:
        """The sample at a position of the view, which may be negative; the last sample is kept."""
        position = range(len(self))[position]
        if self._last is None or self._last[0] != position:
            rows = self.view.rows
            self._last = position, self.dataset[position if rows is None else int(rows[position])]
        return self._last[1]

    def kept(self, sample: Sample, smallest: int = 1, largest: float = inf) -> npt.NDArray[np.int64]:
        """The masks that meet the view's condition, of at least `smallest` pixels and less than the part
        `largest` of the image.
        """
        found = sample.annotations
        kept = (found.area >= smallest) & (found.area / (found.width * found.height) < largest)
        if self.view.masks_where is not None:
            kept &= self.view.masks_where.masks(found)
        return np.flatnonzero(kept)

    def with_masks(self, position: int, smallest: int = 1) -> tuple[Sample, npt.NDArray[np.int64]]:
        """The sample at a position and its masks as of `kept`; BadValue: there are none."""
        sample = self.sample(position)
        kept = self.kept(sample, smallest)
        if not len(kept):
            remedy = "pass a view made with --images-where 'masks >= 1'"
            raise BadValue(f"image {sample.image_id}: has no mask; {remedy}")
        return sample, kept

    def path(self, sample: Sample) -> str:
        """A path by which iopath opens the image in this process, until others have been read."""
        register()
        path = f"{PREFIX}{self.dataset.root}#{sample.image_id}"
        _read.pop(path, None)
        _read[path] = sample.jpeg
        for old in list(_read)[:-_KEPT]:
            del _read[old]
        return path


@cache
def register() -> None:
    """Let iopath, with which other projects open files, open the images that `path` has named."""
    files = import_module("iopath.common.file_io")
    methods: dict[str, Any] = {"_get_supported_prefixes": lambda self: [PREFIX]}
    methods["_open"] = lambda self, path, *_, **__: BytesIO(_read[path])  # of an image read in this process
    methods |= {"_isfile": lambda self, path, **_: True, "_get_local_path": lambda self, path, **_: path}
    handler = type("ShardImages", (files.PathHandler,), methods)()
    files.g_pathmgr.register_handler(handler, allow_override=True)
