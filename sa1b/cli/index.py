"""Make indexes, the sample table and dataset.json again from the shards.

Example: sa1b index shards --workers 4
         sa1b index shards/sa1b-000020-0003.tar
         sa1b index shards --tables

The bytes are those that `sa1b reshard` wrote. Run the same command again after an interruption: indexes
that are done are kept. Exit code 0: made; 1: a shard is damaged, the others are done; 2: nothing was done;
130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import loading
from sa1b.errors import UsageError


def main(
    path: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="ROOT|SHARD.tar...")],
    /,
    workers: int = 1,
    tables: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Make indexes, the sample table and dataset.json again from the shards.

    Readers may have the dataset open: every file is replaced in one step. Refused while reshard is at work.

    Args:
        path: A folder that `sa1b reshard` made: all its indexes, the sample table and dataset.json. Or
            shards: only their indexes, each beside its tar.
        workers: Shards read at a time, each by a process of its own with up to 500 MB of memory.
        tables: Only the sample table, its parts in tasks/ and dataset.json, from the task files and indexes;
            no shard is read.
        json_output: Print the summary as JSON, without progress.
    """
    folders = [one for one in path if one.is_dir()]
    if not path or (folders and len(path) > 1):
        raise UsageError("name one ROOT folder, or one or more SHARD.tar; see --help")
    for one in path:
        if not one.exists():
            raise UsageError(f"{one}: no such file or folder")
        if one not in folders and one.suffix != ".tar":
            raise UsageError(f"{one}: not a shard; its name would end in .tar")
    if workers < 1:
        raise UsageError("--workers must be at least 1")
    with loading():
        from sa1b.verify.rebuild import rebuild_root, rebuild_shards, rebuild_tables
    root = folders[0] if folders else None
    if root is None:
        if tables:
            raise UsageError("--tables takes a ROOT folder")
        summary = rebuild_shards(list(path), workers=workers, quiet=json_output)
    elif tables:
        summary = rebuild_tables(root)
    else:
        summary = rebuild_root(root, workers=workers, quiet=json_output)
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table(root))
    return summary.exit_code()
