"""Faults injected into calls of the operating system: see faults.c; a machine that misbehaves: see machine.c.

`python -m tests.faults all SOURCE.tar` runs the full counts; the suite runs a seeded part of them.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path


def build(folder: Path, name: str = "faults") -> Path | None:
    """A library of this folder, compiled; None if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process that loads the library."""
    return {**os.environ, "LD_PRELOAD": str(library), "SA1B_TEST_FAULTS": str(library)}


class Faults:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["SA1B_TEST_FAULTS"])
        self._library.fault_calls.restype = ctypes.c_long
        self._library.fault_arm.argtypes = [
            ctypes.c_char_p,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_uint64,
            ctypes.c_uint64,
        ]
        self._library.fault_record.argtypes = [ctypes.c_char_p, ctypes.c_char_p]

    def arm(
        self, root: Path, *, kill_at: int = -1, disk_bytes: int = -1, seed: int = 0, one_in: int = 0
    ) -> None:
        self._library.fault_arm(os.fsencode(root), kill_at, disk_bytes, seed, one_in)

    def record(self, root: Path, log: Path) -> None:
        self._library.fault_record(os.fsencode(root), os.fsencode(log))

    def calls(self) -> int:
        return int(self._library.fault_calls())
