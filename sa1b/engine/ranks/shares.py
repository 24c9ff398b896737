"""Unequal shares of a step: --parallel.shares, for ranks of different speed."""

from sa1b.console import counted
from sa1b.errors import UsageError


def parse(shares: str, world_size: int) -> tuple[int, ...]:
    """The numbers of --parallel.shares.

    Raises:
        UsageError: the flag has another form, or another number of shares.
    """
    words = shares.split(",")
    if len(words) != world_size or not all(word.isdecimal() and int(word) for word in words):
        ranks = counted(world_size, "rank")
        raise UsageError(
            f"--parallel.shares {shares}: does not fit {ranks}; pass a positive whole number for each rank, "
            "with commas between them, such as 2,1,1"
        )
    return tuple(map(int, words))
