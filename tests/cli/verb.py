"""One verb of `sa1b`, run in a separate process."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

from tests import processes


def runner(verb: str) -> Callable[..., "CompletedProcess[str]"]:
    """A function that runs the verb with arguments as text and returns its output."""

    def run(*arguments: object) -> "CompletedProcess[str]":
        command = [sys.executable, "-m", "sa1b", verb, *map(str, arguments)]
        return processes.run(command, capture_output=True, text=True, check=False)

    return run
