"""The division of a step's images into micro-batches, by the settings of data and ranks."""

from dataclasses import replace

from sa1b.console import counted
from sa1b.engine.feed import DataConfig, with_flags
from sa1b.engine.parallel import ParallelConfig, rank_shares
from sa1b.engine.pipeline import Schedule
from sa1b.errors import UsageError
from sa1b.stream.order import check_global_batch, micro_batch_count
from sa1b.stream.plan import largest_share


def micro_batches(data: DataConfig, parallel: ParallelConfig, world_size: int) -> tuple[int, int]:
    """Images of the largest micro-batch of a rank, and the number of micro-batches in a step.

    Raises:
        UsageError: the global batch does not fit this number of ranks; the message names the flag.
    """
    batch, shares = data.global_batch, rank_shares(parallel, world_size)
    readers = world_size if parallel.divides_steps else 1
    try:
        check_global_batch(batch, readers, data.block_size, shares)
    except ValueError as error:
        raise with_flags(error) from None
    share = largest_share(batch, readers, shares)
    size = min(data.micro_batch or share, share)
    count = micro_batch_count(batch, readers, size, block_size=data.block_size, shares=shares)
    if parallel.mode == "pipeline":
        _check_pipeline(batch, size, count, parallel.schedule, world_size)
    return size, count


def fitting(data: DataConfig, parallel: ParallelConfig, stages: int) -> DataConfig:
    """The data with the largest micro-batches that a pipeline can use, unless --data.micro-batch is set."""
    batch = data.global_batch
    if parallel.divides_steps or data.micro_batch is not None:
        return data
    least = stages if parallel.schedule == "1f1b" else 1
    counts = (count for count in range(least, batch + 1) if batch % count == 0)
    return replace(data, micro_batch=batch // next(counts, batch))


def _check_pipeline(batch: int, size: int, count: int, schedule: Schedule, stages: int) -> None:
    """Every rank has all micro-batches of a step. They must be equal: stages send one shape only."""
    if batch % size:
        raise UsageError(
            f"--data.micro-batch {size}: does not divide --data.global-batch {batch}, and --parallel.mode "
            "pipeline needs equal micro-batches; pass one that does"
        )
    if schedule == "1f1b" and count < stages:
        raise UsageError(
            f"--data.micro-batch {size}: {counted(count, 'micro-batch', 'es')} of a step for {stages} stages,"
            " and 1f1b needs one for each; lower it, or pass --parallel.schedule gpipe"
        )
