"""What may be printed: no secret of a URL, no character that controls a terminal."""

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sa1b.errors import Sa1bError, printable
from tests.cli.verb import runner
from tests.shards import tiny

SECRETS = ("USER1", "PASS2", "TOK3", "SIG4", "FRAG5")
SIGNS = ("", "'", '"', "<", ">", "%3F", ";", "#", "$", "&", ",")


QUERIES = ("?token={0}TOK3&X-Amz-Signature=b{0}SIG4#{0}FRAG5", "%3Ftoken={0}TOK3")
FORMS = [  # in the key of a bucket, "#" is a character like others
    *(
        (scheme, query)
        for scheme in ("http", "https", "HTTP", "s3", "S3", "abfss", "hf")
        for query in QUERIES
    ),
    ("http", "#{0}FRAG5"),
]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(("scheme", "query"), FORMS)
def test_no_secret_of_a_url_is_left(scheme: str, query: str, sign: str) -> None:
    url = f"{scheme}://USER1:a{sign}PASS2@host:80/folder/x.tar{query.format(sign)}"
    for text in (
        url,
        f"{url}: denied; see 'x'",
        f"'{url}'",
        f"({url})",
        f"a {url}, {url}.",
        f"--out {Path(url)}: no folder",
        json.dumps({"url": url}),
    ):
        shown = printable(text)
        assert not [secret for secret in SECRETS if secret in shown], shown
        assert "host:80/folder/x.tar" in shown
        assert str(Sa1bError(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "see https://host/x.tar; then run it again",
        "s3://bucket/folder#1/x.tar: missing (404), see https://host/a?",
        "a#b; c?d=e@f /path/with?question#hash;semicolon user@host",
        "line one\n\tline two",
        "C:/me@home/x?, host:80/a@b",
        "images of 日本 and ü",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text


def test_characters_that_control_a_terminal_are_escaped() -> None:
    assert (
        printable("a\x1b[31mb\x07\x00\x9b\x7f\r\u2028\u202e") == r"a\x1b[31mb\x07\x00\x9b\x7f\r\u2028\u202e"
    )


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that refuses everything; its host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403, "no")

        do_HEAD = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_no_command_prints_or_writes_a_secret_of_a_url(
    refusing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root, tars = tmp_path / "root", tmp_path / "in"
    tiny.make_tar(tars / "sa_000001.tar", range(3))
    assert runner("reshard")(tars, "--out", root).returncode == 0
    (tmp_path / "ids.txt").write_text("1\n")
    query = "?token='TOK3\"&X-Amz-Signature=%3FSIG4#FRAG5"
    url = f"http://USER1:'PASS2\"<;@{refusing}/folder"
    (tmp_path / "links.txt").write_text(f"sa_000009.tar\t{url}/sa_000009.tar{query}\n")
    tar = f"{url}/sa_000002.tar{query}"
    for verb, *arguments in (
        ("reshard", tar, "--out", root),
        ("reshard", "--links", "links.txt", "--out", root),
        ("reshard", "--links", "links.txt", "--out", root, "--json"),
        ("fetch", tar, "--ids", "ids.txt", "--out", tmp_path / "some"),
        ("plan", tar),
        *((verb, f"{url}{query}") for verb in ("verify", "index", "gallery", "locate")),
        ("view", f"{url}{query}", "--held-out", "1%", "--name", "a"),
        ("copy", f"{url}{query}", tmp_path / "copy"),
        ("copy", root, f"{url}{query}"),
        ("export", f"{url}{query}", "--to", "coco", "--out", tmp_path / "out"),
        ("query", f"{url}{query}", "SELECT 1"),
        ("bench", f"{url}{query}"),
        ("train", "--preset", "tiny", "--data.root", f"{url}{query}", "--out", tmp_path / "run"),
        ("annotate", f"{url}{query}", "--weights", f"{url}{query}", "--out", tmp_path / "labels"),
    ):
        done = runner(verb)(*arguments)
        assert done.returncode != 0, (verb, done.stdout)
        said = done.stdout + done.stderr
        assert not [secret for secret in SECRETS if secret in said], (verb, said)
        assert "Traceback" not in said, (verb, said)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "links.txt"]
    assert not [(path, one) for path in files for one in SECRETS if one.encode() in path.read_bytes()]


def test_names_of_others_do_not_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of members, files, columns and categories that somebody else chose."""
    monkeypatch.chdir(tmp_path)
    evil = "e\x1b]0;title\x07\x1b[31m\x9b31m\x7f\u202ex"
    (tmp_path / evil).mkdir()
    tiny.make_tar(tmp_path / evil / "sa_000001.tar", range(3), gzip=False)
    with tarfile.open(tmp_path / evil / "sa_000001.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo(f"sa_7{evil}.jpg"), io.BytesIO(b""))
    (tmp_path / evil / f"{evil}.tar").touch()
    for verb, *arguments in (
        ("reshard", evil, "--out", "refused"),
        ("reshard", f"{evil}/sa_000001.tar", "--out", f"out{evil}"),
        ("query", f"out{evil}", f"SELECT '{evil}' AS \"{evil}\""),
        ("locate", f"out{evil}", "1"),
    ):
        done = runner(verb)(*arguments)
        said = done.stdout + done.stderr
        assert "\\x1b" in said, (verb, said)
        assert not {*said} & {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"}, (verb, said)
