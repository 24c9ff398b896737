"""Check shards, indexes, samples.bin and dataset.json of a root.

Example: python tools/verify.py shards --deep --workers 4

Names shard, offset and image id of all damage and what to do about it. Exit code 0: clean; 1: damage;
2: could not check; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import run
from sa1b.errors import UsageError
from sa1b.verify.verify import verify


def main(
    root: Annotated[Positional[Path], tyro.conf.arg(metavar="ROOT")],
    /,
    deep: bool = False,
    workers: int = 1,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check shards, indexes, samples.bin and dataset.json of a root.

    Checks digests, the structure of every tar, its members against index and samples.bin, and the numbers of
    the index against the mask records. Nothing is changed.

    Args:
        root: Folder that tools/reshard.py made.
        deep: Also decode every JPEG and every mask, and compare the record's masks with the index's.
        workers: Shards checked at a time, each by a process of its own with up to 500 MB of memory.
        json_output: Print the report as JSON, without progress.
    """
    if workers < 1:
        raise UsageError("--workers must be at least 1")
    report = verify(root, deep=deep, workers=workers, quiet=json_output)
    print(json.dumps(report.document(), indent=1) if json_output else report.table())
    return report.exit_code()


if __name__ == "__main__":
    run(main, __doc__)
