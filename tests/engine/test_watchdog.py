"""A rank that hangs is named, with its phase, stacks and pending read: real ranks on gloo, and a real store."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, Process

STALL = 1.0
PATIENCE = 120  # seconds; a loaded machine runs threads late


def wait(until: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class Ranks:
    """Ranks of tests.engine.watched and the process of their store."""

    def __init__(self, folder: Path, world_size: int, processes: ExitStack) -> None:
        self.folder, self.run = folder, folder / "run"
        self.run.mkdir()
        self._processes = processes
        port = folder / "port"
        self.store = self._start(["tests.engine.watched", str(port)], dict(os.environ), "store")
        wait(port.exists, "the store does not start")
        self.port = port.read_text()
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        common |= {"WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = ["tests.engine.watched", str(folder), str(STALL)]
        self.ranks = [
            self._start(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(rank))
            for rank in range(world_size)
        ]
        for rank in range(world_size):
            wait((folder / f"step-{rank}").exists, f"rank {rank} does not start: {self.output(rank)}")

    def _start(self, module: list[str], environment: dict[str, str], name: str) -> Process:
        with (self.folder / f"{name}.log").open("w") as log:
            process = Process(
                [sys.executable, "-m", *module], stdout=log, stderr=log, cwd=REPOSITORY, env=environment
            )
        self._processes.callback(process.wait)
        self._processes.callback(process.kill)
        return process

    def output(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def wait_for(self, pattern: str, rank: int) -> None:
        """Wait until a rank has printed it, and make it print anything later anew."""
        log = self.folder / f"{rank}.log"
        wait(lambda: re.search(pattern, self.output(rank)), f"rank {rank} does not print {pattern}")
        os.truncate(log, 0)

    def wait_for_step(self) -> None:
        before = (self.folder / "step-0").read_text()
        wait(lambda: (self.folder / "step-0").read_text() != before, "no step is done")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    with ExitStack() as processes:
        yield lambda world_size: Ranks(tmp_path, world_size, processes)


def test_each_hang_is_named_and_the_run_goes_on_if_it_ends(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    (three.folder / "loop-2").touch()
    three.wait_for(
        r"sa1b: no progress for \d+ s\n  rank 2 \(host .*\) is in step \d+, compute, micro-batch 1, for \d+ s, at "
        r"engine/watched.py:\d+ hang, and the others wait for it\n",
        rank=0,
    )
    stacks = three.run / "stacks-2.txt"
    wait(lambda: re.search(r"File .*watched.py\", line \d+ in hang", stacks.read_text()), "no stacks")
    (three.folder / "loop-2").unlink()
    three.wait_for("sa1b: rank 0 continues after", rank=0)
    assert "no progress" not in three.output(1) + three.output(2)  # one rank reports

    os.kill(three.ranks[0].pid, signal.SIGSTOP)  # the one that would report
    stopped = r"rank 0 \(host .*\) does not answer: it is stopped or dead"
    three.wait_for(stopped, rank=1)
    # Printed before the disk is used, which may be hanging.
    wait(lambda: re.search(stopped, (three.run / "stall.txt").read_text()), "the report is in no file")
    os.kill(three.ranks[0].pid, signal.SIGCONT)
    three.wait_for_step()

    three.ranks[1].kill()  # with its connections, so that the others end at once
    for rank in (0, 2):
        assert three.ranks[rank].wait(PATIENCE) == 1
        *_, last = three.output(rank).splitlines()
        assert re.match(rf"rank {rank}: rank 1 \(host .*\) does not answer: it is stopped or dead", last)


def test_a_blocked_read_is_named_with_its_shard_and_a_rank_in_c_still_writes_its_stacks(
    ranks: Callable[[int], Ranks],
) -> None:
    two = ranks(2)
    os.mkfifo(two.folder / "read-1")
    two.wait_for(
        r"rank 1 \(host .*\) is in step \d+, data, micro-batch 1, .* it waits for image 5 in shard.tar at "
        r"offset 512, and the others wait for it\n",
        rank=0,
    )
    stacks = two.run / "stacks-1.txt"
    wait(lambda: "watched.py" in stacks.read_text(), "no stacks")
    with (two.folder / "read-1").open("w"):
        two.wait_for_step()

    os.mkfifo(two.folder / "lock-1")  # not even its watchdog can run
    two.wait_for(r"rank 1 \(host .*\) does not answer", rank=0)
    in_c = r"^Stack .*\n  File .*watched.py\", line \d+ in lock_interpreter"
    wait(lambda: re.search(in_c, stacks.read_text(), re.M), "no stacks")
    with (two.folder / "lock-1").open("w"):
        two.wait_for_step()
    (two.folder / "end").touch()
    assert [rank.wait(PATIENCE) for rank in two.ranks] == [0, 0]


@pytest.mark.slow
def test_a_store_that_hangs_or_is_lost_is_named(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    lost = rf"the rendezvous store at 127.0.0.1:{two.port} does not answer"
    os.kill(two.store.pid, signal.SIGSTOP)
    (two.folder / "loop-1").touch()
    two.wait_for(lost, rank=0)
    assert "does not answer" not in two.output(1)  # it is not the first rank of its machine
    two.store.kill()
    two.ranks[1].kill()
    assert two.ranks[0].wait(PATIENCE) == 1
    assert f"rank 0: {lost}" in re.sub(r"\\", "", two.output(0))
