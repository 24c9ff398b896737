"""Killed readers: the caller gets an error at once, no resources remain, and the sequence resumes exactly."""

import json
import os
import re
import signal
import time
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from tests.stream.leftovers import names, session, shared_memory, wait_for_end
from tests.stream.reading import KINDS, PIECES, STEP, batches, first_lines, start, stream_of
from tests.stream.recorded import digest, make_root, sequence

IMAGES = 23
# Python's tracker of semaphores, which only spawned workers have, does not ignore SIGUSR1; another one then
# misses what the first one knew.
TRACKER = re.compile(
    r"\S+resource_tracker\.py:\d+: UserWarning: resource_tracker: process died unexpectedly.*\n.*\n"
    r"|Traceback \(most recent call last\):\n  File \"\S+resource_tracker\.py\", .*\n.*\nKeyError: .*\n"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("killed"), IMAGES)


def recorded(root: Path, count: int) -> list[str]:
    """The first batches of the sequence by its formula."""
    return [digest(batch) for batch in islice(sequence(root, count, **STEP), count)]


def piece(position: int) -> int:
    """The number of the batch that begins at the position of a step."""
    assert position % STEP["global_batch"] == 0
    return position // STEP["global_batch"] * PIECES


def test_a_killed_worker_is_an_error_at_once_and_new_ones_go_on_exactly(root: Path, short_path: Path) -> None:
    whole = recorded(root, 60)
    segments = names()
    process = start("workers", root, "murders", short_path / "tmp", forked=True)
    out, errors = process.communicate(timeout=600)  # more than it waits for what settles
    assert process.returncode == 0, errors.decode()
    lives = [json.loads(line) for line in out.splitlines()]
    assert [life["error"] is None for life in lives] == [False] * 4 + [True]
    for life in lives:
        first = piece(life["begun"])
        assert life["digests"] == whole[first : first + len(life["digests"])]
        assert life["waits"] <= 1  # by the signal, or when the DataLoader next looks at its workers
        assert life["before"] == life["after"]
    # Each process resumed after the last complete step of the previous process.
    ends = [piece(life["begun"]) + len(life["digests"]) for life in lives[:-1]]
    assert [piece(life["begun"]) for life in lives[1:]] == [end // PIECES * PIECES for end in ends]
    assert session(process.pid) == []
    assert shared_memory([process.pid], segments) == []
    # Who is killed, or ended by torch's DataLoader because another was, cannot remove the folder with the
    # socket through which multiprocessing hands on tensors: nothing else may be left.
    left = [path for path in (short_path / "tmp").rglob("*") if not path.is_dir()]
    assert all(path.is_socket() for path in left)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_end_with_a_forgotten_iterator_and_by_sigterm_but_not_by_sigusr1(
    root: Path, short_path: Path, method: str
) -> None:
    process = start(method, root, "signalled", short_path / "tmp")
    try:
        whole = recorded(root, 10)
        assert json.loads(first_lines(process, 1)[0]) == {"forgotten": [False, False]}
        assert json.loads(first_lines(process, 1)[0])["digests"] == whole[:2]
        os.killpg(process.pid, signal.SIGUSR1)
        assert json.loads(first_lines(process, 1)[0]) == {"digests": whole[2:], "alive": [True, True]}
        os.killpg(process.pid, signal.SIGTERM)
        out, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, TRACKER.sub("", errors.decode())) == (0, "")
    ended = json.loads(out)
    assert ended["codes"] == [-signal.SIGTERM] * 2
    assert ended["error"]
    assert ended["position"] == 18  # after the ninth batch
    wait_for_end(process.pid, 300)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_worker_is_left_whenever_the_training_process_is_killed(
    root: Path, short_path: Path, method: str
) -> None:
    """Also while a worker sends a batch that nobody receives, and others hold the end of its pipe."""
    random, segments = Random(method), names()
    for number in range(5):
        folder = short_path / f"{method}{number}"
        process = start(method, root, "abandoned", folder)
        members = [process.pid, *json.loads(first_lines(process, 1)[0])["workers"]]
        time.sleep(random.uniform(0, 0.3))
        process.kill()
        process.wait(60)
        wait_for_end(process.pid, 10)
        assert shared_memory(members, segments) == []
        process.communicate(timeout=60)


def test_workers_end_by_themselves_when_their_process_is_killed_and_the_rest_is_the_suffix(
    root: Path, short_path: Path
) -> None:
    segments = names()
    started = {kind: start(kind, root, "endless", short_path / kind, forked=True) for kind in KINDS}
    received = {kind: first_lines(process, 5 + i) for i, (kind, process) in enumerate(started.items())}
    members = {kind: session(process.pid) for kind, process in started.items()}
    assert {kind: len(pids) for kind, pids in members.items()} == {"loader": 1, "workers": 3}
    for process in started.values():
        process.kill()
    for kind, process in started.items():
        out, _ = process.communicate(timeout=300)  # ends when the last holder of its pipes has
        # What lies in the pipe since counts too; the last line may be cut.
        text = b"".join(received[kind]) + out
        lines = [json.loads(line) for line in text[: text.rindex(b"\n")].splitlines()]
        wait_for_end(process.pid, 300)
        assert shared_memory(members[kind], segments) == []
        whole = recorded(root, len(lines) + 10)
        assert [line["digest"] for line in lines] == whole[: len(lines)]
        stream = stream_of(root)
        stream.load_state_dict(lines[-1]["state"])
        first = len(lines) // PIECES * PIECES
        assert [digest(batch) for batch in islice(stream, 7)] == whole[first : first + 7]
        stream.load_state_dict(lines[-1]["state"])
        again = batches(kind, stream)
        assert [digest(batch) for batch in islice(again, 7)] == whole[first : first + 7]
        assert list((short_path / kind).iterdir()) == []
