"""Where the workers of a verb run: in processes of this machine, or on a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import tyro

from sa1b.errors import UsageError
from sa1b.workers import Supervise, supervise

Engine = Annotated[
    Literal["processes", "ray"],
    tyro.conf.arg(
        help="Where the workers run: in processes of this machine, or on a Ray cluster (sa1b[ray]), whose "
        "machines must reach all files under the same paths."
    ),
]
Address = Annotated[
    str | None,
    tyro.conf.arg(
        help="With --engine ray: address of the cluster, or `auto` on one of its machines. By default a "
        "cluster on this machine is started for this run."
    ),
]


@contextmanager
def engine(name: str, address: str | None, workers: int | None) -> Iterator[tuple[int, Supervise]]:
    """The number of workers, by default 1 process or one for each CPU of the Ray cluster, and their function.

    Without `address`, a Ray cluster on this machine ends with the context.

    Raises:
        UsageError: `workers` is below 1, `address` is for processes, or no Ray cluster can be used.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: must be at least 1")
    if name != "ray":
        if address is not None:
            raise UsageError(f"--address {address}: is for --engine ray; add it, or omit --address")
        yield workers or 1, supervise
        return
    from sa1b import ray_tasks

    with ray_tasks.cluster(address, workers) as count:
        yield count, ray_tasks.supervise
