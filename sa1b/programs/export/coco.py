"""Export in COCO's format: a JSON file of annotations beside the folder `images`.

    images/sa_223750.jpg         original bytes; absent if the dataset directory has annotations only
    annotations.json             all images; or annotations-0000.json, ... with a number of images in each
    parts/annotations-0000.json  beside annotations.json: the files that it was joined from, for a rerun

Masks of files in COCO's format keep their category, `iscrowd` and further fields; others have the category
`object`, whose id is 1 or, if a file uses 1, one above those of the files. `bbox` is COCO's box of the mask
(x, y, width, height in pixels), `area` its pixels. Annotations are numbered from 1 in each file, because
COCO's tools need unique ids above 0. `mask_id` and the other fields of SA-1B are kept, and `sa1b reshard`
reads them again.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sa1b.errors import UsageError
from sa1b.masks import coco, geometry
from sa1b.names import MASK_KEYS, member_name
from sa1b.programs.export.export_format import (
    IMAGES_PER_PART,
    Format,
    Ids,
    JoinedColumn,
    PartFiles,
    Rows,
    blocks,
    by_source,
    check_joined,
    joined_identity,
    joined_value,
)
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import READING
from sa1b.shards.sample import Sample
from sa1b.sources.coco_pair import json_text
from sa1b.storage.atomic import commit, flush, naming_path, temporary_path

Segmentation = Literal["rle", "polygons"]
JOINED = "annotations.json"
_HEAD = '{"annotations": [\n'
_MIDDLE = '], "images": [\n'
_CATEGORIES = '], "categories": [\n'
_TAIL = "]}\n"
_IMAGE_KEYS = ("id", "file_name", "width", "height")
_TAKEN_KEYS = (*MASK_KEYS, "image_id", "category_id", "category", "iscrowd", "mask_id")  # of annotations
_OBJECT = {"id": 1, "name": "object", "supercategory": ""}


@dataclass(frozen=True)
class Coco(Format):
    """Annotations in COCO's format. Memory: one image, and 200 bytes for each image of a part.

    Polygons along the sides of pixels are those that pycocotools rasterises to the same masks. A mask without
    a pixel has run lengths.
    """

    images_per_file: int | None = None  # in a JSON file; None: one file for all of them
    segmentation: Segmentation = "rle"
    annotations_only: bool = field(default=False, repr=False)  # the content of a part differs with it
    categories: tuple[str, ...] = ()  # those of the sources as JSON, in every file
    object_id: int = 1  # id of the category `object`
    columns: tuple[JoinedColumn, ...] = ()  # keys of the images or, by mask_id, of the annotations
    texts: bool = False  # a key of the images: the texts of the sources

    @property
    def identity(self) -> str:
        return f"{replace(self, columns=())!r} {joined_identity(self.columns)}"

    def check(self, dataset: Dataset) -> None:
        super().check(dataset)
        check_joined(self.columns, dataset, {"image_id": _IMAGE_KEYS, "mask_id": _TAKEN_KEYS})

    @property
    def kind(self) -> str:
        number = self.images_per_file
        return "coco" if number is None else f"coco --images-per-file {number}"

    @property
    def lists(self) -> tuple[str, ...]:
        return (JOINED,) if self.images_per_file is None else ()

    def without_images(self) -> Format:
        return replace(self, annotations_only=True)

    def of(self, dataset: Dataset, rows: Rows) -> Format:
        readings: dict[str, Any] = dataset.manifest.get(READING, {})
        categories: dict[int, dict[str, Any]] = {}
        for name, _ in by_source(dataset, rows) if readings else ():
            for category in readings.get(name, {}).get("categories", ()):
                _add(categories, category, name)
        object_id = max(categories) + 1 if 1 in categories else 1
        object_id = next(
            (key for key, category in categories.items() if category.get("name") == "object"), object_id
        )
        return replace(self, categories=tuple(map(json.dumps, categories.values())), object_id=object_id)

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        return blocks([("annotations", rows)], self.images_per_file or IMAGES_PER_PART)

    def paths(self, part: str, ids: Ids) -> list[str]:
        images = map(_image_path, ids.tolist()) if not self.annotations_only else ()
        return [self._path(part), *images]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        entries = []
        categories = {category["id"]: category for category in map(json.loads, self.categories)}
        first = 1
        with files.open(self._path(part)) as file:
            file.write(_HEAD.encode())
            for sample in samples:
                if not self.annotations_only:
                    files.write(_image_path(sample.image_id), sample.jpeg)
                values = {column.name: joined_value(column, sample) for column in self.columns}
                of_masks = [column.name for column in self.columns if column.key == "mask_id"]
                lists = {name: values.pop(name) for name in of_masks}
                for index, annotation in enumerate(
                    annotations(sample, first, self.segmentation, self.object_id)
                ):
                    annotation |= {name: given[index] for name, given in lists.items() if given is not None}
                    category = annotation.pop("category", _OBJECT["name"])
                    _add(categories, {**_OBJECT, "id": annotation["category_id"], "name": category}, part)
                    file.write(b",\n" * (first > 1) + json_text(annotation).encode())
                    first += 1
                values |= {"texts": sample.annotations.texts()} if self.texts else {}
                further = {name: value for name, value in values.items() if value is not None}
                entries.append(json_text(_entry(sample) | further))
            file.write(b"\n" * (first > 1) + _MIDDLE.encode())
            file.write(",\n".join(entries).encode() + f"\n{_CATEGORIES}".encode())
            file.writelines(line.encode() for line in _separated(_listed(categories)))
            file.write(_TAIL.encode())

    def finish(self, out: Path, parts: list[str], ids: Ids) -> None:
        if self.images_per_file is not None:
            return
        partial = temporary_path(out / JOINED)
        try:
            with naming_path(out / JOINED):
                with partial.open("w", encoding="ascii") as file:
                    file.write(_HEAD)
                    file.writelines(_separated(self._annotations(out, parts)))
                    file.write(_MIDDLE)
                    file.writelines(_separated(self._images(out, parts)))
                    file.write(_CATEGORIES)
                    file.writelines(_separated(_listed(self._categories(out, parts))))
                    file.write(_TAIL)
                flush(partial)
            commit(partial, out / JOINED)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, part: str) -> str:
        return f"parts/{part}.json" if self.images_per_file is None else f"{part}.json"

    def _annotations(self, out: Path, parts: list[str]) -> Iterator[str]:
        number = 0
        for part in parts:
            with (out / self._path(part)).open(encoding="ascii") as file:
                for line in _section(file, _HEAD, _MIDDLE):
                    number += 1
                    yield f'{{"id": {number}{line[line.index(",") :]}'

    def _images(self, out: Path, parts: list[str]) -> Iterator[str]:
        for part in parts:
            with (out / self._path(part)).open(encoding="ascii") as file:
                yield from _section(file, _MIDDLE, _CATEGORIES)

    def _categories(self, out: Path, parts: list[str]) -> dict[int, dict[str, Any]]:
        categories: dict[int, dict[str, Any]] = {}
        for part in parts:
            with (out / self._path(part)).open(encoding="ascii") as file:
                for line in _section(file, _CATEGORIES, _TAIL):
                    _add(categories, json.loads(line), part)
        return categories


def _section(lines: Iterable[str], begin: str, end: str) -> Iterator[str]:
    """The objects between two lines, one on each line, without their separators."""
    rest = iter(lines)
    for line in rest:
        if line == begin:
            break
    for line in rest:
        if line == end:
            return
        yield line.rstrip().removesuffix(",")


def _add(categories: dict[int, dict[str, Any]], category: dict[str, Any], part: str) -> None:
    """Add a category to those of a file, in which each id is one category."""
    names = [
        str(entry.get("name", category["id"]))
        for entry in (categories.setdefault(category["id"], category), category)
    ]
    if names[0] != names[1]:
        raise UsageError(
            f"category {category['id']} of {part}: is {names[0]!r} in one source and {names[1]!r} in "
            "another; export the sources apart, each with a view"
        )


def _listed(categories: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield from (
        (json.dumps(categories[key]) for key in sorted(categories)) if categories else [json.dumps(_OBJECT)]
    )


def _separated(lines: Iterable[str]) -> Iterator[str]:
    last = None
    for line in lines:
        if last is not None:
            yield f"{last},\n"
        last = line
    if last is not None:
        yield f"{last}\n"


def _image_path(image_id: int) -> str:
    return f"images/{member_name(image_id, 'jpg')}"


def _entry(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.image_id,
        "file_name": member_name(sample.image_id, "jpg"),
        "width": sample.annotations.width,
        "height": sample.annotations.height,
    }


def annotations(
    sample: Sample, first: int, segmentation: Segmentation, object_id: int
) -> Iterator[dict[str, Any]]:
    """The annotations of an image in COCO's form, numbered from `first`."""
    stored, runs = sample.annotations, sample.runs
    boxes, areas = geometry.bbox(runs).tolist(), geometry.area(runs).tolist()
    masks: list[Any]
    if segmentation == "rle":
        masks = runs.to_coco(text=True)
    else:
        masks = [[part.reshape(-1).tolist() for part in parts] for parts in coco.polygons(runs)]
        # pycocotools cannot read a list without a polygon.
        empty = [index for index, mask in enumerate(masks) if not mask]
        for index, mask in zip(empty, runs.select(empty).to_coco(text=True), strict=True):
            masks[index] = mask
    origin = stored.origin()
    further = [{}] * len(masks) if origin is None else list(map(json.loads, origin["fields"].tolist()))
    for index, mask in enumerate(masks):
        fields = further[index]
        if type(fields.get("category_id")) is not int:
            fields = {key: value for key, value in fields.items() if key not in ("category_id", "category")}
        elif type(fields.get("category")) is not str:
            fields = {**fields, "category": str(fields["category_id"])}
        yield {
            "id": first + index,
            "image_id": sample.image_id,
            "category_id": object_id,
            "iscrowd": 0,
            **{key: value for key, value in fields.items() if key not in ("id", "image_id", "mask_id")},
            "bbox": boxes[index],
            "area": areas[index],
            "segmentation": mask,
            "mask_id": int(stored.mask_id[index]),
            "predicted_iou": float(stored.predicted_iou[index]),  # NaN where a file lacks it
            "stability_score": float(stored.stability_score[index]),
            "point_coords": [stored.point_coords[index].tolist()],
            "crop_box": stored.crop_box[index].tolist(),
        }
