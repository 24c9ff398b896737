"""A store with the protocol of S3 in the memory of the test's process, which answers wrongly on demand.

    with StoreServer() as store:
        store.load(folder)
        fault = store.fault("shifted", "GET", "*.tar", at=2)  # the second read of a shard
        sa1b.Stream(store.root, storage_options=store.options, ...)
        assert fault.hits == 1

Requests are named by what they do: GET, HEAD, LIST; PUT, CREATE (If-None-Match), REPLACE (If-Match), DELETE;
BEGIN, PART, COMPLETE, ABORT and UPLOADS of uploads in parts. Any signature is accepted. Faults:

    500, 403, ...  this status with an error document, and nothing is done
    done 500 ...   it is done, then this status
    reset          the connection is closed in place of an answer; `done reset`: after it is done
    hang           no answer until the server ends
    slow           the answer begins 0.2 s later, after the request is done
    redirect       307 to another key
    expired        400 ExpiredToken, as for credentials that have expired; `expired KEY`: those with this key
    links          400 for a signed URL: the store wants the signature in the header
    revoked        403 for a signature that was seen before the fault was set
    strange        412 for every If-Match
    cached         one bit is wrong, as in the cache of a proxy, unless the client wants no cached answer
    garbled        bytes that are no HTTP
    surplus        7 bytes more than the Content-Length says
    unsized        a Content-Range that does not say the size of the object
    bare           no Content-Range
    whole          200 with the whole object in place of a range
    shifted        the range one byte later, with a Content-Range that says so
    short, longer  half of the bytes, or 7 more, with a Content-Length and a Content-Range that agree
    cut            half of the bytes under the Content-Length of all, then the end of the connection
    flipped, noise one bit is wrong: the same in each answer, or another one
    retagged       another ETag
    replaced       what `next` has, key -> bytes, is stored before the answer
    stale          a list of the time when the fault was set
    lost           the answer of success, and nothing is done
    misstored      what is stored has one wrong bit, and its own ETag
    unconditional  conditions are ignored
    error in 200   status 200 with an error document
"""

import contextlib
import hashlib
import itertools
import re
import socket
import ssl
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CODES = {
    **{307: "TemporaryRedirect", 400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchKey"},
    **{412: "PreconditionFailed", 416: "InvalidRange", 429: "TooManyRequests", 500: "InternalError"},
    **{503: "SlowDown", 507: "InsufficientStorage"},
}


_NUMBERS = itertools.count()


class Stored(NamedTuple):
    """An object; its entity tag is its md5, of an upload in parts that of the digests."""

    data: bytes
    etag: str
    written: float


class Request(NamedTuple):
    """A request that was answered; `sent` are the bytes of a read object."""

    what: str
    key: str
    range: str
    status: int
    sent: int


@dataclass
class Fault:
    """What goes wrong with the requests number `at`, ..., `at + times - 1` of those that match."""

    kind: str
    what: str
    key: str
    at: int
    times: float
    before: dict[str, Stored]
    signatures: set[str]
    seen: int = 0
    hits: int = 0


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # another Content-Length than that of the body


class StoreServer:
    """Use as a context; `page` is the number of keys in an answer to LIST, `before` is called before a request.

    `secured`: the files of a certificate and its key, for TLS. `web` is the root for a client of plain HTTP.
    """

    def __init__(self, page: int = 3, secured: tuple[Path, Path] | None = None) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.next: dict[str, bytes] = {}
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.signatures: set[str] = set()
        self.before: Callable[[str, str], object] = lambda what, key: None
        self.page, self.lock, self.closing = page, threading.RLock(), threading.Event()
        self._server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"store": self}))
        if secured is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*secured)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "http" if secured is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self.move(f"bucket{next(_NUMBERS)}/root")
        self.options = {"key": "KEY", "secret": "secret", "endpoint_url": self.url}

    def move(self, prefix: str) -> None:
        """Have the root elsewhere, BUCKET/FOLDER."""
        self.prefix, self.root, self.web = prefix, f"s3://{prefix}", f"{self.url}/{prefix}"

    def __enter__(self) -> "StoreServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fault(self, kind: str, what: str, key: str = "*", *, at: int = 1, times: float = 1) -> Fault:
        """Set a fault for requests WHAT whose BUCKET/KEY matches."""
        self.faults.append(Fault(kind, what, key, at, times, dict(self.objects), {*self.signatures} - {""}))
        return self.faults[-1]

    def load(self, folder: Path) -> None:
        for path in filter(Path.is_file, folder.rglob("*")):
            self.put(f"{self.prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def files(self) -> dict[str, bytes]:
        """Name -> bytes of all objects below the root, as kit.files of a folder."""
        found = {key.removeprefix(f"{self.prefix}/"): one.data for key, one in self.objects.items()}
        return {name: data for name, data in found.items() if name[0] != "."}

    def asked(self, what: str, key: str = "*") -> list[Request]:
        return [one for one in self.log if one.what in what.split() and fnmatchcase(one.key, key)]

    def put(self, key: str, data: bytes, etag: str = "") -> None:
        self.objects[key] = Stored(data, f'"{etag or md5(data)}"', time.time())

    def wrong(self, what: str, key: str) -> Fault | None:
        """The fault of this request."""
        found = None
        for one in self.faults:
            if one.what == what and fnmatchcase(key, one.key):
                one.seen += 1
                if found is None and one.at <= one.seen < one.at + one.times:
                    one.hits += 1
                    found = one
        return found

    def answer(self, what: str, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        """Do what a request asks for."""
        stored = self.objects.get(key)
        upload = self.uploads.get(query.get("uploadId", ""))
        if what in ("GET", "HEAD"):
            return error(404) if stored is None else self._object(stored, headers)
        if what == "LIST":
            return self._list(key, query, self.objects)
        if what == "CREATE" and stored is not None:
            return error(412)
        if headers.get("If-Match") is not None and (stored is None or headers["If-Match"] != stored.etag):
            return error(404 if stored is None else 412)
        if what in ("PUT", "CREATE", "REPLACE"):
            self.put(key, body)
            return Answer(headers={"ETag": self.objects[key].etag})
        if what == "DELETE":
            self.objects.pop(key, None)
            return Answer(204)
        if what == "BEGIN":
            number = f"upload{len(self.log)}"
            self.uploads[number] = (key, {})
            return document("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        if what == "UPLOADS":
            text = "<IsTruncated>false</IsTruncated>"
            for number, (one, _) in self.uploads.items():
                if one.startswith(key):
                    name = escape(one.partition("/")[2])
                    text += f"<Upload><Key>{name}</Key><UploadId>{number}</UploadId><Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>"
            return document("ListMultipartUploadsResult", text)
        if upload is None:
            return error(404, "NoSuchUpload")
        if what == "PART":
            upload[1][int(query["partNumber"])] = body
            return Answer(headers={"ETag": f'"{md5(body)}"'})
        del self.uploads[query["uploadId"]]
        if what == "ABORT":
            return Answer(204)
        numbers = [int(one.text or 0) for one in ET.fromstring(body).iter() if one.tag.endswith("PartNumber")]
        parts = [upload[1][number] for number in numbers]
        digests = b"".join(bytes.fromhex(md5(part)) for part in parts)
        self.put(key, b"".join(parts), f"{md5(digests)}-{len(parts)}")
        return document("CompleteMultipartUploadResult", f"<ETag>{self.objects[key].etag}</ETag>")

    def _object(self, stored: Stored, headers: Any) -> Answer:
        data = stored.data
        fields = {"ETag": stored.etag, "Last-Modified": formatdate(stored.written, usegmt=True)}
        if headers.get("If-Match", stored.etag) != stored.etag:
            return error(412)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if wanted is None:
            return Answer(200, data, fields)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        return ranged(data, first, last + 1, fields) if first < len(data) else error(416)

    def _list(self, key: str, query: dict[str, str], objects: dict[str, Stored]) -> Answer:
        bucket, _, prefix = key.partition("/")
        delimiter = query.get("delimiter", "")
        found: dict[str, str] = {}
        for path, one in sorted(objects.items()):
            name = path.removeprefix(f"{bucket}/")
            if not path.startswith(key) or name <= query.get("continuation-token", ""):
                continue
            folder, slash, _ = name[len(prefix) :].partition(delimiter or "\0")
            if slash:
                text = f"<CommonPrefixes><Prefix>{escape(prefix + folder)}/</Prefix></CommonPrefixes>"
                found[f"{prefix}{folder}/\U0010fffd"] = text
            else:
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(one.written))
                found[name] = (
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(one.data)}</Size>"
                    f"<ETag>{escape(one.etag)}</ETag><LastModified>{when}</LastModified></Contents>"
                )
        names = sorted(found)[: min(self.page, int(query.get("max-keys", self.page)))]
        more = len(names) < len(found)
        text = f"<KeyCount>{len(names)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>"
        return document("ListBucketResult", text + "".join(found[name] for name in names))

    def wrongly(self, fault: Fault, key: str, query: dict[str, str], headers: Any, answer: Answer) -> Answer:
        """The answer with a fault of what is sent."""
        kind, stored = fault.kind, self.objects.get(key)
        found = re.fullmatch(r"bytes (\d+)-(\d+)/\d+", answer.headers.get("Content-Range", ""))
        first, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(answer.body))
        if kind.startswith("done "):
            return error(int(kind[5:]))
        if kind == "error in 200":
            return replace(error(500), status=200)
        if kind == "slow":
            time.sleep(0.2)
        elif kind == "stale":
            return self._list(key, query, fault.before)
        elif kind == "unsized":
            answer.headers["Content-Range"] = f"bytes {first}-{end - 1}/*"
        elif kind == "bare":
            answer.headers.pop("Content-Range", None)
        elif kind == "surplus":
            answer.length, answer.body = len(answer.body), answer.body + bytes(7)
        elif kind == "retagged":
            answer.headers["ETag"] = f'"{md5(str(fault.hits).encode())}"'
        elif kind == "cached" and headers.get("Cache-Control") == "no-cache":
            pass
        elif kind in ("flipped", "noise", "cached") and answer.body:
            body = bytearray(answer.body)
            at = 0 if kind != "noise" else fault.hits % (8 * len(body))
            body[at // 8] ^= 1 << at % 8
            answer.body = bytes(body)
        elif kind == "cut":
            answer.length, answer.body = len(answer.body), answer.body[: len(answer.body) // 2]
        elif stored is not None and kind in ("whole", "shifted", "short", "longer"):
            changed = {"shifted": (first + 1, end + 1), "short": (first, (first + end + 1) // 2)}
            first, end = changed.get(kind, (first, end + 7))
            if kind == "whole":
                answer.headers.pop("Content-Range", None)
                return replace(answer, status=200, body=stored.data)
            return ranged(stored.data, first, end, answer.headers)
        return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: StoreServer

    def answer(self) -> None:
        address = urlsplit(self.path)
        key = unquote(address.path).lstrip("/")
        query = {name: given[0] for name, given in parse_qs(address.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = unchunked(body)
        what = self._what(query)
        if what in ("LIST", "UPLOADS"):
            key = f"{key.rstrip('/')}/{query.get('prefix', '')}"
        store, fault = self.store, None
        store.before(what, key)
        with store.lock:
            store.signatures.add(query.get("X-Amz-Signature", ""))
            fault = store.wrong(what, key)
            kind = fault.kind if fault else ""
            if kind == "misstored":
                body = bytearray(body)
                body[len(body) // 2] ^= 1
            headers = {} if kind == "unconditional" else self.headers
            for name, data in store.next.items() if kind == "replaced" else ():
                store.put(name, data)
            if kind.isdigit():
                found = error(int(kind))
            elif kind.startswith("expired") and kind[8:] in self._credential(query):
                found = error(400, "ExpiredToken")
            elif kind == "links" and "X-Amz-Signature" in query:
                found = error(400)
            elif kind == "strange" and "If-Match" in self.headers:
                found = error(412)
            elif kind == "revoked" and query.get("X-Amz-Signature") in fault.signatures:
                found = error(403)
            elif kind == "redirect":
                found = error(307)
                found.headers["Location"] = f"{store.url}/elsewhere{self.path}"
            elif kind in ("hang", "reset", "garbled"):
                found = Answer(0)
            elif kind == "lost":
                found = Answer(headers={"ETag": f'"{md5(body)}"'})
            else:
                what = "PUT" if kind == "unconditional" else what
                found = store.answer(what, key, query, headers, body)
            sent = len(found.body) if what == "GET" and found.status < 300 else 0
            store.log.append(Request(what, key, self.headers.get("Range", ""), found.status, sent))
        if kind == "hang":
            store.closing.wait()
        if kind == "garbled":
            self.wfile.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
        if fault is None or kind not in ("hang", "reset", "garbled", "done reset"):
            self._send(found if fault is None else store.wrongly(fault, key, query, self.headers, found))
        else:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def _credential(self, query: dict[str, str]) -> str:
        return f"{self.headers.get('Authorization')} {query.get('X-Amz-Credential')}"

    def _what(self, query: dict[str, str]) -> str:
        if "uploadId" in query:
            return {"PUT": "PART", "POST": "COMPLETE", "DELETE": "ABORT"}[self.command]
        if "uploads" in query:
            return "BEGIN" if self.command == "POST" else "UPLOADS"
        if "list-type" in query:
            return "LIST"
        if self.command == "PUT" and "If-None-Match" in self.headers:
            return "CREATE"
        return "REPLACE" if self.command == "PUT" and "If-Match" in self.headers else self.command

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        length = len(answer.body) if answer.length is None else answer.length
        if answer.status != 204:
            answer.headers["Content-Length"] = str(length)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
            if length > len(answer.body):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *given: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*given)

    def process_request(self, request: Any, address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        pass  # clients that went away


def ranged(data: bytes, first: int, end: int, headers: dict[str, str]) -> Answer:
    """A part of an object, also of bytes that it does not have."""
    part = data[first:end] + bytes(max(0, end - max(first, len(data))))
    return Answer(206, part, {**headers, "Content-Range": f"bytes {first}-{end - 1}/{max(end, len(data))}"})


def error(status: int, code: str = "") -> Answer:
    code = code or CODES[status]
    return replace(
        document("Error", f"<Code>{code}</Code><Message>{code} of the test</Message>"), status=status
    )


def document(name: str, content: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


def unchunked(body: bytes) -> bytes:
    """The content of a body that is sent in signed chunks."""
    found, rest = b"", body
    while rest:
        head, _, rest = rest.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        found, rest = found + rest[:size], rest[size + 2 :]
    return found


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
