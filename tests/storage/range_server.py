"""A small server of byte ranges with as much of S3 as s3fs needs to read: GET, HEAD, PUT, ListObjectsV2.

`python -m tests.storage.range_server FOLDER` serves FOLDER/<bucket>/<key> as /<bucket>/<key> on a free port
of 127.0.0.1 and writes the port. Signatures are not checked. Some names answer as a store with trouble does:

    bucket `denied`        403 AccessDenied
    access key `EXPIRED`   400 ExpiredToken, as any bucket
    bucket `norange`       200 with the whole object, whatever range was asked for
    bucket `brief`         206 with half of the range, for ever
    bucket `linked`        403 unless the query is LINKED, byte for byte, as with a signed link
"""

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_COUNTS = {"GET": 0, "HEAD": 0, "PUT": 0}
_BYTES = [0]
LINKED = "Signature=a%2Fb%3D~x&Expires=1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_PUT(self) -> None:
        _COUNTS["PUT"] += 1
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._send(200, b"")

    def _serve(self, *, body: bool) -> None:
        _COUNTS[self.command] += 1
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if "Credential=EXPIRED/" in self.headers.get("Authorization", ""):
            self._fail(400, "ExpiredToken", body=body)
        elif bucket == "denied" or (bucket == "linked" and address.query != LINKED):
            self._fail(403, "AccessDenied", body=body)
        elif "list-type" in query:
            self._list(bucket, query.get("prefix", [""])[0])
        else:
            self._file(bucket, self.folder / bucket / key, body=body)

    def _file(self, bucket: str, path: Path, *, body: bool) -> None:
        if not path.is_file():
            self._fail(404, "NoSuchKey", body=body)
            return
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and bucket != "norange":
            first, status = int(wanted[1]), 206
            last = min(last, int(wanted[2] or last))
            if first > last:
                self._fail(416, "InvalidRange", body=body)
                return
        length = last - first + 1
        if status == 206 and bucket == "brief":
            length //= 2
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body:
            _BYTES[0] += length
            with path.open("rb") as file:
                while length:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), first, length)
                    first, length = first + sent, length - sent

    def _list(self, bucket: str, prefix: str) -> None:
        root = self.folder / bucket
        keys = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{(root / key).stat().st_size}</Size></Contents>"
            for key in keys
            if key.startswith(prefix)
        )
        head = (
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        )
        self._send(200, f"<ListBucketResult>{head}{contents}</ListBucketResult>".encode())

    def _fail(self, status: int, code: str, *, body: bool) -> None:
        document = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._send(status, document if body else b"")

    def _send(self, status: int, document: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        pass  # clients that went away


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for _ in sys.stdin:
        print(json.dumps({**_COUNTS, "bytes": _BYTES[0]}), flush=True)
    os._exit(0)  # at once, whatever its threads are sending


if __name__ == "__main__":
    main()
