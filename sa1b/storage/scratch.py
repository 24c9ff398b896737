"""Free space on the local disk for the shards of a bucket that are being downloaded or uploaded."""

import shutil
from collections.abc import Sequence

from sa1b.console import counted
from sa1b.errors import UsageError
from sa1b.storage.store import Store


def check_scratch(store: Store, sizes: Sequence[int], workers: int) -> None:
    """Check that the scratch folder of a bucket has space for the largest objects of `workers` processes.

    Args:
        store: the dataset directory; a folder needs no scratch.
        sizes: of the files of each shard, in bytes.
        workers: processes, each with the files of one shard at a time.

    Raises:
        UsageError: too little free space.
    """
    if store.is_local or not sizes:
        return
    store.scratch.mkdir(parents=True, exist_ok=True)
    need = sum(sorted(sizes, reverse=True)[: max(1, workers)])
    free = shutil.disk_usage(store.scratch).free
    if free < need:
        raise UsageError(
            f"{store.scratch}: {free / 1e6:,.0f} MB free, {need / 1e6:,.1f} MB needed for "
            f"{counted(max(1, workers), 'shard')} at a time; name a larger disk with --scratch, "
            "or use fewer --workers"
        )
