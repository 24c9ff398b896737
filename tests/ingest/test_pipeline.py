"""Stages in threads: order, bounds, errors at once, and no thread left."""

import threading

import pytest

from sa1b.ingest.source_pass import SourcePass, ThreadStages
from sa1b.shards import jpeg
from sa1b.sources.source import SourceReader
from tests.ingest import inside
from tests.shards import tiny

WAIT = 30  # seconds after which a test gives up on a thread


def names():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("sa1b ")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert names() == set()


def test_items_pass_all_stages_in_order():
    with ThreadStages() as pipeline:
        first = pipeline.stage("first", range(1000), size=lambda item: 1, max_bytes=10)
        second = pipeline.stage("second", (2 * item for item in first), size=lambda item: 1, max_bytes=10)
        assert list(second) == [2 * item for item in range(1000)]


def test_a_stage_is_no_further_ahead_than_its_bytes():
    made = threading.Semaphore(0)
    count = 0

    def items():
        nonlocal count
        for item in range(100):
            count += 1
            made.release()
            yield item

    with ThreadStages() as pipeline:
        queue = pipeline.stage("read", items(), size=lambda item: 10, max_bytes=35)
        for _ in range(4):  # three wait, one is in its hand
            assert made.acquire(timeout=WAIT)
        assert not made.acquire(timeout=0.2)
        assert next(queue) == 0
        assert made.acquire(timeout=WAIT)
        assert count == 5


def test_an_item_larger_than_the_bound_waits_alone():
    with ThreadStages() as pipeline:
        assert list(pipeline.stage("read", [100, 1, 100], size=int, max_bytes=10)) == [100, 1, 100]


def test_an_error_comes_before_the_items_that_wait():
    failed = threading.Event()

    def items():
        yield from range(3)
        failed.set()
        raise OSError(5, "Input/output error", "source.tar")

    with ThreadStages() as pipeline:
        first = pipeline.stage("first", items(), size=lambda item: 0, max_bytes=10)
        second = pipeline.stage("second", (item for item in first), size=lambda item: 0, max_bytes=10)
        assert failed.wait(WAIT)
        with pytest.raises(OSError, match="source.tar"):
            list(second)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_early_ends_stages_that_wait_for_room_or_for_items(error):
    begun = threading.Event()

    def silent(items):
        """Takes everything and yields nothing, as pairing does while it waits for partners."""
        for item in items:
            if item == 5:
                begun.set()
        yield 0

    def endless():
        item = 0
        while True:
            yield item
            item += 1

    def work():
        with ThreadStages() as pipeline:
            first = pipeline.stage("first", endless(), size=lambda item: 1, max_bytes=10)
            pipeline.stage("second", silent(first), size=lambda item: 1, max_bytes=10)
            assert begun.wait(WAIT)
            raise error

    with pytest.raises(error):
        work()


def test_no_thread_to_be_had_is_out_of_memory(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(MemoryError), ThreadStages() as pipeline:
        pipeline.stage("read", [1], size=int, max_bytes=10)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(SourceReader, "items"), (jpeg, "frame"), (SourcePass, "_store")],
    ids=["read", "check", "write"],
)
@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error", "/disk/x"), KeyboardInterrupt(), ZeroDivisionError("a bug")]
)
def test_a_failure_in_any_stage_ends_the_source_with_that_error(tmp_path, monkeypatch, owner, name, error):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(40)))
    calls = 0
    original = getattr(owner, name)

    def failing(*arguments, **options):
        nonlocal calls
        calls += 1
        if name == "items" or calls == 5:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(type(error)) as caught:
        inside.ingest_tar(path, tmp_path / "root")
    assert caught.value is error
    assert calls <= 40
    assert [file for file in (tmp_path / "root").rglob("*") if file.is_file()] == []
