"""Show images with their masks on one HTML page.

Example: sa1b gallery shards --count 12 --sort area

The page needs no other file and no network. It has at most 20 MB: if necessary, it has smaller images, then
fewer images. A click opens an image; click a mask to see its numbers, or use the keys that the page lists.
Exit code 0: written; 2: not written; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.names import ID_END
from sa1b.report import present
from sa1b.sources.path_arguments import check_here, takes_endpoint

TOUR = (180, "Questions about both", "show images with masks", "sa1b gallery shards")


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    ids: Annotated[
        UseAppendAction[tuple[tuple[int, ...], ...]], tyro.conf.arg(name="id", metavar="N ...")
    ] = (),
    count: Annotated[int, Range(1, 100)] = 24,
    sort: Literal["stability_score", "predicted_iou", "masks", "area", "image_id"] = "stability_score",
    out: Path = Path("gallery.html"),
    overwrite: bool = False,
    max_side: Annotated[int, Range(64, 1000, unit=" pixels")] = 1000,
    seed: int = 0,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    layers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    warnings: bool = False,
    predictions: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show images with their masks on one HTML page.

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL.
        ids: Show these images instead of a sample, at most 100.
        count: Images to show: a uniform sample of the input.
        sort: Order of the images on the page: stability_score or predicted_iou (mean over an image's masks,
            lowest first), masks (number, most first), area (mean, largest first), image_id. Only the sample
            is sorted; for the extremes of a dataset, find ids with `sa1b query` and use --id.
        out: File for the page; a page of the same input is replaced.
        overwrite: Replace any existing file.
        max_side: Longer side of the images.
        seed: Seed of the sample.
        view: Show a sample of this view of ROOT: its name, digest or path. All masks of its images are shown,
            also if the view has a condition on masks.
        layers: Show the masks of ROOT with the changes of these layers (`sa1b layer add`), in this order.
        warnings: Show only images of ROOT that have a warning from reshard; the page contains the reasons.
        predictions: File predictions.jsonl from the output folder of `sa1b train`: show its images, with the
            predicted masks next to the true masks.
        json_output: Print the summary as JSON, without progress.
    """
    chosen = tuple(dict.fromkeys(image_id for some in ids for image_id in some))
    if len(chosen) > 100 or any(not 0 <= image_id < ID_END for image_id in chosen):
        raise UsageError(f"--id ({len(chosen)} ids): must be at most 100 ids, each from 0 to 2**63 - 1")
    check_here("--out", out)
    with loading():
        from sa1b.programs.gallery.page import check_replaceable, open_part, read_pictures, write_page
    mark = check_replaceable(root, out, overwrite=overwrite)
    part = open_part(root, view, layers, warnings=warnings, predictions=predictions)
    read_pictures(part, chosen, count, seed, predictions, max_side, quiet=json_output)
    present(write_page(part, out, mark, sort, max_side), json_output)
    return 0
