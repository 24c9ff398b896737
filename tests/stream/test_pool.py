"""Threads with two queues: what is first, in order; then the rest, in order."""

import threading
from concurrent.futures import wait

import pytest

from sa1b.stream.loader import Pool


def test_what_is_first_goes_before_what_was_submitted_earlier() -> None:
    pool, busy, done = Pool(1), threading.Event(), []
    pool.submit(lambda: busy.wait(30))
    later = [pool.submit(lambda i=i: done.append(i)) for i in range(3)]
    first = [pool.submit(lambda i=i: done.append(-i), first=True) for i in range(1, 4)]
    busy.set()
    wait(later + first, timeout=30)
    pool.shutdown()
    assert done == [-1, -2, -3, 0, 1, 2]


def test_results_and_errors_come_out_of_the_futures() -> None:
    pool = Pool(2)
    assert [pool.submit(lambda i=i: i * i).result(30) for i in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0, first=True).result(30)
    assert pool.submit(lambda: "alive").result(30) == "alive"
    pool.shutdown()


def test_all_threads_work_at_a_time() -> None:
    pool, together = Pool(3), threading.Barrier(3, timeout=30)
    assert sorted(future.result(30) for future in [pool.submit(together.wait) for _ in range(3)]) == [0, 1, 2]
    pool.shutdown()


def test_a_cancelled_job_is_left_out() -> None:
    pool, busy, done = Pool(1), threading.Event(), []
    pool.submit(lambda: busy.wait(30))
    dropped = pool.submit(lambda: done.append("dropped"))
    kept = pool.submit(lambda: done.append("kept"))
    assert dropped.cancel()
    busy.set()
    kept.result(30)
    pool.shutdown()
    assert done == ["kept"]


def test_shutdown_waits_for_what_is_done_and_drops_the_rest() -> None:
    before = threading.active_count()
    pool, started, busy, done = Pool(1), threading.Event(), threading.Event(), []

    def work() -> None:
        started.set()
        busy.wait(30)
        done.append("begun")

    pool.submit(work)
    pool.submit(lambda: done.append("waits"))
    assert started.wait(30)
    threading.Timer(0.05, busy.set).start()
    pool.shutdown()
    assert done == ["begun"]
    assert threading.active_count() <= before + 1  # the timer may still end
