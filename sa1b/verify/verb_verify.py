"""Check a dataset directory: shards, indexes, tables, dataset.json, task files, views, layers, quarantine.

Example: sa1b verify shards --deep --workers 4 --state verify.state
         sa1b verify s3://BUCKET/shards --deep --scratch /nvme/scratch
         sa1b verify shards --warnings

Prints shard, offset and image id of all damage, and how to repair it. Exit code 0: no damage; 1: damage;
2: not everything could be checked; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b import ray_tasks as engines
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.ray_tasks import Address, Engine
from sa1b.report import present
from sa1b.sources.path_arguments import check_scratch_flag, takes_endpoint

TOUR = (40, "Data", "check a dataset directory", "sa1b verify shards --deep")


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    deep: bool = False,
    workers: int | None = None,
    engine: Engine = "processes",
    address: Address = None,
    state: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    warnings: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check a dataset directory.

    Checks the digests and the structure of every shard and every other file of the dataset. Members are
    compared with index and sample table, and mask records with the index. Layers are compared with their
    digests. No file is changed or locked.
    If reshard runs at the same time, the report lists the sources that it is writing.

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL (s3://...).
        deep: Also decode every JPEG and every mask, compare the masks in records and index, and apply every
            change of a layer.
        workers: Workers, each with one shard at a time and up to 500 MB of memory. By default 1; with Ray
            one for each CPU of the cluster.
        state: File outside ROOT that records the progress. After an interruption, the same command resumes
            from it and prints the same report; the file is removed at the end.
        scratch: For a URL: local folder for the shards that are being checked, one per worker; by default
            sa1b-USERID in the system's folder for temporary files.
        warnings: Check nothing; list the images and masks that reshard stored with a warning, by reason.
        json_output: Print the report as JSON, without progress; with --warnings, all warnings.
    """
    if warnings and (deep or state is not None):
        raise UsageError("--warnings: checks nothing; omit --deep and --state")
    check_scratch_flag(scratch, root)
    with loading():
        from sa1b.verify.image_list_check import SHOWN, WarningList
        from sa1b.verify.verify import check_is_dataset, verify
    if warnings:
        check_is_dataset(root)
        warning_list = WarningList.read(root, limit=None if json_output else SHOWN)
        present(warning_list, json_output)
        return 0
    with engines.engine(engine, address, workers) as (count, supervise):
        report = verify(
            root,
            deep=deep,
            workers=count,
            state=state,
            scratch=scratch,
            quiet=json_output,
            supervise=supervise,
        )
    present(report, json_output)
    return report.exit_code()
