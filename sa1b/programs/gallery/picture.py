"""One image of the gallery: its pixels and its masks at display size, as one HTML figure.

Masks are resized as runs (`sa1b.masks.geometry.resize`) and stored as COCO strings. The page's script decodes
the strings and traces the outlines, so that an outline is the exact boundary of `raster.rasterize` at display
size. The strings take a tenth of the bytes of the same outlines as vector paths.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.console import counted
from sa1b.errors import BadSample
from sa1b.masks import coco, geometry
from sa1b.masks.runs import MaskError, Runs
from sa1b.names import image_name
from sa1b.programs.gallery.members import Exhibit
from sa1b.shards import jpeg
from sa1b.shards.annotation import Annotations
from sa1b.shards.display import display_size, largest_first, scaled
from sa1b.shards.predictions import Predicted

_NUMBERS = (
    "mask_id",
    "area",
    "bbox",
    "predicted_iou",
    "stability_score",
    "point_coords",
    "crop_box",
    "runs_count",
)
_EXACT_IN_SCRIPT = 2**53  # larger integers lose digits in JavaScript


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One decoded image, ready to be drawn at its size or a smaller one."""

    annotations: Annotations
    place: str
    pixels: npt.NDArray[np.uint8]
    runs: Runs  # at source resolution, in the order of `order`
    order: npt.NDArray[np.int64]  # [N], mask indices by area, largest first: small masks are drawn on top
    predicted: Predicted | None = None  # the masks that a model predicted for `runs`, in the same order
    filtered: Runs | None = None  # masks without a prediction, at source resolution, drawn dashed on demand
    warnings: tuple[tuple[str, str], ...] = ()  # reasons and messages of the warnings from ingest

    @property
    def unscored(self) -> int:
        """Number of masks without a prediction, beside masks that have one."""
        return len(self.filtered) if self.filtered is not None and len(self.order) else 0

    @property
    def image_id(self) -> int:
        return self.annotations.image_id


# Order of images: the number of an image, whether the largest number comes first, and a label.
SORTS: dict[str, tuple[Callable[[Annotations], float], bool, str]] = {
    "stability_score": (lambda a: _mean(a.stability_score), False, "mean stability score, lowest first"),
    "predicted_iou": (lambda a: _mean(a.predicted_iou), False, "mean predicted IoU, lowest first"),
    "masks": (lambda a: float(len(a)), True, "number of masks, most first"),
    "area": (lambda a: _mean(a.area / (a.width * a.height)), True, "mean area of masks, largest first"),
    "image_id": (lambda a: float(a.image_id), False, "image id"),
}


def prepare(exhibit: Exhibit, longer_side: int, predicted: Predicted | None = None) -> Picture:
    """Decode an image of at most `longer_side` pixels and its masks, or BadSample; see `filtered`."""
    header = jpeg.frame(exhibit.jpeg)
    pixels = jpeg.decode(exhibit.jpeg)
    assert pixels.shape[:2] == (header.height, header.width)
    try:
        runs = exhibit.annotations.runs()
    except MaskError as error:
        raise BadSample("bad_rle", str(error)) from None
    order = largest_first(runs)
    filtered = None
    if predicted is not None:
        every = order
        order, predicted = _paired(exhibit.annotations, order, predicted)
        filtered = runs.select(every[~np.isin(every, order)])
    return Picture(
        annotations=exhibit.annotations,
        place=exhibit.place,
        pixels=scaled(pixels, longer_side),
        runs=runs.select(order),
        order=order,
        predicted=predicted,
        filtered=filtered,
    )


def _paired(
    annotations: Annotations, order: npt.NDArray[np.int64], predicted: Predicted
) -> tuple[npt.NDArray[np.int64], Predicted]:
    """The masks with a prediction, and the predicted masks in the same order; other sizes: BadSample."""
    if (predicted.runs.height, predicted.runs.width) != (annotations.height, annotations.width):
        raise BadSample("predictions_differ", "the predicted masks have another size than the image")
    at = {mask_id: i for i, mask_id in enumerate(predicted.mask_id.tolist())}
    order = np.array([i for i in order.tolist() if int(annotations.mask_id[i]) in at], np.int64)
    chosen = np.array([at[int(annotations.mask_id[i])] for i in order], np.int64)
    return order, Predicted(
        mask_id=predicted.mask_id[chosen],
        points=predicted.points[chosen],
        iou=predicted.iou[chosen],
        predicted_iou=predicted.predicted_iou[chosen],
        runs=predicted.runs.select(chosen),
        phrases=tuple(predicted.phrases[i] for i in chosen) if predicted.phrases else (),
    )


def display_masks(picture: Picture, longer_side: int) -> Runs:
    """The masks of an image as the page draws them: at display size, largest first."""
    height, width = _display_size(picture, longer_side)
    return geometry.resize(picture.runs, height, width)


def figure(picture: Picture, longer_side: int, quality: int) -> str:
    """The HTML of one image: pixels, never enlarged, an empty SVG for the masks, and their data."""
    annotations = picture.annotations
    height, width = _display_size(picture, longer_side)
    data = simplejpeg.encode_jpeg(scaled(picture.pixels, longer_side), quality, "RGB", "420", fastdct=False)
    image = base64.b64encode(data).decode("ascii")
    keys = " ".join(
        f'data-{name.replace("_", "-")}="{_finite(number(annotations))}"'
        for name, (number, *_) in SORTS.items()
    )
    count = len(picture.order)
    title = image_name(annotations.image_id)
    masks = counted(count, "mask")
    if picture.filtered is not None and len(picture.filtered):
        masks = f"{count:,} of {counted(count + len(picture.filtered), 'mask')}"
    twin, words, noted = "", "", ""
    if picture.warnings:
        reasons = "".join(
            f"<li><b>{escape(reason)}</b> {escape(message)}</li>" for reason, message in picture.warnings
        )
        noted = f'<ul class="noted">{reasons}</ul>'
    if picture.predicted is not None:
        phrased = bool(picture.predicted.phrases)
        of_model = "the regions that the model found" if phrased else "the model's masks from one click each"
        true = "True masks and their phrases" if phrased else "True masks"
        label = "Regions that the model found" if phrased else "Masks of the model from one click each"
        twin = (
            f'<div class="stage twin" role="img" aria-label="{label}">'
            f'<img alt="" width="{width}" height="{height}">'
            f'<svg viewBox="0 0 {width} {height}" aria-hidden="true"></svg></div>'
        )
        mean = f"{picture.predicted.iou.mean():.3f}" if count else "none"
        masks = f"mean IoU {mean}, {masks}"
        words = f"<p>{true}, then {of_model}. {_filtered(picture)}</p>"
    return (
        f'<figure class="picture" id="{title}" {keys} style="--ratio:{width / height:.6f}">'
        f'<div class="stage" tabindex="0" role="group" '
        f'aria-label="Image {annotations.image_id} with {count:,} masks; arrow keys go through them">'
        f'<img alt="" width="{width}" height="{height}" src="data:image/jpeg;base64,{image}">'
        f'<svg viewBox="0 0 {width} {height}" aria-hidden="true"></svg></div>{twin}'
        f'<figcaption><h2><a href="#{title}">{title}</a><small>{masks}</small></h2>'
        f"<p>{annotations.width:,} × {annotations.height:,} px, {escape(picture.place)}</p>{words}"
        f"{_phrases(picture.predicted)}{noted}"
        f'<dl class="numbers" aria-live="polite"></dl></figcaption>'
        f'<script type="application/json">{_script_json(_masks(picture, longer_side))}</script></figure>'
    )


def _phrases(predicted: Predicted | None) -> str:
    """The phrases as a list of buttons, each with the IoU of the region that was found for it."""
    if predicted is None or not predicted.phrases:
        return ""
    items = "".join(
        f'<li><button type="button" data-number="{number}" aria-pressed="false" '
        f'class="{"found" if iou == 1 else "other"}"><span class="swatch"></span>'
        f"<span>{escape(phrase)}</span>"
        f"<small>{'found' if iou == 1 else f'IoU {iou:.2f}'}</small></button></li>"
        for number, (phrase, iou) in enumerate(zip(predicted.phrases, predicted.iou.tolist(), strict=True))
    )
    return f'<ol class="phrases worded">{items}</ol>'


def _filtered(picture: Picture) -> str:
    runs = picture.filtered
    if runs is None or not len(runs):
        return "Every mask of the image has a prediction."
    areas = geometry.area(runs)
    size = f"{areas.min():,} px" if areas.min() == areas.max() else f"{areas.min():,} to {areas.max():,} px"
    where = (
        "the button Masks without a prediction shows them" if picture.unscored else "shown as dashed outlines"
    )
    return f"Filtered: {counted(len(runs), 'mask')} of {size} without a prediction; {where}."


def sort_key(picture: Picture, sort: str) -> tuple[bool, float, int]:
    """Sort key of an image in the order `sort`; images without the number are last, ties are sorted by id."""
    number, descending, _ = SORTS[sort]
    value = number(picture.annotations)
    missing = bool(np.isnan(value))
    return missing, 0.0 if missing else (-value if descending else value), picture.image_id


def _masks(picture: Picture, longer_side: int) -> dict[str, Any]:
    """The data for the page's script: one list per number, in drawing order."""
    annotations, order = picture.annotations, picture.order
    columns = {name: _plain(getattr(annotations, name)[order]) for name in _NUMBERS}
    masks = display_masks(picture, longer_side)
    strings = [string.decode("ascii") for string in coco.encode(masks)]
    predicted = {}
    if picture.predicted is not None:
        resized = geometry.resize(picture.predicted.runs, masks.height, masks.width)
        columns["point_coords"] = _plain(picture.predicted.points)
        predicted = {
            "predicted": [string.decode("ascii") for string in coco.encode(resized)],
            "iou": _plain(picture.predicted.iou),
            "model_iou": _plain(picture.predicted.predicted_iou),
            **({"phrases": list(picture.predicted.phrases)} if picture.predicted.phrases else {}),
        }
    if picture.filtered is not None:
        rest = geometry.resize(picture.filtered, masks.height, masks.width)
        predicted["filtered"] = [string.decode("ascii") for string in coco.encode(rest)]
    return {
        "width": masks.width,
        "height": masks.height,
        "source_width": annotations.width,
        "source_height": annotations.height,
        "counts": strings,
        **columns,
        **predicted,
    }


def _plain(values: npt.NDArray[Any]) -> list[Any]:
    """Values for the script: null for NaN and infinities, 5 for 5.0, text for integers that lose digits."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, float) and not np.isfinite(value):
            return None
        if abs(value) > _EXACT_IN_SCRIPT:
            return str(value)
        return int(value) if value == int(value) else value

    return [plain(value) for value in values.tolist()]


def _script_json(document: Any) -> str:
    """JSON that cannot end the enclosing script element."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _display_size(picture: Picture, longer_side: int) -> tuple[int, int]:
    height, width = picture.pixels.shape[:2]
    return display_size(height, width, longer_side)


def _mean(values: npt.NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _finite(value: float) -> str:
    return f"{value:.10g}" if np.isfinite(value) else ""
