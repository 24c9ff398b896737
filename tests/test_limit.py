"""The threads of calls with a limit."""

import gc
import threading

import pytest

from sa1b.limit import Limited


@pytest.mark.parametrize("way", ["closed", "collected"])
def test_idle_threads_end_with_their_owner(way: str) -> None:
    limited = Limited()
    thread = limited.call(threading.current_thread, 60.0)
    assert thread.is_alive()
    if way == "closed":
        limited.close()
    del limited
    gc.collect()
    assert not thread.is_alive()
