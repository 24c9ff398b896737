"""Tars behind servers with unusual answers: the stored bytes, or a clear error, and never the link's signature."""

import hashlib
from pathlib import Path

import pytest

from sa1b.errors import Sa1bError, SourceError, printable
from sa1b.sources.remote_sources import named_links, remote_sources
from sa1b.sources.source import SourceReader, digest_of_source
from sa1b.sources.stored_file import Link, RemoteFile, link_of, read_links
from tests.cli.verb import runner
from tests.shards import tiny
from tests.sources.strange_server import SECRET, StrangeServer

reshard = runner("reshard")
NAME = "sa_000000.tar"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tars").mkdir()
    tiny.make_tar(tmp_path / "tars" / NAME, range(4))
    return tmp_path / "tars"


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with a file of several ranges instead of the tar."""
    monkeypatch.setattr("sa1b.storage.reader.PIECE", 1 << 20)
    (folder / NAME).write_bytes(hashlib.shake_256(b"x").digest(3 << 20))
    return folder


def link_to(server: StrangeServer, *, connections: int = 1) -> Link:
    url = f"{server.url}/a/{NAME}?{SECRET}"
    return Link(url, NAME, f"links.txt, line 1: {NAME}", Path("links.txt"), connections)


def read_all(link: Link) -> bytes:
    file = RemoteFile(link)
    try:
        return b"".join(iter(lambda: file.read(1 << 20), b""))
    finally:
        file.close()


def error_of(link: Link) -> str:
    """The message of reading all of a file."""
    with pytest.raises(Sa1bError) as raised:
        read_all(link)
    assert "hidden" not in str(raised.value)
    assert str(raised.value).startswith(link.label)
    return str(raised.value)


@pytest.mark.parametrize("mode", ["usual", "chunks", "no HEAD", "cut", "encoding", "no ranges"])
def test_the_stored_bytes_are_read(folder: Path, mode: str) -> None:
    with StrangeServer(folder, mode) as server:
        (source,), failed = remote_sources(named_links([link_to(server)]))
        reader = SourceReader(source)
        assert len(list(reader.items())) == 8
        reader.check_unchanged()
        reader.close()
        assert not failed
        assert digest_of_source(source) == hashlib.sha256((folder / NAME).read_bytes()).hexdigest()


def test_a_redirection_to_another_host_keeps_the_signature(folder: Path) -> None:
    with StrangeServer(folder) as target, StrangeServer(folder, "redirect", target.url) as server:
        (source,), failed = remote_sources(named_links([link_to(server)]))
        assert not failed
        assert digest_of_source(source) == hashlib.sha256((folder / NAME).read_bytes()).hexdigest()


@pytest.mark.parametrize("mode", ["cut", "usual"])
def test_a_cut_connection_continues_at_the_range(large: Path, mode: str) -> None:
    with StrangeServer(large, mode) as server:
        assert read_all(link_to(server)) == (large / NAME).read_bytes()
        assert len(server.requests) == 1 + 3 + server.cuts


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no ranges", "the server ignores byte ranges; use one that supports them"),
        ("no length", "the server does not return its size; use one that supports byte ranges"),
        ("replaced", "changed while it was read; run the same command again"),
        ("expires", "the link has expired or is wrong (access denied (Odd: "),
        ("echo", "the link has expired or is wrong (access denied (Odd: "),
        ("echo 400", "the request was refused (Odd: "),
    ],
)
def test_errors_are_clear(large: Path, mode: str, words: str) -> None:
    with StrangeServer(large, mode) as server:
        assert words in error_of(link_to(server))


def test_a_target_of_a_redirection_that_refuses(large: Path) -> None:
    with StrangeServer(large, "echo") as target, StrangeServer(large, "redirect", target.url) as server:
        assert "the link has expired" in error_of(link_to(server))


def test_a_url_without_a_list_says_to_check_the_url(tmp_path: Path, folder: Path) -> None:
    with StrangeServer(folder, "echo") as server:
        done = reshard(f"{server.url}/a/{NAME}?{SECRET}", "--out", tmp_path / "root")
    assert done.returncode == 1
    assert f"FAILED sa_000000: {server.url}/a/{NAME}: access denied" in done.stdout
    assert "; check the URL" in done.stdout
    assert "AWS" not in done.stdout
    written = "".join(path.read_text() for path in (tmp_path / "root").rglob("*.failed"))
    assert "access denied" in written
    assert "hidden" not in done.stdout + done.stderr + written


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://h/a.tar?Policy=a,b;c)d&Sig=x~_- failed", "GET https://h/a.tar failed"),
        ("(url='https://h/a?x=1')", "(url='https://h/a')"),
        ("https://h/a?x=1; check it", "https://h/a; check it"),
        ("https://me:pass@h/a?x", "https://h/a"),
        ("nothing secret (at all); b", "nothing secret (at all); b"),
    ],
)
def test_secrets_of_urls_are_removed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_links_do_not_show_their_secrets(tmp_path: Path) -> None:
    link = link_of("https://me:pass@h/sa_1.tar?Signature=hidden")
    assert link.label == "https://h/sa_1.tar"
    assert "hidden" not in repr(link)
    assert "pass" not in repr(link)
    (tmp_path / "links.txt").write_text("sa_1.tar https://h/a?hidden")
    with pytest.raises(SourceError) as raised:
        read_links(tmp_path / "links.txt")
    assert "hidden" not in str(raised.value)
