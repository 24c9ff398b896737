"""The operations of a dataset directory: in a folder, in a bucket in memory and in a real store.

Of Ceph, test_ceph_writes.py has quick ones.
"""

import contextlib
import json
import pickle
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from sa1b.storage import protocols
from sa1b.storage.atomic import temporary_name, this_process
from sa1b.storage.bucket import BucketStore
from sa1b.storage.bucket_requests import BucketRequests, Conditions
from sa1b.storage.cache import download
from sa1b.storage.claim import Claim, holder, live_holders
from sa1b.storage.errors import DeniedError, StorageError
from sa1b.storage.objects import Objects, S3Objects, Stat, Upload
from sa1b.storage.open import open_store
from sa1b.storage.reader import Reader
from sa1b.storage.store import FolderStore, Store
from tests.storage.ceph import wait_for
from tests.storage.conftest import directory_of
from tests.storage.service import Service


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[BucketStore]:
    name = secrets.token_hex(4)
    store = BucketStore(f"memory://{name}/shards", scratch=tmp_path / "scratch")
    yield store
    store.close()
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


SERVERS = {"gs": "gcs_server", "az": "azurite_server"}


@pytest.fixture(
    params=["folder", "memory", pytest.param("ceph", marks=(pytest.mark.ceph, pytest.mark.slow)), *SERVERS]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path / "root")
    if request.param in SERVERS:
        return directory_of(request.getfixturevalue(SERVERS[request.param]), tmp_path / "scratch")
    found: BucketStore = request.getfixturevalue("bucket" if request.param == "memory" else "ceph_bucket")
    return found


def test_objects_are_written_read_listed_and_removed(store: Store) -> None:
    assert store.names("tasks") == []
    assert not store.is_folder("tasks")
    assert store.size("tasks/a.json") is None
    assert store.age("tasks/a.json") is None
    with pytest.raises(FileNotFoundError):
        store.read("tasks/a.json")
    store.put("tasks/a.json", b"one")
    store.put("tasks/a.json", b"two2")
    store.put("tasks/b.failed", b"")
    store.put("tasks/.hidden.json", b"hidden")
    assert store.read("tasks/a.json") == b"two2"
    assert store.size("tasks/a.json") == 4
    assert store.names("tasks") == ["a.json", "b.failed"]
    assert store.names("tasks", ".json") == ["a.json"]
    assert store.is_folder("tasks")
    age = store.age("tasks/a.json")
    assert age is not None
    assert abs(age) < 60
    store.remove("tasks/a.json", "tasks/never.json")
    assert store.names("tasks") == ["b.failed"]


def test_two_shortened_responses_are_not_the_object(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("tasks/a.json", b"0123456789")
    responses = iter([b"01234", b"01234", b"0123456789", b"0123456789"])

    async def get(system: Any, url: str) -> tuple[bytes, Stat]:
        data = next(responses)
        return data, Stat(len(data))

    monkeypatch.setattr(bucket._requests.objects, "get", get)
    assert bucket.read("tasks/a.json") == b"0123456789"


def test_an_object_is_written_once(store: Store) -> None:
    assert store.put_if_absent("tasks/a", b"one")
    assert not store.put_if_absent("tasks/a", b"two")
    assert store.read("tasks/a") == b"one"


def test_an_object_is_replaced_and_removed_only_if_it_matches(store: Store) -> None:
    assert not store.replace_if("tasks/a", b"new", lambda data: True)
    assert not store.remove_if("tasks/a", lambda data: True)
    store.put("tasks/a", b"one")
    assert not store.replace_if("tasks/a", b"two", b"another".__eq__)
    assert store.replace_if("tasks/a", b"two", b"one".__eq__)
    assert not store.remove_if("tasks/a", b"one".__eq__)
    assert store.read("tasks/a") == b"two"
    assert store.remove_if("tasks/a", b"two".__eq__)
    assert store.names("tasks") == []
    assert store.size("tasks/a") is None


def test_an_object_is_renewed_by_its_content(bucket: BucketStore) -> None:
    bucket.put("a", b"one")
    assert bucket.renew("a", b"one")
    assert not bucket.renew("a", b"two")
    assert not bucket.renew("b", b"one")
    assert bucket.read("a") == b"one"


def _is_own(name: str) -> bool:
    return name in ("x.json", "y.jpg", "old.json")


def test_files_of_others_stay_in_a_folder_that_is_replaced_or_removed(store: Store) -> None:
    staged = store.scratch / ".partial" / "two"
    staged.mkdir(parents=True)
    (staged / "x.json").write_bytes(b"{}")
    for name in ("old.json", "notes.txt", "old/thesis.csv"):
        store.put(f"quarantine/sa/{name}", b"mine")
    store.commit_folder(staged, "quarantine/sa", _is_own)
    assert not staged.exists()
    assert [name for name in store.names("quarantine/sa") if "." in name] == ["notes.txt", "x.json"]
    store.remove_folder("quarantine/sa", _is_own)
    assert [name for name in store.names("quarantine/sa") if "." in name] == ["notes.txt"]
    assert store.read("quarantine/sa/notes.txt") == store.read("quarantine/sa/old/thesis.csv") == b"mine"


def test_files_and_folders_are_committed(store: Store) -> None:
    staged = store.scratch / ".partial" / "one"
    (staged / "quarantine").mkdir(parents=True)
    (staged / "a.tar").write_bytes(b"shard")
    (staged / "a.parquet").write_bytes(b"")
    (staged / "quarantine" / "x.json").write_bytes(b"{}")
    (staged / "quarantine" / "y.jpg").write_bytes(b"jpg")
    store.put("quarantine/sa/old.json", b"{}")
    store.commit_folder(staged / "quarantine", "quarantine/sa", _is_own)
    store.commit([staged / "a.tar", staged / "a.parquet"])
    assert list(staged.iterdir()) == []
    assert store.names("", ".tar") + store.names("", ".parquet") == ["a.tar", "a.parquet"]
    assert [name for name in store.names("quarantine/sa") if "." in name] == ["x.json", "y.jpg"]
    with store.files("a.tar", "none.tar", "quarantine/sa/y.jpg", "a.parquet") as paths:
        found = [path.read_bytes() if path.exists() else None for path in paths]
        assert found == [b"shard", None, b"jpg", b""]
    store.remove_folder("quarantine/sa", _is_own)
    assert not store.is_folder("quarantine/sa")
    assert not store.is_folder("quarantine")
    assert store.uploads() == []
    assert store.abort_uploads(lambda name: True) == 0


def test_temporary_copies_are_removed(bucket: BucketStore) -> None:
    bucket.put("a", b"one")
    with bucket.files("a") as (path,):
        assert path.read_bytes() == b"one"
    assert list(bucket.scratch.iterdir()) == []


def test_an_object_that_is_replaced_during_its_copy_is_named(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(reader: Reader, name: str, stat: Stat, path: Path) -> None:
        download(reader, name, stat, path)
        bucket.put(name, b"two")

    monkeypatch.setattr("sa1b.storage.bucket.download", copy)
    bucket.put("samples.bin", b"one")
    message = r"shards/samples\.bin: replaced during the copy; run the command again"
    with pytest.raises(StorageError, match=message), bucket.files("samples.bin"):
        pass
    assert list(bucket.scratch.iterdir()) == []


def test_a_file_larger_than_the_free_space_is_refused(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("samples.bin", b"x" * 100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 99}))
    message = r"shards/samples.bin: 100 bytes, .* 99 bytes free; .* --scratch"
    with pytest.raises(StorageError, match=message), bucket.files("samples.bin"):
        pass


def test_a_claim_is_held_released_and_taken_over(store: Store) -> None:
    name = "tasks/sa_000020.claim"
    with Claim.take(store, name) or pytest.fail("held") as claim:
        assert Claim.take(store, name) is None
        assert list(live_holders(store, "tasks")) == ["sa_000020"]
        claim.check()
    assert store.names("tasks") == []
    theirs = {"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs", "timeout": 0.5}
    store.put(name, json.dumps(theirs).encode())
    taken: list[Claim | None] = []
    wait_for(lambda: taken.append(Claim.take(store, name)) or taken[-1] is not None, "the end of the claim")
    claim = taken[-1] or pytest.fail("held")
    assert claim.previous is not None
    assert claim.previous.token == "theirs"
    assert not store.renew(name, json.dumps(theirs).encode()) or isinstance(store, FolderStore)
    found = holder(store, name)
    assert found is not None
    assert found.token != "theirs"
    claim.release()
    assert store.names("tasks") == []


def test_a_lock_object_of_an_ended_process_is_removed(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("tasks/a", b"one")
    bucket.put("tasks/.a.lock", b"")
    monkeypatch.setattr("sa1b.storage.bucket_requests._REMOVAL", 0.1)
    assert not bucket.replace_if("tasks/a", b"two", b"one".__eq__)  # in use
    monkeypatch.undo()
    monkeypatch.setattr(BucketRequests, "age", lambda self, stat: 61.0)
    assert bucket.replace_if("tasks/a", b"two", b"one".__eq__)
    assert bucket.read("tasks/a") == b"two"
    assert not bucket.exists("tasks/.a.lock")


def test_leftover_lock_objects_are_removed_with_other_temporary_objects(bucket: BucketStore) -> None:
    with subprocess.Popen(["sleep", "0"]) as ended:
        pass
    machine = this_process().partition("-")[0]
    bucket.put("tasks/.a.claim.lock", f".lock-{machine}-{ended.pid}-0".encode())
    bucket.put("tasks/.b.claim.lock", temporary_name(".lock-").encode())
    bucket.remove_temporary(lambda process, age: False)
    assert list(bucket._requests.sizes("tasks")) == [".b.claim.lock"]


def test_the_age_of_an_object_that_another_machine_left_is_known(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems of fsspec do not send the time of an object with its content."""
    theirs = b"sa1b: removed by-another-4711-1-0"
    bucket.put("a", theirs)
    assert not bucket.put_if_absent("a", b"ours")
    stat = bucket._requests.stat

    def old(name: str) -> Stat | None:
        found = stat(name)
        return found and replace(found, age=120.0)

    monkeypatch.setattr(bucket._requests, "stat", old)
    assert bucket.put_if_absent("a", b"ours")
    assert bucket.read("a") == b"ours"


def test_a_lock_object_in_use_is_waited_for(bucket: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("tasks/a", b"one")
    bucket.put("tasks/.a.lock", b"")
    remove_stale = Conditions._remove_stale
    turns: list[str] = []

    def release(self: Conditions, lock: str) -> None:
        remove_stale(self, lock)
        turns.append(lock)
        if len(turns) == 3:
            bucket.remove(lock)

    monkeypatch.setattr(Conditions, "_remove_stale", release)
    assert bucket.replace_if("tasks/a", b"two", b"one".__eq__)
    assert turns == ["tasks/.a.lock"] * 3


def test_an_interrupted_removal_is_finished_by_the_next_writer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(store, BucketStore):
        pytest.skip("a folder removes at once")
    kind = type(store._requests.objects)
    delete = kind.delete

    async def end(self: Objects, system: Any, url: str, match: str | None = None) -> bool:
        if url.endswith("/tasks/a"):
            raise StorageError("as if the process had ended here")
        return await delete(self, system, url, match)

    monkeypatch.setattr(kind, "delete", end)
    store.put("tasks/a", b"one")
    assert store.remove_if("tasks/a", b"one".__eq__)
    assert store.exists("tasks/a")
    with pytest.raises(FileNotFoundError):
        store.read("tasks/a")
    assert not store.remove_if("tasks/a", lambda data: True)
    assert not store.put_if_absent("tasks/a", b"two")
    monkeypatch.undo()
    monkeypatch.setattr(BucketRequests, "age", lambda self, stat: 61.0)
    assert store.put_if_absent("tasks/a", b"two")
    assert store.read("tasks/a") == b"two"


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with Service("range_server", tmp_path) as service:
        options = {"anon": True, "endpoint_url": service.url}
        store = BucketStore("s3://data/shards", scratch=tmp_path, options=options)
        store.put("a", b"one")
        assert store.read("a") == b"one"
        with pytest.raises(StorageError, match=r"s3://data/shards: this store ignores .* sa1b copy"):
            store.put_if_absent("tasks/sa.claim", b"one")
        store.close()
    assert [path.name for path in (tmp_path / "data" / "shards").iterdir()] == ["a"]


def test_a_file_system_without_conditions_or_writes_is_refused(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create" or path.endswith("read_only"):
            raise NotImplementedError

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", write)
    monkeypatch.setattr(BucketRequests, "_is_stored", lambda self, name, data, stat: True)
    with pytest.raises(StorageError, match="ignores the condition of a write"):
        bucket.put_if_absent("tasks/a", b"one")
    with pytest.raises(StorageError, match=r"shards/read_only: fsspec cannot write to memory://; write to"):
        bucket.put("read_only", b"one")


def test_a_missing_permission_to_remove_objects_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with Service("object_server", tmp_path) as service:
        options = {"key": "KEY", "secret": "secret", "endpoint_url": service.url}
        with contextlib.closing(BucketStore("s3://kept/run", scratch=tmp_path, options=options)) as store:
            for _ in range(2):
                with pytest.raises(
                    DeniedError, match="needs permission to get, put, list and delete objects"
                ):
                    store.put_if_absent("run.claim", b"one")
            assert not store.exists("run.claim")


def test_uploads_that_may_not_be_listed_are_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def deny(self: S3Objects, system: Any, url: str) -> list[Upload]:
        raise DeniedError(f"{url}: access denied")

    monkeypatch.setattr(S3Objects, "uploads", deny)
    with contextlib.closing(BucketStore("s3://data/shards", options={"anon": True})) as store:
        assert store.abort_uploads(lambda name: True) == 0
    assert "s3://data/shards: access denied" in caplog.text


def test_an_http_root_can_only_be_read(tmp_path: Path) -> None:
    store = open_store("https://127.0.0.1:1/shards", scratch=tmp_path)
    for write in (
        lambda: store.put("a", b"one"),
        lambda: store.put_if_absent("a", b"one"),
        lambda: store.remove("a"),
    ):
        with pytest.raises(StorageError, match=r"127.0.0.1:1/shards.*can only be read"):
            write()


def test_a_url_is_opened_once_per_process(tmp_path: Path) -> None:
    assert open_store("memory://one/shards", scratch=tmp_path) is open_store(
        "memory://one/shards/", scratch=tmp_path
    )
    assert open_store("memory://one/shards") is not open_store("memory://two/shards")


def test_a_store_can_be_pickled_after_use(bucket: BucketStore) -> None:
    assert bucket.put_if_absent("a", b"one")
    copy: BucketStore = pickle.loads(pickle.dumps(bucket))
    assert copy.read("a") == b"one"
    assert not copy.put_if_absent("a", b"two")
    copy.close()


def test_a_kind_of_store_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(scheme: str) -> type:
        class Disk(fsspec.get_filesystem_class("memory")):
            protocol = scheme

            def __init__(self, *, region: str, **more: object) -> None:
                super().__init__(**more)
                self.region = region

        return Disk

    kind = protocols.StoreKind(
        ("mine",), "ask my team", endpoint="region", file_system=disk, options=lambda *_: {"region": "here"}
    )
    monkeypatch.setattr(protocols, "KINDS", (*protocols.KINDS, kind))
    store = open_store(f"mine://{tmp_path.name}/shards", scratch=tmp_path)
    store.put("a/b.json", b"data")
    assert (store.read("a/b.json"), store.names("a"), store.size("a/b.json")) == (b"data", ["b.json"], 4)
    assert protocols.endpoint_options("mine://x", "there") == {"region": "there"}
    assert protocols.kind_of("mine://x").advice == "ask my team"
