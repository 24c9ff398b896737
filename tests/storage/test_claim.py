"""Claims: one holder at a time, kept by a heartbeat, taken over when that ends."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from sa1b.errors import LockedError
from sa1b.storage.atomic import is_of_dead_process, this_process
from sa1b.storage.claim import Claim, holder, live_holders, remove_dead
from sa1b.storage.store import FolderStore

NAME = "tasks/sa_000020.claim"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "tasks").mkdir()
    return FolderStore(tmp_path)


def dead_process() -> str:
    """Name of a process of this machine that has ended."""
    return subprocess.run(
        [sys.executable, "-c", "from sa1b.storage.atomic import this_process; print(this_process())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def foreign(store: FolderStore, *, age: float, process: str = "another-1", **more: object) -> None:
    """A claim as a process elsewhere leaves it, `age` seconds after its last heartbeat."""
    document = {"host": "node7", "pid": 4711, "process": process, "token": "theirs", **more}
    store.put(NAME, json.dumps(document).encode())
    then = time.time() - age
    os.utime(store.path(NAME), (then, then))


def leftovers(store: FolderStore) -> list[str]:
    return sorted(path.name for path in store.path("tasks").iterdir())


def test_of_many_that_ask_at_once_exactly_one_gets_it(store: FolderStore) -> None:
    for _ in range(20):
        barrier = threading.Barrier(8)

        def ask(barrier: threading.Barrier = barrier) -> Claim | None:
            barrier.wait()
            return Claim.take(store, NAME)

        with ThreadPoolExecutor(8) as pool:
            taken = [one for one in (call.result() for call in [pool.submit(ask) for _ in range(8)]) if one]
        assert len(taken) == 1
        taken[0].release()
        assert leftovers(store) == []


def test_the_heartbeat_keeps_a_claim(store: FolderStore) -> None:
    claim = Claim.take(store, NAME, timeout=0.6)
    assert claim is not None
    with claim:
        before = store.path(NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while store.path(NAME).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_another_machines_claim_is_kept_until_its_heartbeat_is_too_old(store: FolderStore) -> None:
    foreign(store, age=60)
    assert Claim.take(store, NAME) is None
    foreign(store, age=1000)
    claim = Claim.take(store, NAME)
    assert claim is not None
    assert claim.previous is not None
    assert claim.previous.host == "node7"
    claim.release()


@pytest.mark.parametrize(("timeout", "age"), [(600, 300), (1200, 600)])
def test_the_timeout_of_the_holder_decides(store: FolderStore, timeout: float, age: float) -> None:
    foreign(store, age=age, timeout=timeout)
    assert Claim.take(store, NAME, timeout=1) is None
    assert list(live_holders(store, "tasks")) == ["sa_000020"]
    remove_dead(store, NAME, timeout=1)
    assert holder(store, NAME) is not None
    foreign(store, age=timeout + 1000, timeout=timeout)
    claim = Claim.take(store, NAME, timeout=10_000)
    assert claim is not None
    claim.release()


def test_a_process_that_is_alive_on_this_machine_never_loses_its_claim(store: FolderStore) -> None:
    claim = Claim.take(store, NAME, timeout=0.01)
    assert claim is not None  # without a heartbeat: its thread has not started
    os.utime(store.path(NAME), (1, 1))
    assert Claim.take(store, NAME, timeout=0.01) is None
    found = holder(store, NAME)
    assert found is not None
    assert f"held until process {os.getpid()}" in found.terms(store.path(NAME))
    claim.release()


@pytest.mark.parametrize("content", [b"", b'{"pid": Infinity, "host": "a"}', None])
def test_a_claim_that_is_dated_in_the_future_ages_from_when_it_is_seen(
    store: FolderStore, content: bytes | None
) -> None:
    foreign(store, age=-1e9, timeout=0.5)
    if content is not None:
        store.path(NAME).write_bytes(content)
    os.utime(store.path(NAME), (time.time() + 1e9,) * 2)
    assert Claim.take(store, NAME) is None
    found = holder(store, NAME)
    assert found is not None
    assert 0 <= found.age < 3600  # not in the future any more
    assert "remove this file if no process uses it" in found.terms(store.path(NAME))
    os.utime(store.path(NAME), (time.time() - 1000,) * 2)
    claim = Claim.take(store, NAME)
    assert claim is not None
    claim.release()


@pytest.mark.parametrize("timeout", ["NaN", "Infinity", "-1", '"soon"', "1e300"])
def test_a_timeout_that_says_nothing_is_the_usual_one(store: FolderStore, timeout: str) -> None:
    store.path(NAME).write_text(
        f'{{"host": "a", "pid": 1, "process": "x-1", "token": "t", "timeout": {timeout}}}'
    )
    found = holder(store, NAME)
    assert found is not None
    assert found.timeout == 120


def test_a_dead_process_of_this_machine_loses_its_claim_at_once(store: FolderStore) -> None:
    process = dead_process()
    assert is_of_dead_process(process)
    assert not is_of_dead_process(this_process())
    foreign(store, age=0, process=process)
    claim = Claim.take(store, NAME)
    assert claim is not None
    claim.release()
    foreign(store, age=0, process=process)
    remove_dead(store, NAME)
    assert leftovers(store) == []


def test_of_many_that_take_over_at_once_at_most_one_may_commit(store: FolderStore) -> None:
    for _ in range(20):
        foreign(store, age=1000)
        barrier = threading.Barrier(8)

        def ask(barrier: threading.Barrier = barrier) -> Claim | None:
            barrier.wait()
            return Claim.take(store, NAME, timeout=120)

        with ThreadPoolExecutor(8) as pool:
            taken = [one for one in (call.result() for call in [pool.submit(ask) for _ in range(8)]) if one]
        # One that looks in the moment of a takeover may believe it has the claim; `check` is what counts.
        passed = 0
        for one in taken:
            with suppress(LockedError):
                one.check()
                passed += 1
        assert passed <= 1
        for one in taken:
            one.release()
        store.remove(NAME)


def test_a_holder_that_was_taken_over_finds_out_and_leaves_the_new_claim_alone(store: FolderStore) -> None:
    claim = Claim.take(store, NAME)
    assert claim is not None
    foreign(store, age=0)
    with pytest.raises(LockedError, match=r"node7:4711.*took over.*raise --claim-timeout"):
        claim.check()
    claim.release()
    assert leftovers(store) == ["sa_000020.claim"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": "a"}'])
def test_a_claim_that_a_crash_cut_counts_by_its_age(store: FolderStore, content: bytes) -> None:
    store.path(NAME).write_bytes(content)
    assert Claim.take(store, NAME) is None
    os.utime(store.path(NAME), (1, 1))
    claim = Claim.take(store, NAME)
    assert claim is not None
    claim.release()
    assert leftovers(store) == []


def test_put_if_absent_shows_the_content_at_once_and_keeps_the_first(store: FolderStore) -> None:
    assert store.put_if_absent("tasks/a", b"one")
    assert not store.put_if_absent("tasks/a", b"two")
    assert store.read("tasks/a") == b"one"
    assert store.names("tasks") == ["a"]
    assert leftovers(store) == ["a"]
