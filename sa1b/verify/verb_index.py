"""Rebuild indexes, the sample table and dataset.json from the shards.

Example: sa1b index shards --workers 4
         sa1b index shards/sa1b-000020-0003.tar
         sa1b index shards --tables
         sa1b index s3://BUCKET/shards --scratch /nvme/scratch

The files have the same bytes as those of `sa1b reshard`. After an interruption, run the same command again:
finished indexes are kept. Exit code 0: rebuilt; 1: a shard is damaged, the others are finished; 2: nothing
was rebuilt; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range, is_url
from sa1b.console import loading, show
from sa1b.errors import UsageError
from sa1b.sources.path_arguments import check_scratch_flag, check_writable, takes_endpoint

TOUR = (70, "Data", "rebuild indexes and tables", "sa1b index shards")


@takes_endpoint
def main(
    path: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="ROOT|SHARD.tar...")],
    /,
    workers: Annotated[int, Range(1)] = 1,
    tables: bool = False,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Rebuild indexes, the sample table and dataset.json from the shards.

    Readers may have the dataset open, because every file is replaced atomically. The command refuses to run
    while reshard writes to the directory.

    Args:
        path: A dataset directory that `sa1b reshard` made (a folder or a URL), to rebuild all indexes, the
            sample table and dataset.json. Or shards (files or URLs), to rebuild only their indexes.
        workers: Worker processes, each with one shard at a time and up to 500 MB of memory.
        tables: Rebuild only the sample table, its parts in tasks/ and dataset.json, from the task files and
            indexes, without reading the shards.
        scratch: For a URL: local folder for the shards that are being read, one per worker; by default
            sa1b-USERID in the system's folder for temporary files.
        json_output: Print the summary as JSON, without progress.
    """
    folders = [
        argument
        for argument in path
        if Path(argument).is_dir() or (is_url(argument) and not argument.endswith(".tar"))
    ]
    if not path or (folders and len(path) > 1):
        raise UsageError(f"ROOT ({len(path)} paths): must be one folder, or one or more SHARD.tar")
    for argument in path:
        if argument not in folders and not argument.endswith(".tar"):
            with loading():
                from sa1b.shards.manifest import DATASET, no_dataset
            if Path(argument).name == DATASET or not Path(argument).exists():
                raise no_dataset(argument)
            raise UsageError(f"{argument}: not a shard; pass a file with the ending .tar")
        if not is_url(argument) and not Path(argument).exists():
            raise UsageError(f"{argument}: no such file; check the path")
    check_scratch_flag(scratch, *path)
    for argument in path:
        check_writable("the command writes there", argument)
    with loading():
        from sa1b.verify.rebuild import rebuild_root, rebuild_shards, rebuild_tables
    root = folders[0] if folders else None
    if root is None:
        if tables:
            raise UsageError(f"--tables: {path[0]} is not a folder; pass ROOT instead of shards")
        summary = rebuild_shards(path, workers=workers, scratch=scratch, quiet=json_output)
    elif tables:
        summary = rebuild_tables(root, scratch=scratch)
    else:
        summary = rebuild_root(root, workers=workers, scratch=scratch, quiet=json_output)
    show(json.dumps(summary.document(), indent=1) if json_output else summary.table(root))
    return summary.exit_code()
