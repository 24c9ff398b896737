"""A dataset directory copied to a production object store, checked, used and copied back.

`pytest -m ceph`; skipped if the programs are not installed.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

import sa1b
from sa1b.console import command
from tests.storage import ceph
from tests.transfer.test_killed import killed, points

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.slow,  # tests/transfer/test_copy.py has the same on folders and buckets in memory
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]
REPOSITORY = Path(__file__).parents[2]
SHARD = "sa1b-000001-0001"


@dataclass
class Bucket:
    """A bucket, and commands that use it."""

    gateway: ceph.Gateway
    folder: Path

    @property
    def url(self) -> str:
        return "s3://bucket/shards"

    def run(self, *arguments: object, code: int = 0) -> str:
        """The standard output of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "sa1b", *map(str, arguments)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    def system(self):
        return fsspec.filesystem("s3", **self.gateway.options, skip_instance_cache=True)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with ceph.Gateway() as gateway:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.options["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.SECRET)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        found = Bucket(gateway, tmp_path)
        found.system().mkdir("bucket")
        yield found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_commands_on_a_bucket(root, sources, bucket, tmp_path):
    """reshard, copy, verify, view, gallery, index, export, copy back: everything equals the folder's."""
    shutil.rmtree(root / "views")
    scratch = ("--scratch", tmp_path / "scratch")
    bucket.run("copy", root, bucket.url, "--workers", 2, *scratch)
    assert "Clean: s3://bucket/shards" in bucket.run("verify", bucket.url, "--deep", "--workers", 2, *scratch)

    for one in (root, bucket.url):
        bucket.run("view", one, "--masks-where", "area > 40", "--held-out", "30%", "--name", "good")
    for one, name in ((root, "here"), (bucket.url, "there")):
        bucket.run("gallery", one, "--view", "good", "--count", 4, "--out", f"{name}.html")
        bucket.run("export", one, "--to", "sa1b", "--view", "good", "--out", name, "--workers", 2)
    here, there = (
        {name: data for name, data in files(tmp_path / one).items() if name.endswith(".tar")}
        for one in ("here", "there")
    )
    assert here == there
    assert len((tmp_path / "there.html").read_bytes()) > 10_000

    bucket.system().rm([f"bucket/shards/{SHARD}.parquet", "bucket/shards/dataset.json"])
    report = json.loads(bucket.run("verify", bucket.url, "--json", *scratch, code=1))
    assert {one["kind"] for one in report["findings"]} == {"dataset_missing", "index_missing"}
    assert f"`{command('index')} s3://bucket/shards/{SHARD}.tar`" in json.dumps(report)
    bucket.run("index", bucket.url, "--workers", 2, *scratch)

    bucket.run("copy", bucket.url, "back", "--workers", 2, *scratch)
    assert files(tmp_path / "back") == files(root)
    bucket.run("copy", bucket.url, "part", "--view", "good", *scratch)
    assert "Clean: part" in bucket.run("verify", "part", "--deep")
    assert "good" in bucket.run("export", "part", "--to", "sa1b", "--view", "good", "--out", "good")
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []


ODD = ("odd + key/ü %41#?&=~'\"<>", "a//b", "dot.", " space ", "%2e%2e")


@pytest.mark.parametrize("name", ["bucket", "my.dotted.bucket"])
def test_keys_and_names_of_any_form(root, bucket, tmp_path, name):
    if name != "bucket":
        bucket.system().mkdir(name)
    for number, key in enumerate(ODD):
        url = f"s3://{name}/{key}/shards"
        bucket.run("copy", root, url, "--scratch", tmp_path / "scratch")
        assert f"Clean: {url}" in bucket.run("verify", url, "--deep")
        assert len(list(sa1b.open(url))) == len(sa1b.open(root))
        bucket.run("copy", url, f"back{number}")
        assert files(tmp_path / f"back{number}") == files(root)


@pytest.mark.parametrize(("of", "to"), [("folder", "bucket"), ("bucket", "folder"), ("bucket", "bucket")])
def test_a_killed_copy_is_completed(root, bucket, tmp_path, of, to):
    if of == "bucket":
        bucket.run("copy", root, bucket.url)
    settings = {
        "root": bucket.url if of == "bucket" else str(root),
        "of_root": bucket.gateway.options if of == "bucket" else {},
        "dest": "s3://bucket/copies" if to == "bucket" else str(tmp_path / "copies"),
        "options": bucket.gateway.options if to == "bucket" else {},
        "scratch": str(tmp_path / "scratch"),
    }
    whole = killed({**settings, "points": [10**9]}, tmp_path)
    assert whole["wrong"] == []
    found = killed({**settings, "points": points(8, whole["steps"], 5)}, tmp_path)
    assert found["wrong"] == []
    assert found["killed"] >= 7
