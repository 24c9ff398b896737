"""NCCL's own report on a job that hangs, requested from its RAS subsystem.

NCCL 2.24 and later answer a text protocol at localhost:28028, or at the address in NCCL_RAS_ADDR, in one
process of each machine. See
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html and NVIDIA's client
`ncclras`, which does the same.
"""

import os
import socket
from collections.abc import Mapping

_PROTOCOL = 2  # NCCL answers older and newer clients
_TIMEOUT = 5  # seconds for which NCCL waits for its other processes
_LARGEST = 4 << 20  # bytes


def nccl_status(environment: Mapping[str, str] = os.environ) -> str:
    """The status of all communicators of the job on this machine, as text.

    Raises:
        OSError: nothing answers there, or not within some seconds: NCCL is older, or RAS is disabled.
    """
    host, _, port = environment.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=2) as connection:
        connection.settimeout(4 * _TIMEOUT)
        with connection.makefile("rb") as answers:
            for line in (f"CLIENT PROTOCOL {_PROTOCOL}", f"TIMEOUT {_TIMEOUT}"):
                connection.sendall(f"{line}\n".encode())
                if not answers.readline(1024):
                    raise ConnectionResetError(f"{host}:{port}: the connection ended after {line!r}")
            connection.sendall(b"VERBOSE STATUS\n")
            return answers.read(_LARGEST).decode(errors="replace")
