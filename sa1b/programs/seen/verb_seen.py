"""Which images a run was trained on, and how often.

Example: sa1b seen run
         sa1b seen run --image 223750 --before-step 5000
         sa1b seen run --out seen.parquet

The order of a run is a formula, so nothing is logged for each image: the answer is computed from the starts
in RUN/metrics.jsonl. The table of --out has the columns image_id, times and source, for `sa1b query` and
`sa1b view --ids`. Exit code 0: answered; 1: an image of --image was not seen; 2: not
answered; 130: interrupted.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import counted, loading
from sa1b.errors import UsageError
from sa1b.report import first_lines, present
from sa1b.sources.path_arguments import takes_endpoint

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
            return "\n".join(
                first_lines(
                    [
                        f"image {one['image_id']}: seen {counted(one['times'], 'time')}"
                        + (f" in {one['source']}" if one["source"] else "; not an image of this run")
                        for one in self.images
                    ]
                )
            )
        lines = [f"{self.run}: {counted(self.steps, 'step')}"]
        for one in self.sources:
            lines.append(
                f"{one['source']} ({one['root']}): {counted(one['used'], 'image')} used, "
                f"{one['distinct']:,} of {one['images']:,} seen, "
                f"each {one['least']:,} to {one['most']:,} times"
            )
        return "\n".join(lines)

    def exit_code(self) -> int:
        return int(any(not one["times"] for one in self.images))


@takes_endpoint
def main(
    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")],
    /,
    image: Annotated[UseAppendAction[tuple[int, ...]], tyro.conf.arg(metavar="ID")] = (),
    before_step: Annotated[int | None, Range(0)] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Which images a run was trained on, and how often.

    Args:
        run: --out of `sa1b train`: a folder or a URL.
        image: Id of an image; repeat it for several. Exit code 1 if one was not seen.
        before_step: Count the first steps only; by default all that metrics.jsonl has.
        out: Also write a table of all images that were seen, a Parquet file.
        json_output: Print the result as JSON.
    """
    if before_step is not None:
        Range(0).check("--before-step", before_step)
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists; pass another file, or move it away")
    with loading():
        from sa1b.programs.seen.history import read_metrics, seen_images, spans
    found = spans(run, read_metrics(run), before_step)
    images = seen_images(found)
    sources = [
        {
            "source": one.source,
            "root": one.root,
            "images": len(one.ids),
            "used": int(one.times.sum()),
            "distinct": int((one.times > 0).sum()),
            "least": int(one.times.min()),
            "most": int(one.times.max()),
        }
        for one in images
    ]
    answers: list[dict[str, Any]] = []
    for wanted in image:
        places = [(one, one.times[one.ids == wanted]) for one in images]
        known = [(one.source, int(times[0])) for one, times in places if len(times)]
        answers += [{"image_id": wanted, "source": source, "times": times} for source, times in known]
        if not known:
            answers.append({"image_id": wanted, "source": None, "times": 0})
    if out is not None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        from sa1b.storage.atomic import write_whole

        used = [one.times > 0 for one in images]
        columns = {
            "image_id": np.concatenate([one.ids[some] for one, some in zip(images, used, strict=True)]),
            "times": np.concatenate([one.times[some] for one, some in zip(images, used, strict=True)]),
            "source": np.concatenate(
                [np.full(int(some.sum()), one.source) for one, some in zip(images, used, strict=True)]
            ),
        }
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        write_whole(out, buffer.getvalue())
    answer = Seen(run, sum(span.stop - span.first for span in found), sources, answers)
    present(answer, json_output)
    return answer.exit_code()
