"""The steps of a run with the highest loss or gradient norm, their worst images, and views without them."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from sa1b.console import command, counted
from sa1b.errors import UsageError
from sa1b.names import is_short_name
from sa1b.programs.seen.history import Span, sources_of
from sa1b.programs.seen.replayed import Replayed, number_text
from sa1b.report import aligned
from sa1b.views.view import write_view

By = Literal["loss", "grad_norm", "rise"]
_BEFORE = 50  # logged steps whose median a rise is compared with


@dataclass(frozen=True, slots=True)
class WorstStep:
    """A logged step, and the image with the highest loss in it; None: not recorded, or not finite."""

    step: int
    loss: float | None
    grad_norm: float | None
    rise: float | None  # of the loss above the median of the logged steps before
    image_id: int | None = None
    position: int | None = None  # of the image, in the order of the run
    image_loss: float | None = None  # mean over the masks of the image


@dataclass(frozen=True, slots=True, eq=False)
class WorstSteps:
    """The worst steps of a run, and the views that were written without their images."""

    run: str
    by: By
    of: int  # logged steps
    steps: list[WorstStep]
    views: list[dict[str, Any]] = field(default_factory=list)
    images: list[Replayed] = field(default_factory=list)  # rebuilt: one for each step

    def document(self) -> dict[str, Any]:
        images = [image.document() for image in self.images]
        return {**asdict(replace(self, images=[])), "images": images}

    def title(self) -> str:
        """What is listed, in one line."""
        return f"{self.run}: the {counted(len(self.steps), 'step')} of {self.of:,} with the highest {self.by}"

    def table(self) -> str:
        rows = [("step", "loss", "rise", "grad_norm", "image", "its loss")]
        rows += [
            (
                f"{step.step:,}",
                *map(number_text, (step.loss, step.rise, step.grad_norm)),
                *(
                    ("not recorded",)
                    if step.image_id is None
                    else (str(step.image_id), number_text(step.image_loss))
                ),
            )
            for step in self.steps
        ]
        lines = [self.title(), *aligned(rows, [True] * 6, "  ")]
        for image in self.images:
            lines += image.table().splitlines()
        for view in self.views:
            left_out = counted(view["of_images"] - view["images"], "image")
            lines.append(
                f"{view['path']}: view of {view['root']} without {left_out}: {view['images']:,} images"
            )
            flags = "--data.root", view["root"], "--data.view", view["opens"]
            new = f"a new run: {command('train', *flags)} ..."
            if view["source"] is not None:
                new = f"in the file of --data.mix: {view['source']}: {{view: {view['opens']}}}"
            lines.append(f"  {new}")
        return "\n".join(
            [*lines, f"Next: {command('replay', self.run, '--step', self.steps[0].step)} --out PAGE"]
        )


class _Image(msgspec.Struct):
    id: int
    position: int
    loss: float | None = None


class _Step(msgspec.Struct):
    step: int
    loss: float | None
    grad_norm: float | None
    worst_image: _Image | None = None


def worst_steps(run: str, data: bytes, count: int, by: By) -> WorstSteps:
    """The steps of a metrics.jsonl with the highest figure, those that are not finite first."""
    found = re.findall(rb'^{"step": .*"grad_norm": .*}$', data, re.MULTILINE)
    try:
        lines = [json.loads(line) for line in found]
        msgspec.convert(lines, list[_Step])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{run}/metrics.jsonl: damaged ({error}); restore it from a copy") from None
    if not lines:
        raise UsageError(f"{run}/metrics.jsonl: has no step; pass a run that has trained")
    losses = np.array([np.nan if line["loss"] is None else line["loss"] for line in lines])
    before = np.lib.stride_tricks.sliding_window_view(
        np.append(np.full(_BEFORE, np.nan), losses[:-1]), _BEFORE
    )
    known = np.isfinite(before).any(axis=1)
    rises = np.zeros(len(losses))
    rises[known] = losses[known] - np.nanmedian(before[known], axis=1)
    figures = rises if by == "rise" else [line[by] for line in lines]
    key = np.array([np.inf if value is None or math.isnan(value) else value for value in figures])
    chosen = np.argsort(-key, kind="stable")[:count].tolist()
    steps = []
    for i in chosen:
        line, worst = lines[i], lines[i].get("worst_image", {})
        steps.append(
            WorstStep(
                step=line["step"],
                loss=line["loss"],
                grad_norm=line["grad_norm"],
                rise=None if math.isnan(rises[i]) else float(rises[i]),
                image_id=worst.get("id"),
                position=worst.get("position"),
                image_loss=worst.get("loss"),
            )
        )
    return WorstSteps(run, by, len(lines), steps)


def check_path(out: Path) -> None:
    """UsageError: a view cannot be written at this path."""
    if out.suffix != ".json":
        raise UsageError(f"--out-view {out}: must end with .json; pass a new file such as without.json")


def positions_of(steps: Sequence[WorstStep], flag: str) -> dict[int, int]:
    """Step -> position of its worst image; UsageError with `flag`: no step has one."""
    positions = {step.step: step.position for step in steps if step.position is not None}
    if not positions:
        raise UsageError(
            f"{flag}: metrics.jsonl has no worst images, as of earlier versions and models without sums of "
            "images; find them with --step N --out PAGE and pass the others to `sa1b view --ids`"
        )
    return positions


def write_views(span: Span, steps: Sequence[WorstStep], out: Path) -> list[dict[str, Any]]:
    """Write a view of each dataset of the run without the worst images of these steps: OUT, or of a mixture
    OUT with the name of the source before its ending. UsageError: there is nothing to leave out, or a file is
    there.
    """
    positions = list(positions_of(steps, "--out-view").values())
    sources, mixture = sources_of(span)
    which = np.zeros(len(positions), np.int64)
    if mixture is not None:
        which, _, _ = mixture.locate(np.array(positions))
    ids = np.array([step.image_id for step in steps if step.position is not None], np.uint64)
    used = [number for number in range(len(sources)) if (which == number).any()]
    names = [
        source.name if is_short_name(source.name) else str(number) for number, source in enumerate(sources)
    ]
    targets = {0: out}
    if mixture is not None:
        targets = {number: out.with_name(f"{out.stem}-{names[number]}.json") for number in used}
    if there := [str(path) for path in targets.values() if path.exists()]:
        raise UsageError(f"--out-view {there[0]}: exists; pass another file, or move it away")
    written = []
    for number, path in targets.items():
        source = sources[number]
        view, table = source.view, source.table
        rows = np.arange(len(table), dtype=np.uint32) if view.rows is None else view.rows
        kept = np.sort(rows[~np.isin(table.image_id[rows], ids[which == number])])
        condition = {} if view.masks_where is None else {"masks-where": view.masks_where.text}
        write_view(
            source.root,
            table,
            kept,
            masks_where=view.masks_where,
            layers=view.layers,
            chosen_by={**condition, "ids": str(path.with_suffix(".ids"))},
            out=path,
        )
        opens = str(path) if "/" in str(path) else f"./{path}"
        written.append(
            {
                "path": str(path),
                "source": None if mixture is None else source.name,
                "root": source.root,
                "images": len(kept),
                "of_images": len(rows),
                "opens": opens,
            }
        )
    return written
