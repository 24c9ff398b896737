"""A small server of byte ranges with as much of S3 as s3fs needs: GET, HEAD, PUT, DELETE, ListObjectsV2.

`python -m tests.storage.range_server FOLDER` serves FOLDER/<bucket>/<key> as /<bucket>/<key> on a free port
of 127.0.0.1 and writes the port. Of signatures only the access key and the expiry are checked. Some names
answer as a store with trouble does:

    bucket `denied`        403 AccessDenied
    bucket `header`        400 InvalidRequest for a presigned URL: it wants the signature in the header
    access key `EXPIRED`   400 ExpiredToken, as any bucket
    bucket `norange`       200 with the whole object, whatever range was asked for
    bucket `brief`         206 with half of the range, for ever
    bucket `shifted`       206 with the bytes from one later on
    bucket `carefree`      If-Match is ignored
    bucket `strange`       412 for every If-Match
    key    `secret.bin`    403 AccessDenied
    bucket `linked`        403 unless the query is LINKED, byte for byte, as with a signed link

A line on standard input answers the counts of requests and bytes sent; {"do": "revoke"} also makes the server
refuse every signature that it has seen until now with 403 AccessDenied; {"do": "accept"} ends that.
"""

import json
import os
import re
import sys
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.object_server import serve

_COUNTS = {"GET": 0, "HEAD": 0, "PUT": 0, "authorized": 0, "signed": 0}
_BYTES = [0]
_SEEN: set[str] = set()
_REVOKED: set[str] = set()
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

    def do_DELETE(self) -> None:
        (self.folder / unquote(urlsplit(self.path).path).lstrip("/")).unlink(missing_ok=True)
        self._send(204, b"")

    def _serve(self, *, body: bool) -> None:
        _COUNTS[self.command] += 1
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        signature = query.get("X-Amz-Signature", [""])[0]
        _SEEN.add(signature)
        _COUNTS["authorized"] += "Authorization" in self.headers
        _COUNTS["signed"] += bool(signature)
        if "Credential=EXPIRED/" in self.headers.get("Authorization", "") + unquote(address.query):
            self._fail(400, "ExpiredToken", body=body)
        elif signature and bucket == "header":
            self._fail(400, "InvalidRequest", body=body)
        elif (
            (signature and (signature in _REVOKED or _expired(query)))
            or bucket == "denied"
            or key == "secret.bin"
            or (bucket == "linked" and address.query != LINKED)
        ):
            self._fail(403, "AccessDenied", body=body)
        elif "list-type" in query:
            self._list(bucket, query.get("prefix", [""])[0])
        else:
            self._file(bucket, self.folder / bucket / key, body=body)

    def _file(self, bucket: str, path: Path, *, body: bool) -> None:
        if not path.is_file():
            self._fail(404, "NoSuchKey", body=body)
            return
        with path.open("rb") as file:
            self._send_range(bucket, file, body=body)

    def _send_range(self, bucket: str, file: BinaryIO, *, body: bool) -> None:
        found = os.fstat(file.fileno())
        size = found.st_size
        first, last, status = 0, size - 1, 200
        etag = f'"{found.st_mtime_ns:x}-{found.st_ino:x}"'
        condition = self.headers.get("If-Match")
        if condition and bucket != "carefree" and (condition != etag or bucket == "strange"):
            self._fail(412, "PreconditionFailed", body=body)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and bucket != "norange":
            first, status = int(wanted[1]), 206
            last = min(last, int(wanted[2] or last))
            if first > last:
                self._fail(416, "InvalidRange", body=body)
                return
        if bucket == "shifted":
            first, last = first + 1, last + 1
        length = last - first + 1
        if status == 206 and bucket == "brief":
            length = (length + 1) // 2
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", self.date_time_string(found.st_mtime))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body:
            _BYTES[0] += length
            while length:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), first, length)
                first, length = first + sent, length - sent

    def _lacks(self, query: dict[str, list[str]]) -> bool:
        """Whether a signed header is missing."""
        return not all(name in self.headers for name in query["X-Amz-SignedHeaders"][0].split(";"))

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


def _expired(query: dict[str, list[str]]) -> bool:
    signed = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return time.time() >= signed.timestamp() + int(query["X-Amz-Expires"][0])


def main() -> None:
    serve(Handler)
    for line in sys.stdin:
        if json.loads(line).get("do") == "revoke":
            _REVOKED.update(_SEEN)
        if json.loads(line).get("do") == "accept":
            _REVOKED.clear()
        print(json.dumps({**_COUNTS, "bytes": _BYTES[0]}), flush=True)
    os._exit(0)  # at once, whatever its threads are sending


if __name__ == "__main__":
    main()
