"""The copy of a view to another dataset directory that has all its images."""

import numpy as np
import numpy.typing as npt

from sa1b.shards.dataset import Dataset
from sa1b.storage.open import open_store
from sa1b.views.view import find_view, open_view, write_view


def images_of(root: str, which: str) -> npt.NDArray[np.uint64]:
    """The image ids of a view of a dataset directory, uint64 [n], ascending; none: ManifestError."""
    dataset = Dataset(root)
    return open_view(dataset.reader, dataset.table, which).image_ids(dataset.table)


def copy_view(root: str, dest: str, which: str) -> str:
    """Write a view of `root` to `dest` and return its digest, which is the same there.

    The row numbers are those of the sample table of `dest`. Names of the view move to it. ManifestError:
    `dest` lacks an image of the view.
    """
    dataset = Dataset(root)
    located = find_view(dataset.reader, dataset.table, which)
    view = open_view(dataset.reader, dataset.table, which)
    if located is None:
        return view.digest  # all images, which need no document
    _, document = located
    table = Dataset(dest).table
    rows = np.flatnonzero(np.isin(table.image_id, view.image_ids(dataset.table), assume_unique=True))
    for name in document.names or (None,):
        written = write_view(
            open_store(dest),
            table,
            rows.astype(np.uint32),
            masks_where=view.masks_where,
            name=name,
            chosen_by=document.chosen_by,
            counts=document.counts,
            overwrite=True,
        )
    return written.digest
