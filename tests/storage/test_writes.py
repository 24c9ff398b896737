"""What commands write into folders and stores: whole or not at all, nothing of others is touched, nothing is left."""

import os
import stat
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import sa1b
from tests import kit
from tests.directories import bucket, reshard
from tests.disks import small_disk
from tests.shards.tiny_source import pairs, write_source
from tests.storage.test_wrong_answers import (
    EVER,
    SHARD,
    assert_is_stopped_and_completed,
    command,
    ended,
    ended_first,
    made,
    store,
    tars,
)

__all__ = ["made", "store", "tars"]


# Files of the user


def test_a_device_is_not_replaced(made, tmp_path):
    path = tmp_path / "page.html"
    path.symlink_to(os.devnull)
    kit.refused("gallery", made, "--out", path, "--overwrite", names=f"{path}: a device, pipe or socket")
    assert path.readlink() == Path(os.devnull)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_and_a_link_to_a_file_are_replaced(made, tmp_path):
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_bytes(b"old")
    link.symlink_to(target)
    for path in (target, link):
        kit.run("gallery", made, "--out", path, "--overwrite")
        assert path.read_bytes()[:9] == b"<!doctype"
        assert stat.S_ISREG(path.lstat().st_mode)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["folder", "bucket"])
@pytest.mark.parametrize("flag", ["--redo", "--drop"])
def test_files_of_others_stay_in_a_quarantine_that_is_replaced_or_removed(tmp_path, kind, flag):
    root = tmp_path / "root" if kind == "folder" else bucket(tmp_path / "root")
    bad = {**pairs(range(100, 104)), 102: (b"no jpeg", pairs([102])[102][1])}
    one = [
        write_source(tmp_path / "sa_000001.tar", bad),
        write_source(tmp_path / "sa_000002.tar", pairs([300])),
    ]
    reshard(root, *one)
    own = {name for name in kit.files(root) if name.startswith("quarantine/sa_000001/")}
    assert own
    mine = {f"quarantine/sa_000001/{name}": b"mine" for name in ("notes.txt", "old/thesis.csv")}
    for name, data in mine.items():
        kit.put(root, name, data)
    words = ("--redo", "sa_000001", *one) if flag == "--redo" else ("--drop", "sa_000001")
    kit.run("reshard", *words, "--out", root, "--workers", 1, code=None)
    found = kit.files(root)
    assert {name: found.get(name) for name in mine} == mine
    assert (own <= found.keys()) == (flag == "--redo")
    assert len(sa1b.open(root)) == (4 if flag == "--redo" else 1)


# Stores


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("key", ["*/dataset.json", "*/tasks/sa_000001.json", "*/tasks/sa_000001.samples"])
def test_a_small_object_that_is_shortened_in_two_answers_is_read_whole(
    tars, made, store, tmp_path, key, times
):
    store.load(made)
    fault = store.fault("short", "GET", key, times=times)
    words, found = command("copy from", tars, made, store, tmp_path)
    assert kit.run(*words).code == 0
    assert fault.hits == times
    assert found() == kit.files(made)


REFUSED = [
    ("reshard", "DELETE", "*", "403", "permission to get, put, list and delete objects"),
    ("copy to", "PUT", SHARD, "507", "the store is full: free space in it"),
    ("copy to", "PART", "*", "404", "the store has removed this unfinished upload"),
]


@pytest.mark.parametrize(("verb", "what", "key", "kind", "cause"), REFUSED)
def test_a_store_that_refuses_a_write_is_named_with_the_way_out(
    tars, made, store, tmp_path, verb, what, key, kind, cause
):
    if what == "PART":
        made = tmp_path / "large"
        large = {7: (pairs([7])[7][0][:2] + COMMENT * 280 + pairs([7])[7][0][2:], pairs([7])[7][1])}
        reshard(made, write_source(tmp_path / "sa_000001.tar", large))
    fault = store.fault(kind, what, key, times=EVER)
    assert_is_stopped_and_completed(*command(verb, tars, made, store, tmp_path), made, store, fault, cause)


COMMENT = b"\xff\xfe\xff\xff" + bytes(range(1, 254)) * 258 + bytes(259)  # 64 KiB of a JPEG


@pytest.mark.parametrize("verb", ["copy to", "reshard"])
def test_uploads_that_may_not_be_listed_are_no_reason_to_stop(tars, made, store, tmp_path, verb):
    fault = store.fault("403", "UPLOADS", times=EVER)
    words, found = command(verb, tars, made, store, tmp_path)
    assert ended_first(words).code == 0
    assert verb == "copy to" or fault.hits
    assert found() == kit.files(made)


@pytest.mark.parametrize("verb", ["verify", "index"])
def test_scratch_is_empty_after_a_command_and_too_little_of_it_is_named(made, store, tmp_path, verb):
    store.load(made)
    for name in ("sa1b-000001-0000.parquet", "sa1b-000002-0000.parquet") if verb == "index" else ():
        del store.objects[f"{store.prefix}/{name}"]
    words = (verb, store.root, "--endpoint", store.url, "--scratch")
    with small_disk(tmp_path / "disk", 16384) as disk:
        done = ended((*words, disk))
        assert done.code in (1, 2)
        assert "--scratch" in done.out + done.err
        assert list(disk.iterdir()) == []
    done = ended((*words, tmp_path / "scratch"))
    assert done.code == 0, done.err
    assert list((tmp_path / "scratch").iterdir()) == []
    assert store.files() == kit.files(made)


def test_an_object_that_is_replaced_during_its_copy_is_copied_by_the_next(made, store, tmp_path, monkeypatch):
    """In a store without entity tags, the time of the object shows it."""
    root, name = f"memory://{store.prefix}", "tasks/sa_000002.samples"
    fsspec.filesystem("memory").put(str(made), f"/{store.prefix}", recursive=True)
    cat, hits = MemoryFileSystem.cat_file, []

    def replacing(system, path, *given, **more):
        data = cat(system, path, *given, **more)
        if path.endswith(name) and not hits:
            hits.append(path)
            system.pipe_file(path, data[:-1] + b"x")
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", replacing)
    done = kit.run("copy", root, tmp_path / "copy", "--scratch", tmp_path / "scratch", code=None)
    assert hits
    assert done.code in (1, 2)
    assert f"{root}/{name}" in done.out + done.err
    fsspec.filesystem("memory").pipe_file(f"/{store.prefix}/{name}", (made / name).read_bytes())
    kit.run("copy", root, tmp_path / "copy", "--scratch", tmp_path / "scratch")
    assert kit.files(tmp_path / "copy") == kit.files(made)
