"""A map-style Dataset over extracted pairs, as in SAM-like training code, in one shuffled pass.

The file list is read once and the masks are decoded when they are sampled. It resumes within an epoch by
slicing the seeded permutation, which needs a custom loop.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import simplejpeg
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.peers import pixels
from benchmarks.peers.task import Delivered, Pair, Place, Task
from sa1b.masks.grid import framed_size


class Files(Dataset[pixels.Sample]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> pixels.Sample:
        return self.paths[i].read_bytes(), self.paths[i].with_suffix(".json").read_bytes()


def convert(pairs: Iterable[Pair], folder: Path) -> None:
    for pair in pairs:
        (folder / f"sa_{pair.image_id}.jpg").write_bytes(pair.jpeg)
        (folder / f"sa_{pair.image_id}.json").write_bytes(pair.text)


def batches(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    return _batches(place, task, workers, start, partial(pixels.collate, place, task))


def tuned(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    """The same, optimised: scaled JPEG decoding, and pixels selected along columns."""
    how = partial(pixels.collate, place, task, picture=scaled, mask=pixels.pick)
    return _batches(place, task, workers, start, how)


def scaled(jpeg: bytes, slot: pixels.Pixels, height: int, width: int) -> None:
    """An image decoded at the smallest n/8 that is not below the target."""
    rows, columns = framed_size(height, width, len(slot))
    image = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=rows, min_width=columns)
    pixels.cv2.resize(image, (columns, rows), dst=slot[:rows, :columns])
    slot[rows:] = 0
    slot[:rows, columns:] = 0


def _batches(
    place: Place, task: Task, workers: int, start: float, collate: partial[Delivered]
) -> Iterator[Delivered]:
    files = Files(place.folder)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    left = order[int(len(files) * start) // task.batch * task.batch :].tolist()
    return iter(DataLoader(Subset(files, left), task.batch, num_workers=workers, collate_fn=collate))
