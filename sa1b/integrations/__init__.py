"""Datasets for the training code of other projects, fed from shards."""

import operator
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from io import BytesIO
from math import inf
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadType, BadValue, check_arguments
from sa1b.errors import UsageError
from sa1b.shards.dataset import check_images, open_dataset
from sa1b.shards.sample import Sample
from sa1b.views.view import open_view

PREFIX = "sa1b-shard://"  # of the paths of images that iopath opens
_KEPT = 4  # images that this process has read last, by their paths
_read: dict[str, bytes] = {}


class ViewOptions(TypedDict, total=False):
    """Further arguments of the datasets: the name of a view, and those of `sa1b.open`."""

    view: str | None
    layers: Sequence[str]
    storage_options: Mapping[str, Any] | None
    cache: str | None
    cache_bytes: int | None


takes_view = partial(check_arguments, options=ViewOptions)  # decorates functions with **options


def position_of(index: Any, count: int) -> int:
    """The position of an index, which may be negative as in a list."""
    try:
        if isinstance(index, bool):
            raise TypeError
        return range(count)[operator.index(index)]
    except TypeError:
        raise BadType(f"index {index!r}: must be an integer, not {type(index).__name__}") from None
    except IndexError:
        raise IndexError(f"index {index!r}: out of range; there are {count}") from None


class ViewSamples:
    """A view of a dataset directory, by default all images; takes the arguments of `sa1b.open`. Picklable."""

    def __init__(self, root: str, view: str | None = None, **options: Any) -> None:
        if not isinstance(view, str | None):
            raise BadType(f"view={view!r}: not a name; pass the name of a view, or None")
        self.dataset = open_dataset(root, **options)
        check_images(self.dataset, "training of another project")
        self.view = open_view(self.dataset.reader, self.dataset.table, view)
        self._last: tuple[int, Sample | None] = (0, None)

    def __len__(self) -> int:
        return self.view.count

    @property
    def image_ids(self) -> npt.NDArray[np.uint64]:
        """The ids of the images by position, uint64 [N]."""
        ids = self.dataset.table.image_id
        return ids if self.view.rows is None else ids[self.view.rows]

    def sample(self, position: int) -> Sample:
        """The sample at a position of the view, which may be negative; the last sample is kept."""
        position = position_of(position, len(self))
        last, sample = self._last
        if sample is None or last != position:
            rows = self.view.rows
            sample = self.dataset[position if rows is None else int(rows[position])]
            self._last = position, sample
        return sample

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
            raise BadValue(
                f"image {sample.image_id}: has no mask; pass a view made with --images-where 'masks >= 1'"
            )
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


def module_of(name: str, project: str) -> Any:
    """A module of another project; UsageError: it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{project}: cannot be imported ({error}); install it, or add it to PYTHONPATH"
        ) from None


@cache
def register() -> None:
    """Let iopath, with which other projects open files, open the images that `path` has named."""
    files = module_of("iopath.common.file_io", "the package iopath")

    def open_image(self: Any, path: str, mode: str = "r", buffering: int = -1, **_: Any) -> BytesIO:
        if path not in _read:
            raise UsageError(f"{path}: not read in this process; load its masks before the image")
        return BytesIO(_read[path])

    methods = {
        "_get_supported_prefixes": lambda self: [PREFIX],
        "_open": open_image,
        "_isfile": lambda self, path, **_: True,
        "_get_local_path": lambda self, path, force=False, **_: path,
    }
    handler = type("ShardImages", (files.PathHandler,), methods)()
    files.g_pathmgr.register_handler(handler, allow_override=True)
