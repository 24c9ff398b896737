"""Show images with their masks, and the distributions of a whole input, as one HTML page.

Example: python tools/gallery.py shards --count 12 --sort area

The page needs no other file and no network, and stays below 20 MB: pictures are made smaller, then fewer,
until it fits. Point at a mask to see its numbers, or use the keyboard (the page lists its keys).
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.console import run
from sa1b.gallery.page import write_gallery
from sa1b.gallery.selection import Choice


def main(
    source: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT|SHARD.tar|SOURCE.tar")],
    /,
    ids: Annotated[
        UseAppendAction[tuple[tuple[int, ...], ...]], tyro.conf.arg(name="id", metavar="N ...")
    ] = (),
    count: int = 24,
    sort: str = "stability_score",
    out: Path = Path("gallery.html"),
    max_side: int = 1000,
    seed: int = 0,
    predictions: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show images with their masks, and the distributions of a whole input, as one HTML page.

    Args:
        source: What tools/reshard.py made, one of its shards, a source tar (gzip or plain), a folder of
            extracted pairs or of tars. With indexes beside the shards only the chosen images are read.
        ids: Show these images instead of a sample.
        count: Images to show, 1 to 100: a uniform sample of the input, the same one for a source and for
            the shards made of it.
        sort: Order of the pictures on the page: stability_score or predicted_iou (mean over an image's masks,
            lowest first), masks (number, most first), area (mean part of the image, largest first), image_id.
            It orders the sample; to see the extremes of a dataset, query its index for ids and use --id.
        out: The page. An existing one is replaced.
        max_side: Longer side of the pictures in pixels, 64 to 1000.
        seed: Another seed, another sample.
        predictions: File of a model's masks, as sa1b/train.py writes it into its folder: shows its images,
            with the model's masks beside the true ones.
        json_output: Print the summary as JSON, without progress.
    """
    chosen = tuple(dict.fromkeys(image_id for some in ids for image_id in some))
    summary = write_gallery(
        source,
        out,
        Choice(chosen, count, seed),
        sort=sort,
        max_side=max_side,
        predictions=predictions,
        quiet=json_output,
    )
    print(json.dumps(summary.document(), indent=1) if json_output else summary.text())
    return 0


if __name__ == "__main__":
    run(main, __doc__)
