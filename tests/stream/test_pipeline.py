"""The threads of a loader: jobs of the smallest priority first, equal ones in order."""

import threading
from functools import partial

import pytest

from sa1b.stream.pipeline import Pool

FIRST, SECOND = (0, 0), (0, 1)


def finished(pool: Pool, priority: tuple[int, int] = (9, 9)) -> threading.Event:
    """An event that is set when the pool has done all current jobs."""
    event = threading.Event()
    pool.submit(event.set, priority)
    return event


def held(pool: Pool) -> threading.Event:
    """Keep a thread of the pool busy until the event is set."""
    started, busy = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        busy.wait(30)

    pool.submit(wait, FIRST)
    assert started.wait(30)
    return busy


def test_small_priorities_go_before_what_was_submitted_earlier() -> None:
    pool, done = Pool(1), list[int]()
    busy = held(pool)
    for i in range(3):
        pool.submit(lambda i=i: done.append(i), SECOND)
    for i in range(1, 4):
        pool.submit(lambda i=i: done.append(-i), FIRST)
    assert sorted(pool.waiting()) == [FIRST] * 3 + [SECOND] * 3
    event = finished(pool)
    busy.set()
    assert event.wait(30)
    pool.shutdown()
    assert done == [-1, -2, -3, 0, 1, 2]
    assert pool.waiting() == []


def test_a_job_may_submit_another_one_and_an_error_ends_no_thread() -> None:
    pool, done = Pool(1), list[str]()
    pool.submit(lambda: 1 // 0, FIRST)
    pool.submit(lambda: pool.submit(lambda: done.append("second"), SECOND), SECOND)
    pool.submit(partial(done.append, "first"), FIRST)
    assert finished(pool).wait(30)
    pool.shutdown()
    assert done == ["first", "second"]


def test_all_threads_work_at_a_time() -> None:
    pool, together = Pool(3), threading.Barrier(4)
    for _ in range(3):
        pool.submit(lambda: together.wait(30), FIRST)
    together.wait(30)
    pool.shutdown()


def test_shutdown_waits_for_what_is_done_and_drops_the_rest() -> None:
    before = threading.active_count()
    pool, done = Pool(1), list[str]()
    busy = held(pool)
    pool.submit(lambda: done.append("waits"), FIRST)
    threading.Timer(0.05, busy.set).start()
    pool.shutdown()
    assert done == []
    assert threading.active_count() <= before + 1  # the timer may still end


def test_a_thread_that_cannot_be_started_is_an_error_and_a_job_after_the_end_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, done = Pool(1), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(lambda: done.append(1), FIRST)
    pool.shutdown()
    pool.submit(lambda: done.append(2), FIRST)
    assert done == []
