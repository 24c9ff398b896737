"""Source tars at URLs: lists of links, and reading without storing."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.cli.verb import runner
from tests.kit import refused, run
from tests.shards import tiny
from tests.sources.strange_server import SECRET, StrangeServer
from tests.storage.range_server import LINKED
from tests.storage.service import Service

GOOD = "sa_000021.tar\thttps://h/b?s=1\nsa_000020.tar\thttps://h/a?s=2"


def digest(root: Path, source: str) -> str:
    return str(json.loads((root / "tasks" / f"{source}.json").read_text())["source"]["sha256"])


def test_the_tars_of_a_list_are_sources_and_the_other_files_of_it_are_named(tmp_path: Path) -> None:
    for number in (20, 21):
        tiny.make_tar(tmp_path / "tars" / f"sa_0000{number}.tar", [number])
    links = tmp_path / "links.txt"
    with StrangeServer(tmp_path / "tars") as server:
        lines = [f"{name}\t{server.url}/{name}?{SECRET}" for name in ("sa_000021.tar", "sa_000020.tar")]
        more = ["file_name\tcdn_link", "sa_images_ids.txt\thttps://h/i", "sa_co_gold.tar\thttps://h/g", ""]
        links.write_text("\n".join([*more, *lines]), encoding="utf-8-sig")
        done = run("reshard", "--links", links, "--out", tmp_path / "root", "--json")
    assert done.json["done"] == ["sa_000020", "sa_000021"]
    assert all(name in done.err for name in ("sa_images_ids.txt", "sa_co_gold.tar"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sa_000020.tar\thttps://[h/a?SIGNED", ", line 1: "),
        ("sa_000020.tar\thttps:h/a?sig=SIGNED", ", line 1: "),
        ("sa_000020.tar\tfile:///a\0b", ", line 1: "),
        ("sa_000020.tar https://h/a?SIGNED", ", line 1: "),
        ("sa_000020.tar\t/a/b", ", line 1: "),
        ("\thttps://h/a", ", line 1: "),
        ("sa_000020.tar\thttps://h/a b", ", line 1: "),
        (GOOD + "\nsa_000020.tar\thttps://h/c?SIGNED", ", line 3: sa_000020.tar"),
        ("", ": "),
        ("file_name\tcdn_link\nsa_images_ids.txt\thttps://h/i?SIGNED", ": "),
        ("<html>Sign in</html>", ", line 1: "),
    ],
)
def test_a_wrong_list_names_its_line_and_shows_no_secret(tmp_path: Path, text: str, line: str) -> None:
    links = tmp_path / "links.txt"
    links.write_text(text)
    done = refused("reshard", "--links", links, "--out", tmp_path / "root", names=f"{links}{line}")
    assert "SIGNED" not in done.err


@pytest.mark.parametrize(
    ("urls", "named"),
    [
        (["https://me:pass@h/sa%201.tar?SIGNED"], "https://h/sa%201.tar: "),
        (["https:///sa_1.tar?SIGNED"], "https:///sa_1.tar"),
        (["https://h/a/sa_1.tar?SIGNED", "https://h/b/sa_1.tgz"], "https://h/b/sa_1.tgz: "),
    ],
)
def test_urls_whose_names_cannot_be_those_of_sources_are_refused(
    tmp_path: Path, urls: list[str], named: str
) -> None:
    done = refused("reshard", *urls, "--out", tmp_path / "root", names=named)
    assert "SIGNED" not in done.err
    assert "pass" not in done.err.partition(";")[0]


def test_the_tars_in_a_folder_of_a_store_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    for number, name in enumerate(("sa_1.tar", "sa_2.TGZ")):
        tiny.make_tar(tmp_path / "bucket" / "tars" / name, [number])
    (tmp_path / "bucket" / "tars" / "notes.txt").write_text("notes")
    with Service("range_server", tmp_path) as host:
        words = ("s3://bucket/tars/", "--out", tmp_path / "root", "--endpoint", host.url, "--json")
        done = runner("reshard")(*words)
    made = json.loads(done.stdout)
    assert (made["done"], made["failed"]) == (["sa_1", "sa_2"], {})


def test_broken_connections_do_not_change_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "linked" / "sa_1.tar"
    rest = hashlib.shake_256(b"y").digest((16 << 20) + 77)  # two ranges
    tiny.write_tar(path, [*tiny.pairs([1]), ("./rest.bin", rest)], gzip=False)
    host = Service("range_server", tmp_path)
    with host, Service("fault_proxy", host.port, 3, 0.4, "reset", "reset_body", "short") as proxy:
        (tmp_path / "links.txt").write_text(f"sa_1.tar\t{proxy.url}/linked/sa_1.tar?{LINKED}")
        for root in (tmp_path / "first", tmp_path / "second"):
            run("reshard", "--links", tmp_path / "links.txt", "--out", root, "--connections", 2, code=3)
            assert digest(root, "sa_1") == hashlib.sha256(path.read_bytes()).hexdigest()
        assert proxy.ask({"do": "log"})


def test_the_rate_is_limited(tmp_path: Path) -> None:
    """Waits of more than 100 s are only written down."""
    tiny.write_tar(
        tmp_path / "tars" / "sa_1.tar", [*tiny.pairs([1]), ("./rest.bin", bytes(990_000))], gzip=False
    )
    size = (tmp_path / "tars" / "sa_1.tar").stat().st_size
    code = (
        "import sys, time\n"
        "usual, log = time.sleep, open(sys.argv[1], 'a', buffering=1)\n"
        "time.sleep = lambda seconds: log.write(f'{seconds}\\n') if seconds > 100 else usual(seconds)\n"
        "from sa1b.cli import main\n"
        "main(sys.argv[2:])"
    )
    with StrangeServer(tmp_path / "tars") as server:
        url = f"{server.url}/sa_1.tar?{SECRET}"
        words = [tmp_path / "waits", "reshard", url, "--out", tmp_path / "root", "--max-rate", "0.001"]
        done = processes.run(
            [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 3, done.stderr
    waits = [float(line) for line in (tmp_path / "waits").read_text().split()]
    assert size / 1000 - 100 < max(waits) <= size / 1000
