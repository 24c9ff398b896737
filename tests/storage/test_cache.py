"""Sample tables of URLs are copied once per machine: one download for all processes, never wrong, nothing left behind."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import sa1b
from sa1b.storage.errors import DamageError, StorageError
from tests.directories import images
from tests.storage.store_server import StoreServer
from tests.storage.test_wrong_answers import EVER, made, other, store, tars

__all__ = ["made", "other", "store", "tars"]
TABLE = "*/samples-*.bin"


@pytest.fixture
def digest(made, store):
    """The sha256 of the table; the store has the directory."""
    store.load(made)
    return str(json.loads((made / "dataset.json").read_text())["samples"]["sha256"])


def opened(store):
    return sa1b.open(store.root, storage_options=store.options)


def copies():
    """The files of the cache of tables."""
    folder = Path(os.environ["XDG_CACHE_HOME"])
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def name(made, digest):
    """Of the copy of the table."""
    (table,) = made.glob("samples-*.bin")
    return f"sa1b/{digest}/{table.name}"


def test_a_copy_lies_under_its_digest_and_is_not_fetched_again(made, store, digest, name):
    for _ in range(2):
        assert len(opened(store)) == 19
        assert copies() == [name]
    path = Path(os.environ["XDG_CACHE_HOME"]) / name
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert sum(one.sent for one in store.asked("GET", TABLE)) <= path.stat().st_size + 1


HARMS = {
    "flip": lambda data: data[:9] + bytes([data[9] ^ 4]) + data[10:],
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_copy_is_found_and_fetched_again(made, store, name, harm):
    opened(store)
    path = Path(os.environ["XDG_CACHE_HOME"]) / name
    data = path.read_bytes()
    path.write_bytes(HARMS[harm](data))
    assert images(store.root, storage_options=store.options) == images(made)
    assert path.read_bytes() == data
    assert copies() == [name]


def test_a_killed_download_is_cleared_by_the_next_one_of_any_dataset(made, other, store, name):
    store.fault("hang", "GET", TABLE, at=2)  # after its size
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            opened(store)
        os._exit(1)
    try:
        while len(store.asked("GET", TABLE)) < 2:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert len(copies()) == 1  # of what is in progress
        with StoreServer() as second:
            second.load(other)
            opened(second)
            assert len(copies()) == 2  # which another process leaves alone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert name not in copies()
    whole = {one for one in copies() if one.endswith(".bin")}
    (one,) = whole
    (Path(os.environ["XDG_CACHE_HOME"]) / one).unlink()
    with StoreServer() as second:
        second.load(other)
        opened(second)
    assert copies() == [one]
    opened(store)
    assert copies() == sorted([one, name])


def test_another_table_in_the_store_is_damage_and_nothing_is_left(made, store, digest):
    (key,) = [key for key in store.objects if "samples-" in key]
    data = store.objects[key].data[:-1] + b"x"
    store.put(key, data)
    found = hashlib.sha256(data).hexdigest()
    with pytest.raises(DamageError, match=rf"^s3://{key}: sha256 {found}, {digest} expected") as caught:
        opened(store)
    assert (caught.value.found, caught.value.expected) == (found, digest)
    assert copies() == []


@pytest.mark.parametrize(
    ("kind", "error"), [("404", Exception), ("403", StorageError), ("retagged", StorageError)]
)
def test_a_table_that_cannot_be_read_leaves_nothing(store, digest, kind, error):
    fault = store.fault(kind, "GET", TABLE, times=EVER)
    with pytest.raises(error, match=rf"{store.root}/samples-"):
        opened(store)
    assert fault.hits
    assert copies() == []


def test_a_full_disk_names_the_file_and_leaves_nothing(store, digest, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left.*{os.environ['XDG_CACHE_HOME']}/sa1b/{digest}"):
        opened(store)
    assert copies() == []


def test_a_folder_needs_no_copy(made, store):
    assert len(sa1b.open(made)) == 19
    assert copies() == []


@pytest.mark.parametrize("digest_of_it", ["../../" + "a" * 58, "A" * 64, "ab"])
def test_a_manifest_whose_digest_is_none_writes_nothing(made, store, tmp_path, digest_of_it):
    root = shutil.copytree(made, tmp_path / "root")
    document = (root / "dataset.json").read_text()
    right = json.loads(document)["samples"]["sha256"]
    (root / "dataset.json").write_text(document.replace(right, digest_of_it))
    store.load(root)
    with pytest.raises(Exception, match=r"sha256"):
        opened(store)
    assert copies() == []


def test_the_default_folder_is_private_and_one_of_another_user_is_refused(
    store, digest, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened(store)
    folder = tmp_path / f"sa1b-{os.getuid()}"
    assert [path.name for path in folder.iterdir()] == [digest]
    assert folder.stat().st_mode & 0o777 == 0o700
    uid = os.getuid()
    folder.rename(tmp_path / f"sa1b-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StorageError, match=f"sa1b-{uid + 1}: belongs to another user; set XDG_CACHE_HOME"):
        opened(store)
