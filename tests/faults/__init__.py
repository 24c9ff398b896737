"""Faults injected into calls of the operating system: see faults.c.

`python -m tests.faults all SOURCE.tar` runs the full counts; the suite runs a seeded part of them.
"""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")


def build(folder: Path) -> Path | None:
    """The compiled library; None if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process that loads the library."""
    return {**os.environ, "LD_PRELOAD": str(library), "SA1B_TEST_FAULTS": str(library)}
