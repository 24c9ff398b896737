"""Runs the blocks of one page, in order, in the current folder: `main(page)`, in a separate process.

All `python` and `sql` blocks run in one process, so that torch is imported once. Each `bash` block runs in a
new shell that stops at the first failing command. A `text` block directly after a block that is run is its
output.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.blocks import LANGUAGES, Block, blocks_of
from tests.docs.flags import check_flags
from tests.docs.output import difference

_DRY_RUN = 'sa1b() { if [ "$1" = train ]; then set -- "$@" --dry-run; fi; command sa1b "$@"; }\n'


def run(page: str, block: Block) -> None:
    """Run or check one block.

    Raises:
        Exception: the error of the block; subprocess.CalledProcessError for a `bash` block.
    """
    if block.not_run is not None:
        if block.language == "python":
            compile(block.code, page, "exec")
        elif block.language == "bash":
            check_flags(block.code)
    elif block.language == "python":
        # The code runs in __main__, so that worker processes find the functions of the page.
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        exec(code, sys.modules["__main__"].__dict__)
    elif block.language == "sql":
        import duckdb

        print(duckdb.sql(block.code))
    else:
        code = block.code if block.dry_run is None else f"{_DRY_RUN}{block.code}"
        command = ["bash", "-euo", "pipefail", "-c", code]
        status = subprocess.run(command, check=False).returncode
        if status != block.exit_code:
            raise subprocess.CalledProcessError(status, block.code)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """A list that receives, at the end, what this process and its children printed; it is printed then too."""
    outputs: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield outputs
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            outputs.append(file.read().decode(errors="replace"))
            print(outputs[0], end="", flush=True)


def main(page: str) -> None:
    """Run all blocks of the page at this path and compare the output that it shows.

    The `python` blocks run in `__main__`, which has no other contents.

    Raises:
        AssertionError: a `text` block is not the output of the block before it.
    """
    # stdout and stderr in the order of a terminal, here and in the commands of the page. The variable is set here
    # and not by the caller: with it, this process could not be forked from one that started without it.
    os.environ["PYTHONUNBUFFERED"] = "1"
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through=True)
    # torch warns of more workers than the processors of this machine; a page has two workers.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    blocks = blocks_of(Path(page).read_text(encoding="utf-8"))
    differences = []
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language not in LANGUAGES:
            continue
        began = time.monotonic()
        not_run = " (not run)" if block.not_run else " (dry run)" if block.dry_run else ""
        print(f"-- {page}:{block.line} {block.language}{not_run}", flush=True)
        with recorded() as outputs:
            run(page, block)
        print(f"-- {time.monotonic() - began:.1f} s", flush=True)
        if after is not None and after.language == "text" and after.follows and not not_run:
            found = difference(after, outputs[0])
            differences += [f"{page}:{after.line}: {found}"] if found else []
    assert not differences, "\n\n".join(differences)
