"""Formats with a file for each image, and mostly an annotation file beside it.

    folders       sa_000020/images/sa_1.jpg, sa_000020/annotations/sa_1.json; flat: without sa_000020
    images        sa_000020/sa_1.jpg; flat: sa_1.jpg
    sam2          img_folder/sa_1.jpg, gt_folder/sa_1.json, file_list.txt
    efficientvit  images/sa_1.jpg, masks/sa_1.json, sa_images_ids.txt
    yolo          images/sa_1.jpg, labels/sa_1.txt, images-0000.txt, data.yaml

JPEGs have the original bytes. Annotation files have the bytes of source_tars.annotation_text.
`sam2` is what the class SA1BRawDataset of facebookresearch/sam2 (training/dataset/vos_raw_dataset.py) reads,
`efficientvit` what OnlineDataset of mit-han-lab/efficientvit (efficientvit/samcore/data_provider/sam.py)
reads. Their lists leave out images without masks, which cannot be trained on there.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from sa1b.errors import BadSample, ShardError
from sa1b.masks import coco
from sa1b.names import image_name, member_name
from sa1b.programs.export.export_format import IMAGES_PER_PART, Format, Ids, PartFiles, Rows, blocks, joined
from sa1b.programs.export.export_format import by_source as sources_of
from sa1b.programs.export.source_tars import annotation_text
from sa1b.shards import jpeg
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample
from sa1b.storage.atomic import write_whole

IMAGES_PER_LIST = 10_000
Layout = Literal["by-source", "flat"]


@dataclass(frozen=True)
class _Pairs(Format):
    """JPEGs in one folder and annotation files in another one, for all parts or for each source."""

    @property
    def by_source(self) -> bool:
        """Whether the folders depend on the source."""
        return False

    @property
    def has_images(self) -> bool:
        return True

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        return _parts(dataset, rows, by_source=self.by_source)

    def folders(self, part: str) -> tuple[str, str]:
        """The folders of JPEGs and of annotation files, relative to the export."""
        raise NotImplementedError

    def paths(self, part: str, ids: Ids) -> list[str]:
        images, annotations = self.folders(part)
        return [
            f"{folder}/{member_name(image_id, ending)}"
            for image_id in ids.tolist()
            for folder, ending in ((images, "jpg"), (annotations, "json"))
            if self.has_images or ending == "json"
        ]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        images, annotations = self.folders(part)
        for sample in samples:
            if self.has_images:
                files.write(f"{images}/{member_name(sample.image_id, 'jpg')}", sample.jpeg)
            files.write(f"{annotations}/{member_name(sample.image_id, 'json')}", annotation_text(sample))


@dataclass(frozen=True)
class Folders(_Pairs):
    """Images and annotation files in folders, those of each source together or all together."""

    layout: Layout = "by-source"
    # write no JPEGs
    annotations_only: bool = field(default=False, repr=False)  # the content of a part differs with it

    @property
    def has_images(self) -> bool:
        return not self.annotations_only

    def without_images(self) -> Format:
        return replace(self, annotations_only=True)

    @property
    def kind(self) -> str:
        return f"folders --layout {self.layout}"

    @property
    def by_source(self) -> bool:
        return self.layout == "by-source"

    def folders(self, part: str) -> tuple[str, str]:
        source = f"{_source(part)}/" if self.by_source else ""
        return f"{source}images", f"{source}annotations"


@dataclass(frozen=True)
class Sam2(_Pairs):
    """The folders and the list that SAM 2's loader of SA-1B reads."""

    @property
    def lists(self) -> tuple[str, ...]:
        return ("file_list.txt",)

    def folders(self, part: str) -> tuple[str, str]:
        return "img_folder", "gt_folder"

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        _write_lines(out / self.lists[0], map(image_name, ids.tolist()))


@dataclass(frozen=True)
class EfficientVit(_Pairs):
    """The folders and the list that the SAM loader of EfficientViT reads."""

    @property
    def lists(self) -> tuple[str, ...]:
        return ("sa_images_ids.txt",)

    def folders(self, part: str) -> tuple[str, str]:
        return "images", "masks"

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        _write_lines(out / self.lists[0], map(str, ids.tolist()))


@dataclass(frozen=True)
class Images(Format):
    """JPEGs only, as stored or scaled down, in a folder for each source, or in one.

    A larger image than `image_size`, pixels of the longer side, is encoded again as by `sa1b reshard
    --image-size`; any other image has its stored bytes.
    """

    layout: Layout = "by-source"
    image_size: int | None = None
    quality: int = 95  # of encoded JPEGs, 1 to 100

    @property
    def kind(self) -> str:
        return f"images --layout {self.layout}"

    def check(self, dataset: Dataset) -> None:
        """Nothing is refused: scaled images are exported as stored, or scaled further."""

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        return _parts(dataset, rows, by_source=self.layout == "by-source")

    def paths(self, part: str, ids: Ids) -> list[str]:
        return [self._path(part, image_id) for image_id in ids.tolist()]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        for sample in samples:
            files.write(self._path(part, sample.image_id), self._encoded(sample))

    def _path(self, part: str, image_id: int) -> str:
        name = member_name(image_id, "jpg")
        return name if self.layout == "flat" else f"{_source(part)}/{name}"

    def _encoded(self, sample: Sample) -> bytes:
        if self.image_size is None:
            return sample.jpeg
        try:
            frame = jpeg.frame(sample.jpeg)
            return jpeg.scale_down(sample.jpeg, frame, self.image_size, self.quality)[0]
        except BadSample as error:
            raise ShardError(
                f"{sample.shard}: image {image_name(sample.image_id)} cannot be scaled: {error}; export "
                "without --image-size, or without this image"
            ) from None


def _parts(dataset: Dataset, rows: Rows, *, by_source: bool) -> Iterable[tuple[str, Rows]]:
    sources: Iterable[tuple[str, Rows]] = sources_of(dataset, rows)
    return blocks(sources if by_source else joined(sources, IMAGES_PER_PART), IMAGES_PER_PART)


def _source(part: str) -> str:
    return part.rpartition("-")[0]


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


@dataclass(frozen=True)
class Yolo(Format):
    """Labels for ultralytics. Polygons are relative to the image, so scaled images can be exported too."""

    # `yolo` is for the segmentation models of ultralytics. A line of labels/ has class 0 and x y of the
    # polygon of a mask, divided by the size. The parts of a mask and its holes are joined by lines that are
    # followed in both directions, see sa1b.masks.coco. The polygon has exactly the pixels of the mask.
    # Ultralytics itself loses some of them: it resamples polygons to 1,000 points, scales them to the size of
    # training, paints their borders, so that joined parts get a line of one pixel between them, and keeps one
    # of several equal boxes.
    images_per_list: int = IMAGES_PER_LIST  # in a list of images
    # ids of images for validation only; None: `train` and `val` are equal
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
        pairs = [path for image_id in ids.tolist() for path in _yolo_paths(image_id)]
        return [f"{part}.txt", *pairs]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        with files.open(f"{part}.txt") as file:
            for sample in samples:
                image, labels = _yolo_paths(sample.image_id)
                files.write(image, sample.jpeg)
                files.write(labels, label_text(sample))
                file.write(f"./{image}\n".encode())

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        train, val = (
            json.dumps([f"{part}.txt" for part in parts if not part.startswith(other)])  # JSON is YAML
            for other in ("val-", "train-")
        )
        write_whole(out / "data.yaml", f"train: {train}\nval: {val}\nnames: {{0: object}}\n".encode())


def _yolo_paths(image_id: int) -> tuple[str, str]:
    return f"images/{member_name(image_id, 'jpg')}", f"labels/{image_name(image_id)}.txt"


def label_text(sample: Sample) -> bytes:
    """The labels of an image: a line for each mask with pixels."""
    # A coordinate has 6 decimals, which determine the pixel in images of up to 65,500 pixels. Ultralytics
    # drops the decimals of a pixel: with a millionth more, it does not take the pixel before.
    size = np.array([sample.annotations.width, sample.annotations.height])
    lines = []
    for (polygon,) in filter(None, coco.polygons(sample.runs, single=True)):
        numbers = np.minimum(polygon / size + 1e-6, 1).reshape(-1).tolist()
        lines.append("0 " + " ".join(f"{number:.6f}" for number in numbers) + "\n")
    return "".join(lines).encode()
