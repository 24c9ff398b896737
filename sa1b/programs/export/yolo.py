"""Export for the segmentation models of ultralytics: a text file of polygons for each image.

    images/sa_223750.jpg        original bytes
    labels/sa_223750.txt        a line for each mask: class 0, x y of its polygon, divided by the size
    images-0000.txt, ...        paths of the images, relative to this file
    train-0000.txt, val-0000.txt, ...    these instead, with `val`
    data.yaml                   names these files and the class

A line has one polygon, so that the parts of a mask and its holes are joined by lines that are followed in
both directions, see sa1b.masks.polygons. The polygon has exactly the pixels of the mask. Ultralytics itself
loses some of them: it resamples polygons to 1,000 points, scales them to the size of training, paints their
borders, so that joined parts get a line of one pixel between them, and keeps one of several equal boxes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sa1b.masks import polygons
from sa1b.names import image_name, member_name
from sa1b.programs.export.export_format import Format, Ids, PartFiles, Rows, blocks
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample
from sa1b.storage.atomic import write_whole

IMAGES_PER_LIST = 10_000


@dataclass(frozen=True)
class Yolo(Format):
    """Labels for ultralytics. Polygons are relative to the image, so that scaled images can be exported too.

    Attributes:
        images_per_list: images in a list of images.
        val: ids of the images for validation, which are not for training; None: `train` and `val` are equal.
    """

    images_per_list: int = IMAGES_PER_LIST
    val: Ids | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return "yolo-seg"

    @property
    def lists(self) -> tuple[str, ...]:
        return ("data.yaml",)

    def check(self, dataset: Dataset) -> None:
        """Nothing is refused: polygons are relative, so images may be scaled."""

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        named = [("images", rows)]
        if self.val is not None:
            held_out = np.isin(dataset.table.image_id[rows], self.val)
            named = [("train", rows[~held_out]), ("val", rows[held_out])]
        return blocks(named, self.images_per_list)

    def paths(self, part: str, ids: Ids) -> list[str]:
        pairs = [path for image_id in ids.tolist() for path in _paths(image_id)]
        return [f"{part}.txt", *pairs]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        with files.open(f"{part}.txt") as file:
            for sample in samples:
                image, labels = _paths(sample.image_id)
                files.write(image, sample.jpeg)
                files.write(labels, label_text(sample))
                file.write(f"./{image}\n".encode())

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        train, val = (
            json.dumps([f"{part}.txt" for part in parts if not part.startswith(other)])  # JSON is YAML
            for other in ("val-", "train-")
        )
        write_whole(out / "data.yaml", f"train: {train}\nval: {val}\nnames: {{0: object}}\n".encode())


def _paths(image_id: int) -> tuple[str, str]:
    return f"images/{member_name(image_id, 'jpg')}", f"labels/{image_name(image_id)}.txt"


def label_text(sample: Sample) -> bytes:
    """The labels of an image: a line for each mask with pixels.

    A coordinate has 6 decimals, which determine the pixel in images of up to 65,500 pixels.
    """
    size = np.array([sample.annotations.width, sample.annotations.height])
    lines = []
    for (polygon,) in filter(None, polygons.polygons(sample.runs, single=True)):
        numbers = (polygon / size).reshape(-1).tolist()
        lines.append("0 " + " ".join(f"{number:.6f}" for number in numbers) + "\n")
    return "".join(lines).encode()
