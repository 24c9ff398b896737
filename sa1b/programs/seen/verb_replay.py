"""Rebuild the images and masks of a step of a run, on one machine, whatever its number of ranks was.

Example: sa1b replay run --worst 20
         sa1b replay run --step 1200 --weights run --out step-1200.safetensors

The images, their frames and their chosen masks are computed from the state that each start of the run
records, so they equal those of the run bit for bit. --worst lists the steps with the highest loss, and the
image with the highest loss of each step, from RUN/metrics.jsonl. Changes of dataset, code, libraries and
damage since the run are named. Exit code 0: rebuilt; 2: nothing was rebuilt; 3: rebuilt except for some
images; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import command, counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import aligned
from sa1b.sources.path_arguments import takes_endpoint

TOUR = (220, "Questions about both", "the images of a step", "sa1b replay run --step 1200")
By = Literal["loss", "grad_norm", "rise"]
_BEFORE = 50  # logged steps whose median a rise is compared with


@takes_endpoint
def main(
    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")],
    /,
    step: Annotated[int | None, Range(1)] = None,
    worst: Annotated[int | None, Range(1)] = None,
    by: By = "loss",
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    weights: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Rebuild the images and masks of a step of a run, on one machine, whatever its number of ranks was.

    Args:
        run: --out of `sa1b train`: a folder or a URL.
        step: The step, counted from 1 as in metrics.jsonl.
        worst: List this number of steps with the highest figure, and the image with the highest loss of each.
        by: The figure of --worst: the loss, the norm of the gradient, or the rise of the loss above the
            median of the 50 logged steps before, which finds spikes.
        out: Also write the tensors of each sample as the model got them, and the JSON as metadata, to this
            new .safetensors file: all samples of --step, or the worst ones of --worst.
        weights: Also compute the prompts of all iterations, and the loss and IoU of each mask: with the
            checkpoint of a run that is nearest to the step, with this checkpoint, or with this file. Prompts
            after the first iteration are those of the run only with a checkpoint of the step before.
        json_output: Print the result as JSON, with a digest of the tensors of each sample.
    """
    if (step is None) == (worst is None):
        raise UsageError(f"{run}: no step is named, or in two ways; pass either --step or --worst")
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists; pass another file, or move it away")
    with loading():
        import safetensors.torch

        from sa1b.programs.seen.history import read_lines, replayed, spans_of, table
        from sa1b.storage.atomic import write_whole
    if worst is None:
        document, tensors = replayed(run, spans_of(run), step or 0, weights)
        lines, images = table(document), [document]
    else:
        document = worst_steps(run, read_lines(run), worst, by)
        lines, images, tensors = _listed(document), document["images"], {}
        if out is not None or weights is not None:
            spans = spans_of(run)
            for bad in document["steps"]:
                if bad["position"] is not None:
                    image, more = replayed(run, spans, bad["step"], weights, bad["position"])
                    images.append(image)
                    tensors |= more
                    lines += table(image)
    if out is not None:
        write_whole(out, safetensors.torch.save(tensors, {"replay": json.dumps(document)}))
    show(json.dumps(document, indent=1) if json_output else "\n".join(lines))
    return 3 if any(": not rebuilt: " in change for image in images for change in image["changes"]) else 0


def worst_steps(run: str, lines: list[bytes], count: int, by: By) -> dict[str, Any]:
    """The steps of a metrics.jsonl with the highest figure, those that are not finite first."""
    import numpy as np

    steps = [json.loads(line) for line in lines if line.startswith(b'{"step": ') and b'"grad_norm": ' in line]
    if not steps:
        raise UsageError(f"{run}/metrics.jsonl: has no step; pass a run that has trained")
    losses = np.array([step["loss"] for step in steps], float)  # None: nan
    padded = np.append(np.full(_BEFORE, np.nan), losses[:-1])
    before = np.lib.stride_tricks.sliding_window_view(padded, _BEFORE)
    known = np.isfinite(before).any(axis=1)
    rises = np.zeros(len(losses))
    rises[known] = losses[known] - np.nanmedian(before[known], axis=1)
    figures = rises if by == "rise" else np.array([step[by] for step in steps], float)
    found = []
    for i in np.argsort(-np.where(np.isnan(figures), np.inf, figures), kind="stable")[:count]:
        image = steps[i].get("worst_image", {})  # that with the highest loss
        named = {name: steps[i][name] for name in ("step", "loss", "grad_norm")}
        named["rise"] = None if np.isnan(rises[i]) else float(rises[i])
        named |= {"image_id": image.get("id"), "position": image.get("position")}
        found.append(named | {"image_loss": image.get("loss")})
    return {"run": run, "by": by, "of": len(steps), "steps": found, "images": []}


def _listed(worst: dict[str, Any]) -> list[str]:
    from sa1b.programs.seen.history import number_text

    rows, steps = [("step", "loss", "rise", "grad_norm", "image", "its loss")], worst["steps"]
    for step in steps:
        figures = map(number_text, (step["loss"], step["rise"], step["grad_norm"]))
        image = str(step["image_id"]), number_text(step["image_loss"])
        known = image if step["position"] is not None else ("not recorded",)
        rows.append((f"{step['step']:,}", *figures, *known))
    title = f"the {counted(len(steps), 'step')} of {worst['of']:,} with the highest {worst['by']}"
    again = command("replay", worst["run"], "--step", steps[0]["step"])
    return [f"{worst['run']}: {title}", *aligned(rows, [True] * 6, "  "), f"Next: {again}"]
