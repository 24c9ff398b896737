"""Google Cloud Storage and Azure Blob Storage, by emulators on this machine.

Skipped where gcsfs, adlfs or the emulators are not installed. The operations of a dataset directory are in
test_bucket.py.
"""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import DeniedError, MissingError, StorageError
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage import azurite, gcs
from tests.storage.conftest import WaitedTime
from tests.storage.service import REPOSITORY
from tests.storage.test_ceph_writes import contents, file_of, in_processes

Server = gcs.Server | azurite.Server
TURNS = 5


def test_one_of_many_processes_writes_an_object(cloud_bucket: BucketStore) -> None:
    assert cloud_bucket.put_if_absent("used", b"before the fork")

    def write(number: int, barrier: Any) -> list[bool]:
        found = []
        for turn in range(TURNS):
            barrier.wait()
            found.append(cloud_bucket.put_if_absent(f"{turn}", b"%d" % number))
        return found

    won = in_processes(write)
    for turn in range(TURNS):
        winners = [number for number, row in enumerate(won) if row[turn]]
        assert winners == [int(cloud_bucket.read(f"{turn}"))]


def test_one_of_many_processes_replaces_an_object(cloud_bucket: BucketStore) -> None:
    cloud_bucket.put("held", b"old")

    def take(number: int, barrier: Any) -> bool:
        barrier.wait()
        return cloud_bucket.replace_if("held", b"%d" % number, b"old".__eq__)

    won = in_processes(take)
    assert [number for number, row in enumerate(won) if row] == [int(cloud_bucket.read("held"))]
    assert not [name for name in cloud_bucket._requests.sizes("") if name.startswith(".")]


@pytest.mark.parametrize("size", [0, 1_000, 70_000_000])  # 64 MiB: more than one request
def test_a_file_is_uploaded_with_progress_and_read_back(
    cloud_bucket: BucketStore, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sa1b.storage.cache._REPORT", 0.001)
    path, data = file_of(tmp_path / "staged", size)
    stored: list[int] = []
    cloud_bucket.commit([path], progress=stored.append)
    assert sum(stored) == size
    assert len(stored) > 1 or size < 5 << 20
    assert not path.exists()
    assert contents(cloud_bucket, "a.tar") == data
    assert cloud_bucket.sizes() == {"a.tar": size}


def test_an_interrupted_upload_leaves_no_object(cloud_bucket: BucketStore, tmp_path: Path) -> None:
    path, _ = file_of(tmp_path / "staged", 150_000_000)

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cloud_bucket.commit([path], progress=interrupt)
    assert cloud_bucket.size("a.tar") is None
    assert path.exists()


def test_ranges_are_read_and_errors_are_classified(cloud_bucket: BucketStore) -> None:
    data = random.Random(1).randbytes(50_000)
    cloud_bucket.put("deep/b c+ü#1.bin", data)
    cloud_bucket.put("empty", b"")
    reader = cloud_bucket.reader
    assert reader.read_range("deep/b c+ü#1.bin", 1_000, 30_000) == data[1_000:31_000]
    assert reader.read_whole("deep/b c+ü#1.bin", 1 << 20) == data
    assert reader.read_whole("empty", 10) == b""
    assert reader.names("deep") == ["b c+ü#1.bin"]
    assert reader.names("never") == []
    with pytest.raises(MissingError, match="never: no such object"):
        reader.read_range("never", 0, 10)
    with pytest.raises(StorageError, match="the object ends at byte 50,000; it is truncated"):
        reader.read_range("deep/b c+ü#1.bin", 49_000, 2_000)
    with pytest.raises(StorageError, match="the object ends at byte 50,000; it is truncated"):
        reader.read_range("deep/b c+ü#1.bin", 60_000, 2_000)


def test_a_missing_bucket_is_named(cloud: Server, tmp_path: Path) -> None:
    root = f"{cloud.protocol}://never-made/shards"
    with contextlib.closing(BucketStore(root, scratch=tmp_path, options=cloud.options)) as store:
        with pytest.raises(StorageError, match=rf"{root}/.*create the bucket first"):
            store.put_if_absent("a", b"")
        path, _ = file_of(tmp_path / "staged", 6_000_000)
        with pytest.raises(StorageError, match=rf"{root}/a\.tar.*create the bucket first"):
            store.commit([path])
        assert store.names("") == []


def test_denied_access_is_an_error_at_once(
    gcs_server: gcs.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(BucketStore(gcs_server.denied, options=gcs_server.options)) as store:
        with pytest.raises(DeniedError, match=r"denied/shards/.*does not have storage\.objects.*gcloud auth"):
            store.put("a", b"")
        with pytest.raises(DeniedError, match="GOOGLE_APPLICATION_CREDENTIALS"):
            store.reader.read_range("a", 0, 1)
        path, _ = file_of(tmp_path / "staged", 6_000_000)
        with pytest.raises(DeniedError, match="Writing needs permission"):
            store.commit([path])


def test_a_wrong_key_is_an_error_at_once(azurite_server: azurite.Server, tmp_path: Path) -> None:
    root = f"az://{azurite_server.new_bucket()}/shards"
    options = azurite_server.options_with(azurite.WRONG_KEY)
    with contextlib.closing(BucketStore(root, options=options)) as store:
        with pytest.raises(
            DeniedError, match=r"access denied.*AZURE_STORAGE_CONNECTION_STRING.*Writing needs"
        ):
            store.put("a", b"")
        with pytest.raises(DeniedError, match="access denied"):
            store.reader.size("a")
        path, _ = file_of(tmp_path / "staged", 6_000_000)
        with pytest.raises(DeniedError, match="Writing needs permission"):
            store.commit([path])


def test_an_account_without_credentials_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with (
        Reader("az://container/shards") as reader,
        pytest.raises(DeniedError, match="az://container/shards: no access.*AZURE_STORAGE_ACCOUNT_NAME"),
    ):
        reader.size("a")


def test_the_account_may_be_in_the_url(azurite_server: azurite.Server) -> None:
    name = azurite_server.new_bucket()
    root = f"abfs://{name}@{azurite.ACCOUNT}.dfs.core.windows.net/shards"
    with contextlib.closing(BucketStore(root, options=azurite_server.options)) as store:
        store.put("tasks/a", b"one")
        assert store.read("tasks/a") == b"one"
        assert store.names("tasks") == ["a"]
    with contextlib.closing(BucketStore(f"az://{name}/shards", options=azurite_server.options)) as store:
        assert store.read("tasks/a") == b"one"


def test_a_server_that_stays_away_is_named(cloud: Server, waited: WaitedTime) -> None:
    url = cloud.url.replace("127.0.0.1", "127.0.0.2")  # where nothing listens
    options = {name: str(value).replace(cloud.url, url) for name, value in cloud.options.items()}
    with (
        Reader(
            f"{cloud.protocol}://bucket/shards", options=options, retry_policy=waited.policy(20)
        ) as reader,
        pytest.raises(StorageError, match="bucket/shards/a: unavailable"),
    ):
        reader.size("a")
    assert waited.now == pytest.approx(20)  # it was retried to the deadline


_USE = """
import sys
from sa1b.storage.open import open_store
store = open_store(sys.argv[1])
store.put("a", b"one")
print(store.read("a"))
store.put_if_absent("b", b"two")
try:
    store.reader.read_range("never", 0, 1)
except Exception as error:
    print(type(error).__name__)
"""


def test_a_process_needs_only_environment_variables_and_prints_nothing(cloud: Server) -> None:
    command = [sys.executable, "-W", "error", "-c", _USE, f"{cloud.protocol}://{cloud.new_bucket()}/shards"]
    environment = {**os.environ, **cloud.environment, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'one'\nMissingError\n", "")


def test_the_deadline_of_an_upload_grows_with_its_size(
    cloud_bucket: BucketStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload may last longer than the deadline of a request, as long as it is not slower than the limit."""
    deadlines: list[float] = []
    request = Reader.request

    def record(reader: Reader, name: str, work: Any, **more: Any) -> Any:
        if more.get("size"):
            deadlines.append((more.get("policy") or RetryPolicy()).deadline)
        return request(reader, name, work, **more)

    monkeypatch.setattr(Reader, "request", record)
    path, _ = file_of(tmp_path / "staged", 6_000_000)
    cloud_bucket.commit([path])
    policy = cloud_bucket.reader.retry_policy
    assert deadlines == [policy.deadline + 6_000_000 / policy.min_throughput]
