"""Every rank under torchrun reads its part of the recorded sequence, in every way of reading."""

import json
import math
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY, Process, rank_environments
from tests.stream.rank_program import COUNT, STEP
from tests.stream.recorded import digest, make_root, sequence

WORLDS = (1, 2, 3)
BY_TORCHRUN = 1  # the ranks of the others get its variables
WAYS = ["0, by torchrun's variables", "0", "1", "2", "Loader"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("torchrun"), 17)


@pytest.fixture(scope="module")
def seen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the records of each rank of each world size."""
    out = tmp_path_factory.mktemp("seen")
    program = ["-m", "tests.stream.rank_program", str(root), str(out)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={BY_TORCHRUN}"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launched = [Process([sys.executable, *torchrun, *program], cwd=REPOSITORY, **options)]
    with ExitStack() as stores:
        for world_size in WORLDS:
            if world_size != BY_TORCHRUN:
                for environment in stores.enter_context(rank_environments(world_size)):
                    command = [sys.executable, *program]
                    launched.append(Process(command, cwd=REPOSITORY, env=environment, **options))
        for one in launched:
            output, _ = one.communicate(timeout=600)
            assert one.returncode == 0, output
    return out


@pytest.mark.parametrize("world_size", WORLDS)
def test_ids_positions_and_bytes_are_the_recorded_ones_on_every_rank(
    root: Path, seen: Path, world_size: int
) -> None:
    for rank in range(world_size):
        batches = islice(sequence(root, COUNT, **STEP, rank=rank, world_size=world_size), COUNT)
        recorded = [{"ids": b.ids.tolist(), "position": b.position, "digest": digest(b)} for b in batches]
        found = json.loads((seen / f"{rank} of {world_size}.json").read_text())
        assert list(found) == WAYS
        for way in WAYS:
            assert found[way] == recorded, f"rank {rank} of {world_size}, {way}"


def test_no_step_depends_on_how_many_ranks_there_are(seen: Path) -> None:
    steps: dict[int, list[list[int]]] = {}
    for world_size in WORLDS:
        pieces = math.ceil(math.ceil(STEP["global_batch"] / world_size) / STEP["micro_batch"])
        ranks = [
            json.loads((seen / f"{rank} of {world_size}.json").read_text())["2"] for rank in range(world_size)
        ]
        steps[world_size] = [
            [i for rank in ranks for batch in rank[step * pieces : (step + 1) * pieces] for i in batch["ids"]]
            for step in range(COUNT // pieces)
        ]
    shortest = min(map(len, steps.values()))
    assert shortest == 4
    assert steps[1][:shortest] == steps[2][:shortest] == steps[3][:shortest]
