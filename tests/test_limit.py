"""The threads of calls with a limit."""

import gc
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from sa1b.limit import Limited, Outcome, Worker


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


def test_an_outcome_that_is_interrupted_at_any_instruction_of_the_wait_can_be_set() -> None:
    reached, ended = 0, False
    while not ended:
        outcome = Outcome[int]()
        ended = _interrupted(outcome, reached)
        setter = Worker()
        done = setter.begin(lambda outcome=outcome: outcome.set(7))
        assert done.wait(60.0), f"the setting thread waits after an interrupt at instruction {reached}"
        assert outcome.done
        assert outcome.result() == 7
        setter.end()
        setter.join()
        reached += 1
    assert reached > 10


def _interrupted(outcome: Outcome[int], number: int) -> bool:
    """Raise KeyboardInterrupt before instruction `number` of a wait; return whether it ended without."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        outcome.wait(0.0)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return True


def test_the_error_of_a_call_is_that_of_its_outcome() -> None:
    worker = Worker()
    outcome = worker.begin(lambda: 1 // 0)
    assert outcome.wait(60.0)
    with pytest.raises(ZeroDivisionError):
        outcome.result()
    worker.end()
    worker.join()
