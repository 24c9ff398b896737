"""Why a TCP connection fails, as text."""

import socket

_CONNECT = 5.0  # seconds


def connect_reason(host: str, port: int, seconds: float = _CONNECT) -> str:
    """The reason for a failing connection, such as "timed out"; empty if the connection works."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "connection refused"
    except socket.gaierror:
        return "name not known"
    except OSError as error:
        text = (error.strerror or str(error)).lower()
        return "no route" if "unreachable" in text or "no route" in text else text
    return ""
