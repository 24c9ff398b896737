"""The query of NCCL's RAS subsystem, with a server that speaks its protocol."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from sa1b.engine.watch.watchdog.states import nccl_status

STATUS = b"NCCL version 2.30.3\nJob summary\n  2 nodes 16 processes\n  rank 3: NOCOMM\n"


@pytest.fixture
def serve() -> Iterator[Callable[[dict[bytes, bytes]], str]]:
    """A function that starts a server of answers by request and returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def start(answers: dict[bytes, bytes]) -> str:
            threading.Thread(target=run, args=(answers,), daemon=True).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        def run(answers: dict[bytes, bytes]) -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    if line not in answers:
                        return
                    connection.sendall(answers[line])
                    if line == b"VERBOSE STATUS\n":
                        return

        yield start


HANDSHAKE = {b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n", b"TIMEOUT 5\n": b"OK\n"}


def test_the_status_is_the_text_after_the_handshake(serve: Callable[[dict[bytes, bytes]], str]) -> None:
    address = serve({**HANDSHAKE, b"VERBOSE STATUS\n": STATUS})
    assert nccl_status({"NCCL_RAS_ADDR": address}) == STATUS.decode()


def test_a_server_that_ends_the_connection_is_an_error(serve: Callable[[dict[bytes, bytes]], str]) -> None:
    address = serve({b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n"})
    with pytest.raises(ConnectionResetError, match="TIMEOUT 5"):
        nccl_status({"NCCL_RAS_ADDR": address})


def test_nothing_at_the_address_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        nccl_status({"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
