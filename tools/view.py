"""Choose images and masks of a root by their numbers: a view to train on.

Example: python tools/view.py shards --masks-where "stability_score >= 0.96 and area_fraction < 0.9"
             --images-where "masks >= 5 and width >= 1500" --held-out 2% --name good

Nothing is copied: a view is a list of row numbers in ROOT/views. Exit code 0: written; 2: not written;
130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.console import run
from sa1b.errors import UsageError
from sa1b.views.selection import Selection, select


def main(
    root: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT")],
    /,
    masks_where: Annotated[str | None, tyro.conf.arg(metavar="CONDITION")] = None,
    images_where: Annotated[str | None, tyro.conf.arg(metavar="CONDITION")] = None,
    subset: Annotated[str | None, tyro.conf.arg(metavar="PART")] = None,
    held_out: Annotated[str | None, tyro.conf.arg(metavar="PART")] = None,
    split: Literal["train", "held-out"] = "train",
    ids: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    workers: int = 1,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Choose images and masks of a root by their numbers: a view to train on.

    Conditions know comparisons, and, or, not, + - * /, parentheses, numbers and fields. The digest names the
    set of images: the same command gives the same digest whatever the sharding.

    Args:
        root: Folder that tools/reshard.py made.
        masks_where: Which masks of an image count. Fields: area, area_fraction (of the image), bbox_x,
            bbox_y, bbox_width, bbox_height, predicted_iou, stability_score, point_x, point_y, crop_x,
            crop_y, crop_width, crop_height, runs_count, mask_id; width, height of the image.
        images_where: Which images. Fields: masks (those that --masks-where left), width, height of the
            source, image_width, image_height as stored, image_id, jpg_bytes, masks_bytes.
        subset: Only this part, such as 1%, by hash of the image id: 1% lies within 2%.
        held_out: Keep this part, such as 2%, for evaluation; see --split.
        split: With --held-out: the images to train on, or those held out. --subset thins the former only.
        ids: File with an image id a line: only these images.
        name: Readable alias of the digest.
        workers: Threads that read index files.
        json_output: Print the result as JSON, without progress.
    """
    if workers < 1:
        raise UsageError("--workers must be at least 1")
    selection = Selection(masks_where, images_where, subset, held_out, split, ids)
    chosen = select(root, selection, name=name, workers=workers, quiet=json_output)
    print(json.dumps(chosen.document(), indent=1) if json_output else chosen.table(root))
    return 0


if __name__ == "__main__":
    run(main, __doc__)
