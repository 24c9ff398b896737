"""Memory and processor time of a tree of processes, including its children."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import process_tree

# A child that allocates 64 MB, computes for half a second, prints a line and waits for the end of its input.
CHILD = """
import sys, time
held = b"x" * 64_000_000
while time.process_time() < 0.5:
    pass
print(len(open("/dev/zero", "rb").read(1_000_000)), flush=True)
sys.stdin.read()
"""
# A child that allocates 64 MB and shares it with its own child until the end of its input.
FORKED = """
import os, sys
held = b"x" * 64_000_000
if os.fork():
    print(1000000, flush=True)
sys.stdin.read()
"""


@contextmanager
def tree(child: str = CHILD) -> Iterator[subprocess.Popen[str]]:
    """A shell with a child. The test process itself is not measured, because it has other children."""
    line = ["sh", "-c", '"$0" -c "$1"; exit', sys.executable, child]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1000000\n"
        yield process


def test_memory_and_processor_and_bytes_of_a_child_count() -> None:
    own = os.getpid()
    seconds = process_tree.processor_seconds(own)
    with tree() as process:
        below = process_tree.below(process.pid)
        assert len(below) == 2
        assert {own, *below} <= set(process_tree.below(own))
        assert process_tree.memory(process.pid) > 60_000_000
        read = process_tree.bytes_read(process.pid)
        assert set(read) == set(below)
        assert max(read.values()) > 1_000_000
    # Processor time of an ended process is still counted, its memory is not.
    assert process_tree.processor_seconds(own) - seconds >= 0.5
    assert not set(below) & set(process_tree.below(own))


def test_shared_pages_count_once() -> None:
    with tree(FORKED) as process:
        assert len(process_tree.below(process.pid)) == 3
        assert 60_000_000 < process_tree.memory(process.pid) < 100_000_000


def test_a_watch_keeps_the_highest_memory() -> None:
    with tree() as process, process_tree.Watch(process.pid) as watch:
        while watch.peak < 60_000_000:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert process_tree.memory(process.pid) == 0
    assert watch.peak > 60_000_000
    assert 60_000_000 < sum(watch.alone.values()) <= watch.peak
