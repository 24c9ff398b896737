"""Datasets for the training code of other projects, fed from shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.shards.dataset import check_images, open_dataset
from sa1b.shards.sample import Sample
from sa1b.views.view import open_view


class ViewSamples:
    """A view of a dataset directory; arguments as of `sa1b.open`, and the name of a view. Picklable."""

    def __init__(
        self,
        root: str,
        view: str | None,
        layers: Sequence[str],
        storage_options: Mapping[str, Any] | None,
        cache: str | None,
        cache_bytes: int | None,
    ) -> None:
        given: Any = {"storage_options": storage_options, "cache": cache, "cache_bytes": cache_bytes}
        self.dataset = open_dataset(root, layers=tuple(layers), **given)
        check_images(self.dataset, "training of another project")
        self.view = open_view(self.dataset.reader, self.dataset.table, view)

    def __len__(self) -> int:
        return self.view.count

    def sample(self, position: int) -> Sample:
        """The sample at a position of the view."""
        rows = self.view.rows
        return self.dataset[position if rows is None else int(rows[position])]

    def kept(self, sample: Sample, largest: float = 1.1) -> npt.NDArray[np.int64]:
        """The masks that are not empty, meet the condition of the view, and are smaller than the part
        `largest` of the image; above 1: of any size.
        """
        found = sample.annotations
        kept = found.area > 0
        if largest <= 1.0:
            kept &= found.area / (found.width * found.height) < largest
        if self.view.masks_where is not None:
            kept &= self.view.masks_where.masks(found)
        return np.flatnonzero(kept)
