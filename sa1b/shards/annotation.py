"""One image's annotation file as arrays, and back without loss.

A file in SA-1B's usual form becomes typed columns. If columns cannot express the file (unknown
keys, another key order, mixed number types, values out of range), its JSON text is stored beside the columns,
so that the original is always restored with all values and types.

A file whose masks cannot be trusted raises `BadSample`. A readable file with odd values has warnings; its
image is kept unchanged and listed.
"""

import json
import re
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import BadSample
from sa1b.masks import coco, geometry
from sa1b.masks.runs import MaskError, Runs
from sa1b.names import MASK_KEYS, member_name
from sa1b.shards import MAX_IMAGE_PIXELS, MAX_STORED_PIXELS
from sa1b.shards.annotation_columns import (
    BBOX_IS_INT,
    CROP_BOX_IS_INT,
    ImageWarnings,
    decode_usual,
    name_of,
    unusual_columns,
    usual_columns,
)

MAX_JSON_BYTES = 4 << 20  # real files: 63 kB on average; empty lists take 25 times their text in memory
MAX_JSON_DEPTH = 100  # real files: 5; readers parse it again, also from deep call stacks

IMAGE_KEYS = ("image_id", "width", "height", "file_name")
PROVENANCE = "provenance"  # key of an annotation file for the origin of masks that are not SA-1B's
NO_ORIGIN: dict[str, str | int] = {"category": "", "category_id": -1, "iscrowd": 0, "fields": "{}"}
ORIGIN = {"category": np.str_, "category_id": np.int64, "iscrowd": np.int64, "fields": np.str_}
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True, eq=False)
class Annotations:
    """The N masks of one image with their boxes, points and scores, in pixels of the source image.

    Attributes:
        image_id: id of the image in the annotation file.
        width: width of the source image in pixels.
        height: height of the source image in pixels.
        mask_id: int64 [N], ids of the masks; -1 where the file has none.
        area: int64 [N], areas in pixels, as recorded in the file.
        bbox: float64 [N, 4], SA-1B's [x, y, xmax - xmin, ymax - ymin] (one less than COCO's width, height).
        predicted_iou: float64 [N], NaN where the file has none.
        stability_score: float64 [N], NaN where the file has none.
        point_coords: float64 [N, 2], the prompt point (x, y).
        crop_box: float64 [N, 4], [x, y, width, height] of the crop the mask was found in.
        number_types: uint8 [N], bit 0: bbox is written in integers, bit 1: crop_box is.
        rle: uint8 [sum of rle_bytes], all COCO strings one after the other.
        rle_bytes: uint32 [N], length of each string.
        runs_count: uint32 [N], runs in each mask.
        text: the JSON file verbatim if these columns cannot reproduce it, otherwise None.
    """

    image_id: int
    width: int
    height: int
    mask_id: npt.NDArray[np.int64]
    area: npt.NDArray[np.int64]
    bbox: npt.NDArray[np.float64]
    predicted_iou: npt.NDArray[np.float64]
    stability_score: npt.NDArray[np.float64]
    point_coords: npt.NDArray[np.float64]
    crop_box: npt.NDArray[np.float64]
    number_types: npt.NDArray[np.uint8]
    rle: npt.NDArray[np.uint8]
    rle_bytes: npt.NDArray[np.uint32]
    runs_count: npt.NDArray[np.uint32]
    text: bytes | None = None

    def __repr__(self) -> str:
        return f"Annotations({self.image_id}: {len(self):,} masks, {self.width} x {self.height} pixels)"

    def __len__(self) -> int:
        return len(self.mask_id)

    def runs(self, select: npt.ArrayLike | None = None) -> Runs:
        """The masks as runs at source resolution; only the selected ones are decoded.

        Args:
            select: integers [K] or bool [N], as for `Runs.select`; by default all masks.

        Raises:
            IndexError: an index is outside the masks, or not an integer.
            MaskError: a string is malformed (never for a record that passed the checks of ingest).
        """
        if select is None:
            return coco.decode_joined(self.rle, self.rle_bytes, self.height, self.width)
        return coco.decode_selected(self.rle, self.rle_bytes, select, self.height, self.width)

    def keep(self, which: npt.NDArray[np.bool_]) -> "Annotations":
        """Only the masks of `which`, bool [N], also in `text`."""
        text = self.text
        if text is not None:
            document = json.loads(text)
            if self.origin() is not None:
                document[PROVENANCE]["masks"] = list(compress(document[PROVENANCE]["masks"], which))
            document["annotations"] = list(compress(document["annotations"], which))
            text = json.dumps(document).encode()
        others = ("image_id", "width", "height", "rle", "text")
        columns: dict[str, Any] = {
            attribute.name: self.column(attribute.name)[which]
            for attribute in fields(self)
            if attribute.name not in others
        }
        return replace(self, rle=self.rle[np.repeat(which, self.rle_bytes)], text=text, **columns)

    def origin(self) -> dict[str, npt.NDArray[Any]] | None:
        """Fields of a file in COCO's format by mask; None: the masks come from no such file.

        `category` str [N], "" for none; `category_id` int64 [N], -1 for none or one that is not an integer;
        `iscrowd` int64 [N]; `fields` str [N], all fields of the annotation as a JSON object.
        """
        masks = self._provenance("masks", dict)
        if masks is None or len(masks) != len(self):
            return None
        columns = {
            "category": [mask.get("category") if type(mask.get("category")) is str else "" for mask in masks],
            "category_id": [_small(mask.get("category_id"), -1) for mask in masks],
            "iscrowd": [_small(mask.get("iscrowd"), 0) for mask in masks],
            "fields": [json.dumps(mask) for mask in masks],
        }
        return {name: np.array(columns[name], kind) for name, kind in ORIGIN.items()}

    def texts(self) -> list[str] | None:
        """The texts that stood beside the image in its source; None: the source was not read for texts."""
        return self._provenance("texts", str)

    def image_fields(self) -> str | None:
        """The fields of the image in its source as a JSON object: those beside an image alone, or the object
        of a file in COCO's format; None: the source was not read for them.
        """
        provenance = self._origin_of_image()
        if not isinstance(fields := provenance.get("fields", provenance.get("image")), dict):
            return "{}" if "texts" in provenance else None
        further = (
            {"further_entries": provenance["further_entries"]} if "further_entries" in provenance else {}
        )
        return json.dumps(fields | further)

    def _provenance(self, key: str, kind: type) -> list[Any] | None:
        """A list of the provenance whose values have one type; None if there is no such list."""
        values = self._origin_of_image().get(key)
        return values if isinstance(values, list) and not {*map(type, values)} - {kind} else None

    def _origin_of_image(self) -> dict[str, Any]:
        """The provenance of the file; empty if it has none."""
        try:
            provenance = None if self.text is None else json.loads(self.text)[PROVENANCE]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return provenance if isinstance(provenance, dict) else {}

    def column(self, name: str) -> npt.NDArray[Any]:
        """The values [N] of a column by its name, also those of `origin`."""
        if name not in ORIGIN:
            return np.asarray(getattr(self, name))
        return (self.origin() or no_origin(len(self)))[name]

    def to_json(self) -> Any:
        """The annotation file as parsed by `json.loads`: same values, types and key order."""
        if self.text is not None:
            return json.loads(self.text)
        image = dict(
            zip(
                IMAGE_KEYS,
                (self.image_id, self.width, self.height, member_name(self.image_id, "jpg")),
                strict=True,
            )
        )
        joined = self.rle.tobytes().decode("ascii")
        ends = np.cumsum(self.rle_bytes, dtype=np.int64).tolist()
        annotations = []
        start = 0
        for i, end in enumerate(ends):
            kind = int(self.number_types[i])
            bbox = self.bbox[i].tolist()
            crop_box = self.crop_box[i].tolist()
            values = (
                [int(v) for v in bbox] if kind & BBOX_IS_INT else bbox,
                int(self.area[i]),
                {"size": [self.height, self.width], "counts": joined[start:end]},
                float(self.predicted_iou[i]),
                [self.point_coords[i].tolist()],
                [int(v) for v in crop_box] if kind & CROP_BOX_IS_INT else crop_box,
                int(self.mask_id[i]),
                float(self.stability_score[i]),
            )
            annotations.append(dict(zip(MASK_KEYS, values, strict=True)))
            start = end
        return {"image": image, "annotations": annotations}


def no_origin(masks: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of `Annotations.origin` for masks that come from no file in COCO's format."""
    return {
        name: np.full(masks, value, np.array(value, ORIGIN[name]).dtype) for name, value in NO_ORIGIN.items()
    }


def _small(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int) and abs(value) < 1 << 53 else default


@dataclass(frozen=True, slots=True)
class Parsed:
    """An annotation file that can be used; `runs` are all its masks, decoded."""

    annotations: Annotations
    runs: Runs
    warnings: ImageWarnings = field(default_factory=ImageWarnings)  # reason -> warning about an odd value


def pixels_message(what: str, width: int, height: int, max_pixels: int) -> str:
    """The message for an image that is too large, with the flag that allows it if there is one."""
    message = f"{what} {width} x {height} pixels, cap {max_pixels:,} in all"
    takes = width > 0 and height > 0 and width * height <= MAX_STORED_PIXELS
    return f"{message}; --max-pixels {width * height} takes it" if takes else message


def parse_annotation(text: bytes, image_id: int, max_pixels: int = MAX_IMAGE_PIXELS) -> Parsed:
    """Read the annotation file of image `image_id`, check it and decode its masks.

    A file of 100 masks in the usual form takes 0.64 ms, more than half of it to parse the JSON. BadSample:
    not JSON, fields that decoding needs are missing, or a mask is malformed.
    """
    if len(text) > MAX_JSON_BYTES:
        raise BadSample("json_too_large", f"annotation file of {len(text):,} bytes, cap {MAX_JSON_BYTES:,}")
    if b"\0" in text:
        raise BadSample("invalid_json", f"annotation file is not UTF-8: zero byte at {text.index(0):,}")
    warnings = ImageWarnings()
    usual = decode_usual(text, image_id, max_pixels)
    if usual is not None:
        (height, width, columns), exact = usual, True
    else:
        height, width, columns, exact = _read_document(text, image_id, max_pixels, warnings)
    strings = columns.pop("strings")
    try:
        joined = "".join(strings).encode("ascii")
        lengths = np.fromiter(map(len, strings), np.uint32, len(strings))
        runs = coco.decode_joined(np.frombuffer(joined, np.uint8), lengths, height, width)
    except UnicodeEncodeError:
        raise BadSample("bad_rle", "segmentation counts hold a character outside COCO's alphabet") from None
    except MaskError as error:
        raise BadSample("bad_rle", str(error)) from None
    annotations = Annotations(
        image_id=image_id,
        width=width,
        height=height,
        rle=np.frombuffer(joined, np.uint8),
        rle_bytes=lengths,
        runs_count=np.diff(runs.offsets).astype(np.uint32),
        text=None if exact else text,
        **columns,
    )
    _compare(annotations, runs, warnings)
    return Parsed(annotations, runs, warnings)


def _read_document(
    text: bytes, image_id: int, max_pixels: int, warnings: ImageWarnings
) -> tuple[int, int, dict[str, Any], bool]:
    """Height, width and columns of a file in any form, and whether the columns reproduce the file."""
    try:
        document = json.loads(text)
    except RecursionError:
        message = f"annotation file is not JSON that can be read: nested {_depth(text):,} deep"
        raise BadSample("invalid_json", f"{message}, cap {MAX_JSON_DEPTH}") from None
    except ValueError as error:
        raise BadSample("invalid_json", f"annotation file is not JSON: {error}") from None
    height, width, usual = _read_image(document, image_id, max_pixels, warnings)
    masks = document["annotations"]
    columns = usual_columns(masks, height, width) if usual else None
    # A usual file has a fixed number of quotes; more means keys that json.loads merged.
    exact = columns is not None and text.count(b'"') == 14 + 22 * len(masks)
    if not exact and (depth := _depth(text)) > MAX_JSON_DEPTH:
        raise BadSample("nested_too_deep", f"annotation file nested {depth:,} deep, cap {MAX_JSON_DEPTH}")
    if columns is None:
        columns = unusual_columns(masks, height, width, warnings)
    elif not exact and PROVENANCE not in document:
        warnings.add("duplicate_key", "a key occurs more than once")
    return height, width, columns, exact


def _depth(text: bytes) -> int:
    """Levels of brackets in a JSON text; takes 1 ms for a file of usual size."""
    plain = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    opened = (plain == ord("[")) | (plain == ord("{"))
    closed = (plain == ord("]")) | (plain == ord("}"))
    return int(np.cumsum(opened.astype(np.int32) - closed, dtype=np.int32).max(initial=0))


def _read_image(
    document: Any, image_id: int, max_pixels: int, warnings: ImageWarnings
) -> tuple[int, int, bool]:
    """Height, width, and whether the document has the usual form outside its list of masks."""
    if not isinstance(document, dict):
        raise BadSample("wrong_type", f"annotation file holds {name_of(document)} where an object belongs")
    image = document.get("image")
    if not isinstance(image, dict):
        raise BadSample("missing_key", "annotation file has no object 'image'")
    for key in ("image_id", "width", "height"):
        if key not in image:
            raise BadSample("missing_key", f"'image' has no {key!r}")
        if type(image[key]) is not int:
            raise BadSample("wrong_type", f"image.{key} is {name_of(image[key])}, not an integer")
    if image["image_id"] != image_id:
        raise BadSample(
            "image_id_mismatch", f"image.image_id is {image['image_id']}, the name says {image_id}"
        )
    height, width = image["height"], image["width"]
    if not (0 < height <= max_pixels and 0 < width <= max_pixels and height * width <= max_pixels):
        raise BadSample("absurd_size", pixels_message("image of", width, height, max_pixels))
    if not isinstance(document.get("annotations"), list):
        raise BadSample("missing_key", "annotation file has no list 'annotations'")
    file_name = image.get("file_name")
    if file_name != member_name(image_id, "jpg"):
        shown = repr(file_name) if isinstance(file_name, str) else name_of(file_name)
        warnings.add("file_name", f"image.file_name is {shown}, expected 'sa_{image_id}.jpg'")
    expected = ("image", "annotations", PROVENANCE)[: 2 + isinstance(document.get(PROVENANCE), dict)]
    usual = tuple(document) == expected and tuple(image) == IMAGE_KEYS
    if not usual:
        warnings.add("keys", f"keys {list(document)} and {list(image)}")
    return height, width, usual and "file_name" not in warnings


def _compare(annotations: Annotations, runs: Runs, warnings: ImageWarnings) -> None:
    def check(
        reason: str,
        wrong: npt.NDArray[np.bool_] | np.bool_,
        values: npt.NDArray[Any],
        expected: object = None,
    ) -> None:
        if wrong.any():
            masks = np.flatnonzero(wrong).tolist()
            i = masks[0]
            tail = "" if expected is None else f", the mask says {np.asarray(expected)[i].tolist()}"
            warnings.add_masks(reason, masks, lambda: f"mask {i}: {reason} {values[i].tolist()}{tail}")

    area = geometry.area(runs)
    bbox = geometry.bbox_sa1b(runs)
    check("empty_mask", area == 0, area)
    check("area", annotations.area != area, annotations.area, area)
    check("bbox", (annotations.bbox != bbox).any(axis=1), annotations.bbox, bbox)
    for name in ("predicted_iou", "stability_score"):
        score = getattr(annotations, name)
        check(name, ~((score >= 0) & (score <= 1.5)), score)
    limits = np.array([annotations.width, annotations.height], np.float64)
    box = annotations.crop_box
    with np.errstate(over="ignore", invalid="ignore"):  # a sum of infinities counts as outside the image too
        inside = (box[:, :2] >= 0) & (box[:, 2:] > 0) & (box[:, :2] + box[:, 2:] <= limits)
    check("crop_box", ~inside.all(axis=1), box)
    point = annotations.point_coords
    check("point_coords", ~((point >= 0) & (point <= limits)).all(axis=1), point)
