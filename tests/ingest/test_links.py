"""reshard of tars at URLs: Meta's list of links, and URLs as SOURCE."""

import json
import re
import shutil
from pathlib import Path

import pytest

import sa1b
from tests.cli.verb import runner
from tests.shards import tiny
from tests.storage.range_server import LINKED
from tests.storage.service import Service

reshard = runner("reshard")
verify = runner("verify")


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "host" / "linked"
    folder.mkdir(parents=True)
    for number in range(3):
        ids = range(10 * number, 10 * number + 4)
        tiny.make_tar(folder / f"sa_00000{number}.tar", ids, gzip=number != 1)
    return folder


def write_links(path: Path, host: Service, bucket: str = "linked", query: str = LINKED) -> Path:
    lines = [
        f"sa_00000{number}.tar\t{host.url}/{bucket}/sa_00000{number}.tar?{query}" for number in (2, 0, 1)
    ]
    path.write_text("\n".join(["file_name\tcdn_link", f"sa_images_ids.txt\t{host.url}/ids", *lines]))
    return path


def contents(root: Path) -> dict[str, bytes]:
    """All files of a dataset directory, without the times of the sources."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.parent.name == "tasks" and path.suffix == ".json":
                document = json.loads(data)
                document["source"]["mtime_ns"] = 0
                data = json.dumps(document).encode()
            found[str(path.relative_to(root))] = data
    return found


def test_links_give_the_same_dataset_as_downloaded_tars(
    tmp_path: Path, downloads: Path, host: Service
) -> None:
    links = write_links(tmp_path / "links.txt", host)
    done = reshard("--links", links, "--out", tmp_path / "root", "--workers", 2, "--connections", 2)
    assert done.returncode == 0, done.stderr
    assert f"note: {links}: 1 other file left out (sa_images_ids.txt)" in done.stderr
    assert "Complete" in done.stdout
    done = reshard(downloads, "--out", tmp_path / "local")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "root") == contents(tmp_path / "local")
    assert verify(tmp_path / "root", "--deep").returncode == 0


def test_a_newer_list_continues_the_work_of_an_expired_one(tmp_path: Path, host: Service) -> None:
    root, links = tmp_path / "root", write_links(tmp_path / "links.txt", host)
    expired = links.read_text().replace(f"sa_000001.tar?{LINKED}", "sa_000001.tar?Signature=old&Expires=0")
    links.write_text(expired)
    done = reshard("--links", links, "--out", root, "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["done"] == ["sa_000000", "sa_000002"]
    assert f"{links}, line 5: sa_000001.tar: the link has expired" in summary["failed"]["sa_000001"]
    assert "pass it with --links" in summary["failed"]["sa_000001"]
    assert "Signature" not in done.stdout + done.stderr
    assert len(sa1b.open(root)) == 8
    # The links of finished sources are not used: they may have expired, too.
    write_links(links, host)
    links.write_text(links.read_text().replace(f"sa_000000.tar?{LINKED}", "sa_000000.tar?old"))
    done = reshard("--links", links, "--out", root, "--json")
    assert done.returncode == 0, done.stdout
    summary = json.loads(done.stdout)
    assert (summary["done"], summary["skipped"]) == (["sa_000001"], ["sa_000000", "sa_000002"])
    assert len(sa1b.open(root)) == 12


def test_urls_as_sources(tmp_path: Path, downloads: Path, host: Service) -> None:
    shutil.copytree(downloads, downloads.parent / "plain")
    one = f"{host.url}/plain/sa_000000.tar"
    done = reshard(one, downloads / "sa_000001.tar", "--out", tmp_path / "root")
    assert done.returncode == 0, done.stderr
    assert len(sa1b.open(tmp_path / "root")) == 8
    for url, words in (
        (f"{host.url}/plain/sa_9.tar", "FAILED sa_9"),
        (f"{host.url}/plain/", "no tar and no Parquet file is there"),
        (f"{one}", "has the name of"),
    ):
        done = reshard(url, downloads / "sa_000000.tar", "--out", tmp_path / "other")
        assert done.returncode in (1, 2)
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_whose_name_has_a_colon(
    tmp_path: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a relative path is no URI, although it looks like one to other libraries."""
    monkeypatch.chdir(tmp_path)
    for verb, words in (
        (reshard, (downloads, "--out", "my:data/shards")),
        (verify, ("my:data/shards", "--deep")),
        (runner("view"), ("my:data/shards", "--masks-where", "area > 3")),
        (runner("gallery"), ("my:data/shards", "--out", "page.html")),
        (runner("copy"), ("my:data/shards", "other:copy")),
    ):
        done = verb(*words)
        assert done.returncode == 0, done.stderr + done.stdout


def test_a_folder_with_the_name_of_a_scheme(
    tmp_path: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = reshard(downloads, "--out", "http")
    assert done.returncode == 0, done.stderr
    assert len(sa1b.open("http")) == 12


@pytest.mark.parametrize("listed", [True, False])
def test_the_advice_for_a_source_from_a_link_repairs(
    tmp_path: Path, downloads: Path, host: Service, listed: bool
) -> None:
    shutil.copytree(downloads, downloads.parent / "plain")
    root, links = tmp_path / "root", write_links(tmp_path / "links.txt", host)
    source = ["--links", links] if listed else [f"{host.url}/plain/sa_000001.tar"]
    done = reshard(*source, "--out", root, "--max-pixels", 9000)
    assert done.returncode == 0, done.stderr
    before = contents(root)
    next(root.glob("sa1b-000001-*.tar")).unlink()
    (advice,) = re.findall("with (the real .*?) `.* reshard (.*?)`", verify(root).stdout)
    assert advice == (
        "the real path or URL of the source, or --links FILE,",
        f"PATH/TO/sa_000001.tar --out {root} --redo sa_000001 --max-pixels 9000",
    )
    other = reshard(*source, *advice[1].split()[1:-1], 8000)
    assert other.returncode == 2
    assert "has sa_000001 with --max-pixels 9000, this run has --max-pixels 8000" in other.stderr
    assert reshard(*source, *advice[1].split()[1:]).returncode == 0
    assert contents(root) == before


def test_a_url_where_a_path_belongs(tmp_path: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb, words, message in (
        (reshard, (downloads, "--out", "s3://"), "s3://: names no bucket"),
        (reshard, (downloads, "--out", "s3:/bucket/x"), "did you mean s3://bucket/x?"),
        (verify, ("s3:/bucket/x",), "did you mean s3://bucket/x?"),
        (runner("synthesize"), ("s3://bucket/x",), "must be a path of this machine"),
        (runner("index"), ("http://127.0.0.1:9/x",), "http can only be read"),
        (runner("view"), ("http://127.0.0.1:9/x", "--subset", "50%"), "http can only be read"),
        (runner("train"), ("--data.root", "x", "--out", "http://127.0.0.1:9/run"), "http can only be read"),
    ):
        done = verb(*words)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("s3*"))


def test_wrong_flags(tmp_path: Path, downloads: Path) -> None:
    for flags, words in (
        (("--max-rate", "0"), "--max-rate 0: must be more than 0"),
        (("--connections", "0"), "--connections 0: must be at least 1"),
        (("--links", tmp_path / "none.txt"), "none.txt: no such file"),
        (("--endpoint", "http://x"), "--endpoint http://x: only if --out or SOURCE is a URL"),
    ):
        done = reshard(downloads, "--out", tmp_path / "root", *flags)
        assert done.returncode == 2, flags
        assert words in done.stderr


def test_tasks_that_finish_the_dataset_by_themselves(tmp_path: Path, downloads: Path) -> None:
    root = tmp_path / "root"
    done = reshard(downloads, "--out", root, "--task", "0/2", "--finish")
    assert done.returncode == 0, done.stderr
    assert "Other tasks have sources left" in done.stdout
    assert not (root / "dataset.json").exists()
    done = reshard(downloads, "--out", root, "--task", "1/2", "--finish")
    assert done.returncode == 0, done.stderr
    assert "Complete" in done.stdout
    assert len(sa1b.open(root)) == 12
    assert not list((root / "tasks").glob("*.expected"))


def test_a_failed_source_of_another_task_does_not_keep_the_dataset_open(
    tmp_path: Path, downloads: Path
) -> None:
    (downloads / "sa_000001.tar").write_bytes(b"<html>")
    root = tmp_path / "root"
    assert reshard(downloads, "--out", root, "--task", "1/2", "--finish").returncode == 1
    done = reshard(downloads, "--out", root, "--task", "0/2", "--finish")
    assert "Partial" in done.stdout
    assert len(sa1b.open(root)) == 8
