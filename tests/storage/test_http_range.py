"""What a range request accepts: every response is compared with the request."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google_crc32c
import pytest

from sa1b.storage.errors import DamageError, MissingError, ReplacedError, StorageError, UnavailableError
from sa1b.storage.reader import Reader
from tests.storage.conftest import WaitedTime

BODY = bytes(range(100))


class Scripted(BaseHTTPRequestHandler):
    """Answers every request with the server's `status`, `fields` and `body`; notes the requests' headers.

    If the server `is_sized`, the first byte is served correctly. The bytes in `raw` are sent as responses
    first, and `cached` is the body of requests that do not bypass caches.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        server.requests.append(dict(self.headers))
        server.ports.append(self.client_address[1])
        if server.raw:
            self.wfile.write(server.raw.pop(0))
            return
        if server.is_sized and self.headers["Range"] == "bytes=0-0":
            self.send_response(206)
            self.send_header("Content-Range", "bytes 0-0/100")
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(BODY[:1])
            return
        self.send_response(server.status)
        for name, value in server.fields.items():
            self.send_header(name, value)
        if "Transfer-Encoding" not in server.fields:
            self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        is_cached = server.cached and self.headers["Cache-Control"] != "no-cache"
        self.wfile.write(server.cached if is_cached else server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    served: Any = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    served.daemon_threads = True
    served.requests, served.ports, served.raw = [], [], []
    served.is_sized, served.cached = False, b""
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def answers(server: Any, status: int, body: bytes = b"", **fields: str) -> None:
    server.status, server.body = status, body
    server.fields = {name.replace("_", "-"): value for name, value in fields.items()}


@pytest.fixture
def reader(server: Any, waited: WaitedTime) -> Iterator[Reader]:
    with Reader(f"http://127.0.0.1:{server.server_port}/d", retry_policy=waited.policy(20)) as reader:
        yield reader


def test_the_requested_range_is_accepted(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY[10:30], Content_Range="bytes 10-29/100", ETag='"a"')
    assert reader.read_range("x", 10, 20) == BODY[10:30]
    assert reader.read_range("x", 10, 20) == BODY[10:30]
    assert [(one["Range"], one.get("If-Match")) for one in server.requests] == [
        ("bytes=10-29", None),
        ("bytes=10-29", '"a"'),
    ]
    assert all(one["Accept-Encoding"] == "identity" for one in server.requests)


def test_a_range_of_an_object_of_unknown_size_is_accepted(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY[10:30], Content_Range="bytes 10-29/*")
    assert reader.read_range("x", 10, 20) == BODY[10:30]


@pytest.mark.parametrize(
    ("content_range", "words"),
    [
        ("bytes 11-30/100", "bytes 11 to 31 received, 10 to 30 requested"),
        ("bytes 10-28/100", "bytes 10 to 29 received"),
        ("bytes 10-30/100", "bytes 10 to 31 received"),
        ("bytes 0-19/100", "bytes 0 to 20 received"),
        ("10-29/100", "Content-Range '10-29/100'"),
        (None, "Content-Range None"),
        ("bytes */100", "Content-Range"),
    ],
)
def test_another_range_is_not_accepted(
    server: Any, reader: Reader, content_range: str | None, words: str
) -> None:
    fields = {} if content_range is None else {"Content_Range": content_range}
    answers(server, 206, BODY[10:30], **fields)
    server.is_sized = True
    with pytest.raises(UnavailableError, match=words.replace("*", r"\*")):
        reader.read_range("x", 10, 20)
    assert reader.counters().short == reader.counters().faults > 2


def test_more_bytes_than_the_range_are_not_accepted(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY * 50, Content_Range="bytes 10-29/100")
    server.is_sized = True
    with pytest.raises(UnavailableError, match="5,000 bytes sent, 20 requested"):
        reader.read_range("x", 10, 20)


def test_a_range_that_passes_the_end_is_damage(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY[:1], Content_Range="bytes 0-0/1")
    with pytest.raises(DamageError, match="the object ends at byte 1"):
        reader.read_range("x", 0, 20)


def test_a_complete_object_in_place_of_its_range_is_accepted(server: Any, reader: Reader) -> None:
    answers(server, 200, BODY)
    assert reader.read_range("x", 0, 100) == BODY
    assert reader.size("x") == 100


def test_a_range_with_status_200_is_accepted_if_it_says_so(server: Any, reader: Reader) -> None:
    answers(server, 200, BODY[10:30], Content_Range="bytes 10-29/100")
    assert reader.read_range("x", 10, 20) == BODY[10:30]


@pytest.mark.parametrize("start", [0, 10])
def test_another_complete_object_is_an_error_at_once(server: Any, reader: Reader, start: int) -> None:
    answers(server, 200, BODY)
    with pytest.raises(StorageError, match="100 bytes received, the server ignores byte ranges"):
        reader.read_range("x", start, 20)
    assert len(server.requests) == 1


def test_weak_tags_are_compared_and_not_sent(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY[:10], Content_Range="bytes 0-9/100", ETag='W/"a"')
    for _ in range(2):
        reader.read_range("x", 0, 10)
    assert not any("If-Match" in one for one in server.requests)
    answers(server, 206, BODY[:10], Content_Range="bytes 0-9/100", ETag='"a"')
    reader.read_range("x", 0, 10)
    answers(server, 206, BODY[:10], Content_Range="bytes 0-9/100", ETag='"b"')
    with pytest.raises(ReplacedError, match='ETag W/"a", now "b"'):
        reader.read_range("x", 0, 10)


@pytest.mark.parametrize(
    ("status", "error"), [(404, MissingError), (410, MissingError), (400, StorageError), (412, StorageError)]
)
def test_refusals_are_errors_at_once_with_the_message_of_the_server(
    server: Any, reader: Reader, status: int, error: type[Exception]
) -> None:
    answers(server, status, b"<Error><Code>Odd</Code><Message>Because\n of that.</Message></Error>")
    with pytest.raises(error, match="Odd: Because of that."):
        reader.read_range("x", 0, 10)
    assert len(server.requests) == 1


def test_the_size_of_an_empty_object_and_of_none(server: Any, reader: Reader) -> None:
    answers(server, 416, b"")
    assert reader.size("x") == 0
    answers(server, 206, b"a", Content_Range="bytes 0-0/*")
    with pytest.raises(StorageError, match="does not return its size"):
        reader.size("x")


_SENT = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 10-29/100\r\n"


@pytest.mark.parametrize(
    "garbled",
    [
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent Range\x00 x\r\n\r\n",
        _SENT + b"Content-Length: abc\r\n\r\n" + BODY[10:30],
        _SENT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY[10:30],
        _SENT + b"Content-Length: 20\r\n\r\n" + BODY[:20] + b"surplus",
    ],
)
def test_a_garbled_response_is_requested_again_on_a_new_connection(
    server: Any, reader: Reader, garbled: bytes
) -> None:
    server.raw = [garbled, garbled]
    answers(server, 206, BODY[10:30], Content_Range="bytes 10-29/100")
    crc = int(google_crc32c.value(BODY[10:30]))
    assert reader.read_range("x", 10, 20, crc) == BODY[10:30]
    assert len(server.ports) == len(set(server.ports)) == 3


def test_a_wrong_body_of_a_proxys_cache_is_not_taken_for_stored_damage(server: Any, reader: Reader) -> None:
    server.cached = BODY[11:31]
    answers(server, 206, BODY[10:30], Content_Range="bytes 10-29/100")
    assert reader.read_range("x", 10, 20, int(google_crc32c.value(BODY[10:30]))) == BODY[10:30]
    assert [one.get("Cache-Control") for one in server.requests] == [None, "no-cache"]


def test_two_reads_that_agree_are_not_both_of_a_proxys_cache(server: Any, reader: Reader) -> None:
    server.cached = BODY[11:31]
    answers(server, 206, BODY[10:30], Content_Range="bytes 10-29/100")
    first = reader.read_range("x", 10, 20)
    assert reader.read_agreed("x", 10, 20, first) == BODY[10:30]


def test_stored_damage_is_found_past_the_caches(server: Any, reader: Reader) -> None:
    answers(server, 206, BODY[11:31], Content_Range="bytes 10-29/100")
    with pytest.raises(DamageError, match="in two separate reads"):
        reader.read_range("x", 10, 20, int(google_crc32c.value(BODY[10:30])))
    assert server.requests[-1]["Cache-Control"] == "no-cache"


def test_a_store_that_sends_nothing_is_reported_while_the_first_attempt_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()
    requests = []

    class Silent(BaseHTTPRequestHandler):
        """Answers after the line was printed; without it, the attempt would end at its timeout."""

        def do_GET(self) -> None:
            requests.append(said.wait(60))
            self.send_response(206)
            self.send_header("Content-Range", "bytes 0-9/100")
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(BODY[:10])

        def log_message(self, *_: object) -> None:
            pass

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    monkeypatch.setattr("sa1b.storage.retry._warned", [float("-inf")])
    monkeypatch.setattr("sa1b.storage.retry._FIRST_WARNING", 0.05)
    handler = Noting()
    logging.getLogger("sa1b.storage.retry").addHandler(handler)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Reader(f"http://127.0.0.1:{server.server_port}", attempt_timeout=60) as reader:
            assert reader.read_range("a", 0, 10) == BODY[:10]
            assert reader.counters().attempts == 1
    finally:
        server.shutdown()
        server.server_close()
        logging.getLogger("sa1b.storage.retry").removeHandler(handler)
    assert requests == [True]
    (line,) = caplog.messages
    assert "/a, bytes 0 to 10: no response yet; retrying for up to " in line
