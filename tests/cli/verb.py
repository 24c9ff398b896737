"""One verb of `sa1b`, run in a separate process or in this one."""

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from sa1b.cli import main
from tests import processes


def runner(verb: str) -> Callable[..., "CompletedProcess[str]"]:
    """A function that runs the verb with arguments as text and returns its output."""

    def run(*arguments: object) -> "CompletedProcess[str]":
        command = [sys.executable, "-m", "sa1b", verb, *map(str, arguments)]
        return processes.run(command, capture_output=True, text=True, check=False)

    return run


def called(verb: str, encoding: str = "utf-8") -> Callable[..., "CompletedProcess[str]"]:
    """As `runner`, in this process and without the cost of another one.

    For verbs and refusals without worker processes, whose output is Python's. `train` ends its process.
    """

    def run(*arguments: object) -> "CompletedProcess[str]":
        words = [verb, *map(str, arguments)]
        # With an encoding, on which the form of tyro's messages depends.
        output, errors = (TextIOWrapper(BytesIO(), encoding, write_through=True) for _ in range(2))
        with (
            patch.object(sys, "argv", ["sa1b", *words]),
            redirect_stdout(output),
            redirect_stderr(errors),
            pytest.raises(SystemExit) as ended,
        ):
            main(words)
        texts = (file.buffer.getvalue().decode() for file in (output, errors))
        return CompletedProcess(words, ended.value.code, *texts)

    return run
