"""Write the images of a root back as SA-1B source tars.

Example: python tools/export.py shards --to sa1b --out tars

Exit code 0: written; 2: nothing, or not everything, was written; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.console import run
from sa1b.errors import UsageError
from sa1b.export.source_tars import export_sa1b


def main(
    root: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT")],
    /,
    to: Literal["sa1b"],
    out: Path,
    images_per_tar: int | None = None,
    ids: Path | None = None,
    plain: bool = False,
    overwrite: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Write the images of a root back as SA-1B source tars.

    The tars have the download's form and the sources' names; images have the original bytes, annotation files
    say what the originals say.

    Args:
        root: Folder that tools/reshard.py made, without --image-size.
        to: What to write: sa1b, tars as downloaded.
        out: Folder for the tars, made if need be.
        images_per_tar: Split each source into <source>-0000.tar, <source>-0001.tar, ... of so many images.
        ids: File with an image id a line: only these images.
        plain: Plain tars instead of gzip.
        overwrite: Replace tars that exist.
        json_output: Print the summary as JSON, without progress.
    """
    if images_per_tar is not None and images_per_tar < 1:
        raise UsageError("--images-per-tar must be at least 1")
    assert to == "sa1b"  # the only format so far
    summary = export_sa1b(
        root,
        out,
        images_per_tar=images_per_tar,
        ids=ids,
        plain=plain,
        overwrite=overwrite,
        quiet=json_output,
    )
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table())
    return 0


if __name__ == "__main__":
    run(main, __doc__)
