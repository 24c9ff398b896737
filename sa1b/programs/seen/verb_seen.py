"""Which images a run was trained on, and how often.

Example: sa1b seen run
         sa1b seen run --image 223750 --before-step 5000
         sa1b seen run --image 223750 --masks
         sa1b seen run --out seen.parquet

The order of a run is a formula, so nothing is logged for each image: the answer is computed from the starts
in RUN/metrics.jsonl. The table of --out has the columns image_id, times and source, for `sa1b query` and
`sa1b view --ids`, and with --masks also mask_id and mask_index. Exit code 0: answered; 1: an image of --image
was not seen; 2: not answered; 130: interrupted.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import counted, loading
from sa1b.errors import UsageError
from sa1b.report import first_lines, present
from sa1b.sources.path_arguments import takes_endpoint

if TYPE_CHECKING:
    from sa1b.programs.seen.history import Span

TOUR = (145, "Train", "images that a run trained on", "sa1b seen run")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The answer: of each source, its images by the number of times they were used; and single images."""

    run: str
    steps: int
    sources: list[dict[str, Any]]
    images: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        return {"run": self.run, "steps": self.steps, "sources": self.sources, "images": self.images}

    def table(self) -> str:
        if self.images:
            return "\n".join(first_lines([line for answer in self.images for line in _lines(answer)]))
        lines = [f"{self.run}: {counted(self.steps, 'step')}"]
        for source in self.sources:
            lines.append(
                f"{source['source']} ({source['root']}): {counted(source['used'], 'image')} used, "
                f"{source['distinct']:,} of {source['images']:,} seen, "
                f"each {source['least']:,} to {source['most']:,} times"
            )
        return "\n".join(lines)

    def exit_code(self) -> int:
        seen = {answer["image_id"] for answer in self.images if answer["times"]}  # in any source
        return int(not seen.issuperset(answer["image_id"] for answer in self.images))


@takes_endpoint
def main(
    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")],
    /,
    image: Annotated[UseAppendAction[tuple[int, ...]], tyro.conf.arg(metavar="ID")] = (),
    before_step: Annotated[int | None, Range(0)] = None,
    masks: bool = False,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Which images a run was trained on, and how often.

    Args:
        run: --out of `sa1b train`: a folder or a URL.
        image: Id of an image; repeat it for several. Exit code 1 if one was not seen.
        before_step: Count the first steps only; by default all that metrics.jsonl has.
        masks: Also count the masks that were chosen, of --image, or of all images in the table of --out. The
            choice depends on the stored masks, so that each sample is read.
        out: Also write a table of the images that were seen, all or those of --image, a Parquet file.
        json_output: Print the result as JSON.
    """
    if before_step is not None:
        Range(0).check("--before-step", before_step)
    if masks and not image and out is None:
        raise UsageError("--masks: needs --image or --out, because a run has many masks; add one of them")
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists; pass another file, or move it away")
    with loading():
        from sa1b.programs.seen.history import read_metrics, spans
    starts = spans(run, read_metrics(run), before_step)
    steps = sum(span.stop - span.first for span in starts)
    sources, answers = ([], _answers(starts, image, masks)) if image else (_sources(starts), [])
    answer = Seen(run, steps, sources, answers)
    if out is not None:
        _write(out, starts, image, masks)
    present(answer, json_output)
    return answer.exit_code()


def _lines(answer: dict[str, Any]) -> list[str]:
    there = f" in {answer['source']}" if answer["source"] else "; not an image of this run"
    masks = [
        f"  mask {mask['mask_id']}: {counted(mask['times'], 'time')}" for mask in answer.get("masks", ())
    ]
    return [f"image {answer['image_id']}: seen {counted(answer['times'], 'time')}{there}", *masks]


def _sources(starts: "list[Span]") -> list[dict[str, Any]]:
    from sa1b.programs.seen.history import seen_images

    return [
        {
            "source": seen.source,
            "root": seen.root,
            "images": len(seen.ids),
            "used": int(seen.times.sum()),
            "distinct": int((seen.times > 0).sum()),
            "least": int(seen.times.min()),
            "most": int(seen.times.max()),
        }
        for seen in seen_images(starts)
    ]


def _answers(starts: "list[Span]", images: tuple[int, ...], masks: bool) -> list[dict[str, Any]]:
    """How often each image was used, in each dataset that has it; with `masks` also each of its masks."""
    from sa1b.programs.seen.history import visits

    answers: list[dict[str, Any]] = []
    for wanted in images:
        known: dict[str, dict[str, Any]] = {}
        for span, source, positions in visits(starts, wanted):
            answer = known.setdefault(source.name, {"image_id": wanted, "source": source.name, "times": 0})
            answer["times"] += len(positions)
            if masks:
                answer.setdefault("visits", []).append((span, positions))
        for answer in known.values():
            if masks:
                from sa1b.programs.seen.samples import seen_masks

                rows = seen_masks(answer.pop("visits")).to_pylist()
                answer["masks"] = [
                    {name: row[name] for name in ("mask_id", "mask_index", "times")} for row in rows
                ]
        answers += known.values() or [{"image_id": wanted, "source": None, "times": 0}]
    return answers


def _write(out: Path, starts: "list[Span]", images: tuple[int, ...], masks: bool) -> None:
    """Write the table of --out."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sa1b.programs.seen.history import seen_images, visits
    from sa1b.storage.atomic import write_whole

    if masks:
        from sa1b.programs.seen.samples import seen_masks

        pieces = [(span, positions) for wanted in images for span, _, positions in visits(starts, wanted)]
        whole = [(span, range(span.position, span.end)) for span in starts]
        table = seen_masks(pieces if images else whole)
    else:
        parts = seen_images(starts)
        used = [(part.times > 0) & (not images or np.isin(part.ids, images)) for part in parts]
        columns = {
            "image_id": [part.ids[some] for part, some in zip(parts, used, strict=True)],
            "times": [part.times[some] for part, some in zip(parts, used, strict=True)],
            "source": [np.full(int(some.sum()), part.source) for part, some in zip(parts, used, strict=True)],
        }
        table = pa.table({name: np.concatenate(arrays) for name, arrays in columns.items()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    write_whole(out, buffer.getvalue())
