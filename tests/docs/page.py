"""Runs the blocks of one page, in order, in the current folder: `main(page)`, in a process of its own.

One process for all `python` and `sql` blocks, so that torch is imported once. Each `bash` block is a shell of its
own that stops at the first failing command.
"""

import subprocess
import sys
import time
from pathlib import Path

from tests.docs.blocks import LANGUAGES, Block, blocks_of
from tests.docs.flags import check_flags


def run(page: str, block: Block) -> None:
    """Run or check one block.

    Raises:
        Exception: whatever the block raises; subprocess.CalledProcessError for a `bash` block.
    """
    if block.not_run is not None:
        if block.language == "python":
            compile(block.code, page, "exec")
        elif block.language == "bash":
            check_flags(block.code)
    elif block.language == "python":
        # In __main__, as in a script: worker processes find the functions that the page defines.
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        exec(code, sys.modules["__main__"].__dict__)
    elif block.language == "sql":
        import duckdb

        print(duckdb.sql(block.code))
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        code = subprocess.run(command, check=False).returncode
        if code != block.exit_code:
            raise subprocess.CalledProcessError(code, block.code)


def main(page: str) -> None:
    """Run all blocks of the page at this path. The `python` blocks run in `__main__`, which holds nothing else."""
    for block in blocks_of(Path(page).read_text(encoding="utf-8")):
        if block.language in LANGUAGES:
            began = time.monotonic()
            not_run = " (not run)" if block.not_run else ""
            print(f"-- {page}:{block.line} {block.language}{not_run}", flush=True)
            run(page, block)
            print(f"-- {time.monotonic() - began:.1f} s", flush=True)
