"""torchrun with a varying number of machines: agents on this machine that are killed, leave and join again.

The losses are those of an undisturbed run to rounding, and each image occurs once.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY, Process
from tests.stream.leftovers import names, shared_memory
from tests.train.command import (
    FLAGS,
    PATIENCE,
    SECOND_FLAGS,
    assert_same_state,
    checkpoint_steps,
    ids_of_steps,
    lines,
    losses,
    processes_of,
    starts,
    train_to_end,
)

RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
# A small learning rate: differences of rounding must not grow over many steps.
LONG = ("--optim.steps", "100000", "--optim.lr", "0.0001", "--checkpoint.every", "5")


@dataclass
class Machines:
    """Agents of one run, by name; the first one holds the rendezvous.

    Attributes:
        forked: ranks are forked from their agent (tests/train/agent.py) instead of started by torchrun.
    """

    root: Path
    folder: Path
    most: int
    least: int = 1
    restarts: int = 20
    mode: str = "ddp"
    ranks: int = 1
    forked: bool = True
    flags: Sequence[str] = ()
    agents: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segments = names()
        (self.folder / "ids").mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def join(self, name: str) -> None:
        """Start an agent."""
        mishap = json.dumps({"what": "record", "into": str(self.folder / "ids"), "pace": 0.2})
        command = [
            *(sys.executable, "-m", "tests.train.agent" if self.forked else "torch.distributed.run"),
            *(f"--nnodes={self.least}:{self.most}", f"--nproc-per-node={self.ranks}"),
            f"--max-restarts={self.restarts}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={RENDEZVOUS}"),
            *((mishap,) if self.forked else ("-m", "tests.train.mishap_rank", "sam", mishap)),
            *(
                "--data.root",
                str(self.root),
                "--out",
                str(self.out),
                *(SECOND_FLAGS if self.forked else FLAGS),
            ),
            *("--parallel.mode", self.mode, *LONG, *self.flags),
        ]
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        if not self.forked:
            environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("a") as log:
            self.agents[name] = Process(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment,
                start_new_session=True,
            )  # fmt: skip
        if len(self.agents) == 1:
            self.wait_for_rendezvous()

    def wait_for_rendezvous(self) -> None:
        """Wait until the first agent listens: the agent that binds the port holds the rendezvous, and must not be killed."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert all(agent.poll() is None for agent in self.agents.values()), self.log()
            time.sleep(0.1)
        raise AssertionError(f"nothing listens: {self.log()}")

    def ranks_of(self, name: str) -> list[int]:
        pid = self.agents[name].pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self, name: str, *, ranks: bool = True) -> None:
        """Kill an agent, and its ranks at once."""
        killed, agent = self.ranks_of(name) if ranks else [], self.agents.pop(name)
        for pid in (agent.pid, *killed):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def leave(self, name: str) -> None:
        """Ask an agent to end, as a scheduler does that takes a machine away."""
        agent = self.agents.pop(name)
        os.kill(agent.pid, signal.SIGTERM)
        assert agent.wait(PATIENCE) == 1, self.log()  # torchrun's code after any signal

    def wait_for(self, world_size: int) -> None:
        """Wait until so many ranks have done three steps since they started."""

        def holds() -> bool:
            last, done = starts(self.out)[-1], lines(self.out)[-1]["step"]
            return last["world_size"] == world_size and done >= last["step"] + 3

        self.wait_until(holds)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the files of the run."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(OSError, ValueError, AssertionError, IndexError):  # the file is being written
                if holds():
                    return
            assert all(agent.poll() is None for agent in self.agents.values()), self.log()
            time.sleep(0.1)
        raise AssertionError(f"it does not come: {self.log()}")

    def stop(self) -> int:
        """Stop the run on all machines by a signal to one rank; returns the number of steps."""
        os.kill(self.ranks_of("a")[0], signal.SIGUSR1)
        codes = {name: agent.wait(PATIENCE) for name, agent in self.agents.items()}
        assert set(codes.values()) == {0}, self.log()
        return checkpoint_steps(self.out)[-1]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """Leave no process, whatever happened."""
        for name in list(self.agents):
            with suppress(OSError):  # it has ended already
                self.kill(name)


@pytest.fixture
def machines(root: Path, tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    """A function that makes `Machines`; they end with the test."""
    made: list[Machines] = []

    def make(**settings: Any) -> Machines:
        made.append(Machines(root, tmp_path / "elastic", **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def assert_as_undisturbed(found: Machines, steps: int) -> None:
    """Each step has its images once, and the loss of a run of one process to rounding."""
    mishap = {"what": "stop", "step": steps - 1}
    flags = (*LONG, *found.flags)
    model = "reconstruction" if found.forked else "sam"
    undisturbed = train_to_end(found.root, found.folder / "undisturbed", *flags, mishap=mishap, model=model)
    assert losses(found.out) == pytest.approx(losses(undisturbed), rel=1e-4, abs=0)
    assert len(losses(found.out)) == steps
    of_rank: dict[int, dict[tuple[int, int], list[int]]] = {}
    pids = set()
    for path in (found.folder / "ids").glob("*.jsonl"):
        noted = [json.loads(line) for line in path.read_text().splitlines()]
        pids |= {one["pid"] for one in noted}
        of_rank[int(path.stem)] = {(one["step"], one["world_size"]): one["ids"] for one in noted}
    begun = starts(found.out)  # those whose steps were kept
    for step, ids in enumerate(ids_of_steps(found.root, steps)):
        world_size = next(one["world_size"] for one in reversed(begun) if one["step"] <= step)
        assert [one for rank in range(world_size) for one in of_rank[rank][step, world_size]] == ids
    assert len(pids) >= len(begun)
    assert_nothing_left(found, undisturbed, pids)


def assert_nothing_left(found: Machines, undisturbed: Path, pids: Set[int]) -> None:
    """No process, shared memory, temporary file, socket or FIFO; only files that an undisturbed run has too."""
    assert processes_of(found.out) == []
    assert shared_memory(sorted(pids), found.segments) == []
    # Folders of torchrun's logs and torch's caches.
    assert {re.sub("_.*", "", path.name) for path in (found.folder / "tmp").iterdir()} <= {
        "torchelastic",
        "torchinductor",
    }
    assert all(path.is_file() or path.is_dir() for path in found.out.rglob("*"))
    of_killed = {"heartbeat", "stacks-2.txt", "stacks-3.txt"}  # of ranks that did not come back
    assert names_in(found.out) - of_killed == names_in(undisturbed)


def names_in(run: Path) -> set[str]:
    """Names in the folder of a run, without those of checkpoints."""
    found = {str(path.relative_to(run)) for folder in (run, run / "checkpoints") for path in folder.iterdir()}
    return {name for name in found if not re.fullmatch(r"checkpoints/step-\d{8}", name)}


def test_a_machine_is_killed_and_joins_again(machines: Callable[..., Machines]) -> None:
    found = machines(most=2)
    found.join("a")
    found.join("b")
    found.wait_for(2)
    found.kill("b")
    found.wait_for(1)
    found.join("b")
    found.wait_for(2)
    steps = found.stop()
    assert_as_undisturbed(found, steps)
    assert {one["world_size"] for one in starts(found.out)} >= {1, 2}


@pytest.mark.slow
def test_a_fixed_number_of_machines_ends_when_one_leaves_and_resumes_bit_for_bit(
    machines: Callable[..., Machines],
) -> None:
    found = machines(most=2, least=2, restarts=0)
    for name in "ab":
        found.join(name)
    found.wait_for(2)
    found.leave("b")
    other = found.agents.pop("a")
    assert other.wait(PATIENCE) == 1, found.log()  # with 0, it would wait for the other one first
    step = checkpoint_steps(found.out)[-1]
    assert f"stopped after step {step} and saved a checkpoint" in found.log()
    begun = len(starts(found.out))
    for name in "ab":
        found.join(name)
    found.wait_until(lambda: len(starts(found.out)) > begun)
    found.wait_for(2)
    mishap = {"what": "stop", "step": found.stop() - 1}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    undisturbed = train_to_end(found.root, found.folder / "undisturbed", *LONG, **given)
    assert losses(found.out) == losses(undisturbed)
    assert_same_state(found.out, undisturbed)


@pytest.mark.slow
def test_an_agent_is_killed_and_its_ranks_live_on(machines: Callable[..., Machines]) -> None:
    """They train on with the others, until an agent that joins starts all ranks again; then they end."""
    found = machines(most=2, forked=False)  # a forked rank gets SIGINT when its agent ends
    found.join("a")
    found.join("b")
    found.wait_for(2)
    found.kill("b", ranks=False)
    before, begun = lines(found.out)[-1]["step"], len(starts(found.out))
    found.wait_until(lambda: lines(found.out)[-1]["step"] > before + 3)
    assert len(starts(found.out)) == begun
    found.join("b")
    found.wait_until(lambda: len(starts(found.out)) > begun)
    found.wait_for(2)
    assert_as_undisturbed(found, found.stop())


@pytest.mark.slow
@pytest.mark.parametrize("forked", [False, True])
def test_five_changes_in_a_row(machines: Callable[..., Machines], forked: bool) -> None:
    found = machines(most=2, forked=forked)
    found.join("a")
    found.wait_for(1)
    for number in range(5):
        found.join("b")
        found.wait_for(2)
        (found.leave if number % 2 else found.kill)("b")
        found.wait_for(1)
    found.join("b")
    found.wait_for(2)
    assert_as_undisturbed(found, found.stop())


@pytest.mark.slow
def test_replicas_fall_and_return(machines: Callable[..., Machines]) -> None:
    found = machines(most=2, ranks=2, mode="fsdp", flags=("--parallel.replicas", "2"))
    found.join("a")
    found.wait_for(2)
    assert "--parallel.replicas 2: does not fit 2 ranks, so it is 1" in found.log()
    found.join("b")
    found.wait_for(4)
    before = found.log().count("does not fit")
    found.kill("b")
    found.wait_for(2)
    assert found.log().count("does not fit") > before
    steps = found.stop()
    assert json.loads((found.out / "config.json").read_text())["parallel"]["replicas"] == 2
    found.flags = ()  # of the undisturbed run, which has one process
    assert_as_undisturbed(found, steps)


@pytest.mark.slow
def test_a_third_machine_joins_and_one_leaves(machines: Callable[..., Machines]) -> None:
    # The agents of the first two notice the third one up to a second apart.
    found = machines(most=3)
    for name in "ab":
        found.join(name)
    found.wait_for(2)
    found.join("c")
    found.wait_for(3)
    found.leave("b")
    found.wait_for(2)
    found.join("b")
    found.wait_for(3)
    assert_as_undisturbed(found, found.stop())
