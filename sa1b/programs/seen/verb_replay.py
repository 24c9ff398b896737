"""Rebuild the images and masks of a step of a run, on one machine, whatever its number of ranks was.

Example: sa1b replay run --worst 20
         sa1b replay run --step 1200 --out step-1200
         sa1b replay run --worst 20 --by rise --out-view without.json

The images, their frames and their chosen masks are a formula of the state that each start of the run records,
so that they are those of the run to the bit. --worst lists the steps with the highest loss and the image with
the highest loss of each, from RUN/metrics.jsonl. Exit code 0: rebuilt; 2: not rebuilt; 130: interrupted.
"""

import hashlib
import html
import io
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import counted, loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import takes_endpoint

if TYPE_CHECKING:
    from sa1b.programs.seen.history import Span
    from sa1b.stream.batch import Batch

TOUR = (146, "Train", "the images of a step", "sa1b replay run --step 1200")
_TOGETHER = 16  # images that are rebuilt at a time


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The samples of a step, in the order of their positions, and what has changed since the run."""

    run: str
    step: int
    samples: list[dict[str, Any]]
    changes: list[str]

    def document(self) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "samples": self.samples, "changes": self.changes}

    def table(self) -> str:
        lines = [f"warning: {change}" for change in self.changes]
        lines.append(f"{self.run}, step {self.step:,}: {counted(len(self.samples), 'image')}")
        for one in self.samples:
            source = f"{one['source']}  " if one["source"] else ""
            mirrored = ", mirrored" if one["mirrored"] else ""
            masks = counted(len(one["mask_ids"]), "mask")
            lines.append(f"{one['position']:>12,}  {source}image {one['image_id']}, {masks}{mirrored}")
        return "\n".join(lines)


@takes_endpoint
def main(
    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")],
    /,
    step: Annotated[int | None, Range(1)] = None,
    worst: Annotated[int | None, Range(1)] = None,
    by: Literal["loss", "grad_norm", "rise"] = "loss",
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
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
        out: Also write a page with the images and their chosen masks, as the model got them, into this new
            folder: all images of --step, or the worst ones of --worst.
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
        from sa1b.programs.seen.worst import check_path, worst_steps, write_views
    if out_view is not None:
        check_path(out_view)
    text = read_metrics(run)
    if worst is not None:
        listed = worst_steps(run, text, worst, by)
        if out_view is not None:
            listed = replace(listed, views=write_views(spans(run, text, None)[-1], listed.steps, out_view))
        present(listed, json_output)
        return 0
    of_step = [one for one in spans(run, text, None) if step is not None and one.first < step <= one.stop]
    if not of_step or step is None:
        raise UsageError(f"--step {step}: the run has no such step; pass one that its metrics.jsonl has")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        samples, pictures = rebuilt(of_step[-1], step, draw=out is not None)
    replayed = Replayed(run, step, samples, [str(one.message) for one in noted])
    if out is not None:
        _write(out, replayed, pictures)
    present(replayed, json_output)
    return 0


def rebuilt(span: "Span", step: int, *, draw: bool) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The samples of a step of this start of a run, and their images with masks as PNG if `draw`."""
    from sa1b.programs.seen.history import stream_of
    from sa1b.stream.plan import MicroBatch

    stream, size = stream_of(span), int(span.receipt["global_batch"])
    start = span.position + (step - 1 - span.first) * size
    samples: list[dict[str, Any]] = []
    pictures: list[bytes] = []
    for first in range(start, start + size, _TOGETHER):
        last = min(first + _TOGETHER, start + size)
        batch = stream.submit(MicroBatch(first, last, last)).finish()
        samples += [_sample(batch, i) for i in range(len(batch))]
        pictures += [_picture(batch, i) for i in range(len(batch))] if draw else []
    stream.close()
    return samples, pictures


def digest(batch: "Batch", i: int) -> str:
    """SHA-256 of the tensors of one sample of a batch: its image and its masks with boxes and points."""
    found = hashlib.sha256(batch.images[i].contiguous().numpy().tobytes())
    masks = batch.masks.image == i
    for value in (batch.boxes, batch.points, batch.mask_ids, batch.mask_index, batch.masks.dense()):
        found.update(value[masks].numpy().tobytes())
    return found.hexdigest()


def _sample(batch: "Batch", i: int) -> dict[str, Any]:
    return {
        "position": int(batch.positions[i]),
        "source": batch.source[i] if batch.source else None,
        "image_id": int(batch.ids[i]),
        "window": batch.windows[i].tolist(),
        "mirrored": bool(batch.flipped[i]),
        "mask_ids": batch.mask_ids[batch.masks.image == i].tolist(),
        "sha256": digest(batch, i),
    }


def _picture(batch: "Batch", i: int) -> bytes:
    """The image as the model gets it, with its masks, as PNG."""
    from PIL import Image

    from sa1b.masks.runs import Runs
    from sa1b.shards.display import overlay

    rows, columns = batch.framed_sizes[i].tolist()
    pixels = batch.images[i].permute(1, 2, 0).numpy()[:rows, :columns]
    dense = batch.masks.dense()[batch.masks.image == i].numpy()[:, :rows, :columns]
    buffer = io.BytesIO()
    Image.fromarray(overlay(pixels, Runs.from_pixels(dense))).save(buffer, "PNG")
    return buffer.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }}
body {{ margin: 1.5rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1rem }}
figure {{ margin: 0 }}
img {{ width: 100% }}
</style>
<h1>{title}</h1>
<main>
{figures}
</main>
</html>
"""


def _write(out: Path, replayed: Replayed, pictures: list[bytes]) -> None:
    out.mkdir(parents=True)
    figures = []
    for one, picture in zip(replayed.samples, pictures, strict=True):
        name = f"{one['position']}.png"
        (out / name).write_bytes(picture)
        source = f"{one['source']}, " if one["source"] else ""
        mirrored = ", mirrored" if one["mirrored"] else ""
        caption = f"{source}image {one['image_id']}, {counted(len(one['mask_ids']), 'mask')}{mirrored}"
        figures.append(
            f'<figure><img src="{name}" alt=""><figcaption>{html.escape(caption)}</figcaption></figure>'
        )
    title = html.escape(f"{replayed.run}, step {replayed.step:,}")
    (out / "index.html").write_text(_PAGE.format(title=title, figures="\n".join(figures)), encoding="utf-8")
