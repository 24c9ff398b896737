"""Show images with their masks, and distributions over the input, on one HTML page.

Example: sa1b gallery shards --count 12 --sort area

The page needs no other file and no network. It has at most 20 MB: if necessary, it has smaller images, then
fewer images. A click opens an image; point at a mask to see its numbers, or use the keys that the page lists.
Exit code 0: written; 2: not written; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.names import ID_END
from sa1b.report import present
from sa1b.sources.path_arguments import check_here, takes_endpoint

TOUR = (70, "See and select", "show images with masks", "sa1b gallery shards")


@takes_endpoint
def main(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT|SHARD.tar|SOURCE.tar")],
    /,
    ids: Annotated[
        UseAppendAction[tuple[tuple[int, ...], ...]], tyro.conf.arg(name="id", metavar="N ...")
    ] = (),
    count: int = 24,
    sort: str = "stability_score",
    out: Path = Path("gallery.html"),
    overwrite: bool = False,
    max_side: int = 1000,
    seed: int = 0,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    layers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    warnings: bool = False,
    survey: Literal["sample", "all"] = "sample",
    predictions: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show images with their masks, and distributions over the input, on one HTML page.

    Args:
        source: Dataset directory that `sa1b reshard` made (a folder or a URL), a shard, a source tar (gzip or
            plain), or a folder of extracted pairs or of tars. If the shards have indexes, only the chosen
            images are read.
        ids: Show these images instead of a sample.
        count: Images to show, 1 to 100: a uniform sample of the input. A source and its shards give the same
            sample.
        sort: Order of the images on the page: stability_score or predicted_iou (mean over an image's masks,
            lowest first), masks (number, most first), area (mean fraction of the image, largest first),
            image_id. Only the sample is sorted; to see the extremes of a dataset, find ids in its index and
            use --id.
        out: File for the page; a page of the same input is replaced.
        overwrite: Replace any existing file.
        max_side: Longer side of the images in pixels, 64 to 1000.
        seed: Seed of the sample.
        view: Show a sample of this view of ROOT: its name, digest or path. All masks of its images are shown,
            also if the view has a condition on masks.
        layers: Show the masks of ROOT with the changes of these layers (`sa1b layer add`), in this order. The
            distributions are those of the shards.
        warnings: Show only images of ROOT that have a warning from reshard; the page contains the reasons.
        survey: Distributions of ROOT: over a sample of at most 64 shards, or over all shards.
        predictions: File predictions.jsonl from the output folder of `sa1b train`: show its images, with the
            predicted masks next to the true masks.
        json_output: Print the summary as JSON, without progress.
    """
    chosen = tuple(dict.fromkeys(image_id for some in ids for image_id in some))
    if any(not 0 <= image_id < ID_END for image_id in chosen):
        raise UsageError(f"--id ({len(chosen)} ids): every id must be from 0 to 2**63 - 1")
    check_here("--out", out)
    with loading():
        from sa1b.programs.gallery.inputs import is_dataset
        from sa1b.programs.gallery.members import Choice
        from sa1b.programs.gallery.page import write_gallery
        from sa1b.shards.dataset import open_dataset
        from sa1b.views.view import view_of
    images, facts = None, []
    if layers and not is_dataset(source):
        raise UsageError(
            f"--layers {layers[0]}: {source} is no dataset directory; pass one, or omit --layers"
        )
    if view is not None:
        if not is_dataset(source):
            raise UsageError(f"{source}: not a dataset directory; pass one, or omit --view and --warnings")
        opened, dataset = view_of(open_dataset(source, layers=layers), view)
        images = opened.image_ids(dataset.table)
        layers = layers or tuple(layer for layer, _ in opened.layers)
        name = "" if opened.digest.startswith(view) else f"{view}, "
        facts.append(("View", f"{name}{opened.digest}"))
        if opened.masks_where is not None:
            others = "all masks are shown" if predictions is None else "masks without a prediction are dashed"
            facts.append(("Condition of the view", f"{opened.masks_where.text} ({others})"))
    summary = write_gallery(
        source,
        out,
        Choice(chosen, count, seed, images, layers),
        sort=sort,
        max_side=max_side,
        predictions=predictions,
        warnings=warnings,
        survey_all=survey == "all",
        overwrite=overwrite,
        facts=facts,
        quiet=json_output,
    )
    present(summary, json_output)
    return 0
