"""Make indexes, samples.bin and dataset.json again from the tars.

Example: python tools/index.py shards
         python tools/index.py shards/sa1b-000020-0003.tar

The bytes are those that tools/reshard.py wrote. Exit code 0: made; 1: a tar is damaged, the others are done;
2: nothing was done; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import run
from sa1b.errors import UsageError
from sa1b.verify.rebuild import rebuild_root, rebuild_shards


def main(
    path: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="ROOT|SHARD.tar...")],
    /,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Make indexes, samples.bin and dataset.json again from the tars.

    Args:
        path: A folder that tools/reshard.py made: all its indexes, samples.bin and dataset.json. Or shards:
            only their indexes, each beside its tar.
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
    root = folders[0] if folders else None
    if root is not None:
        summary = rebuild_root(root, quiet=json_output)
    else:
        summary = rebuild_shards(list(path), quiet=json_output)
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table(root))
    return summary.exit_code()


if __name__ == "__main__":
    run(main, __doc__)
