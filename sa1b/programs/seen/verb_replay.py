"""Rebuild the images and masks of a step of a run, on one machine, whatever its number of ranks was.

Example: sa1b replay run --worst 20
         sa1b replay run --step 1200 --out step-1200
         sa1b replay run --worst 20 --by rise --out-view without.json

The images, their frames and their chosen masks are computed from the state that each start of the run
records, so they equal those of the run bit for bit. --worst lists the steps with the highest loss, and the
image with the highest loss of each step, from RUN/metrics.jsonl. Changes of dataset, code, libraries and
damage since the run are named. Exit code 0: rebuilt; 2: nothing was rebuilt; 3: rebuilt except for some
images; 130: interrupted.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import loading, show
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import takes_endpoint

if TYPE_CHECKING:
    from sa1b.programs.seen.history import Span
    from sa1b.programs.seen.replayed import Replayed
    from sa1b.programs.seen.worst import WorstSteps

TOUR = (146, "Train", "the images of a step", "sa1b replay run --step 1200")


@takes_endpoint
def main(
    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")],
    /,
    step: Annotated[int | None, Range(1)] = None,
    worst: Annotated[int | None, Range(1)] = None,
    by: Literal["loss", "grad_norm", "rise"] = "loss",
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    weights: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None,
    out_view: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Rebuild the images and masks of a step of a run, on one machine, whatever its number of ranks was.

    Args:
        run: --out of `sa1b train`: a folder or a URL.
        step: The step, counted from 1 as in metrics.jsonl.
        worst: List this number of steps with the highest figure, and the image with the highest loss of each.
        by: The figure of --worst: the loss, the norm of the gradient, or the rise of the loss above the
            median of the 50 logged steps before, which finds spikes.
        out: Also write a page with the images and their chosen masks with prompts, as the model got them,
            into this new folder: all images of --step, or the worst ones of --worst.
        weights: Also compute the prompts of all iterations, and the loss and IoU of each mask: with the
            checkpoint of a run that is nearest to the step, with this checkpoint, or with this file. Prompts
            after the first iteration are those of the run only with a checkpoint of the step before.
        out_view: With --worst: also write a view without these images, a .json file; of a mixture, a file for
            each source that has one of them.
        json_output: Print the result as JSON, with a digest of the tensors of each sample.
    """
    if (step is None) == (worst is None):
        named = "no step is named" if step is None else "a step and the worst steps are named"
        raise UsageError(f"{run}: {named}; pass either --step or --worst")
    if worst is None and out_view is not None:
        raise UsageError("--out-view: needs --worst; add it, or drop --out-view")
    Range(1).check("--step" if worst is None else "--worst", worst or step or 0)
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists; pass a new folder")
    with loading():
        from sa1b.programs.seen.history import read_metrics, spans
        from sa1b.programs.seen.replayed import write_page
        from sa1b.programs.seen.worst import check_path, positions_of, worst_steps, write_views
    if out_view is not None:
        check_path(out_view)
    data = read_metrics(run)
    answer: Replayed | WorstSteps
    if worst is None:
        assert step is not None
        images = [_replayed(run, spans(run, data, None), step, weights, None, draw=out is not None)]
        title, answer = f"{run}, step {step:,}", images[0]
    else:
        listed = worst_steps(run, data, worst, by)
        if out_view is not None:
            listed = replace(listed, views=write_views(spans(run, data, None)[-1], listed.steps, out_view))
        images = []
        if out is not None or weights is not None:
            positions = positions_of(listed.steps, "--weights" if out is None else "--out")
            starts = spans(run, data, None)
            images = [
                _replayed(run, starts, number, weights, {position}, draw=out is not None)
                for number, position in positions.items()
            ]
        title, answer = listed.title(), replace(listed, images=images)
    if out is not None:
        write_page(out, title, images)
    present(answer, json_output)
    if out is not None and not json_output:
        show(f"page: {out}/index.html")
    return max((image.exit_code() for image in images), default=0)


def _replayed(
    run: str, starts: "list[Span]", step: int, weights: str | None, positions: set[int] | None, *, draw: bool
) -> "Replayed":
    from sa1b.programs.seen.prompts import Prompts
    from sa1b.programs.seen.replayed import rebuilt

    span = next(
        (candidate for candidate in reversed(starts) if candidate.first < step <= candidate.stop), None
    )
    if span is None:
        raise UsageError(f"--step {step}: the run has no such step; pass one that its metrics.jsonl has")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch about a single process
        prompts = Prompts(run, span, step, weights)
    return rebuilt(run, span, step, prompts, positions=positions, draw=draw)
