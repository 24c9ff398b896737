"""Copy a dataset directory, verified, between folders and object stores.

Example: sa1b copy shards s3://BUCKET/shards --workers 4 --scratch /nvme/scratch
         sa1b copy s3://BUCKET/shards shards --shards 'sa1b-00002*'
         sa1b copy s3://BUCKET/shards shards --view small

To resume an interrupted copy, run the same command again: copied sources are skipped. Exit code 0: copied;
1: a source or layer is damaged and was left out, the others are copied; 2: an error ended the copy;
130: interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import check_scratch_flag, takes_endpoint

TOUR = (90, "Data", "copy to or from a bucket", "sa1b copy shards s3://BUCKET/shards")


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    dest: Annotated[Positional[str], tyro.conf.arg(metavar="DEST")],
    /,
    shards: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = (),
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    workers: Annotated[int, Range(1)] = 1,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Copy a dataset directory, verified, between folders and object stores.

    Every shard and index is verified by its SHA-256 in dataset.json while it is copied. DEST can be read when
    the command ends; until then it has no dataset.json, or the one of an earlier copy. A source with a
    damaged shard is left out, and the message names the repair.

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL (s3://...).
        dest: Folder or URL of the copy: empty, or with a part of the same dataset, which is completed.
        shards: Copy only the shards whose names match, such as 'sa1b-000020-*'; may be repeated. Views,
            layers, warnings and quarantine of incomplete sources are not copied.
        view: Copy only the shards that hold an image of this view (its name, digest or path), the view, and
            the layers that it was made with.
        workers: Sources that are copied at the same time.
        scratch: With a URL: local folder for the objects that are being copied; by default sa1b-USERID in the
            system's folder for temporary files.
        json_output: Print the summary as JSON, without progress.
    """
    if view is not None and shards:
        raise UsageError("--shards: cannot be combined with --view, which selects shards itself; omit one")
    check_scratch_flag(scratch, root, dest)
    with loading():
        from sa1b.programs.transfer.dataset_copy import copy_dataset
        from sa1b.views.view import copy_view, images_of
    images, layers = None, tuple[str, ...]()
    if view is not None:
        images, _, layers = images_of(root, view)
    try:
        summary = copy_dataset(
            root,
            dest,
            shards=shards,
            images=images,
            layers=layers if shards or view is not None else None,
            workers=workers,
            scratch=scratch,
            quiet=json_output,
        )
    except KeyboardInterrupt:
        sys.stderr.write("Nothing is damaged; run the same command again to resume.\n")
        raise
    if view is not None and not summary.failed:
        summary.views.append(copy_view(root, dest, view))
    present(summary, json_output)
    return summary.exit_code()
