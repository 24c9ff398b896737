"""A small server with as much of S3 as writing needs: PUT and DELETE with conditions, GET, HEAD and listings.

`python -m tests.storage.object_server FOLDER` serves FOLDER/<bucket>/<key> as /<bucket>/<key> on a free port of
127.0.0.1 and writes the port. An entity tag is the md5 of the object. There are no uploads in parts, so an object
has at most 16 MiB. A bucket is full while FOLDER/<bucket>.full exists. The bucket `denied` answers 403 AccessDenied, and `kept` does for DELETE. A line on standard input answers the number of
requests.
"""

import hashlib
import os
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_LOCK = threading.Lock()
_REQUESTS = [0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()

    def do_GET(self) -> None:
        bucket, path, query = self._asked()
        if "list-type" in query:
            self._list(bucket, query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        elif "uploads" in query:
            self._send(
                200,
                b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>",
            )
        else:
            self._object(path)

    def do_HEAD(self) -> None:
        self._object(self._asked()[1])

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        _, path, _ = self._asked()
        with _LOCK:
            if self._holds(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self._send(200, b"", ETag=f'"{_etag(data)}"')

    def do_DELETE(self) -> None:
        bucket, path, _ = self._asked()
        with _LOCK:
            if bucket == "kept":
                self._fail(403, "AccessDenied")
            elif self._holds(path):
                path.unlink(missing_ok=True)
                self._remove_empty(path.parent)
                self._send(204, b"")

    def _remove_empty(self, folder: Path) -> None:
        """A bucket has no folders, only objects."""
        while folder.is_dir() and folder.parent != self.folder and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent

    def _asked(self) -> tuple[str, Path, dict[str, list[str]]]:
        _REQUESTS[0] += 1
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        return bucket, self.folder / bucket / key, parse_qs(address.query, keep_blank_values=True)

    def _holds(self, path: Path) -> bool:
        """Whether the conditions of a request hold; if not, the answer is sent."""
        etag = _etag(path.read_bytes()) if path.is_file() else None
        match = self.headers.get("If-Match")
        if path.relative_to(self.folder).parts[0] == "denied":
            self._fail(403, "AccessDenied")
        elif (
            self.command == "PUT"
            and (self.folder / f"{path.relative_to(self.folder).parts[0]}.full").exists()
        ):
            self._fail(403, "QuotaExceeded")
        elif match is not None and etag is None:
            self._fail(404, "NoSuchKey")
        elif (self.headers.get("If-None-Match") == "*" and etag) or match not in (None, f'"{etag}"'):
            self._fail(412, "PreconditionFailed")
        else:
            return True
        return False

    def _object(self, path: Path) -> None:
        with _LOCK:
            data = path.read_bytes() if path.is_file() else None
        if data is None:
            self._fail(404, "NoSuchKey")
            return
        fields = {"ETag": f'"{_etag(data)}"', "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            self._send(200, data, **fields)
            return
        first, _, last = wanted.partition("-")
        part = data[int(first) : int(last or len(data)) + 1]
        fields["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self._send(206, part, **fields)

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        root = self.folder / bucket
        with _LOCK:
            keys = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
            found = {key: path.stat().st_size for key, path in sorted(keys.items()) if key.startswith(prefix)}
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>"
            for key, size in found.items()
            if not delimiter or delimiter not in key[len(prefix) :]
        )
        self._send(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()
        )

    def _fail(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _send(self, status: int, body: bytes, **fields: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        pass  # clients that went away


def serve(handler: Any) -> None:
    """Serve the folder of the command's argument in a thread, and write the port."""
    handler.folder = Path(sys.argv[1])
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)


def main() -> None:
    serve(Handler)
    for _ in sys.stdin:
        print(_REQUESTS[0], flush=True)
    os._exit(0)  # at once, whatever its threads are sending


if __name__ == "__main__":
    main()
