"""Write the images of a dataset directory back as SA-1B source tars.

Example: sa1b export shards --to sa1b --out tars --view small --workers 8

The same command continues an export that was interrupted. Exit code 0: written; 2: not, or not
all, written; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.console import loading
from sa1b.errors import UsageError


def main(
    root: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT")],
    /,
    to: Literal["sa1b"],
    out: Path,
    images_per_tar: int | None = None,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    ids: Annotated[str | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None,
    plain: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Write the images of a dataset directory back as SA-1B source tars.

    The tars have the download's form and the sources' names; images have the original bytes, annotation files
    say what the originals say. The same command continues an export that was interrupted: complete tars are
    recorded in OUT/.export.json and skipped.

    Args:
        root: Folder that `sa1b reshard` made, without --image-size.
        to: What to write: sa1b, tars as downloaded.
        out: Folder for the tars, made if need be.
        images_per_tar: Split each source into <source>-0000.tar, <source>-0001.tar, ... of so many images.
        view: Only the images of this view: its name, its digest or its path. Annotation files stay complete,
            also if the view has a condition on masks.
        ids: Only these images: a text file with an id a line, a CSV, TSV or Parquet file with such a column,
            or the .ids file of a view; see `sa1b view`.
        plain: Plain tars instead of gzip.
        overwrite: Replace tars that exist, complete ones too.
        workers: Processes, each with one tar at a time; the bytes are the same for any number.
        json_output: Print the summary as JSON, without progress.
    """
    if images_per_tar is not None and images_per_tar < 1:
        raise UsageError("--images-per-tar must be at least 1")
    assert to == "sa1b"  # the only format so far
    with loading():
        from sa1b.export.source_tars import export_sa1b
        from sa1b.shards.dataset import open_dataset
        from sa1b.views.view import open_view
    images = None
    if view is not None:
        table = open_dataset(root).table
        images = open_view(root, table, view).image_ids(table)
    summary = export_sa1b(
        root,
        out,
        images_per_tar=images_per_tar,
        ids=ids,
        images=images,
        plain=plain,
        overwrite=overwrite,
        workers=workers,
        quiet=json_output,
    )
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table())
    return 0
