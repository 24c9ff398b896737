"""Select images and masks of a dataset directory by conditions: a view to train on.

Example: sa1b view shards --masks-where "stability_score >= 0.96 and area_fraction < 0.9"
             --images-where "masks >= 5 and width >= 1500" --held-out 2% --name good

Nothing is copied: a view is a list of image ids, in ROOT/views or at --out. Exit code 0: written;
2: not written; 3: written, and ids of --ids were missing (--missing skip or list); 130: interrupted.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import check_here, check_writable, takes_endpoint

TOUR = (50, "Data", "select images and masks", "sa1b view shards --held-out 1% --name train")


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    masks_where: Annotated[str | None, tyro.conf.arg(metavar="CONDITION")] = None,
    images_where: Annotated[str | None, tyro.conf.arg(metavar="CONDITION")] = None,
    subset: Annotated[str | None, tyro.conf.arg(metavar="PART")] = None,
    held_out: Annotated[str | None, tyro.conf.arg(metavar="PART")] = None,
    split: Literal["train", "held-out"] = "train",
    ids: Annotated[str | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None,
    missing: Literal["refuse", "skip", "list"] = "refuse",
    layers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    overwrite: bool = False,
    workers: Annotated[int, Range(1)] = 1,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Select images and masks of a dataset directory by conditions: a view to train on.

    Conditions have comparisons, and, or, not, + - * /, parentheses, numbers and fields. The command prints
    the digest of the view, which is computed from the image ids and the condition on masks. The digest does
    not depend on the division into shards. If sources are added later, an existing view keeps its images and
    its order, and the same command gives another view.

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL. With --out it may be read-only.
        masks_where: Condition on masks. Fields: area, area_fraction (of the image), bbox_x, bbox_y,
            bbox_width, bbox_height, predicted_iou, stability_score, point_x, point_y, crop_x, crop_y,
            crop_width, crop_height, runs_count, mask_id, and the image's width and height.
        images_where: Condition on images. Fields: masks (number of masks that fulfil --masks-where), width,
            height (of the source), image_width, image_height (as stored), image_id, jpg_bytes, masks_bytes.
        subset: Only this fraction, such as 1%, by hash of the image id. The subset of 2% contains that of 1%.
        held_out: Hold out this fraction, such as 2%, for evaluation; see --split.
        split: With --held-out: the training images, or the held-out images. --subset applies to the training
            images only.
        ids: Only these images: a text file with one id per line (223750, sa_223750 or sa_223750.jpg), a CSV,
            TSV, Parquet or JSON file with a column of ids or names (see `sa1b fetch --help`),
            or the .ids file of a view. Images alone also by the names of their files: cats/1.jpg.
        missing: For ids of --ids that ROOT does not contain: refuse to write the view, skip (omit and count
            them) or list (omit and print them).
        layers: Read and count masks with the changes of these layers (`sa1b layer add`), in this order. The
            view records their digests, and they are always applied when it is read.
        name: Readable alias of the digest.
        out: Write the view here instead of ROOT/views: a folder, or a path that ends with .json. To open the
            view, pass this path (with a "/" in it).
        overwrite: Move --name from another view to this view; replace the view in the file --out.
        workers: Threads that read index files.
        json_output: Print the result as JSON, without progress.
    """
    if missing != "refuse" and ids is None:
        raise UsageError(f"--missing {missing}: needs --ids; add --ids or omit --missing")
    if not any((masks_where, images_where, subset, held_out, ids, layers, name, out)):
        raise UsageError(
            f"{root}: the view would have all images; pass --masks-where, --images-where, --subset, "
            "--held-out or --ids, or give a view of all images a --name"
        )
    check_here("--out", out)
    if out is None:
        check_writable("a view is written there without --out", root)
    with loading():
        from sa1b.views.selection import Selection, select
    selection = Selection(
        masks_where=masks_where,
        images_where=images_where,
        subset=subset,
        held_out=held_out,
        split=split,
        ids=ids,
        missing=missing,
        layers=layers,
    )
    selected = select(
        root, selection, name=name, out=out, overwrite=overwrite, workers=workers, quiet=json_output
    )
    present(selected, json_output)
    return 3 if len(selected.missing) else 0
