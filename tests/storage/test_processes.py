"""One reader in many processes: forked, served, spawned, and threads in them."""

import multiprocessing
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sa1b.storage.reader import Range, Reader
from tests.storage.conftest import HASTY, Store
from tests.storage.service import REPOSITORY, Service

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
SERVED = [pytest.param("forkserver", True, marks=pytest.mark.slow)]


def reader_of(store: Store, root: str) -> Reader:
    if root == "s3":
        return Reader("s3://data", options=store.options(), deadline=120)
    return Reader(store.folder / "data", deadline=120)


def answer(reader: Reader, ranges: list[Range], pipe: Connection) -> None:
    """Read in a child: one by one, many at once, and in threads."""
    try:
        one_by_one = [reader.read_range(item.name, item.start, item.length, item.crc) for item in ranges]
        at_once = list(reader.read_ranges(ranges))
        in_threads: dict[int, bytes] = {}

        def work(i: int) -> None:
            item = ranges[i]
            in_threads[i] = reader.read_range(item.name, item.start, item.length, item.crc)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ranges))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        agree = one_by_one == at_once == [in_threads[i] for i in range(len(ranges))]
        pipe.send((one_by_one, agree, reader.counters()))
    except BaseException as error:
        pipe.send((repr(error), False, None))
        raise


def in_child(way: str, reader: Reader, ranges: list[Range]) -> tuple[list[bytes], bool, object]:
    context = multiprocessing.get_context(way)
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(reader, ranges, there))
    process.start()
    there.close()
    assert here.poll(300), "the child hangs"
    found = here.recv()
    process.join(60)
    assert process.exitcode == 0
    return found


@pytest.mark.parametrize("root", ["s3", "local"])
@pytest.mark.parametrize(("way", "used"), [("fork", True), ("fork", False), ("spawn", True), *SERVED])
def test_a_child_reads_whether_or_not_its_parent_did_and_the_parent_reads_on(
    store: Store, way: str, used: bool, root: str
) -> None:
    ranges = store.ranges(8, seed=1)
    with reader_of(store, root) as reader:
        if used:
            list(reader.read_ranges(ranges))
        data, agree, counters = in_child(way, reader, ranges)
        assert data == store.slices(ranges)
        assert agree
        assert getattr(counters, "reads", 0) == 24  # its own, not the parent's
        assert list(reader.read_ranges(ranges)) == store.slices(ranges)
        assert reader.counters().faults == 0


def test_a_child_forked_in_the_middle_of_reads_harms_neither(store: Store) -> None:
    ranges = store.ranges(200, seed=2)
    with reader_of(store, "s3") as reader:
        found = []
        for number, data in enumerate(reader.read_ranges(ranges)):
            found.append(data)
            if number % 60 == 30:
                child, agree, _ = in_child("fork", reader, ranges[:5])
                assert child == store.slices(ranges[:5])
                assert agree
        assert found == store.slices(ranges)
        assert reader.counters().faults == 0


def test_a_grandchild_reads_too(store: Store) -> None:
    ranges = store.ranges(5, seed=3)
    with reader_of(store, "s3") as reader:
        list(reader.read_ranges(ranges))
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def child() -> None:
            list(reader.read_ranges(ranges))
            there.send(in_child("fork", reader, ranges)[:2])

        process = context.Process(target=child)
        process.start()
        assert here.poll(300)
        assert here.recv() == (store.slices(ranges), True)
        process.join(60)
        assert process.exitcode == 0


def test_a_forked_child_that_tears_everything_down_leaves_the_parents_connections_alone(store: Store) -> None:
    script = f"""
import gc, os, sys
from sa1b.storage.reader import Range, Reader
reader = Reader("s3://data", options={store.options()!r})
ranges = [Range("a.bin", 1000 * i, 1000) for i in range(50)]
first = list(reader.read_ranges(ranges))
for child_reads in (False, True):
    child = os.fork()
    if not child:
        if child_reads:
            assert list(reader.read_ranges(ranges)) == first
            reader.close()
        del reader
        gc.collect()
        sys.exit(0)  # an interpreter's end in full, with its exit handlers and collections
    assert os.waitpid(child, 0)[1] == 0
    assert list(reader.read_ranges(ranges)) == first
assert reader.counters().attempts == reader.counters().reads == 150, reader.counters()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        check=False,
    )
    # On a busy machine a response may take longer than the 3 s after which a line says so.
    errors = [line for line in done.stderr.splitlines() if "no response yet" not in line]
    assert (done.returncode, errors) == (0, [])


def test_servers_of_the_tests_end_when_their_parent_is_killed(store: Store, tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "from tests.storage.service import Service\n"
        f"server = Service('range_server', {str(tmp_path)!r})\n"
        "proxy = Service('fault_proxy', server.port, 1, 0.1)\n"
        "print(server.process.pid, proxy.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(runs(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 60
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_process_or_thread_is_left(store: Store) -> None:
    threads = set(threading.enumerate())
    before = set(multiprocessing.active_children())
    with Service("fault_proxy", store.port, 1, 0.3, "reset_body", "short") as proxy:
        reader = Reader("s3://data", options=store.options(proxy.port), retry_policy=HASTY)
        with reader:
            ranges = store.ranges(10)
            assert list(reader.read_ranges(ranges)) == store.slices(ranges)
            in_child("fork", reader, ranges)
        pid = proxy.process.pid
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= before
    assert not runs(pid)


def test_a_reader_that_is_open_at_the_exit_prints_nothing(tmp_path: Path) -> None:
    """Python 3.12 starts no thread then; older versions are made to refuse it as well."""
    (tmp_path / "object").write_bytes(bytes(10))
    script = """
import atexit, sys, threading
from sa1b.storage.reader import Reader

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

reader = Reader(sys.argv[1])
assert reader.read_range("object", 0, 10) == bytes(10)
atexit.register(setattr, threading.Thread, "start", refuse)
"""
    with Service("range_server", tmp_path) as server:
        command = [sys.executable, "-c", script, server.url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
