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

from sa1b import workers
from tests import forked_workers, skipped

# The same examples wherever CI is set. No example has a deadline: a busy machine is slow, and the first call
# of a kernel compiles it.
settings.register_profile("sa1b", derandomize=bool(os.environ.get("CI")), deadline=None)
settings.load_profile("sa1b")


@pytest.fixture(scope="session", autouse=True)
def _workers_of_tests() -> Iterator[None]:
    """Worker processes of the test process start as forks: see forked_workers.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_CONTEXT", workers._CONTEXT)
        forked_workers.use_server()
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` uses a GPU: other tests start several ranks, for which one GPU is not enough."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        # A shell without job control ignores both in what it starts in the background, and so would commands.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing has asked for the number of GPUs yet


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only files with such tests: a machine with a GPU may lack what the others import."""
    if config.option.markexpr == "gpu" and collection_path.match("test_*.py"):
        return "mark.gpu" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
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


@pytest.fixture(autouse=True)
def _seed_of_torch() -> None:
    """Random tensors of a test do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in skipped.lines(map(skipped.reason, terminalreporter.stats.get("skipped", []))):
        terminalreporter.write_line(line)
