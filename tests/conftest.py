"""Settings of all tests.

One run of CI uses the same examples of hypothesis as the next; elsewhere every run uses new ones. Tests run in
random order: `pytest --randomly-seed=SEED` repeats a run that printed SEED, `pytest -p no:randomly` keeps the order
of the files.
"""

import contextlib
import ctypes
import gc
import os
import signal

# The memory of a large array goes back to the system with the array. Without this, glibc keeps blocks up to the size
# of the largest one that was freed, which adds up to hundreds of MB in a test process.
with contextlib.suppress(AttributeError):  # another C library
    ctypes.CDLL(None).mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD

# What torch prints about connections of processes that ended is not about a test.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Set before torch is imported. Two processes run the tests; more threads than cores would slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import (
    forked_workers,  # before the package
    gate,
    processes,
    skipped,
)

# The same examples wherever CI is set. No example has a deadline: a busy machine is slow, and the first call
# of a kernel compiles it.
settings.register_profile("sa1b", derandomize=bool(os.environ.get("CI")), deadline=None)
settings.load_profile("sa1b")
torch.set_num_threads(1)  # whatever OMP_NUM_THREADS is: more are slower for small tensors

# Files, functions and cases that take over a second or two on a machine with two cores.
LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())
OF_A_GPU = ("gpu", "cuda_host")
_SECONDS = 5.0  # of a test that is not among them, after which the last lines of `make test` name it


forked_workers.use_server()


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` uses a GPU: other tests start several ranks, for which one GPU is not enough."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        # A shell without job control ignores both in what it starts in the background, and so would commands.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if config.option.markexpr not in OF_A_GPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing has asked for the number of GPUs yet


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that -m asks for are not imported.

    Imports take seconds, and a machine with a GPU may lack what other tests than those of `-m gpu` import.
    """
    if config.option.markexpr in OF_A_GPU and collection_path.match("test_*.py"):
        return "mark.gpu" not in collection_path.read_text() or None
    is_named = collection_path.is_relative_to(config.rootpath) and is_long(
        collection_path.relative_to(config.rootpath).as_posix()
    )
    return (is_named and "not long" in config.option.markexpr) or None


def is_long(name: str) -> bool:
    """Whether a test, its function or its file is in long.txt."""
    return not LONG.isdisjoint((name, name.partition("[")[0], name.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)  # before the markers are compared with -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_asked = "gate" in config.option.markexpr  # to read all files takes 5 s
    for item in items:
        if item.get_closest_marker("gate"):
            raise pytest.UsageError(f"{item.nodeid}: the marker gate is computed, see tests/gate.py")
        name = item.nodeid.partition("::")[2].partition("[")[0]
        is_quick = not any(map(item.get_closest_marker, ("slow", "ceph")))
        if is_asked and is_quick and isinstance(item, pytest.Function) and gate.is_gate(item.path, name):
            item.add_marker(pytest.mark.gate)
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What test files import stays: to look for garbage in it would take 5 s in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """From here on, no collection of garbage visits the objects of modules and tests: here 0.3 s, in a fork 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Modules are destroyed as usual at the end, or triton's library prints what it calls leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _variables_read_at_start(pytestconfig: pytest.Config) -> Iterator[None]:
    """A variable that a test leaves would keep the commands of later tests from being forked: see processes.py."""
    before = processes.read_at_start(os.environ)
    yield
    if pytestconfig.option.markexpr not in OF_A_GPU:  # there torch sets some, and no command is forked
        message = "the test leaves a variable; set it with monkeypatch"
        assert processes.read_at_start(os.environ) == before, message


@pytest.fixture(autouse=True)
def _seed_of_torch() -> None:
    """Random tensors of a test do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in skipped.lines(map(skipped.reason, terminalreporter.stats.get("skipped", []))):
        terminalreporter.write_line(line)
    passed = terminalreporter.stats.get("passed", [])
    slow = {one.nodeid: one.duration for one in passed if one.duration > _SECONDS and not is_long(one.nodeid)}
    for name, seconds in slow.items() if "not long" in terminalreporter.config.option.markexpr else ():
        terminalreporter.write_line(f"{seconds:.0f} s, and not in tests/long.txt: {name}")
