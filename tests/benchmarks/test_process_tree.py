"""What a tree of processes takes is counted, the children included."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import process_tree

# A child that takes 64 MB and half a second of processor, says so, and waits for its input to end.
CHILD = """
import sys, time
held = b"x" * 64_000_000
while time.process_time() < 0.5:
    pass
print(len(open("/dev/zero", "rb").read(1_000_000)), flush=True)
sys.stdin.read()
"""


@contextmanager
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1000000\n"
        yield process


def test_memory_and_processor_and_bytes_of_a_child_count() -> None:
    own = os.getpid()
    memory, seconds = process_tree.memory(own), process_tree.processor_seconds(own)
    with child() as process:
        assert process.pid in process_tree.below(own)
        assert process_tree.memory(own) - memory > 60_000_000
        read = process_tree.bytes_read(own)
        assert read.keys() >= {own, process.pid}
        assert read[process.pid] > 1_000_000
    # It has ended: its processor time stays, its memory does not.
    assert process_tree.processor_seconds(own) - seconds >= 0.5
    assert process.pid not in process_tree.below(own)


def test_shared_pages_count_once() -> None:
    own = os.getpid()
    held = bytearray(os.urandom(64_000_000))
    before = process_tree.memory(own)
    ready, done = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.close(done)
        os.read(ready, 1)  # until the parent has counted
        os._exit(0)
    try:
        assert process_tree.memory(own) - before < len(held) // 2
    finally:
        os.close(ready)
        os.close(done)
        os.waitpid(forked, 0)


def test_a_watch_keeps_the_highest_memory() -> None:
    with process_tree.Watch(os.getpid()) as watch:
        low = process_tree.memory(os.getpid())
        with child():
            while watch.peak < low + 60_000_000:
                pass
    assert process_tree.memory(os.getpid()) < watch.peak
