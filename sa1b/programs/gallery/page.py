"""The page: one HTML file below 20 MB that needs no other one, with the images, their masks and numbers.

Masks are resized as runs and stored as COCO strings, whose edges the script in page.html traces, pixel by
pixel. Names and messages are escaped, and the content security policy of the page forbids every request.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

import sa1b
from sa1b import masks
from sa1b.console import counted
from sa1b.errors import BadSample, ShardError, UsageError
from sa1b.hashing import Purpose, random_words
from sa1b.names import image_name
from sa1b.programs.gallery.histograms import charts
from sa1b.report import bar, first_names
from sa1b.shards.annotation import Annotations
from sa1b.shards.dataset import check_images
from sa1b.shards.manifest import dataset_around
from sa1b.shards.predictions import Predicted, read_predictions
from sa1b.shards.quarantine import read_warnings
from sa1b.storage.atomic import temporary_path, write_whole
from sa1b.views.view import view_of

_SPARE = 8  # further images, for those that cannot be shown
_FIGURES_BYTES = 19_900_000  # of 20 MB; the rest of the page is small
# Tried in this order until the page fits: fraction of the longer side, JPEG quality.
_STEPS = ((1.0, 88), (1.0, 80), (1.0, 70), (0.8, 70), (0.64, 66), (0.5, 60), (0.4, 50))
_REST = '<button data-layer="unscored" aria-pressed="false">Masks without a prediction <kbd>U</kbd></button>'
_SCORES = ("predicted_iou", "stability_score")
_NUMBERS = ("mask_id", "area", "bbox", *_SCORES, "point_coords", "crop_box", "runs_count")


def _mean(values: npt.NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


# Orders of the images, lowest number first: what is counted, its sign, and a label.
_SORTS: dict[str, tuple[Callable[[Annotations], float], int, str]] = {
    "stability_score": (lambda one: _mean(one.stability_score), 1, "mean stability score, lowest first"),
    "predicted_iou": (lambda one: _mean(one.predicted_iou), 1, "mean predicted IoU, lowest first"),
    "masks": (lambda one: float(len(one)), -1, "number of masks, most first"),
    "area": (lambda one: _mean(one.area / (one.width * one.height)), -1, "mean area of masks, largest first"),
    "image_id": (lambda one: float(one.image_id), 1, "image id"),
}


def _sort_key(name: str) -> Callable[[Annotations], tuple[float, int]]:
    """The key of an order; images without the number are last."""
    number, sign, _ = _SORTS[name]
    return lambda one: (float(np.nan_to_num(sign * number(one), nan=np.inf)), one.image_id)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded image with its N masks by area, largest first, so that small masks are drawn on top."""

    annotations: Annotations
    shard: str
    pixels: npt.NDArray[np.uint8]  # RGB, at the largest size on the page
    order: npt.NDArray[np.int64]  # [N], rows of the annotations
    runs: masks.Runs  # at source resolution, all in the order of the annotations
    predicted: Predicted | None
    rows: npt.NDArray[np.int64]  # [N], rows of `predicted`


@dataclass(slots=True, eq=False)
class Part:
    """The part of a dataset directory that images are chosen from, and those that were chosen."""

    root: str
    title: str  # the last part of `root`
    dataset: sa1b.Dataset
    ids: npt.NDArray[np.uint64]  # to choose from
    facts: dict[str, str] = field(default_factory=dict)  # about the part
    warnings: dict[int, str] = field(default_factory=dict)  # image id -> items of a list in HTML
    predicted: dict[int, Predicted] = field(default_factory=dict)
    rule: str = ""  # how the images were chosen
    pictures: list[Picture] = field(default_factory=list)  # the first chosen first
    skipped: dict[str, list[str]] = field(default_factory=dict)  # reason -> messages


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of writing a page."""

    page: str
    bytes: int
    images: int  # to choose from
    masks: int | None
    shown: list[int]  # ids, in the order of the page
    longer_side: int
    quality: int
    left_out: int  # chosen images that did not fit
    skipped: dict[str, int]  # reason -> number of images that cannot be shown

    document = asdict

    def table(self) -> str:
        total = f", {self.masks:,} masks in total" if self.masks is not None else ""
        lines = [
            f"  shown      {len(self.shown):,} of {self.images:,} images{total}",
            f"  drawn at   at most {self.longer_side:,} px, JPEG quality {self.quality}",
        ]
        if self.left_out:
            lines.append(f"  left out   {self.left_out:,} images that do not fit into 20 MB")
        if self.skipped:
            lines.append("  skipped    " + ", ".join(f"{why}: {n:,}" for why, n in self.skipped.items()))
        return "\n".join((*lines, f"{self.page}: {self.bytes / 1e6:.1f} MB; open it in a browser"))


def open_part(
    root: str, view: str | None, layers: Sequence[str], *, warnings: bool, predictions: Path | None
) -> Part:
    """Open a dataset directory; the arguments are flags. UsageError: no image has a warning."""
    dataset = sa1b.open(root, layers=layers)
    dataset.check_table()
    check_images(dataset, "a gallery")
    title = root.rstrip("/").rpartition("/")[2] if "://" in root else Path(root).resolve().name
    part = Part(root, title, dataset, dataset.table.image_id)
    if view is not None:
        opened, part.dataset = view_of(dataset, view)
        part.ids = opened.image_ids(dataset.table)
        part.facts["View"] = opened.digest if opened.digest.startswith(view) else f"{view}, {opened.digest}"
        if opened.masks_where is not None:
            others = "all masks are shown" if predictions is None else "masks without a prediction are dashed"
            part.facts["Condition of the view"] = f"{opened.masks_where.text} ({others})"
    if warnings:
        for _, entry in read_warnings(root):
            item = f"<li><b>{escape(entry['reason'])}</b> {escape(str(entry.get('message')))}</li>"
            part.warnings[entry["image_id"]] = part.warnings.get(entry["image_id"], "") + item
        part.ids = np.intersect1d(part.ids, np.array([*part.warnings], np.uint64))
        if not len(part.ids):
            raise UsageError(f"{root}: no image has a warning; omit --warnings")
    if predictions is not None:
        part.predicted = read_predictions(predictions)
    layered = [f"{one.info.name} ({one.info.digest[:12]})" for one in part.dataset.layers]
    info = dataset.manifest
    part.facts |= {"Layers": ", ".join(layered)} if layered else {}
    part.facts |= {
        "Images of the directory": f"{len(dataset):,} in {counted(len(dataset.shards), 'shard')}",
        "Sources": f"{len(info['sources']):,} ({first_names([*info['sources']], 6)})",
        "Quarantined": f"{info['totals']['refused']:,}",
        "Kept with warnings": f"{info['totals']['doubtful']:,}",
    }
    return part


def read_pictures(
    part: Part, ids: Sequence[int], count: int, seed: int, predictions: Path | None, side: int, *, quiet: bool
) -> None:
    """Choose images and decode them at most `side` pixels large; the arguments are flags.

    UsageError: an image is not in the part, or none can be shown. StorageError: a shard cannot be read.
    """
    part.rule, flag = "chosen by id" if ids else f"chosen at random with seed {seed}", "--id"
    if predictions is not None and not ids:
        part.rule = f"the first in {predictions.name}, whatever their scores"
        ids, flag = [*part.predicted][:count], f"--predictions {predictions}: its images"
    if missing := first_names([image_id for image_id in ids if image_id not in part.ids], 10):
        where = part.root if len(part.ids) == len(part.dataset) else f"the chosen part of {part.root}"
        raise UsageError(f"{flag} {missing}: not in {where}; choose others of its {len(part.ids):,} images")
    count = len(ids) or count
    if not ids and len(part.ids):
        # Those with the smallest keyed hash: a uniform sample, whatever else is there.
        words = random_words(seed, Purpose.GALLERY, part.ids)
        last = min(count + _SPARE, len(words)) - 1
        best = np.argpartition(words, last)[: last + 1]
        ids = part.ids[best[np.lexsort((part.ids[best], words[best]))]].tolist()
    with bar(count, "gallery", " images", quiet, delay=2) as progress:
        for image_id in ids:
            try:
                part.pictures.append(_picture(part, part.dataset.by_id(image_id), side))
                progress.update()
            except (ShardError, BadSample, masks.MaskError) as error:
                # The path of the directory may be private, and pages are sent to others.
                message = f"{image_name(image_id)}: {error}".replace(str(part.dataset.root), part.title)
                part.skipped.setdefault(getattr(error, "reason", "damaged"), []).append(message)
            if len(part.pictures) == count:
                return
    if not part.pictures:
        examples = "; ".join(message for messages in part.skipped.values() for message in messages[:3])
        raise UsageError(f"{part.root}: none of these images can be shown ({examples}); choose others")


def _picture(part: Part, sample: sa1b.Sample, side: int) -> Picture:
    annotations, runs = sample.annotations, sample.runs
    order, predicted = np.argsort(-masks.area(runs), kind="stable"), part.predicted.get(sample.image_id)
    rows = np.zeros(len(order), np.int64)
    if predicted is not None:
        if (predicted.runs.height, predicted.runs.width) != (annotations.height, annotations.width):
            raise BadSample("predictions_differ", "the predicted masks have another size than the image")
        at = {mask_id: row for row, mask_id in enumerate(predicted.mask_id.tolist())}
        rows = np.array([at.get(one, -1) for one in annotations.mask_id[order].tolist()], np.int64)
        order, rows = order[rows >= 0], rows[rows >= 0]
    pixels = _reduced(sample.image, side)
    return Picture(annotations, sample.shard, pixels, order, runs, predicted, rows)


def _reduced(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """An image of at most `side` pixels; it is never enlarged."""
    if max(pixels.shape) <= side:
        return pixels
    height, width = masks.framed_size(pixels.shape[0], pixels.shape[1], side)
    return np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def write_page(part: Part, out: Path, mark: str, sort: str, max_side: int) -> Summary:
    """Write the page; the same part and arguments give the same bytes. `mark`: see `check_replaceable`."""
    for scale, quality in _STEPS:
        side = round(max_side * scale)
        figures = [_figure(one, side, quality, part.warnings) for one in part.pictures]
        if sum(map(len, figures)) <= _FIGURES_BYTES:
            break
    while len(figures) > 1 and sum(map(len, figures)) > _FIGURES_BYTES:
        figures.pop()  # the last chosen
    left_out = len(part.pictures) - len(figures)
    texts = {one.annotations.image_id: text for one, text in zip(part.pictures, figures, strict=False)}
    shown = [one.annotations for one in part.pictures[: len(figures)]]
    orders = {name: [one.image_id for one in sorted(shown, key=_sort_key(name))] for name in _SORTS}
    here = f"{len(shown):,} of {len(part.ids):,} images" + f", {part.rule}" * (len(shown) < len(part.ids))
    here += f"; at most {side:,} px, JPEG quality {quality}"
    here += f"; {left_out:,} more do not fit into the page" * (left_out > 0)
    is_whole = len(part.ids) == len(part.dataset) and not part.dataset.layers
    total = part.dataset.manifest["totals"]["masks"] if is_whole else None
    unscored = any(one.predicted and 0 < len(one.order) < len(one.runs) for one in part.pictures)
    counts = {reason: len(messages) for reason, messages in sorted(part.skipped.items())}
    examples = {f"{why}: {n:,}": "; ".join(part.skipped[why][:3])[:900] for why, n in counts.items()}
    words = f"{sum(counts.values()):,} skipped because they cannot be shown"
    details = f'<details class="warning"><summary>{words}</summary><dl>{_facts(examples)}</dl></details>'
    fields = {
        "MARK": mark,
        "TITLE": escape(part.title),
        "FACTS": _facts({"Masks": f"{total:,}"} if total is not None else {}) + _facts({"Shown here": here}),
        "MORE": _facts(part.facts),
        "SKIPPED": details if counts else "",
        "CHARTS": charts(shown),
        "UNSCORED": _REST if unscored else "",
        "SORTS": "".join(
            f'<option value="{name}" data-ids="{" ".join(map(image_name, orders[name]))}"'
            f"{' selected' * (name == sort)}>{label}</option>"
            for name, (*_, label) in _SORTS.items()
        ),
        "PICTURES": b"\n".join(texts[image_id] for image_id in orders[sort]).decode(),
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # A single pass, so that text in the data cannot be mistaken for a field.
    page = re.sub(r"<!--([A-Z]+)-->", lambda match: fields[match[1]], template).encode(
        "utf-8", "backslashreplace"
    )
    write_whole(out, page, temporary_path(out))
    return Summary(str(out), len(page), len(part.ids), total, orders[sort], side, quality, left_out, counts)


def check_replaceable(root: str, out: Path, *, overwrite: bool) -> str:
    """The mark of a page of this input, a digest: the path may be private. UsageError: another file."""
    relative = root if "://" in root else os.path.relpath(Path(root).resolve(), out.resolve().parent)
    mark = f"sa1b gallery {hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; pass the path of a file")
    if not out.exists():
        return mark
    with out.open("rb") as file:
        head = file.read(4096)  # the mark is in its first lines
    is_page = b'"sa1b gallery ' in head
    if not is_page and (around := dataset_around(out)) is not None:
        raise UsageError(f"--out {out}: is a file of the dataset directory {around}; choose another --out")
    if not overwrite and mark.encode() not in head:
        what = "a page of another input" if is_page else "not written by this command"
        raise UsageError(f"--out {out}: exists and is {what}; choose another --out, or pass --overwrite")
    return mark


def _figure(picture: Picture, side: int, quality: int, warnings: Mapping[int, str]) -> bytes:
    """The HTML of one image: pixels, an SVG for the masks that the page's script draws, and their data."""
    annotations, predicted, rows = picture.annotations, picture.predicted, picture.rows
    name, count, pixels = image_name(annotations.image_id), len(rows), _reduced(picture.pixels, side)
    height, width = pixels.shape[:2]
    jpeg = base64.b64encode(simplejpeg.encode_jpeg(pixels, quality, "RGB", "420", fastdct=False)).decode()

    def strings(runs: masks.Runs, chosen: npt.NDArray[np.int64]) -> list[str]:
        resized = masks.resize(runs.select(chosen), height, width)
        return [string.decode("ascii") for string in masks.encode(resized)]

    def stage(more: str, source: str) -> str:
        drawing = f'<svg viewBox="0 0 {width} {height}" aria-hidden="true"></svg></div>'
        return f'<div class="stage{more}><img alt="" width="{width}" height="{height}"{source}>{drawing}'

    data: dict[str, Any] = {"width": width, "height": height, "counts": strings(picture.runs, picture.order)}
    data |= {"source_width": annotations.width, "source_height": annotations.height}
    data |= {key: _plain(getattr(annotations, key)[picture.order].tolist()) for key in _NUMBERS}
    title, twin, words = counted(count, "mask"), "", ""
    if predicted is not None:
        rest = np.setdiff1d(np.arange(len(picture.runs)), picture.order)
        data |= {"predicted": strings(predicted.runs, rows), "filtered": strings(picture.runs, rest)}
        columns = (predicted.points, predicted.iou, predicted.predicted_iou)
        for key, column in zip(("point_coords", "iou", "model_iou"), columns, strict=True):
            data[key] = _plain(column[rows].tolist())
        label, left = "masks of the model from one click each", "Every mask of the image has a prediction."
        if predicted.phrases:
            label, data["phrases"] = "regions that the model found", [predicted.phrases[row] for row in rows]
        twin = stage(f' twin" role="img" aria-label="{label.capitalize()}"', "")
        if len(rest):
            areas = masks.area(picture.runs.select(rest))
            sizes = f"{areas.min():,} to {areas.max():,} px"
            left = f"{counted(len(rest), 'mask')} of {sizes} without a prediction."
            title = f"{count:,} of {counted(len(picture.runs), 'mask')}"
        title = f"mean IoU {predicted.iou[rows].mean() if count else np.nan:.3f}, {title}"
        words = f"<p>First the true masks, then the {label}. {left}</p>"
    label = f"Image {annotations.image_id} with {count:,} masks; arrow keys go through them"
    # "<" could end the script element.
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure class="picture" id="{name}" style="--ratio:{width / height:.6f}">'
        + stage(f'" tabindex="0" role="group" aria-label="{label}"', f' src="data:image/jpeg;base64,{jpeg}"')
        + f'{twin}<figcaption><h2><a href="#{name}">{name}</a><small>{title}</small></h2>'
        + f"<p>{annotations.width:,} × {annotations.height:,} px, {escape(picture.shard)}</p>{words}"
        + f'<ul class="noted">{warnings.get(annotations.image_id, "")}</ul>'
        + '<dl class="numbers" aria-live="polite"></dl></figcaption>'
        + f'<script type="application/json">{script}</script></figure>'
    ).encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Numbers for the script: null for NaN and infinities, text for integers that lose digits there."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int):
        return value if abs(value) <= 2**53 else str(value)
    return value if np.isfinite(value) else None


def _facts(facts: Mapping[str, str]) -> str:
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
