"""Source tars at URLs: lists of links, and reading without storing."""

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from sa1b.errors import SourceError
from sa1b.sources import stored_file
from sa1b.sources.remote_sources import links_at, named_links, remote_sources
from sa1b.sources.source import SourceReader, digest_of_source
from sa1b.sources.stored_file import Link, RemoteFile, link_of, read_links
from sa1b.storage.reader import PIECE
from tests.shards import tiny
from tests.storage.range_server import LINKED
from tests.storage.service import Service

GOOD = "sa_000021.tar\thttps://h/b?s=1\nsa_000020.tar\thttps://h/a?s=2"


@dataclass(frozen=True)
class Host:
    """A web server over a folder."""

    folder: Path
    url: str

    def link(self, name: str) -> Link:
        return Link(
            f"{self.url}/linked/{name}?{LINKED}", name, f"links.txt, line 7: {name}", Path("links.txt")
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "linked").mkdir()
    service = Service("range_server", tmp_path)
    try:
        yield Host(tmp_path / "linked", service.url)
    finally:
        service.stop()


def test_the_tars_of_a_list_sorted_and_the_other_files_of_it(tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    more = "sa_images_ids.txt\thttps://h/i\nsa_co_gold.tar\thttps://h/g\n"
    path.write_text("﻿file_name\tcdn_link\n" + more + GOOD, encoding="utf-8")
    links, others = read_links(path)
    assert [(link.file_name, link.url) for link in links] == [
        ("sa_000020.tar", "https://h/a?s=2"),
        ("sa_000021.tar", "https://h/b?s=1"),
    ]
    assert links[0].label == f"{path}, line 5: sa_000020.tar"
    assert others == ["sa_images_ids.txt", "sa_co_gold.tar"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sa_000020.tar\thttps://[h/a", "must be a file name, a tab and a URL"),
        ("sa_000020.tar\thttps:h/a?sig=SIGNED", "line 1: 'sa_000020.tar\\thttps:h/a' must be a file name"),
        ("sa_000020.tar\tfile:///a\0b", "must be a file name, a tab and a URL"),
        ("sa_000020.tar https://h/a", "line 1: 'sa_000020.tar https://h/a' must be a file name, a tab"),
        ("sa_000020.tar\t/a/b", "line 1"),
        ("\thttps://h/a", "line 1"),
        ("sa_000020.tar\thttps://h/a b", "line 1"),
        (GOOD + "\nsa_000020.tar\thttps://h/c", "line 3: sa_000020.tar is listed before with another link"),
        ("", "lists no tar of SA-1B"),
        ("file_name\tcdn_link\nsa_images_ids.txt\thttps://h/i", "lists no tar of SA-1B"),
        ("<html>Sign in</html>", "line 1"),
    ],
)
def test_a_wrong_list_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "links.txt").write_text(text)
    with pytest.raises(SourceError) as error:
        read_links(tmp_path / "links.txt")
    assert words in str(error.value)
    assert str(tmp_path / "links.txt") in str(error.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_remote_tar_has_the_members_and_digests_of_the_file(host: Host, compressed: bool) -> None:
    path = host.folder / "sa_000020.tar"
    tiny.make_tar(path, range(3))
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    (source,), failed = remote_sources(named_links([host.link(path.name)]))
    assert not failed
    assert (source.name, source.size) == ("sa_000020", path.stat().st_size)
    local = SourceReader(replace(source, path=path, link=None, mtime_ns=path.stat().st_mtime_ns), md5=True)
    remote = SourceReader(source, md5=True)
    try:
        assert list(remote.items()) == list(local.items())
        assert remote.digests() == local.digests()
        remote.check_unchanged()
    finally:
        local.close()
        remote.close()
    assert digest_of_source(source, kind="md5") == hashlib.md5(path.read_bytes()).hexdigest()


def test_every_byte_comes_once_and_in_order_over_many_ranges(host: Host) -> None:
    data = hashlib.shake_256(b"x").digest(2 * PIECE + 12_345)
    (host.folder / "sa_1.tar").write_bytes(data)
    file = RemoteFile(host.link("sa_1.tar"))
    read = b"".join(iter(lambda: file.read(1 << 16), b""))
    file.close()
    assert read == data


def test_broken_connections_do_not_change_the_bytes(host: Host) -> None:
    data = hashlib.shake_256(b"y").digest(PIECE + 77)
    (host.folder / "sa_1.tar").write_bytes(data)
    port = host.url.rpartition(":")[2]
    proxy = Service("fault_proxy", port, 3, 0.4, "reset", "reset_body", "short")
    try:
        link = replace(host.link("sa_1.tar"), url=f"{proxy.url}/linked/sa_1.tar?{LINKED}", connections=2)
        for _ in range(2):
            file = RemoteFile(link)
            assert b"".join(iter(partial(file.read, 1 << 20), b"")) == data
            file.close()
        assert proxy.ask({"do": "log"})
    finally:
        proxy.stop()


def test_an_expired_link_names_its_line_and_the_way_to_new_ones(host: Host) -> None:
    link = replace(host.link("sa_000020.tar"), url=f"{host.url}/denied/sa_000020.tar?{LINKED}")
    gone = host.link("sa_000021.tar")
    sources, failed = remote_sources(named_links([link, gone]))
    assert not sources
    for name, line in (("sa_000020", "links.txt, line 7: sa_000020.tar: "), ("sa_000021", "sa_000021.tar: ")):
        assert line in failed[name]
        assert "download the list of links again and pass it with --links" in failed[name]
        assert "Signature" not in failed[name]
        assert "Expires" not in failed[name]


def test_the_link_of_a_finished_source_is_not_used() -> None:
    link = Link("http://127.0.0.1:9/sa_000020.tar", "sa_000020.tar", "links.txt, line 2: sa_000020.tar")
    (source,), failed = remote_sources(named_links([link]), {"sa_000020": (10, 3)})
    assert (source.size, source.mtime_ns, failed) == (10, 3, {})


def test_a_tar_that_is_replaced_while_it_is_read(host: Host) -> None:
    path = host.folder / "sa_1.tar"
    path.write_bytes(bytes(1000))
    file = RemoteFile(host.link("sa_1.tar"))
    assert len(file.read(2000)) == 1000
    path.write_bytes(bytes(1001))
    with pytest.raises(SourceError, match="changed while it was read"):
        file.check_unchanged()
    file.close()


def test_the_rate_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    (host.folder / "sa_1.tar").write_bytes(bytes(1_000_000))
    waits: list[float] = []
    monkeypatch.setattr(stored_file.time, "sleep", waits.append)
    monkeypatch.setattr(stored_file.time, "monotonic", lambda: 100.0)
    file = RemoteFile(replace(host.link("sa_1.tar"), max_rate=250_000.0))
    while file.read(1 << 16):
        pass
    file.close()
    assert waits[0] == pytest.approx(4.0)


def test_the_tars_in_a_folder_of_a_store_and_wrong_urls(host: Host) -> None:
    tars = host.folder.parent / "bucket" / "tars"
    tars.mkdir(parents=True)
    for name in ("sa_1.tar", "sa_2.TGZ", "notes.txt"):
        (tars / name).write_bytes(b"x")
    options = {"anon": True, "endpoint_url": host.url}
    found = links_at("s3://bucket/tars/", options)
    assert [link.url for link in found] == ["s3://bucket/tars/sa_1.tar", "s3://bucket/tars/sa_2.TGZ"]
    assert [link.url for link in links_at("https://h/x/sa_1.tar?s=1")] == ["https://h/x/sa_1.tar?s=1"]
    with pytest.raises(SourceError, match="names no file"):
        link_of("https://h/x/")
