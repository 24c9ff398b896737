"""Check a dataset directory: shards, indexes, sample table, dataset.json, task files, views, quarantine.

Example: sa1b verify shards --deep --workers 4 --state verify.state
         sa1b verify shards --warnings

Names shard, offset and image id of all damage and what to do about it. Exit code 0: clean; 1: damage;
2: could not check all of it; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import loading
from sa1b.errors import UsageError


def main(
    root: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT")],
    /,
    deep: bool = False,
    workers: int = 1,
    state: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    warnings: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check a dataset directory.

    Checks digests, the structure of every shard, its members against index and sample table, the numbers of
    the index against the mask records, and every other file of the dataset. Nothing is changed or locked:
    reshard may run at the same time; what it works on is noted.

    Args:
        root: Folder that `sa1b reshard` made.
        deep: Also decode every JPEG and every mask, and compare the record's masks with the index's.
        workers: Shards checked at a time, each by a process of its own with up to 500 MB of memory.
        state: Record what is done in this file, outside ROOT. The same command after an interruption goes on
            where it stopped, with the same report at its end; the file is removed then.
        warnings: Check nothing; list the odd images and masks that reshard kept, by reason.
        json_output: Print the report as JSON, without progress; with --warnings all of them.
    """
    if workers < 1:
        raise UsageError("--workers must be at least 1")
    if warnings and (deep or state is not None):
        raise UsageError("--warnings checks nothing: leave out --deep and --state")
    with loading():
        from sa1b.verify.quarantine_check import SHOWN, WarningList
        from sa1b.verify.verify import check_is_dataset, verify
    if warnings:
        check_is_dataset(root)
        found = WarningList.read(root, limit=None if json_output else SHOWN)
        print(json.dumps(found.document(), indent=1) if json_output else found.table())
        return 0
    report = verify(root, deep=deep, workers=workers, state=state, quiet=json_output)
    print(json.dumps(report.document(), indent=1) if json_output else report.table())
    return report.exit_code()
