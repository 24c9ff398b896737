"""Faults injected into calls of the operating system: see faults.c; a machine that misbehaves: see machine.c.

`python -m tests.faults all SOURCE.tar` runs the full counts; the suite runs a seeded part of them.
"""

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
