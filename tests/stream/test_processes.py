"""`sa1b.Loader` with processes of its own: the same batches, one damage log, and nothing left after any end."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from sa1b.errors import Sa1bError, UsageError
from sa1b.stream.processes import WorkerError
from sa1b.stream.transform import Frame, Visit
from tests.shards import tiny
from tests.storage.service import Service
from tests.stream.test_stream import assert_equal, take

OPTIONS: dict[str, Any] = {"image_size": 48, "masks": 4, "flip": 0.5, "global_batch": 6, "micro_batch": 3}
IMAGES = 23


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    tiny.synthesize(folder / "sa_000001.tar", images=IMAGES, first_id=100, long_side=160)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
    return folder / "root"


@pytest.fixture(scope="module")
def damaged(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same dataset with two damaged images."""
    copied = tmp_path_factory.mktemp("damaged") / "root"
    shutil.copytree(root, copied)
    dataset = sa1b.open(root)
    for row in (2, 17):
        with (copied / dataset.shards[int(dataset.table.shard[row])]).open("r+b") as shard:
            shard.seek(int(dataset.table.offset[row]) + 200)
            shard.write(b"\0damaged\xff\xd9")
    return copied


def stream(root: Path, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(root, **{**OPTIONS, "damage_log": root.parent / "damaged.jsonl", **options})


def loader(
    root: Path, processes: int = 2, threads: int = 1, dense: int | None = None, **options: Any
) -> sa1b.Loader:
    return sa1b.Loader(stream(root, **options), processes=processes, threads=threads, dense=dense, quiet=True)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def children(pid: int | str = "self") -> set[int]:
    """The processes of a loader: those of the server, which is a child of the loader's process."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and is_alive(int(folder.name)):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                of_server = (Path("/proc") / str(parent) / "cmdline").read_bytes()
                grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            own = os.getpid() if pid == "self" else int(pid)
            if b"forkserver" in b" ".join(words) and b"forkserver" in of_server and grandparent == own:
                found.add(int(folder.name))
    return found


def wait_for_end(pids: set[int], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, f"{pids} after {seconds} s"
        time.sleep(0.01)


@pytest.mark.parametrize(("processes", "threads"), [(2, 1), (2, 2), (3, 1)])
def test_the_sequence_is_the_streams(root: Path, processes: int, threads: int) -> None:
    own = stream(root)
    expected = [batch for _ in range(2) for batch in own]
    made = loader(root, processes, threads)
    assert (made.processes, made.threads) == (processes, threads)
    found = [batch for _ in range(2) for batch in made]  # all are kept, so that most of them are copies
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("read_only", [False, True])
def test_dense_masks_are_those_of_the_batch(root: Path, read_only: bool) -> None:
    made = sa1b.Loader(stream(root), processes=2, dense=24, read_only=read_only, quiet=True)
    for _ in range(2):
        for batch in made:
            assert torch.equal(batch.dense, batch.masks.dense(24))


@pytest.mark.parametrize(
    "options",
    [
        {"order": "sequential"},
        {"rank": 1, "world_size": 2},
        {"global_batch": 5, "micro_batch": 2, "world_size": 2, "rank": 0},
        {"masks": 0},
        {"block_size": 3, "global_batch": 6, "micro_batch": 3},
    ],
)
def test_every_kind_of_stream_is_read(root: Path, options: dict[str, Any]) -> None:
    for one, other in zip(loader(root, **options), stream(root, **options), strict=True):
        if len(one.masks):  # without elements, strides differ
            assert_equal(one, other)
        assert (one.position, one.ids.tolist()) == (other.position, other.ids.tolist())
        assert torch.equal(one.images, other.images)


def test_a_mixture_and_texts_are_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text(
        "image_id,text\n" + "".join(f"{i},image {i}\n" for i in range(100, 123))
    )
    text = sa1b.Text(tmp_path / "text.csv", column="text", key="image_id", tokenizer="bytes", length=16)

    def mixture() -> sa1b.Mix:
        streams = {name: stream(root, epochs=None, seed=seed, text=text) for seed, name in enumerate("ab")}
        return sa1b.Mix({"a": (streams["a"], 2), "b": (streams["b"], 1)})

    made = sa1b.Loader(mixture(), processes=2, threads=1, quiet=True)
    for one, other in zip(islice(made, 12), mixture(), strict=False):
        assert_equal(one, other)
        assert (one.extra, one.source) == (other.extra, other.source)
        assert torch.equal(one.texts.tokens, other.texts.tokens)


def test_a_url_is_read(root: Path) -> None:
    with Service("range_server", root.parent) as server:
        url = f"{server.url}/root"
        made = sa1b.Loader(sa1b.Stream(url, **OPTIONS), processes=2, threads=1, quiet=True)
        for one, other in zip(made, stream(root), strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("taken", [1, 3, 5])
def test_a_state_after_any_batch_is_resumed_by_any_number_of_processes(root: Path, taken: int) -> None:
    whole = take(stream(root), 8)
    made = loader(root)
    batches = iter(made)
    for _ in range(taken):
        last = next(batches)
    state = made.state_dict()
    assert state["position"] == last.position
    batches.close()
    first = 2 * (last.position // 6)  # a step that was begun is read again
    for processes in (1, 3):
        again = loader(root, processes)
        again.load_state_dict(state)
        for one, other in zip(again, whole[first:], strict=True):
            assert_equal(one, other)


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_damage_is_logged_in_the_order_of_the_batches_that_were_delivered(
    damaged: Path, tmp_path: Path, order: str
) -> None:
    for processes in (1, 2):
        log = tmp_path / f"{processes}.jsonl"
        made = loader(damaged, processes, damage_log=log, order=order)
        expected = stream(damaged, damage_log=tmp_path / f"other{processes}.jsonl", order=order)
        for iteration in range(2):
            for one, other in zip(made, expected, strict=True):
                assert_equal(one, other)
                if not iteration:  # what was prefetched beyond this batch is not in the log
                    assert all(line["position"] <= int(one.positions.max()) for line in lines(log))
    assert lines(tmp_path / "1.jsonl") == lines(log) == lines(tmp_path / "other1.jsonl")
    assert len(lines(log)) >= 2


def test_too_much_damage_ends_the_iteration_at_its_batch(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "root"
    shutil.copytree(root, copied)
    dataset = sa1b.open(root)
    for row in range(0, IMAGES, 2):
        with (copied / dataset.shards[int(dataset.table.shard[row])]).open("r+b") as shard:
            shard.seek(int(dataset.table.offset[row]) + 200)
            shard.write(b"\0damaged\xff\xd9")
    ends = {}
    for processes in (1, 2):  # lines of an earlier run neither count nor hide those of this one
        made, count = loader(copied, processes, epochs=None, damage_log=tmp_path / "log.jsonl"), 0
        with pytest.raises(Sa1bError, match="damaged samples, more than 10") as error:  # noqa: PT012
            for _ in made:
                count += 1
        ends[processes] = count, str(error.value), len(lines(tmp_path / "log.jsonl")) / processes
    assert ends[1] == ends[2]


class Fails:
    def __init__(self, image_id: int) -> None:
        self.image_id = image_id

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        if visit.image_id == self.image_id:
            raise RuntimeError("no such luck")
        return frame


def test_the_traceback_of_a_process_is_the_cause_of_its_error(root: Path) -> None:
    (batch,) = take(stream(root), 1)
    with pytest.raises(Sa1bError, match="no such luck") as error:
        list(loader(root, transform=Fails(int(batch.ids[2]))))
    assert "in __call__" in str(error.value.__cause__)


def test_batches_that_the_caller_keeps_are_never_written_again(root: Path) -> None:
    made, expected = loader(root, processes=2, threads=2, epochs=None), stream(root, epochs=None)
    held = [(batch, other) for batch, other in zip(islice(made, 20), expected, strict=False)]
    for one, other in held:
        assert_equal(one, other)
    pixels = held[0][0].images[0].numpy()[:, 3:5]  # a view of numpy keeps the memory too
    copy = pixels.copy()
    held.clear()
    for _ in islice(made, 20):
        assert (pixels == copy).all()


def test_an_iteration_ends_when_another_one_begins(root: Path) -> None:
    for processes in (1, 2):
        made = loader(root, processes, epochs=None)
        first = iter(made)
        position = next(first).position
        second = iter(made)
        assert next(second).position >= position
        with pytest.raises(UsageError, match="another one of the same loader has begun"):
            next(first)
        assert len(list(islice(second, 5))) == 5


def test_many_early_ends_use_no_slot_up(root: Path) -> None:
    made, expected = loader(root, processes=2, threads=2, epochs=None), stream(root, epochs=None)
    for number in range(12):
        for one, other in zip(islice(made, number % 4), expected, strict=False):
            assert_equal(one, other)
        expected.position = made.stream.position


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_the_iteration_with_its_reason(
    root: Path, number: signal.Signals
) -> None:
    before, whole = children(), take(stream(root, epochs=None), 30)
    made = loader(root, processes=2, threads=1, epochs=None)
    batches = iter(made)
    next(batches)
    own = children() - before
    assert len(own) == 2
    os.kill(min(own), number)
    began, taken = time.monotonic(), 1
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "is stopped"
    reason = rf"sa1b-loader-\d \(pid {min(own)}\): {how}.* while it made positions"
    with pytest.raises(Sa1bError, match=reason):  # noqa: PT012
        for batch in batches:
            assert_equal(batch, whole[taken])
            taken += 1
    print(f"{how} after {time.monotonic() - began:.1f} s")
    wait_for_end(own, 60)
    state = made.state_dict()
    first = 2 * (state["position"] // 6)
    for one, other in zip(islice(made, 4), whole[first:], strict=False):  # with new processes
        assert_equal(one, other)


def test_killed_at_random_instants_and_resumed_the_batches_and_the_log_are_the_same(
    damaged: Path, tmp_path: Path
) -> None:
    own = random.Random(5)
    whole = take(stream(damaged, epochs=None, damage_log=tmp_path / "whole.jsonl"), 30)
    log = tmp_path / "log.jsonl"
    made = loader(damaged, processes=2, threads=1, epochs=None, damage_log=log)
    before, taken, kills = children(), 0, 0
    while taken < 30:
        taken = 2 * (made.state_dict()["position"] // 6)
        batches = iter(made)
        try:
            stop = taken + own.randrange(1, 6)
            while taken < min(stop, 30):
                assert_equal(next(batches), whole[taken])
                taken += 1
            if taken < 30 and (pids := sorted(children() - before)):
                threading.Timer(own.random() * 0.01, os.kill, (own.choice(pids), signal.SIGKILL)).start()
            while taken < 30:
                assert_equal(next(batches), whole[taken])
                taken += 1
        except WorkerError:
            kills += 1
    assert kills >= 3
    assert lines(log) == lines(tmp_path / "whole.jsonl")


PROGRAM = """
import sys
import sa1b
stream = sa1b.Stream({root!r}, global_batch=6, micro_batch=3, image_size=48, masks=4, epochs=None, damage_log={log!r})
"""


def program(root: Path, text: str) -> str:
    return PROGRAM.format(root=str(root), log=os.devnull) + textwrap.dedent(text)


OWN = """
print("runs", __name__)

class Own:
    def __call__(self, frame, visit):
        return frame

stream = sa1b.Stream(stream.root, global_batch=6, image_size=48, masks=4, damage_log={log!r}, transform=Own())
"""
READS = """
loader = sa1b.Loader(stream, processes=2)
print(loader.processes, sum(len(batch) for batch, _ in zip(loader, range(4))))
"""


@pytest.mark.parametrize("own", ["", OWN.format(log=os.devnull)], ids=["", "own transform"])
def test_a_script_without_a_main_guard_works(root: Path, tmp_path: Path, own: str) -> None:
    """A process does not import the script, which would make a loader of its own."""
    script = tmp_path / "script.py"
    script.write_text(program(root, own + READS))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=True)
    (line,) = done.stderr.splitlines()
    if own:
        assert done.stdout == "runs __main__\n1 23\n"
        assert line.startswith(
            "sa1b.Loader: one process, because the stream has a function or class of the program itself; "
            "define it in a module; "
        )
    else:
        assert done.stdout == "2 12\n"
        assert line.startswith("sa1b.Loader: 2 processes of 2 threads, ")


def test_a_notebook_works(root: Path) -> None:
    """As in a notebook, the program comes from standard input and has no file."""
    text = program(
        root,
        """
        loader = sa1b.Loader(stream, processes=2, quiet=True)
        print(sum(len(batch) for batch, _ in zip(loader, range(4))))
        """,
    )
    done = subprocess.run(
        [sys.executable, "-"], input=text, capture_output=True, text=True, timeout=300, check=True
    )
    assert (done.stdout, done.stderr) == ("12\n", "")


@pytest.fixture
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    text = program(
        root,
        """
        loader = sa1b.Loader(stream, processes=2, threads=2, quiet=True)
        for number, batch in enumerate(loader):
            if number == 3:
                print("runs", flush=True)
        """,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.parametrize("pause", [0.0, 0.011, 0.037, 0.1])
def test_a_killed_program_leaves_no_process_and_no_memory(
    running: subprocess.Popen[str], pause: float
) -> None:
    own, before = children(running.pid), set(Path("/dev/shm").iterdir())
    assert len(own) == 2
    time.sleep(pause)
    running.kill()
    wait_for_end(own, 30)
    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_for_the_program(
    running: subprocess.Popen[str], number: signal.Signals
) -> None:
    own = children(running.pid)
    os.killpg(running.pid, number)
    _, errors = running.communicate(timeout=60)
    wait_for_end(own, 30)
    assert running.returncode == -number
    assert "sa1b-loader-" not in errors


def test_the_statistics_are_those_of_all_processes(root: Path) -> None:
    made = loader(root)
    assert sum(len(batch) for batch in made) == IMAGES
    stats = made.stats()
    assert stats["read"]["items"] == stats["decode"]["items"] == IMAGES
    assert stats["read"]["bytes"] == int(made.stream.dataset.table.jpg_bytes.sum())
    assert min(stats[name]["seconds"] for name in ("read", "pick", "decode", "collate")) > 0
