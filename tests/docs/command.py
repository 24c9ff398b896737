"""The command `sa1b` of a page's shell: forked from a process that has imported torch, see tests/processes.py.

`bin/sa1b` is a script that sends its arguments, folder, environment and standard streams to a thread of the
test process, and exits with the code that it receives. Importing torch for each command of a page would take
most of the time of the test.
"""

import json
import os
import socket
import sys
import threading
from pathlib import Path

from tests import processes
from tests.docs.blocks import REPOSITORY

_CLIENT = """\
import json, os, socket, struct, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
data = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [struct.pack("<q", len(data))], [0, 1, 2])
connection.sendall(data)
code = json.loads(connection.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""


def write_commands(folder: Path) -> None:
    """Write `sa1b`, `python` and `torchrun` of this interpreter and this checkout, and serve `sa1b`.

    Args:
        folder: created here; its path must be short enough for a socket.
    """
    folder.mkdir()
    address = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    (folder / "client.py").write_text(_CLIENT.format(address=str(address)))
    scripts = {
        "python": f'PYTHONPATH={REPOSITORY} exec {sys.executable} "$@"',
        "torchrun": f'PYTHONPATH={REPOSITORY} exec {sys.executable} -m torch.distributed.run "$@"',
        "sa1b": f'exec {sys.executable} -ISs {folder}/client.py "$@"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    """Run one command of a client, and send it the exit code."""
    with connection:
        header, streams, _, _ = socket.recv_fds(connection, processes.NUMBER.size, 3)
        data = bytearray()
        while len(data) < processes.NUMBER.unpack(header)[0]:
            data += connection.recv(1 << 16)
        words, folder, environment = json.loads(data)
        # Variables that are read at the start of an interpreter have the server's values.
        env = {name: value for name, value in environment.items() if not name.startswith(processes.AT_START)}
        env |= {name: value for name, value in os.environ.items() if name.startswith(processes.AT_START)}
        command = [sys.executable, "-m", "sa1b", *words]
        stdin, stdout, stderr = streams
        try:
            process = processes.Process(
                command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=env
            )
        finally:
            for stream in streams:
                os.close(stream)
        connection.sendall(json.dumps(process.wait()).encode())
