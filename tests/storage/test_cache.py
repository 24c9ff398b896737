"""Objects fetched once per machine: one download for all processes, never wrong, nothing left behind."""

import errno
import hashlib
import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from sa1b.errors import LockedError
from sa1b.storage import cache as cache_module
from sa1b.storage.atomic import lock
from sa1b.storage.cache import default_folder, fetch_once
from sa1b.storage.errors import DamageError, MissingError, StorageError
from sa1b.storage.reader import Reader
from tests.storage.conftest import HASTY, SIZE, Store
from tests.storage.service import Service

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def digest(store: Store) -> str:
    return hashlib.sha256(store.bytes()).hexdigest()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_copy_lies_under_its_digest_and_is_not_fetched_again(
    store: Store, digest: str, tmp_path: Path
) -> None:
    with Reader("s3://data", options=store.options()) as reader:
        path = fetch_once(reader, "a.bin", digest, tmp_path)
        assert path == tmp_path / digest / "a.bin"
        assert path.read_bytes() == store.bytes()
        attempts = reader.counters().attempts
        assert fetch_once(reader, "a.bin", digest, tmp_path) == path
        assert reader.counters().attempts == attempts
    assert files_in(tmp_path) == [f"{digest}/a.bin"]


def fetch_at_once(reader: Reader, digest: str, folder: Path, barrier: Barrier) -> None:
    barrier.wait(60)
    with reader:
        path = fetch_once(reader, "a.bin", digest, folder)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            os._exit(3)


def test_six_processes_at_once_download_once(store: Store, digest: str, tmp_path: Path) -> None:
    before = store.service.ask({})
    barrier = SPAWN.Barrier(6)
    reader = Reader("s3://data", options=store.options())
    processes = [
        SPAWN.Process(target=fetch_at_once, args=(reader, digest, tmp_path, barrier)) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert store.service.ask({})["bytes"] - before["bytes"] == SIZE + 1  # the size is requested with a byte
    assert files_in(tmp_path) == [f"{digest}/a.bin"]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "longer"])
def test_a_damaged_copy_is_found_and_fetched_again(
    store: Store, digest: str, tmp_path: Path, harm: str
) -> None:
    with Reader("s3://data", options=store.options()) as reader:
        path = fetch_once(reader, "a.bin", digest, tmp_path)
        data = bytearray(path.read_bytes())
        if harm == "flip":
            data[SIZE // 2] ^= 4
        elif harm == "cut":
            del data[-1:]
        elif harm == "empty":
            data.clear()
        else:
            data += b"\0"
        path.write_bytes(data)
        assert fetch_once(reader, "a.bin", digest, tmp_path).read_bytes() == store.bytes()


def fetch_slowly(reader: Reader, digest: str, folder: Path) -> None:
    fetch_once(reader, "a.bin", digest, folder)


def test_a_killed_download_leaves_the_lock_free_and_its_partial_is_cleared(
    store: Store, digest: str, tmp_path: Path
) -> None:
    partial = tmp_path / digest / ".partial"
    with Service("fault_proxy", store.port, 1, 1.0, "stall_body") as proxy:
        reader = Reader("s3://data", options=store.options(proxy.port), attempt_timeout=60)
        process = SPAWN.Process(target=fetch_slowly, args=(reader, digest, tmp_path))
        process.start()
        end = time.monotonic() + 120
        while not partial.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        with pytest.raises(LockedError), lock(tmp_path / digest):
            pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    assert partial.exists()
    other = tmp_path / ("0" * 64)
    other.mkdir()
    (other / ".partial").write_bytes(b"of a download that was killed")
    with Reader("s3://data", options=store.options()) as reader:
        fetch_once(reader, "a.bin", digest, tmp_path)
    assert files_in(tmp_path) == [f"{digest}/a.bin"]


def test_a_download_in_progress_is_left_alone_by_others(store: Store, digest: str, tmp_path: Path) -> None:
    other = tmp_path / ("0" * 64)
    other.mkdir()
    (other / ".partial").write_bytes(b"in progress")
    with Reader("s3://data", options=store.options()) as reader, lock(other):
        fetch_once(reader, "a.bin", digest, tmp_path)
    assert files_in(tmp_path) == [f"{other.name}/.partial", f"{digest}/a.bin"]


def test_another_digest_in_the_store_is_damage_and_nothing_is_left(store: Store, tmp_path: Path) -> None:
    wrong = "ab" * 32
    with (
        Reader("s3://data", options=store.options()) as reader,
        pytest.raises(DamageError, match=f"s3://data/a.bin: sha256 .*, {wrong} expected") as caught,
    ):
        fetch_once(reader, "a.bin", wrong, tmp_path)
    assert caught.value.found == hashlib.sha256(store.bytes()).hexdigest()
    assert files_in(tmp_path) == []


def test_a_missing_object_is_missing_and_nothing_is_left(store: Store, tmp_path: Path) -> None:
    with Reader("s3://data", options=store.options()) as reader, pytest.raises(MissingError):
        fetch_once(reader, "none.bin", "ab" * 32, tmp_path)
    assert files_in(tmp_path) == []


def test_bits_that_flip_in_transit_are_fixed(
    store: Store, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sa1b.storage.cache", "sa1b.storage.reader"):
        monkeypatch.setattr(f"{module}.PIECE", 100_000)  # forty pieces, none with a crc
    with (
        Service("fault_proxy", store.port, 3, 0.2, "flip", "short", "reset_body", "busy") as proxy,
        Reader("s3://data", options=store.options(proxy.port), retry_policy=HASTY) as reader,
    ):
        assert fetch_once(reader, "a.bin", digest, tmp_path).read_bytes() == store.bytes()
        assert any(kind == "flip" for *_, kind in proxy.ask({"do": "log"})["faults"])


def test_a_full_disk_names_the_file_and_leaves_nothing(
    store: Store, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        Reader("s3://data", options=store.options()) as reader,
        pytest.raises(OSError, match=f"No space left.*{tmp_path}/{digest}"),
    ):
        fetch_once(reader, "a.bin", digest, tmp_path)
    assert files_in(tmp_path) == []


def test_a_local_root_needs_no_copy(store: Store, digest: str, tmp_path: Path) -> None:
    with Reader(store.folder / "data") as reader:
        assert fetch_once(reader, "a.bin", digest, tmp_path) == store.folder / "data" / "a.bin"
    assert files_in(tmp_path) == []


def test_what_is_no_digest_is_refused(store: Store, tmp_path: Path) -> None:
    with (
        Reader("s3://data", options=store.options()) as reader,
        pytest.raises(ValueError, match="is not a sha256"),
    ):
        fetch_once(reader, "a.bin", "../../" + "a" * 58, tmp_path)


def test_the_default_folder_is_the_users_cache_or_a_private_temporary_one(
    store: Store, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_folder() == tmp_path / f"sa1b-{os.getuid()}"
    with Reader("s3://data", options=store.options()) as reader:
        path = fetch_once(reader, "a.bin", digest)
        assert path.is_relative_to(default_folder())
        assert default_folder().stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(cache_module.os, "getuid", lambda: 12345)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert default_folder() == tmp_path / "xdg" / "sa1b"
        with pytest.raises(StorageError, match="belongs to another user"):
            fetch_once(reader, "a.bin", digest)
