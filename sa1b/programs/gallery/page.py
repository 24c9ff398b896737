"""The gallery page: a single self-contained HTML file below 20 MB.

The structure of the page, its style and its script are in page.html. Names and messages from the input are
escaped, and the content security policy of the page forbids every request, so that a hostile input cannot
load anything.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from sa1b.arguments import Range
from sa1b.console import counted
from sa1b.errors import BadSample, SourceError, UsageError
from sa1b.names import image_name
from sa1b.programs.gallery.chart import charts
from sa1b.programs.gallery.inputs import (
    GallerySummary,
    check_replaceable,
    gather,
    is_dataset,
    origin_mark,
    read_warnings,
)
from sa1b.programs.gallery.members import Choice, Gathered
from sa1b.programs.gallery.picture import SORTS, Picture, figure, prepare, sort_key
from sa1b.report import bar, size_text
from sa1b.shards.predictions import Predicted, read_predictions
from sa1b.storage.atomic import temporary_path, write_whole

MAX_PAGE_BYTES = 19_990_000
MAX_SIDE = 1000  # pixels
MAX_COUNT = 100
# Tried in this order until the page fits: fraction of the longer side, JPEG quality.
_STEPS = ((1.0, 88), (1.0, 80), (1.0, 70), (0.8, 70), (0.64, 66), (0.5, 60), (0.4, 50))
_LISTED = 200  # shards; a dataset of thousands would fill the page with their names
_SIZES_LISTED = 3
_FACTS_SHOWN = 3  # the others are in a collapsed element
_UNSCORED = (
    '<button data-layer="unscored" aria-pressed="false">Masks without a prediction <kbd>U</kbd></button>'
)


def write_gallery(
    path: Path | str,
    out: Path,
    choice: Choice,
    *,
    sort: str = "stability_score",
    max_side: int = MAX_SIDE,
    max_bytes: int = MAX_PAGE_BYTES,
    predictions: Path | None = None,
    warnings: bool = False,
    survey_all: bool = False,
    overwrite: bool = False,
    facts: Sequence[tuple[str, str]] = (),
    quiet: bool = False,
) -> GallerySummary:
    """Write the gallery of an input; the same input and options give the same bytes.

    Args:
        path: dataset directory (also a URL), shard, source tar, folder of pairs or of tars.
        out: path of the page. A page of the same input is replaced, any other file only with `overwrite`.
        sort: order of the images, one of SORTS.
        max_side, max_bytes: largest longer side of an image, in pixels, and largest size of the page.
        predictions: file with masks of a model, see sa1b.shards.predictions. The page shows the images of
            this file, unless `choice` has ids, with the predicted masks next to the true masks.
        warnings: show only the images of a dataset directory that have a warning, with the reasons.
        survey_all: compute distributions over all shards of a dataset directory.
        facts: labels and texts of additional facts about the input.

    Raises:
        UsageError: an option is out of range, the input lacks a requested image, or `out` is not a page of
            this input.
        SourceError, ManifestError, ShardError: the input has nothing to show.
    """
    check_options(choice, sort, max_side)
    check_replaceable(path, out, overwrite=overwrite)
    mark = origin_mark(path, out)
    predicted = {} if predictions is None else read_predictions(predictions)
    rule = "chosen by id" if choice.ids else f"chosen at random with seed {choice.seed}"
    if predictions is not None and not choice.ids:
        rule = f"the first in {predictions.name}, whatever their scores"
        choice = replace(choice, ids=tuple(predicted)[: choice.count], predictions=predictions)
    kept = {}
    if warnings:
        if not is_dataset(path):
            raise UsageError(f"{path}: not a dataset directory; pass one, or omit --warnings")
        kept = read_warnings(path)
        ids = np.array(sorted(kept), np.uint64)
        if choice.images is not None:
            ids = np.intersect1d(ids, choice.images)
        choice = replace(choice, images=ids)
        reasons = Counter(reason for image_id in ids.tolist() for reason, _ in kept[image_id])
        listed = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))
        facts = [*facts, ("Only images kept with warnings", listed)]
    # Most inputs take less than two seconds and need no bar.
    with bar(0, "gallery", "B", quiet, delay=2) as progress:
        gathered = gather(path, choice, progress, survey_all=survey_all)
        pictures = _prepare(gathered, choice, max_side, predicted)
    gathered.facts += facts
    gathered.rule = rule
    pictures = [replace(picture, warnings=tuple(kept.get(picture.image_id, ()))) for picture in pictures]
    if choice.ids and not pictures:
        examples = "; ".join(message for some in gathered.skipped.examples.values() for message in some)
        raise UsageError(f"{path}: none of the --id images can be shown; choose other ids ({examples})")
    side, quality, shown, page = _fit(
        gathered, pictures, sort, max_side=max_side, max_bytes=max_bytes, mark=mark
    )
    if not gathered.images:
        examples = "; ".join(message for some in gathered.skipped.examples.values() for message in some)
        raise SourceError(
            f"{path}: contains no image that can be shown ({examples}); pass a dataset directory, a shard "
            "or a source"
        )
    write_whole(out, page, temporary_path(out))
    return GallerySummary(
        page=out,
        bytes=len(page),
        images=gathered.images,
        masks=gathered.masks,
        shown=[picture.image_id for picture in shown],
        longer_side=side,
        quality=quality,
        left_out=len(pictures) - len(shown),
        skipped=dict(sorted(gathered.skipped.counts.items())),
        surveyed=None if gathered.surveyed is None else (len(gathered.surveyed[0]), gathered.surveyed[1]),
    )


def check_options(choice: Choice, sort: str, max_side: int) -> None:
    """Raise UsageError for an option out of range, before any input is read."""
    if sort not in SORTS:
        raise UsageError(f"--sort {sort}: must be one of {', '.join(SORTS)}")
    Range(1, MAX_COUNT).check("--count", choice.count)
    if len(choice.ids) > MAX_COUNT:
        raise UsageError(f"--id ({len(choice.ids)} ids): there must be at most {MAX_COUNT} ids")
    Range(64, MAX_SIDE, unit=" pixels").check("--max-side", max_side)


def _prepare(
    gathered: Gathered, choice: Choice, max_side: int, predicted: dict[int, Predicted]
) -> list[Picture]:
    """The images to show, highest priority first; an image that cannot be decoded is counted and replaced."""
    pictures: list[Picture] = []
    count = len(choice.ids) or choice.count
    for exhibit in gathered.exhibits:
        try:
            masks = predicted.get(exhibit.annotations.image_id)
            pictures.append(prepare(exhibit, max_side, masks))
        except BadSample as error:
            where = f"{image_name(exhibit.annotations.image_id)} in {exhibit.place}"
            gathered.skipped.add(error.reason, f"{where}: {error}")
        if len(pictures) == count:
            break
    return pictures


def _fit(
    gathered: Gathered, pictures: list[Picture], sort: str, *, max_side: int, max_bytes: int, mark: str
) -> tuple[int, int, list[Picture], bytes]:
    """Longer side, JPEG quality, images and bytes of the best page that fits `max_bytes`."""
    for part, quality in _STEPS:
        side = round(max_side * part)
        figures = {picture.image_id: figure(picture, side, quality) for picture in pictures}
        page = _page(gathered, pictures, figures, sort, side=side, quality=quality, mark=mark)
        if len(page) <= max_bytes:
            return side, quality, _sorted(pictures, sort), page
    room = max_bytes - len(_page(gathered, [], {}, sort, side=side, quality=quality, mark=mark)) - 1000
    shown = []
    for picture in pictures:
        room -= len(figures[picture.image_id].encode()) + 1
        if room < 0:
            break
        shown.append(picture)
    left_out = len(pictures) - len(shown)
    page = _page(gathered, shown, figures, sort, side=side, quality=quality, mark=mark, left_out=left_out)
    return side, quality, _sorted(shown, sort), page


def _sorted(pictures: Sequence[Picture], sort: str) -> list[Picture]:
    return sorted(pictures, key=lambda picture: sort_key(picture, sort))


def _page(
    gathered: Gathered,
    pictures: Sequence[Picture],
    figures: dict[int, str],
    sort: str,
    *,
    side: int,
    quality: int,
    mark: str,
    left_out: int = 0,
) -> bytes:
    shown = f"{len(pictures):,} of {gathered.images:,} images"
    if len(pictures) < gathered.images:
        shown += f", {gathered.rule}"
    shown += f"; at most {side:,} px, JPEG quality {quality}"
    if left_out:
        shown += f"; {left_out:,} more do not fit into the page"
    options = "".join(
        f'<option value="{name}"{" selected" if name == sort else ""}>{escape(meaning)}</option>'
        for name, (_, _, meaning) in SORTS.items()
    )
    facts = _described(gathered, shown)
    descending = " ".join(name for name, (_, largest_first, _) in SORTS.items() if largest_first)
    fields = {
        "ORIGIN": mark,
        "TITLE": escape(gathered.name),
        "KIND": escape(gathered.kind),
        "FACTS": _facts(facts[:_FACTS_SHOWN]),
        "MORE": _facts(facts[_FACTS_SHOWN:]),
        "PARTS": _parts(gathered),
        "SKIPPED": _skipped(gathered),
        "SURVEY": _surveyed(gathered),
        "CHARTS": charts(gathered.survey),
        "UNSCORED": _UNSCORED if any(picture.unscored for picture in pictures) else "",
        "SORTS": options,
        "DESCENDING": descending,
        "PICTURES": "\n".join(figures[picture.image_id] for picture in _sorted(pictures, sort)),
    }
    template = files("sa1b.programs.gallery").joinpath("page.html").read_text(encoding="utf-8")
    # A single pass, so that text in the data cannot be mistaken for a field.
    page = re.sub(r"<!--([A-Z]+)-->", lambda match: fields[match[1]], template)
    return page.encode("utf-8", "backslashreplace")


def _described(gathered: Gathered, shown: str) -> list[tuple[str, str]]:
    survey = gathered.survey
    masks = "" if gathered.masks is None else f"{gathered.masks:,}"
    if survey.images:
        mean = f"{survey.masks / survey.images:,.1f} per image"
        masks = f"{masks} ({mean})" if masks else mean
    per_mask = f"{survey.runs:,} ({survey.runs / survey.masks:,.0f} per mask)" if survey.masks else "0"
    sizes = sorted(survey.sizes.items(), key=lambda item: (-item[1], item[0]))[:_SIZES_LISTED]
    listed = ", ".join(f"{width:,} × {height:,} ({count:,})" for (width, height), count in sizes)
    if len(survey.sizes) > _SIZES_LISTED:
        listed += f" and {counted(len(survey.sizes) - _SIZES_LISTED, 'other size')}"
    stored = sum(part[3] for part in gathered.parts)
    return [
        ("Images", f"{gathered.images:,}"),
        ("Masks", masks or "0"),
        ("Shown here", shown),
        ("Runs", per_mask),
        ("Image sizes", listed or "none"),
        (
            "Stored",
            size_text(stored)
            + (f" in {counted(len(gathered.parts), gathered.part_noun)}" if len(gathered.parts) > 1 else ""),
        ),
        *gathered.facts,
    ]


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in facts)


def _surveyed(gathered: Gathered) -> str:
    if gathered.surveyed is None:
        return ""
    names, of = gathered.surveyed
    listed = ", ".join(names)
    return (
        f"<details><summary>Runs, image sizes and distributions over {len(names):,} of {of:,} shards, evenly "
        f"spaced; --survey all reads every index</summary><p>{escape(listed)}</p></details>"
    )


def _parts(gathered: Gathered) -> str:
    """The collapsed list of files; empty for a single file, whose name is the title."""
    if len(gathered.parts) < 2:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{_count(images)}</td><td>{_count(masks)}</td><td>{size_text(size)}</td></tr>"
        for name, images, masks, size in gathered.parts[:_LISTED]
    )
    more = len(gathered.parts) - _LISTED
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    head = f"<tr><th>{gathered.part_noun.capitalize()}</th><th>Images</th><th>Masks</th><th>Size</th></tr>"
    return (
        f"<details><summary>{counted(len(gathered.parts), gathered.part_noun)}</summary>"
        f'<div class="scroll"><table>{head}{rows}</table></div>{rest}</details>'
    )


def _skipped(gathered: Gathered) -> str:
    counts = gathered.skipped.counts
    if not counts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(reason)}</td><td>{count:,}</td><td>"
        + "<br>".join(escape(message[:300]) for message in gathered.skipped.examples[reason])
        + "</td></tr>"
        for reason, count in sorted(counts.items())
    )
    head = "<tr><th>Reason</th><th>Count</th><th>For example</th></tr>"
    total = sum(counts.values())
    return (
        f'<details class="warning"><summary>{total:,} skipped because they cannot be used</summary>'
        f'<div class="scroll"><table>{head}{rows}</table></div></details>'
    )


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
