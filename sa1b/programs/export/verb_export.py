"""Write images and masks of a dataset directory in another format.

Example: sa1b export shards --to sa1b --out tars --view small --workers 8
         sa1b export shards --to folders --out some --ids ids.txt
         sa1b export shards --to images --image-size 512 --out images512 --workers 8
         sa1b export s3://BUCKET/shards --to webdataset --join caption=captions.parquet --out tars
         sa1b export shards --to coco --out coco --segmentation polygons
         sa1b export shards --to yolo-seg --view train --val-view held-out --out yolo
         sa1b export shards --to parquet --out parquet --workers 4

To resume an interrupted export, run the same command again. Exit code 0: all images are exported; 2: a part
is not written; 3: exported, and an id of --ids is missing; 130: interrupted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b import ray_tasks as engines
from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.ray_tasks import Address, Engine
from sa1b.report import present
from sa1b.sources.path_arguments import check_here, checked_quality, takes_endpoint

TOUR = (80, "Data", "write other formats", "sa1b export shards --to folders --out files")

if TYPE_CHECKING:
    from sa1b.programs.export.export_format import Format, JoinedColumn

To = Literal["sa1b", "folders", "images", "sam2", "efficientvit", "webdataset", "coco", "yolo-seg", "parquet"]

# Flag -> the formats that it is for.
_FLAGS: dict[str, tuple[To, ...]] = {
    "--images-per-tar": ("sa1b", "webdataset"),
    "--images-per-file": ("coco", "yolo-seg", "parquet"),
    "--segmentation": ("coco",),
    "--plain": ("sa1b",),
    "--val-view": ("yolo-seg",),
    "--layout": ("folders", "images"),
    "--image-size": ("images",),
    "--quality": ("images",),
    "--join": ("webdataset", "parquet", "coco"),
    "--link-from": ("folders", "images", "sam2", "efficientvit"),
}


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    to: To,
    out: Path,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    val_view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    ids: Annotated[str | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None,
    layers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    layout: Annotated[Literal["by-source", "flat"] | None, tyro.conf.arg(metavar="{by-source,flat}")] = None,
    image_size: int | None = None,
    quality: int | None = None,
    images_per_tar: Annotated[int | None, Range(1)] = None,
    images_per_file: Annotated[int | None, Range(1)] = None,
    segmentation: Annotated[
        Literal["rle", "polygons"] | None, tyro.conf.arg(metavar="{rle,polygons}")
    ] = None,
    plain: bool = False,
    join: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=FILE|texts")] = (),
    link_from: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    overwrite: bool = False,
    workers: int | None = None,
    engine: Engine = "processes",
    address: Address = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Write images and masks of a dataset directory in another format.

    Images have the original bytes, and annotation files the original values. To resume an interrupted export,
    run the same command again: complete parts are recorded in OUT/.export.jsonl and skipped.

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL. If it was made with --image-size,
            only --to images and yolo-seg can export it.
        to: Format of the export. sa1b: tars like the download; folders: images/ and annotations/ of each
            source; images: only JPEGs; sam2, efficientvit: the folders and the list of these projects'
            loaders; webdataset: tars with jpg, json and joined columns; coco: images/ and annotations.json;
            yolo-seg: images/, labels/ and data.yaml for ultralytics; parquet: for the library datasets, with
            images and run lengths.
        out: Folder of the export; created if it is missing.
        view: Only the images of this view, and of these only the masks that pass its condition: its name,
            digest or path.
        val_view: For yolo-seg: view of the images for validation. The images of --view, or all others, are
            for training.
        ids: Only these images: a text file with one id per line, a CSV, TSV or Parquet file with a column of
            ids, or the .ids file of a view; see `sa1b view`. Ids that the dataset lacks are listed, and the
            exit code is 3.
        layers: Layers of masks (`sa1b layer add`) whose changes the exported masks have, in this order.
        layout: For folders and images: by-source (default) makes a folder for each source, flat only one.
        image_size: For images: re-encode images so that the longer side has this many pixels, 16 to 65500,
            as by `sa1b reshard`. Images that are not larger keep their bytes.
        quality: JPEG quality of re-encoded images, 1 to 100, by default 95. Only with --image-size.
        images_per_tar: Images in a tar. For sa1b: split each source into tars <source>-0000.tar, ..., by
            default one tar for each source; for webdataset: by default 1000.
        images_per_file: For coco: annotations-0000.json, ... of this many images instead of one file; for
            yolo-seg and parquet: images in a list or file, by default 10000 and 1000.
        segmentation: For coco: masks as run lengths (rle, the default) or as polygons along the sides of
            pixels, which pycocotools rasterises to the same masks.
        plain: For sa1b: write plain tars instead of gzip.
        join: For webdataset, parquet and coco: add this column of a table, by image id or mask_id, see
            `sa1b.Stream(join=)`, or the `texts` that stood beside the images in their sources. May be
            repeated.
        link_from: For formats with a file for each image: folder of an earlier export. Files with the same
            path and bytes there become hard links, which take no space.
        overwrite: Replace existing files, also complete ones. For webdataset and parquet, also remove those
            of an earlier export. Other files in the folder are kept.
        workers: Workers, each with one part at a time. The bytes do not depend on the number. By default 1;
            with Ray one for each CPU of the cluster.
        json_output: Print the summary as JSON, without progress.
    """
    quality = checked_quality(image_size, quality)
    given = {
        "--images-per-tar": images_per_tar,
        "--images-per-file": images_per_file,
        "--segmentation": segmentation,
        "--plain": plain or None,
        "--layout": layout,
        "--image-size": image_size,
        "--join": join or None,
        "--link-from": link_from,
        "--val-view": val_view,
    }
    _check_flags(to, [flag for flag, value in given.items() if value is not None])
    check_here("--out", out)
    check_here("--link-from", link_from)
    with loading():
        import numpy as np

        from sa1b.programs.export.export import export
        from sa1b.programs.export.image_files import Yolo
        from sa1b.views.view import images_of
    form = _format(
        root,
        to,
        layout=layout,
        image_size=image_size,
        quality=quality,
        number=images_per_tar or images_per_file,
        segmentation=segmentation,
        plain=plain,
        join=join,
    )
    images, masks_where = None, None
    if view is not None:
        images, masks_where, layers = images_of(root, view, layers)
    if isinstance(form, Yolo) and val_view is not None:
        val, val_where, layers = images_of(root, val_view, layers)
        if images is not None:
            if (both := np.isin(images, val).sum()) or masks_where != val_where:
                why = f"{both:,} of its images are also in" if both else "another condition on masks than"
                raise UsageError(
                    f"--val-view {val_view}: {why} --view {view}; make both with the same flags of "
                    "`sa1b view`, one of them with --split held-out"
                )
            images = np.union1d(images, val)
        form, masks_where = Yolo(form.images_per_list, val), val_where
    with engines.engine(engine, address, workers) as (count, supervise):
        summary = export(
            root,
            out,
            form,
            ids=ids,
            images=images,
            masks_where=None if to == "images" else masks_where,
            layers=layers,
            link_from=link_from,
            overwrite=overwrite,
            workers=count,
            quiet=json_output,
            supervise=supervise,
        )
    present(summary, json_output)
    return summary.exit_code()


def _check_flags(to: str, given: Sequence[str]) -> None:
    for flag in given:
        formats = _FLAGS[flag]
        if to not in formats:
            which = " and ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))
            raise UsageError(f"{flag}: is for --to {which}, not for {to}; omit it")


def _format(
    root: str,
    to: To,
    layout: Literal["by-source", "flat"] | None,
    image_size: int | None,
    quality: int | None,
    number: int | None,
    segmentation: Literal["rle", "polygons"] | None,
    plain: bool,
    join: Sequence[str],
) -> "Format":
    from sa1b.programs.export.image_files import IMAGES_PER_LIST, EfficientVit, Folders, Images, Sam2, Yolo
    from sa1b.programs.export.source_tars import SourceTars

    if to == "folders":
        return Folders(layout or "by-source")
    if to == "images":
        return Images(layout or "by-source", image_size, quality or 0)
    if to == "sam2":
        return Sam2()
    if to == "efficientvit":
        return EfficientVit()
    texts = "texts" in join
    if to == "webdataset":
        from sa1b.programs.export.source_tars import IMAGES_PER_TAR, WebDataset

        return WebDataset(number or IMAGES_PER_TAR, _columns(root, join), texts)
    if to == "coco":
        from sa1b.programs.export.coco import Coco

        return Coco(number, segmentation or "rle", columns=_columns(root, join), texts=texts)
    if to == "yolo-seg":
        return Yolo(number or IMAGES_PER_LIST)
    if to == "parquet":
        from sa1b.programs.export.parquet import IMAGES_PER_FILE, Parquet

        return Parquet(number or IMAGES_PER_FILE, _columns(root, join), texts)
    return SourceTars(number, plain)


def _columns(root: str, join: Sequence[str]) -> "tuple[JoinedColumn, ...]":
    from sa1b.shards.dataset import open_dataset
    from sa1b.storage.errors import MissingError
    from sa1b.stream.columns import open_columns
    from sa1b.stream.text import ColumnError

    joined = [_joined(text) for text in join if text != "texts"]
    names = [name for name, _ in joined] + ["texts"] * join.count("texts")
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise UsageError(f"--join {twice[0]}: given twice; rename the column of one of the tables")
    try:
        return tuple(open_columns(dict(joined), dataset=open_dataset(root), argument="--join {}").values())
    except (ColumnError, MissingError) as error:
        raise UsageError(str(error)) from None


def _joined(text: str) -> tuple[str, str]:
    """Name and source of NAME=FILE."""
    name, equals, source = text.partition("=")
    if not (equals and source and name.isidentifier()) or name in ("jpg", "json"):
        raise UsageError(
            f"--join {text}: must be NAME=FILE, such as caption=captions.parquet, or texts; NAME is of "
            "letters, digits and _, and not jpg or json"
        )
    return name, source
