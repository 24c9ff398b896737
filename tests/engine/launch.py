"""Real processes for distributed tests: gloo on 127.0.0.1, one thread each, forked after importing torch."""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from tests.processes import REPOSITORY, Process, rank_environments


def launch(work: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """The result of `work(*arguments)` on each rank; an exception on any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder, rank_environments(world_size) as environments:
        Path(folder, "work").write_bytes(pickle.dumps((work, arguments)))
        ranks = []
        for rank, environment in enumerate(environments):
            with Path(folder, f"{rank}.log").open("w") as log:
                ranks.append(
                    Process(
                        [sys.executable, "-m", "tests.engine.launch", folder],
                        env=environment,
                        cwd=REPOSITORY,
                        stderr=log,
                    )
                )
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):  # the other ranks would wait for this rank
                for rank in ranks:
                    rank.kill()
                    rank.wait()
            time.sleep(0.01)
        logs = [Path(folder, f"{rank}.log").read_text() for rank in range(world_size)]
        assert [rank.wait() for rank in ranks] == [0] * world_size, "\n".join(logs)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


@contextmanager
def group(config: ParallelConfig) -> Iterator[RankInfo]:
    """A separate process group for one check; in mode none, a single process has no group."""
    try:
        yield start(config)
    finally:
        stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    called, given = pickle.loads(Path(sys.argv[1], "work").read_bytes())
    torch.save(called(*given), Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
