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
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import first_lines
from sa1b.sources.path_arguments import takes_endpoint

TOUR = (210, "Questions about both", "images that a run trained on", "sa1b seen run")


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
    if masks and not image and out is None:
        raise UsageError("--masks: needs --image or --out, because a run has many masks; add one of them")
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists; pass another file, or move it away")
    with loading():
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        from sa1b.programs.seen.history import seen_images, seen_masks, spans_of
        from sa1b.storage.atomic import write_whole
    spans = spans_of(run, before_step)
    found = seen_images(spans)
    chosen = seen_masks(spans, image) if masks else []
    steps = sum(span.stop - span.first for span in spans)
    lines, images, sources = [] if image else [f"{run}: {counted(steps, 'step')}"], [], []
    for wanted in image:
        there = [(name, times[ids == wanted]) for name, (_, ids, times) in found.items()]
        answers: list[tuple[str | None, int]] = [(name, int(one[0])) for name, one in there if len(one)]
        for source, count in answers or [(None, 0)]:
            answer: dict[str, Any] = {"image_id": wanted, "source": source, "times": count}
            where = f" in {source}" if source else "; not an image of this run"
            lines.append(f"image {wanted}: seen {counted(count, 'time')}{where}")
            if masks and source:
                own = [mask for mask in chosen if (mask["source"], mask["image_id"]) == (source, wanted)]
                names = ("mask_id", "mask_index", "times")
                answer["masks"] = [{name: mask[name] for name in names} for mask in own]
                lines += [f"  mask {mask['mask_id']}: {counted(mask['times'], 'time')}" for mask in own]
            images.append(answer)
    for name, (root, ids, times) in found.items() if not image else ():
        figures = {"used": times.sum(), "distinct": (times > 0).sum()}
        figures |= {"least": times.min(), "most": times.max()}
        counts = {key: int(figure) for key, figure in figures.items()}
        sources.append({"source": name, "root": root, "images": len(ids), **counts})
        text = "{used:,} images used, {distinct:,} of {images:,} seen, each {least:,} to {most:,} times"
        lines.append(f"{name} ({root}): {text.format(**sources[-1])}")
    if out is not None:
        columns = ["image_id", *(["mask_id", "mask_index"] if masks else []), "times"]
        schema = pa.schema([*((name, pa.int64()) for name in columns), ("source", pa.string())])
        parts = [pa.Table.from_pylist(chosen, schema)]
        for name, (_, ids, times) in found.items() if not masks else ():
            rows = (times > 0) & (not image or np.isin(ids, image))
            parts.append(pa.table([ids[rows], times[rows], [name] * int(rows.sum())], schema=schema))
        buffer = io.BytesIO()
        pq.write_table(pa.concat_tables(parts), buffer)
        write_whole(out, buffer.getvalue())
    document = {"run": run, "steps": steps, "sources": sources, "images": images}
    show(json.dumps(document, indent=1) if json_output else "\n".join(first_lines(lines)))
    seen = {one["image_id"] for one in images if one["times"]}  # in any source
    return int(not seen.issuperset(image))
