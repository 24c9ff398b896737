"""Print the bytes, disk space and hours that a conversion will take, and the links that do not work.

Example: sa1b plan downloads --out shards --workers 4
         sa1b plan --links links.txt --out s3://BUCKET/shards --workers 32 --rate 500
         sa1b plan --links links.txt --image-size 1024 --json

`sa1b plan train` and `sa1b plan order` are other commands: what a training run takes on a cluster, and what
its order reads. For a folder of sources with one of these names, write ./train or ./order.

Writes no file. Exit code 0: printed; 1: printed, and a link does not work or the disk is too small; 2:
nothing was printed; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import Endpoint, check_rate, checked_quality, linked, paths_of, store_of
from sa1b.sources.stored_file import CONNECTIONS

TOUR = (20, "Make shards", "estimate disk and time", "sa1b plan downloads --out shards")


def main(
    source: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")
    ] = (),
    /,
    links: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    image_size: int | None = None,
    annotations_only: bool = False,
    workers: Annotated[int, Range(1)] = 1,
    rate: Annotated[float | None, tyro.conf.arg(metavar="MB/S")] = None,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    ignore: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the bytes, disk space and hours that a conversion will take, and the links that do not work.

    Space is estimated as `sa1b reshard` estimates it before it starts. The smaller of two rates determines
    the time: that of reading (--rate), and that of the processors. The second one was measured on an Intel
    Xeon: 146 MB/s of source for each processor, at most 197 MB/s for each worker, and a fifth of both with
    --image-size.

    Args:
        source: Tars, folders of extracted pairs, folders that contain these, or URLs of tars, as for
            `sa1b reshard`.
        links: Meta's list of links to the tars of SA-1B. The size of each tar is requested, at most four at
            the same time.
        out: Dataset directory or URL of the conversion. Sources that are finished there are not counted.
        image_size: Re-encode images so that the longer side has this many pixels. By default images keep
            their original bytes, and the estimate for 1024 is also printed.
        annotations_only: Store annotations and indexes without images, as `sa1b reshard --annotations-only`.
        workers: Worker processes.
        rate: Rate at which the sources can be read or downloaded, in MB per second, over all workers.
        scratch: With a URL as --out: local folder for the shards of a source until they are uploaded; by
            default sa1b-USERID in the system's folder for temporary files.
        ignore: Ignore files and folders whose name, or path below SOURCE, matches this pattern. May be
            repeated.
        json_output: Print the estimates as JSON, without progress.
    """
    if not source and links is None:
        raise UsageError("SOURCE or --links: missing; add tars, folders or a list of links")
    check_rate("--rate", rate)
    checked_quality(image_size, None, annotations_only=annotations_only)
    store = None if out is None else store_of(out, scratch, endpoint, source)
    with loading():
        from sa1b.programs.plan.ingest_plan import plan
    ingest_plan = plan(
        paths_of(source),
        linked(source, links, CONNECTIONS, None, endpoint),
        store,
        image_size=image_size,
        annotations_only=annotations_only,
        workers=workers,
        rate=None if rate is None else rate * 1e6,
        ignore=ignore,
        quiet=json_output,
    )
    present(ingest_plan, json_output)
    return ingest_plan.exit_code()
