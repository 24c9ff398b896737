"""Parts of a run on a GPU that end badly, for tests/benchmarks/test_gpu.py."""

import ctypes
import os

from benchmarks.gpu.part import Record, Setting, Skipped


def good(setting: Setting, record: Record) -> None:
    record.check("a check", True)
    record.figure("a figure", 1.5, "ms", at_most=1)
    record.about(python="3")


def fails(setting: Setting, record: Record) -> None:
    record.check("first", True)
    record.check("second", False, "3 of 4 masks differ")


def raises(setting: Setting, record: Record) -> None:
    record.figure("before the error", 1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def goes_on(setting: Setting, record: Record) -> None:
    with record.attempt("the first half"):
        raise RuntimeError("one thing fails")
    record.figure("the second half", 2)


def crashes(setting: Setting, record: Record) -> None:
    record.check("before the crash", True)
    ctypes.string_at(0)


def hangs(setting: Setting, record: Record) -> None:
    record.check("before the hang", True)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    setting.run("child", "-c", code)


def records_nothing(setting: Setting, record: Record) -> None:
    print("nothing")


def leaves(setting: Setting, record: Record) -> None:
    record.check("before the end", True)
    os._exit(0)


def skips(setting: Setting, record: Record) -> None:
    raise Skipped("no decoder is installed")
