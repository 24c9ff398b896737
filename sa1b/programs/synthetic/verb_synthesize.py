"""Make synthetic source tars: drawn images in the format of the SA-1B download, with its statistics.

Example: sa1b synthesize source --long-side 640

Exit code 0: written; 2: not written; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import loading, show
from sa1b.errors import UsageError
from sa1b.sources.path_arguments import check_here

TOUR = (10, "Data", "make synthetic source tars", "sa1b synthesize downloads --long-side 640")


def main(
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    tars: Annotated[int, Range(1)] = 2,
    images_per_tar: Annotated[int, Range(1, 11187)] = 100,
    long_side: Annotated[int | None, Range(32, unit=" pixels")] = None,
    first_tar: Annotated[int, Range(0)] = 0,
    seed: Annotated[int, Range(0)] = 0,
    simple: bool = False,
    plain: bool = False,
    phrases: bool = False,
    workers: Annotated[int | None, Range(1)] = None,
    overwrite: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Make synthetic source tars: drawn images in the format of the SA-1B download, with its statistics.

    The tars are gzip, with ./sa_<id>.jpg and ./sa_<id>.json in random order, like the download. The same
    options give the same bytes for any number of workers. An image of full size takes about 0.4 s and 1 MB,
    an image of 640 pixels 0.03 s and 0.1 MB. Without flags: 200 images, 80 s of processor time, 200 MB.

    Args:
        out: Folder for sa_000000.tar, sa_000001.tar, ...; created if it is missing.
        tars: Number of tars.
        images_per_tar: Images per tar, at most 11187.
        long_side: Pixels of the longer side, at least 32; by default full size, mostly 2250x1500.
        first_tar: Number of the first tar, which determines the image ids.
        seed: Seed of the images.
        simple: Draw a few large objects with smooth outlines and plain surfaces instead of scenes with
            SA-1B's statistics, so that a small model learns in minutes.
        plain: Write plain tars instead of gzip.
        phrases: Also write OUT/phrases.parquet, which describes the size, colour, texture and shape of each
            object, for `sa1b train --preset grounding --data.text OUT/phrases.parquet`.
        workers: Worker processes, each with one tar at a time; by default one for each CPU that this job may
            use.
        overwrite: Replace existing tars.
        json_output: Print the summary as JSON, without progress.
    """
    check_here("OUT", out)
    with loading():
        from sa1b.programs.synthetic.source_tars import write_tars
        from sa1b.report import bar
        from sa1b.workers import available_cpus
    if (out / "dataset.json").exists():
        raise UsageError(f"{out}: a dataset directory; name another folder for source tars")
    with bar(tars * images_per_tar, "synthesize", "image", json_output) as shown:
        figures = write_tars(
            out,
            tars=tars,
            images_per_tar=images_per_tar,
            first_tar=first_tar,
            seed=seed,
            long_side=long_side,
            simple=simple,
            compress=not plain,
            workers=available_cpus() if workers is None else workers,
            overwrite=overwrite,
            phrases=phrases,
            progress=shown.update,
        )
    lines = []
    for name, total in figures.items():
        of = {"runs": "masks"}.get(name, "images" if name in ("masks", "jpeg_bytes", "json_bytes") else "")
        each = (
            f"{total / max(figures[of], 1):>13,.{0 if 'bytes' in name else 1}f} per {of[:-1]}" if of else ""
        )
        label = name.replace("_", " ").replace("jpeg", "JPEG").replace("json", "JSON")
        lines.append(f"{label:<11}{total:>15,}{each}")
    show(json.dumps(figures, indent=1) if json_output else "\n".join(lines))
    return 0
