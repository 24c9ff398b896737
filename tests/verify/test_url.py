"""verify and index on a bucket: the findings of a folder, with remedies that name the URL."""

import contextlib
import secrets
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from sa1b.errors import ManifestError, UsageError
from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import UnavailableError
from sa1b.storage.objects import Upload
from sa1b.verify.image_list_check import WarningList
from sa1b.verify.rebuild import rebuild_root
from tests.verify.checking import check_here, content, flip

SHARD = "sa1b-000002-0000"


class Bucket:
    """A bucket in memory with the files of a folder."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.memory = fsspec.filesystem("memory")
        self.folder = f"/{secrets.token_hex(4)}/shards"
        self.url = f"memory:/{self.folder}"
        self.store = BucketStore(self.url, scratch=scratch)
        for name, data in content(root).items():
            self.memory.pipe_file(f"{self.folder}/{name}", data)

    def content(self) -> dict[str, bytes]:
        names = self.memory.find(self.folder)
        return {name.removeprefix(f"{self.folder}/"): self.memory.cat_file(name) for name in names}

    def change(self, name: str, offset: int) -> None:
        data = bytearray(self.memory.cat_file(f"{self.folder}/{name}"))
        data[offset] ^= 0x40
        self.memory.pipe_file(f"{self.folder}/{name}", bytes(data))

    def remove(self, *names: str) -> None:
        for name in names:
            self.memory.rm_file(f"{self.folder}/{name}")


@pytest.fixture
def bucket(each_root, tmp_path):
    found = Bucket(each_root, tmp_path / "scratch")
    yield found
    found.store.close()
    found.memory.rm(found.folder.rpartition("/")[0], recursive=True)


def scratch_files(bucket):
    return [path for path in bucket.store.scratch.rglob("*") if path.is_file()]


def test_copies_of_killed_processes_are_removed(bucket):
    dead = subprocess.run(
        [sys.executable, "-c", "from sa1b.storage.atomic import this_process as p; print(p())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    for verb in (check_here, rebuild_root):
        left = bucket.store.scratch / f".download.{dead}-0123abcd.partial" / "0"
        left.mkdir(parents=True)
        (left / "sa1b-000001-0000.tar").write_bytes(bytes(1000))
        verb(bucket.store)
        assert not left.parent.exists()


def test_a_bucket_has_the_report_of_the_folder(bucket, each_root):
    before = bucket.content()
    here, there = check_here(each_root, deep=True), check_here(bucket.store, deep=True)
    assert there.findings == []
    assert there.root == bucket.url
    assert (there.shards, there.images, there.masks, there.bytes) == (
        here.shards,
        here.images,
        here.masks,
        here.bytes,
    )
    assert there.notes == here.notes
    assert bucket.content() == before
    assert scratch_files(bucket) == []


def test_damage_in_transit_is_no_damage(root, tmp_path, monkeypatch):
    """The first copy of each shard has a flipped bit."""
    bucket = Bucket(root, tmp_path / "scratch")
    seen = set()
    fetch = BucketStore.files

    @contextlib.contextmanager
    def files(self, *names):
        with fetch(self, *names) as paths:
            if names[0].endswith(".tar") and names not in seen:
                seen.add(names)
                flip(paths[0], 3000)
            yield paths

    monkeypatch.setattr(BucketStore, "files", files)
    report = check_here(bucket.store)
    assert (len(seen), report.findings, report.shards) == (5, [], 5)


def test_an_unreachable_shard_is_not_checked_and_no_damage(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    fetch = BucketStore.files

    def files(self, *names):
        if names[0] == f"{SHARD}.tar":
            raise UnavailableError(f"{self.url(names[0])}: no response")
        return fetch(self, *names)

    monkeypatch.setattr(BucketStore, "files", files)
    report = check_here(bucket.store)
    assert (report.findings, report.exit_code()) == ([], 2)
    assert f"{bucket.url}/{SHARD}.tar: no response" in report.unchecked[f"{SHARD}.tar"]


def test_a_check_of_a_bucket_resumes_and_checks_replaced_shards_again(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    state = tmp_path / "state"
    with monkeypatch.context() as context:
        context.setattr("sa1b.verify.root_check.RootCheck.conclude", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            check_here(bucket.store, state=state)
    bucket.change(f"{SHARD}.tar", 3000)
    checked = []
    original = BucketStore.files

    def files(self, *names):
        checked.extend(name for name in names if name.endswith(".tar"))
        return original(self, *names)

    monkeypatch.setattr(BucketStore, "files", files)
    report = check_here(bucket.store, state=state)
    assert set(checked) == {f"{SHARD}.tar"}
    assert {one.shard for one in report.findings} == {f"{SHARD}.tar"}
    assert report.shards == 5


def test_too_little_space_is_refused_before_a_shard_is_fetched(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    largest = max(path.stat().st_size for path in root.glob("*.tar"))
    monkeypatch.setattr("sa1b.storage.bucket.shutil.disk_usage", lambda _: type("", (), {"free": largest}))
    with pytest.raises(UsageError, match="name a larger disk with --scratch"):
        check_here(bucket.store)


def test_unfinished_uploads_are_notes(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    monkeypatch.setattr(BucketStore, "uploads", lambda _: [Upload("sa1b-000009-0000.tar", "1", 5.0)])
    report = check_here(bucket.store)
    assert report.findings == []
    assert any("unfinished uploads" in note and "sa1b-000009-0000.tar" in note for note in report.notes)


def test_a_url_without_a_dataset_is_refused():
    with pytest.raises(ManifestError, match="memory://nothing/there"):
        check_here("memory://nothing/there")


def test_the_warnings_of_a_bucket_are_listed(bucket, each_root):
    here, there = WarningList.read(each_root), WarningList.read(bucket.store)
    assert there.images == here.images
    assert there.document()["root"] == bucket.url
