"""A command in a process of its own that stands still before each change of a folder until the test lets it go on.

Its workers stand too. A change is a file that gets a name, or one that is removed; hidden files and claims are
not counted. The process and its workers lead a session of their own, to which `kill` and `interrupt` go.
"""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.processes import Process
from tests.stream.leftovers import wait_for_end

REPOSITORY = Path(__file__).parents[1]
SECONDS = 60  # until a command that neither changes anything nor ends fails the test


class Steps:
    """The changes of a command, one after the other; `code` is its exit code at the end."""

    def __init__(self, base: Path, words: tuple[object, ...]) -> None:
        address = f"\0sa1b-steps-{uuid.uuid4().hex}"
        self.code: int | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen()
        self._server.settimeout(SECONDS)
        code = f"from tests import steps\nsteps.stand({str(base)!r}, {address!r}, {[str(word) for word in words]!r})"
        self.process = Process(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __iter__(self) -> Iterator[str]:
        """The name that the next change is of; the command goes on when the next one is asked for."""
        while True:
            connection = self._server.accept()[0]
            with connection:
                name = connection.recv(4096).decode()
                if name == "end":
                    break
                yield name
                with suppress(OSError):  # it was killed
                    connection.sendall(b"go")
        self.code = self.process.wait(SECONDS)

    def send(self, number: int) -> None:
        self.process.send_signal(number, session=True)

    def kill(self) -> None:
        """Lose power, except for what the system has in memory."""
        self.send(signal.SIGKILL)
        self.process.wait(SECONDS)
        wait_for_end(self.process.pid, SECONDS)  # a worker ends later, and holds its claim until then

    def close(self) -> None:
        self._server.close()
        self.kill()


@contextmanager
def steps(base: Path, *words: object) -> Iterator[Steps]:
    """`sa1b WORDS`, standing before each change below `base`."""
    one = Steps(base, words)
    try:
        yield one
    finally:
        one.close()


def stand(base: str, address: str, words: list[str]) -> None:
    """In the process of the command."""

    def tell(name: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(name.encode())
            if name != "end":
                connection.recv(2)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.link", "os.remove"):
            path = os.fsdecode(arguments[0 if event == "os.remove" else 1])
            if path.startswith(f"{base}/") and "/." not in path and not path.endswith(".claim"):
                tell(path.removeprefix(f"{base}/"))

    sys.addaudithook(audit)
    from sa1b.cli import main

    try:
        main(words)
    finally:
        tell("end")
