"""The proxy adds latency and changes nothing else."""

import contextlib
import socket
import threading
import time

from benchmarks import latency_proxy


def echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def test_an_answer_comes_the_given_time_later_and_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with (
            latency_proxy.running(server.getsockname()[1], 0.2) as port,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(b"a")
            began = time.monotonic()
            assert client.recv(1) == b"a"
            assert time.monotonic() - began >= 0.19
            # Latency does not reduce the bandwidth: all bytes arrive late, but together.
            sent = bytes(range(256)) * 4000
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert got == sent


def test_a_client_of_a_server_that_is_away_is_let_go() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port_of_nobody = server.getsockname()[1]
    with (
        latency_proxy.running(port_of_nobody, 0.0) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as client,
        contextlib.suppress(ConnectionResetError),
    ):
        assert client.recv(1) == b""
