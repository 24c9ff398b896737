"""Write the images of a dataset directory as SA-1B source tars.

Example: sa1b export shards --to sa1b --out tars --view small --workers 8

To resume an interrupted export, run the same command again. Exit code 0: all tars are written; 2: a tar is
not written; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.cli.paths import check_here
from sa1b.cluster import engine as engines
from sa1b.cluster.engine import Address, Engine
from sa1b.console import loading
from sa1b.errors import UsageError


def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    to: Literal["sa1b"],
    out: Path,
    images_per_tar: int | None = None,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    ids: Annotated[str | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None,
    plain: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    engine: Engine = "processes",
    address: Address = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Write the images of a dataset directory as SA-1B source tars.

    The tars have the format of the download and the names of the sources. Images have the original bytes, and
    annotation files have the original values. To resume an interrupted export, run the same command again:
    complete tars are recorded in OUT/.export.json and skipped.

    Args:
        root: Dataset directory that `sa1b reshard` made without --image-size: a folder or a URL.
        to: Format of the export; sa1b writes tars like the download.
        out: Folder for the tars; created if it is missing.
        images_per_tar: Split each source into tars of this many images, <source>-0000.tar, ...
        view: Only the images of this view: its name, digest or path. Annotation files contain all masks, also
            if the view has a condition on masks.
        ids: Only these images: a text file with one id per line, a CSV, TSV or Parquet file with a column of
            ids, or the .ids file of a view; see `sa1b view`.
        plain: Write plain tars instead of gzip.
        overwrite: Replace existing tars, also complete ones.
        workers: Workers, each with one tar at a time. The bytes do not depend on the number. By default 1;
            with Ray one for each CPU of the cluster.
        json_output: Print the summary as JSON, without progress.
    """
    if images_per_tar is not None and images_per_tar < 1:
        raise UsageError(f"--images-per-tar {images_per_tar}: must be at least 1")
    assert to == "sa1b"  # the only format so far
    check_here("--out", out)
    with loading():
        from sa1b.export.source_tars import export_sa1b
        from sa1b.shards.dataset import open_dataset
        from sa1b.views.view import open_view
    images = None
    if view is not None:
        table = open_dataset(root).table
        images = open_view(root, table, view).image_ids(table)
    with engines.engine(engine, address, workers) as (count, supervise):
        summary = export_sa1b(
            root,
            out,
            images_per_tar=images_per_tar,
            ids=ids,
            images=images,
            plain=plain,
            overwrite=overwrite,
            workers=count,
            quiet=json_output,
            supervise=supervise,
        )
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table())
    return 0
