"""Real processes for distributed tests: gloo on 127.0.0.1, one thread each, forked from a server with torch."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import start_processes

from sa1b.engine.parallel import ParallelConfig, start, stop
from sa1b.engine.ranks import RankInfo


def launch(work: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns on each rank; an exception on any rank is raised here."""
    # The optimizer imports the latter at its first step.
    multiprocessing.set_forkserver_preload(["tests.engine.training", "torch._dynamo"])
    # As torchrun does: the parent holds the store, of all groups, so no port is chosen before somebody listens.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _enter, (work, world_size, store.port, folder, arguments), world_size, start_method="forkserver"
        )
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    rank: int, work: Callable[..., Any], world_size: int, port: int, folder: str, arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.save(work(*arguments), Path(folder) / f"{rank}.pt")


@contextmanager
def group(config: ParallelConfig) -> Iterator[RankInfo]:
    """A process group of its own for one check; none for a single process in mode none."""
    try:
        yield start(config)
    finally:
        stop()
