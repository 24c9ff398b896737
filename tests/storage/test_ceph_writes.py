"""Writes to a production object store on this machine: one winner, complete files, nothing left behind.

`pytest -m ceph`; skipped where the programs are not installed.
"""

import contextlib
import itertools
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sa1b.errors import LockedError
from sa1b.storage.bucket import BucketStore
from sa1b.storage.claim import Claim, holder
from sa1b.storage.errors import DamageError, DeniedError, StorageError, UnavailableError
from sa1b.storage.retry import RetryPolicy
from tests.processes import Process
from tests.storage import ceph
from tests.storage.conftest import HASTY
from tests.storage.fault_proxy import WRITES
from tests.storage.service import REPOSITORY, Service

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]
FAULTS = (*WRITES, "reset", "reset_body", "stall", "stall_body", "busy")  # TLS detects other changes of lists
PROCESSES, ROUNDS = 8, 10


def through(
    proxy: Service, store: BucketStore, policy: RetryPolicy = HASTY
) -> contextlib.AbstractContextManager[BucketStore]:
    """The same directory, reached through a proxy."""
    options = {**store.options, "endpoint_url": proxy.url}
    return contextlib.closing(
        BucketStore(store.root, scratch=store.scratch, options=options, retry_policy=policy)
    )


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sa1b.storage.cache.PART", 5 << 20)  # the least that S3 accepts
    monkeypatch.setattr("sa1b.storage.cache.PIECE", 5 << 20)


def file_of(folder: Path, size: int, seed: int = 0) -> tuple[Path, bytes]:
    folder.mkdir(exist_ok=True)
    data = random.Random(seed).randbytes(size)
    (folder / "a.tar").write_bytes(data)
    return folder / "a.tar", data


def contents(store: BucketStore, name: str) -> bytes:
    with store.files(name) as (path,):
        return path.read_bytes()


def in_processes(work: Callable[[int, Any], object]) -> list[Any]:
    """What `work` returns in each of several forked processes."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(PROCESSES), context.Queue()

    def run(number: int) -> None:
        results.put((number, work(number, barrier)))

    processes = [context.Process(target=run, args=(number,)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return [found[number] for number in range(PROCESSES)]


def test_one_of_many_processes_writes_an_object(ceph_bucket: BucketStore) -> None:
    assert ceph_bucket.put_if_absent("used", b"before the fork")

    def write(number: int, barrier: Any) -> list[bool]:
        found = []
        for turn in range(ROUNDS):
            barrier.wait()
            found.append(ceph_bucket.put_if_absent(f"{turn}", b"%d" % number))
        return found

    won = in_processes(write)
    for turn in range(ROUNDS):
        winners = [number for number in range(PROCESSES) if won[number][turn]]
        assert winners == [int(ceph_bucket.read(f"{turn}"))]


def _write_all(store: BucketStore, word: bytes) -> int:
    return sum(store.put_if_absent(f"{turn}", word) for turn in range(5))


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_store_is_used_in_a_new_process(ceph_bucket: BucketStore, method: str) -> None:
    assert ceph_bucket.put_if_absent("0", b"ours")
    with multiprocessing.get_context(method).Pool(2) as pool:
        won = pool.starmap(_write_all, [(ceph_bucket, b"one"), (ceph_bucket, b"two")])
    assert sum(won) == 4


@pytest.mark.slow  # quick: test_claim.py
def test_one_of_many_processes_takes_over_a_claim(ceph_bucket: BucketStore) -> None:
    names = [f"tasks/{turn}.claim" for turn in range(8)]
    theirs = {"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs", "timeout": 0.1}
    for name in names:
        ceph_bucket.put(name, json.dumps(theirs).encode())
    ceph.wait_for(lambda: (ceph_bucket.age(names[-1]) or 0) > 1, "the age of the claims")

    def take(number: int, barrier: Any) -> list[str | None]:
        found = []
        for name in names:
            barrier.wait()
            claim = Claim.take(ceph_bucket, name)
            found.append(claim and claim._token)
        return found

    tokens = in_processes(take)
    for turn, name in enumerate(names):
        found = holder(ceph_bucket, name)
        assert found is not None
        assert [found.token] == [row[turn] for row in tokens if row[turn]]


@pytest.mark.slow
@pytest.mark.parametrize("if_match", [True, False])
def test_holders_exclude_each_other(ceph_bucket: BucketStore, if_match: bool) -> None:
    """A counter that only the holder of an object increments, by a read and a write, loses no increment."""
    ceph_bucket.put("count", b"0")
    assert ceph_bucket.put_if_absent("used", b"")
    assert ceph_bucket._conditions._has_if_match
    ceph_bucket._conditions._has_if_match = if_match

    def count(number: int, barrier: Any) -> int:
        held = 0
        end = time.monotonic() + 20
        for turn in itertools.count():
            token = b"%d-%d" % (number, turn)
            if time.monotonic() > end:
                return held
            taken = ceph_bucket.put_if_absent("held", token)
            if not taken and turn % 5 == 0:  # as after the end of a claim, by the agreement of its holder
                taken = ceph_bucket.replace_if("held", token, b"released".__eq__)
            if taken:
                assert ceph_bucket.renew("held", token)
                ceph_bucket.put("count", b"%d" % (int(ceph_bucket.read("count")) + 1))
                held += 1
                if turn % 2:
                    assert ceph_bucket.remove_if("held", token.__eq__)
                else:
                    assert ceph_bucket.replace_if("held", b"released", token.__eq__)
        raise AssertionError

    held = in_processes(count)
    print(f"\n{sum(held)} times held, by each process {held}")
    assert int(ceph_bucket.read("count")) == sum(held) > PROCESSES


def test_lost_answers_leave_one_winner(ceph_bucket: BucketStore) -> None:
    with (
        Service("fault_proxy", _port(ceph_bucket), 1, 0.4, "write_lost", "write_reset") as proxy,
        through(proxy, ceph_bucket) as store,
        ThreadPoolExecutor(PROCESSES) as pool,
    ):
        for turn in range(ROUNDS):
            values = [b"%d" % n for n in range(PROCESSES)]
            won = list(pool.map(store.put_if_absent, [f"{turn}"] * PROCESSES, values))
            assert [n for n in range(PROCESSES) if won[n]] == [int(store.read(f"{turn}"))]
            assert store.replace_if(f"{turn}", b"next", lambda data: True)
            assert store.remove_if(f"{turn}", b"next".__eq__)
        assert len(proxy.ask({"do": "log"})["faults"]) > ROUNDS
    assert not ceph_bucket._requests.sizes("", deep=True)


@pytest.mark.slow  # quick: test_lost_answers_leave_one_winner
def test_a_lost_answer_to_the_last_call_of_an_upload_changes_nothing(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None
) -> None:
    last = []
    for seed in range(4):
        with (
            Service("fault_proxy", _port(ceph_bucket), seed, 0.5, "write_lost") as proxy,
            through(proxy, ceph_bucket) as store,
        ):
            path, data = file_of(tmp_path / "staged", 11_000_000, seed)
            store.commit([path])
            assert contents(ceph_bucket, "a.tar") == data
            last += [
                one
                for one in proxy.ask({"do": "log"})["faults"]
                if one[0].startswith("POST") and "uploadId" in one[0]
            ]
    assert last  # the store had completed the upload, and the client did not learn it
    assert ceph_bucket.uploads() == []


@pytest.mark.parametrize(
    ("rate", "size"), [(0.3, 23_000_000), pytest.param(0.05, 200_000_000, marks=pytest.mark.slow)]
)
def test_faults_change_no_byte_of_an_upload(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None, rate: float, size: int
) -> None:
    with (
        Service("fault_proxy", _port(ceph_bucket), 5, rate, *FAULTS) as proxy,
        through(proxy, ceph_bucket, replace(HASTY, min_throughput=5e6, deadline=600)) as store,
    ):
        for seed in range(2):
            path, data = file_of(tmp_path / "staged", size, seed)
            stored: list[int] = []
            store.commit([path], progress=stored.append)
            assert sum(stored) == size
            assert not path.exists()
            assert contents(ceph_bucket, "a.tar") == data
            for number in range(20):
                store.put(f"tasks/{number}.json", b"%d" % (seed + number))
                assert ceph_bucket.read(f"tasks/{number}.json") == b"%d" % (seed + number)
        log = proxy.ask({"do": "log"})
        assert len(log["faults"]) > log["requests"] * rate / 2
    assert ceph_bucket.uploads() == []
    assert not list(ceph_bucket.scratch.iterdir())


def test_flipped_bits_change_no_byte_of_a_read(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = file_of(tmp_path / "staged", 23_000_000)
    ceph_bucket.commit([path])
    ceph_bucket.put("tasks/a.json", data[:5000])
    with (
        Service("fault_proxy", _port(ceph_bucket), 3, 0.2, "flip", "short") as proxy,
        through(proxy, ceph_bucket) as store,
    ):
        assert contents(store, "a.tar") == data
        monkeypatch.setattr("sa1b.storage.cache.composite_etag", lambda etags: "another")
        assert contents(store, "a.tar") == data  # by a second read
        assert [store.read("tasks/a.json") for _ in range(30)] == [data[:5000]] * 30
        assert proxy.ask({"do": "log"})["faults"]  # how many depends on the order of parallel requests
    assert not list(ceph_bucket.scratch.iterdir())


def test_an_object_that_another_process_replaced_is_copied_again(
    ceph_bucket: BucketStore, tmp_path: Path
) -> None:
    with contextlib.closing(
        BucketStore(ceph_bucket.root, scratch=tmp_path, options=ceph_bucket.options)
    ) as other:
        for content in (b"one", b"two2"):
            other.put("samples.bin", content)
            assert contents(ceph_bucket, "samples.bin") == content


def test_an_upload_is_read_back_where_entity_tags_are_no_md5(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sa1b.storage.cache.composite_etag", lambda etags: "another")
    path, data = file_of(tmp_path / "staged", 23_000_000)
    ceph_bucket.commit([path])
    assert contents(ceph_bucket, "a.tar") == data
    path.write_bytes(data)

    def damage(size: int) -> None:
        with path.open("r+b") as file:
            file.seek(1_000)
            file.write(b"\0" if data[1_000] else b"\1")

    with pytest.raises(DamageError, match=r"shards/a\.tar: differs from .*staged/a\.tar after the upload"):
        ceph_bucket.commit([path], progress=damage)
    assert path.exists()


@pytest.mark.slow
def test_a_gateway_killed_during_an_upload_is_waited_for(
    gateway: ceph.Gateway, ceph_bucket: BucketStore, tmp_path: Path, small_parts: None
) -> None:
    path, data = file_of(tmp_path / "staged", 103_000_000)
    parts: list[int] = []

    def kill(size: int) -> None:
        parts.append(size)
        if len(parts) == 3:
            gateway.kill_gateway()
            time.sleep(5)
            gateway.start_gateway()  # by the main thread: daemons end with the thread that started them

    ceph_bucket.commit([path], progress=kill)
    assert contents(ceph_bucket, "a.tar") == data
    assert ceph_bucket._requests.reader.counters().resets > 0


def test_an_interrupted_upload_leaves_nothing(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None
) -> None:
    path, _ = file_of(tmp_path / "staged", 23_000_000)

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ceph_bucket.commit([path], progress=interrupt)
    assert ceph_bucket.uploads() == []
    assert ceph_bucket.size("a.tar") is None
    assert path.exists()


def test_an_unreachable_store_ends_an_upload_at_the_deadline(
    ceph_bucket: BucketStore, tmp_path: Path, small_parts: None
) -> None:
    path, _ = file_of(tmp_path / "staged", 23_000_000)
    hasty = RetryPolicy(deadline=1, attempt_timeout=0.5, initial_backoff=0.02, max_backoff=0.2)
    with (
        Service("fault_proxy", _port(ceph_bucket), 5, 0) as proxy,
        through(proxy, ceph_bucket, hasty) as store,
    ):

        def cut(size: int) -> None:
            proxy.ask({"do": "outage", "seconds": 2})

        with pytest.raises(UnavailableError, match=r"shards/a\.tar.*unavailable"):
            store.commit([path], progress=cut)
    assert ceph_bucket.uploads() == []
    assert path.exists()


_CHILD = """
import json, sys, time
from pathlib import Path
from sa1b.storage import cache
from sa1b.storage.bucket import BucketStore
from sa1b.storage.claim import Claim
cache.PART = cache.PIECE = 5 << 20
root, options, scratch = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
store = BucketStore(root, scratch=scratch, options=options)
"""


@contextlib.contextmanager
def child(store: BucketStore, code: str) -> Iterator[Process]:
    command = [sys.executable, "-c", _CHILD + code, store.root, json.dumps(store.options), str(store.scratch)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Process(command, **pipes, text=True, cwd=REPOSITORY) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: Process) -> str:
    return str(process.stdout.readline().strip())


UPLOADS = """
store.commit([scratch / "a.tar"], progress=lambda size: (print("part", flush=True), time.sleep(60)))
"""


def test_the_upload_of_a_killed_process_is_found_and_removed(ceph_bucket: BucketStore) -> None:
    file_of(ceph_bucket.scratch, 23_000_000)
    with child(ceph_bucket, UPLOADS) as process:
        assert line(process) == "part"
        process.kill()
    (left,) = ceph_bucket.uploads()
    assert left.name == "a.tar"
    assert -2 < left.age < 600
    assert ceph_bucket.abort_uploads("b.tar".__eq__) == 0
    assert ceph_bucket.uploads() == [left] or ceph_bucket.uploads()[0].id == left.id
    assert ceph_bucket.abort_uploads("a.tar".__eq__) == 1
    assert ceph_bucket.uploads() == []


@pytest.mark.slow  # quick: test_the_upload_of_a_killed_process_is_found_and_removed
def test_the_next_upload_of_a_file_replaces_that_of_a_killed_process(
    ceph_bucket: BucketStore, small_parts: None
) -> None:
    path, data = file_of(ceph_bucket.scratch, 23_000_000)
    with child(ceph_bucket, UPLOADS) as process:
        assert line(process) == "part"
        process.kill()
    ceph_bucket.commit([path])
    assert contents(ceph_bucket, "a.tar") == data
    assert ceph_bucket.uploads() == []


def test_ctrl_c_removes_the_upload(ceph_bucket: BucketStore) -> None:
    file_of(ceph_bucket.scratch, 23_000_000)
    with child(ceph_bucket, UPLOADS) as process:
        assert line(process) == "part"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
    assert ceph_bucket.uploads() == []
    assert ceph_bucket.size("a.tar") is None


@pytest.mark.slow  # quick: test_an_upload_that_was_removed_names_the_file
def test_an_upload_that_another_process_finished_is_finished(
    ceph_bucket: BucketStore, small_parts: None
) -> None:
    """A process that was stopped goes on after another one took over its work and removed its upload."""
    path, data = file_of(ceph_bucket.scratch, 43_000_000)
    copy = ceph_bucket.scratch / "copy" / "a.tar"
    copy.parent.mkdir()
    copy.write_bytes(data)
    other = BucketStore(ceph_bucket.root, scratch=ceph_bucket.scratch, options=ceph_bucket.options)
    calls: list[int] = []

    def take_over(size: int) -> None:
        calls.append(size)
        if len(calls) == 1:
            assert other.abort_uploads("a.tar".__eq__) == 1
            other.commit([copy])

    ceph_bucket.commit([path], progress=take_over)
    assert contents(ceph_bucket, "a.tar") == data
    other.close()


def test_an_upload_that_was_removed_names_the_file(ceph_bucket: BucketStore, small_parts: None) -> None:
    path, _ = file_of(ceph_bucket.scratch, 43_000_000)
    with pytest.raises(StorageError, match=r"shards/a\.tar: the store has removed this unfinished upload"):
        ceph_bucket.commit([path], progress=lambda size: bool(ceph_bucket.abort_uploads("a.tar".__eq__)))
    assert ceph_bucket.size("a.tar") is None


HOLDS = """
claim = Claim.take(store, "tasks/sa.claim", timeout=1)
with claim:
    print("held", flush=True)
    sys.stdin.readline()
    try:
        claim.check()
    except Exception as error:
        print(type(error).__name__, flush=True)
print("released", flush=True)
"""


@pytest.mark.slow  # quick: test_claim.py
def test_a_holder_that_was_stopped_does_not_damage_the_claim_of_the_next(ceph_bucket: BucketStore) -> None:
    with child(ceph_bucket, HOLDS) as process:
        assert line(process) == "held"
        first = holder(ceph_bucket, "tasks/sa.claim")
        assert first is not None
        assert first.is_here
        process.send_signal(signal.SIGSTOP)
        ceph.wait_for(lambda: (ceph_bucket.age("tasks/sa.claim") or 0) > 2.5, "the end of the claim")
        # As from another machine: on this one, the process still runs.
        replaced = json.dumps({**json.loads(ceph_bucket.read("tasks/sa.claim")), "started": None}).encode()
        assert ceph_bucket.replace_if("tasks/sa.claim", replaced, lambda data: True)
        claim: list[Claim | None] = []

        def take() -> bool:
            claim[:] = [Claim.take(ceph_bucket, "tasks/sa.claim")]
            return claim[0] is not None

        ceph.wait_for(take, "the claim")
        taken = claim[0]
        assert taken is not None
        assert taken.previous is not None
        assert taken.previous.token == first.token
        with taken:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)  # some heartbeats of the stopped process
            process.stdin.write("\n")
            process.stdin.flush()
            assert line(process) == LockedError.__name__
            assert line(process) == "released"
            taken.check()
    assert ceph_bucket.names("tasks") == []


@pytest.mark.slow  # quick: test_bucket.py
def test_more_names_than_a_page(ceph_bucket: BucketStore) -> None:
    names = [f"tasks/{number:04}.json" for number in range(230)]  # pages of 100
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: ceph_bucket.put(name, b"{}"), names))
    assert [f"tasks/{name}" for name in ceph_bucket.names("tasks")] == names
    ceph_bucket.remove_folder("tasks", lambda name: name.endswith(".json"))
    assert not ceph_bucket.is_folder("tasks")


def test_errors_of_writes_name_the_way_out(ceph_bucket: BucketStore, tmp_path: Path) -> None:
    other = BucketStore("s3://nobucket/shards", scratch=tmp_path, options=ceph_bucket.options)
    with pytest.raises(StorageError, match=r"s3://nobucket/shards/a: cannot be written.*create the bucket"):
        other.put("a", b"one")
    with pytest.raises(StorageError, match=r"cannot be written.*create the bucket"):
        other.put_if_absent("a", b"one")
    other.close()
    wrong = BucketStore(
        ceph_bucket.root, scratch=tmp_path, options={**ceph_bucket.options, "secret": "wrong"}
    )
    with pytest.raises(
        DeniedError, match=r"shards/a: access denied .*permission to get, put, list and delete"
    ):
        wrong.put("a", b"one")
    wrong.close()


def _port(store: BucketStore) -> int:
    return int(store.options["endpoint_url"].rpartition(":")[2])
