"""A web server with one unusual behaviour, for links to tars; it runs in threads of the test's process."""

import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

SECRET = "Signature=hidden%2Fvalue"


class StrangeServer:
    """Serves the files of a folder to requests with the query SECRET.

    Args:
        folder: with the tars.
        mode: "usual"; "no ranges": 200 and the whole file for every request; "no length": the same in chunks,
            without a length; "chunks": ranges in chunks, without a length; "no HEAD": 405; "replaced": another
            ETag from the second range on; "grows": other zeros behind the end from there on; "cut": the first requests of a range end after a part of it;
            "redirect": to `target`; "encoding": Content-Encoding: gzip; "expires": 403 from the third request on; "stalls": every request after the second one; "echo": 403 with the URL in the
            message; "echo 400": the same with 400; "gone": with 404.
        target: base URL that "redirect" names.
    """

    def __init__(self, folder: Path, mode: str = "usual", target: str = "") -> None:
        self.requests: list[str] = []
        self.cuts = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                outer.answer(self, folder, mode, target, body=False)

            def do_GET(self) -> None:
                outer.answer(self, folder, mode, target, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign, assignment]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "StrangeServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(
        self, handler: BaseHTTPRequestHandler, folder: Path, mode: str, target: str, *, body: bool
    ) -> None:
        """Answer one request."""
        self.requests.append(handler.headers.get("Range", handler.command))
        path, _, query = handler.path.partition("?")
        expired = mode == "expires" and len(self.requests) > 2
        if query != SECRET or mode.startswith(("echo", "gone")) or expired:
            text = (
                f"<Error><Code>Odd</Code><Message>{self.url}{handler.path} is bad</Message></Error>".encode()
            )
            _head(handler, {"echo 400": 400, "gone": 404}.get(mode, 403), {"Content-Length": str(len(text))})
            handler.wfile.write(text if body else b"")
            return
        if mode == "stalls" and len(self.requests) > 2:
            time.sleep(600)
        if mode == "redirect":
            _head(handler, 302, {"Location": f"{target}{handler.path}", "Content-Length": "0"})
            return
        if mode == "no HEAD" and not body:
            _head(handler, 405, {"Content-Length": "0"})
            return
        data = (folder / path.rpartition("/")[2]).read_bytes()
        later = sum(one not in ("HEAD", "GET", "bytes=0-0") for one in self.requests) > 1
        etag = '"second"' if mode == "replaced" and later else '"first"'
        data += bytes(512) if mode == "grows" and later else b""
        headers = {"ETag": etag, "Accept-Ranges": "none" if mode == "no ranges" else "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if mode in ("no ranges", "no length") or wanted is None:
            if mode == "no length":
                _head(handler, 200, {**headers, "Transfer-Encoding": "chunked"})
                _chunks(handler, data if body else b"")
                return
            _head(handler, 200, {**headers, "Content-Length": str(len(data))})
            handler.wfile.write(data if body else b"")
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if handler.headers.get("If-Match", etag) != etag:
            _head(handler, 412, {"Content-Length": "0"})
            return
        if mode == "encoding":
            headers["Content-Encoding"] = "gzip"
        if mode == "chunks":
            _head(handler, 206, {**headers, "Transfer-Encoding": "chunked"})
            _chunks(handler, part)
            return
        _head(handler, 206, {**headers, "Content-Length": str(len(part))})
        if mode == "cut" and len(part) > 1 and self.cuts < 3:
            self.cuts += 1
            handler.wfile.write(part[: len(part) // 2])
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        handler.wfile.write(part)


def _head(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def _chunks(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    if data:
        handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")
