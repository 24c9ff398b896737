"""A change while a source is read: a worker makes it just before it opens a certain file to read."""

import sys
from pathlib import Path
from subprocess import CompletedProcess

from tests import processes


def run_changing(
    words: list[object], name: str, path: Path | None, data: bytes, at: int = 0
) -> "CompletedProcess[str]":
    """`sa1b WORDS`; before its worker opens the file NAME to read, it writes `data` at an offset of `path`.

    None: of this file. A file that is not there is made, and its folder.
    """
    program = f"""
import os, sys
from pathlib import Path
from tests import kit

def audit(event, arguments, command=os.getpid(), done=[]):
    if event == "open" and str(arguments[0]).endswith("/{name}") and arguments[1] in (None, "r"):
        if os.getpid() != command and not done:
            done.append(event)
            path = Path({str(path or "")!r} or os.fsdecode(arguments[0]))
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(file, {data!r}, {at})
            os.close(file)

sys.addaudithook(audit)
kit.main({[str(word) for word in words]})
"""
    line = [sys.executable, "-c", program]
    return processes.run(line, cwd=processes.REPOSITORY, capture_output=True, text=True, check=False)
