"""verify and index on a bucket: the findings of a folder, with remedies that name the URL."""

import contextlib
import secrets
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from sa1b.console import command
from sa1b.errors import ManifestError, UsageError
from sa1b.shards.manifest import table_name
from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import UnavailableError
from sa1b.storage.objects import Upload
from sa1b.verify.image_list_check import WarningList
from sa1b.verify.rebuild import rebuild_root, rebuild_shards, rebuild_tables
from tests.verify.checking import check, content, flip

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
    for verb in (check, rebuild_root):
        left = bucket.store.scratch / f".download.{dead}-0123abcd.partial" / "0"
        left.mkdir(parents=True)
        (left / "sa1b-000001-0000.tar").write_bytes(bytes(1000))
        verb(bucket.store)
        assert not left.parent.exists()


def test_a_bucket_has_the_report_of_the_folder(bucket, each_root):
    before = bucket.content()
    here, there = check(each_root, deep=True), check(bucket.store, deep=True)
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


DAMAGES = {
    "shard": lambda bucket: bucket.change(f"{SHARD}.tar", 3000),
    "shard_missing": lambda bucket: bucket.remove(f"{SHARD}.tar"),
    "index": lambda bucket: bucket.change(f"{SHARD}.parquet", 500),
    "index_missing": lambda bucket: bucket.remove(f"{SHARD}.parquet"),
    "task": lambda bucket: bucket.change("tasks/sa_000002.json", 200),
    "task_missing": lambda bucket: bucket.remove("tasks/sa_000002.json"),
    "rows": lambda bucket: bucket.change("tasks/sa_000002.samples", 200),
    "table": lambda bucket: bucket.change(table_name(bucket.store), 200),
    "table_missing": lambda bucket: bucket.remove(table_name(bucket.store)),
    "dataset": lambda bucket: bucket.change("dataset.json", 1),
    "dataset_missing": lambda bucket: bucket.remove("dataset.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_bucket_has_the_findings_of_the_folder(damage, root, tmp_path):
    bucket = Bucket(root, tmp_path / "scratch")
    DAMAGES[damage](bucket)
    there = check(bucket.store)
    now = bucket.content()
    for name in content(root).keys() - now.keys():
        (root / name).unlink()
    for name, data in now.items():
        (root / name).write_bytes(data)
    here = check(root)
    assert here.findings
    assert [(one.kind, one.file, one.offset, one.image_id) for one in there.findings] == [
        (one.kind, one.file, one.offset, one.image_id) for one in here.findings
    ]
    assert [one.remedy for one in there.findings] == [
        one.remedy.replace(str(root), bucket.url) for one in here.findings
    ]
    assert all(bucket.url in one.remedy for one in there.findings)
    assert there.exit_code() == 1
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
    report = check(bucket.store)
    assert (len(seen), report.findings, report.shards) == (5, [], 5)


def test_an_unreachable_shard_is_not_checked_and_no_damage(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    fetch = BucketStore.files

    def files(self, *names):
        if names[0] == f"{SHARD}.tar":
            raise UnavailableError(f"{self.url(names[0])}: no response")
        return fetch(self, *names)

    monkeypatch.setattr(BucketStore, "files", files)
    report = check(bucket.store)
    assert (report.findings, report.exit_code()) == ([], 2)
    assert f"{bucket.url}/{SHARD}.tar: no response" in report.unchecked[f"{SHARD}.tar"]


def test_a_check_of_a_bucket_resumes_and_checks_replaced_shards_again(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    state = tmp_path / "state"
    with monkeypatch.context() as context:
        context.setattr("sa1b.verify.root_check.RootCheck.conclude", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            check(bucket.store, state=state)
    bucket.change(f"{SHARD}.tar", 3000)
    checked = []
    original = BucketStore.files

    def files(self, *names):
        checked.extend(name for name in names if name.endswith(".tar"))
        return original(self, *names)

    monkeypatch.setattr(BucketStore, "files", files)
    report = check(bucket.store, state=state)
    assert set(checked) == {f"{SHARD}.tar"}
    assert {one.shard for one in report.findings} == {f"{SHARD}.tar"}
    assert report.shards == 5


def test_too_little_space_is_refused_before_a_shard_is_fetched(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    largest = max(path.stat().st_size for path in root.glob("*.tar"))
    monkeypatch.setattr("sa1b.storage.bucket.shutil.disk_usage", lambda _: type("", (), {"free": largest}))
    with pytest.raises(UsageError, match="name a larger disk with --scratch"):
        check(bucket.store)


def test_unfinished_uploads_are_notes(root, tmp_path, monkeypatch):
    bucket = Bucket(root, tmp_path / "scratch")
    monkeypatch.setattr(BucketStore, "uploads", lambda _: [Upload("sa1b-000009-0000.tar", "1", 5.0)])
    report = check(bucket.store)
    assert report.findings == []
    assert any("unfinished uploads" in note and "sa1b-000009-0000.tar" in note for note in report.notes)


def test_a_url_without_a_dataset_is_refused():
    with pytest.raises(ManifestError, match="memory://nothing/there"):
        check("memory://nothing/there")


def test_the_warnings_of_a_bucket_are_listed(bucket, each_root):
    here, there = WarningList.read(each_root), WarningList.read(bucket.store)
    assert there.images == here.images
    assert there.document()["root"] == bucket.url


def test_lost_indexes_and_tables_of_a_bucket_are_rebuilt(bucket):
    before = bucket.content()
    bucket.remove(*(name for name in before if name.endswith((".parquet", ".bin", "dataset.json"))))
    summary = rebuild_root(bucket.store, workers=0, quiet=True)
    assert summary.complete
    assert summary.failed == {}
    assert f"Complete: {bucket.url}/dataset.json" in summary.table(bucket.store)
    assert bucket.content() == before
    assert scratch_files(bucket) == []


def test_one_index_and_the_tables_of_a_bucket_are_rebuilt(root, tmp_path):
    bucket = Bucket(root, tmp_path / "scratch")
    before = bucket.content()
    bucket.change(f"{SHARD}.parquet", 500)
    rebuild_shards([f"{bucket.url}/{SHARD}.tar"], workers=0, scratch=tmp_path / "scratch", quiet=True)
    assert bucket.content() == before
    bucket.remove("dataset.json", "tasks/sa_000001.samples", table_name(bucket.store))
    rebuild_tables(bucket.store)
    assert bucket.content() == before


def test_a_damaged_shard_of_a_bucket_gets_no_index(root, tmp_path):
    bucket = Bucket(root, tmp_path / "scratch")
    before = bucket.content()
    bucket.change(f"{SHARD}.tar", 3000)
    bucket.remove(f"{SHARD}.parquet")
    summary = rebuild_root(bucket.store, workers=0, quiet=True)
    assert summary.exit_code() == 1
    (why,) = summary.failed.values()
    assert why.startswith(f"{bucket.url}/{SHARD}.tar")
    assert command("reshard") in why
    assert bucket.content().keys() == before.keys() - {f"{SHARD}.parquet"}
