"""Tars behind servers with unusual answers: the stored bytes, or a clear error, and never the link's signature."""

import hashlib
import json
from pathlib import Path

import pytest

import sa1b
from sa1b.errors import printable
from tests.cli.verb import runner
from tests.kit import Done, run
from tests.shards import tiny
from tests.sources.strange_server import SECRET, StrangeServer

reshard = runner("reshard")
NAME = "sa_000000.tar"
PIECE = 8 << 20  # bytes of a range


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tars").mkdir()
    tiny.make_tar(tmp_path / "tars" / NAME, range(4))
    return tmp_path / "tars"


@pytest.fixture
def large(folder: Path) -> Path:
    """The folder with a tar of three ranges instead, of which a file is refused."""
    rest = hashlib.shake_256(b"x").digest(2 * PIECE + 12_345)
    tiny.write_tar(folder / NAME, [*tiny.pairs(range(4)), ("./rest.bin", rest)], gzip=False)
    return folder


def listed(server: StrangeServer, folder: Path) -> Done:
    """`sa1b reshard --json` of a list with one link."""
    links, root = folder.parent / "links.txt", folder.parent / "root"
    links.write_text(f"{NAME}\t{server.url}/a/{NAME}?{SECRET}")
    words = ("--links", links, "--out", root, "--connections", 1, "--json")
    done = run("reshard", *words, code=None)
    written = [done.out, done.err, *(path.read_text() for path in root.glob("tasks/*.[fj]*"))]
    assert [text for text in written if "hidden" in text] == []
    return done


def check_stored(folder: Path) -> None:
    root = folder.parent / "root"
    assert len(sa1b.open(root)) == 4
    source = json.loads((root / "tasks" / "sa_000000.json").read_text())["source"]
    assert source["sha256"] == hashlib.sha256((folder / NAME).read_bytes()).hexdigest()


@pytest.mark.parametrize("mode", ["usual", "chunks", "no HEAD", "cut", "encoding", "no ranges"])
def test_the_stored_bytes_are_read(folder: Path, mode: str) -> None:
    with StrangeServer(folder, mode) as server:
        assert listed(server, folder).code == 0
    check_stored(folder)


def test_a_redirection_to_another_host_keeps_the_signature(folder: Path) -> None:
    with StrangeServer(folder) as target, StrangeServer(folder, "redirect", target.url) as server:
        assert listed(server, folder).code == 0
    check_stored(folder)


@pytest.mark.parametrize("mode", ["cut", "usual"])
def test_every_byte_is_asked_for_once_and_a_cut_connection_continues_at_the_range(
    large: Path, mode: str
) -> None:
    with StrangeServer(large, mode) as server:
        assert listed(server, large).code == 3
    check_stored(large)
    assert server.cuts == (3 if mode == "cut" else 0)
    ranges = [one for one in server.requests if one not in ("HEAD", "bytes=0-0")]
    assert len(ranges) == 3 + server.cuts
    assert len(server.requests) <= len(ranges) + 3  # sizes


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        ("no ranges", "byte ranges"),
        ("no length", "byte ranges"),
        ("replaced", "run the same command again"),
        ("grows", "run the same command again"),
        ("expires", "--links"),
        ("echo", "--links"),
        ("gone", "--links"),
        ("echo 400", ""),
        ("redirect", "--links"),
    ],
)
def test_errors_name_the_line_of_the_list(large: Path, mode: str, remedy: str) -> None:
    with StrangeServer(large, "echo") as target, StrangeServer(large, mode, target.url) as server:
        done = listed(server, large)
    assert done.code == 1
    why = done.json["failed"]["sa_000000"]
    assert why.startswith(f"{large.parent / 'links.txt'}, line 1: {NAME}: ")
    assert remedy in why
    assert not (large.parent / "root" / "dataset.json").exists()


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
