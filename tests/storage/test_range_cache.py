"""The local cache: what it holds is a formula, its bytes are verified, and nothing that happens to it matters."""

import errno
import gc
import json
import os
import pickle
import shutil
import subprocess
import time
import warnings

import pytest

import sa1b
from sa1b.errors import ShardError
from tests.directories import images
from tests.disks import small_disk
from tests.storage.store_server import StoreServer
from tests.storage.test_reads import failing
from tests.storage.test_wrong_answers import EVER, SHARD, expected, made, of_store, other, store, tars

__all__ = ["expected", "made", "other", "store", "tars"]
ORDER = {  # the shards in the order of the formula -> bytes on disk of the cache with it and those before it
    "sa1b-000001-0000.tar": 20480,
    "sa1b-000001-0001.tar": 40960,
    "sa1b-000001-0003.tar": 53248,
    "sa1b-000002-0000.tar": 73728,
    "sa1b-000001-0002.tar": 94208,
}
ALL, HALF = 94208, 53248


@pytest.fixture
def disk(tmp_path):
    """A separate file system with space for half of the shards."""
    with small_disk(tmp_path / "disk", HALF) as folder:
        yield folder


@pytest.fixture
def filled(made, store, tmp_path):
    """A dataset with a complete cache."""
    store.load(made)
    dataset = opened(store, tmp_path / "cache")
    assert len(list(dataset)) == 19
    return dataset


def opened(store, folder, limit=ALL):
    return sa1b.open(store.root, storage_options=store.options, cache=folder, cache_bytes=limit)


def cached(folder):
    """Name of a shard -> its file in a cache."""
    return {path.name.partition(".tar")[0] + ".tar": path for path in folder.rglob("*.sparse")}


def taken(folder):
    """Bytes that the files of a cache take on disk."""
    return sum(path.stat().st_blocks * 512 for path in cached(folder).values())


def reads(store, dataset, whole):
    """The number of requests that all samples take; they are right."""
    store.log.clear()
    assert {sample.image_id: sample.jpeg for sample in dataset} == {i: jpeg for i, (jpeg, _) in whole.items()}
    return len(store.asked("GET", SHARD))


@pytest.fixture(scope="module")
def whole(made):
    return images(made)


@pytest.mark.parametrize("spare", [0, -1])
@pytest.mark.parametrize("count", range(1, 6))
def test_what_is_cached_is_a_formula_of_names_and_limit(made, store, tmp_path, whole, count, spare):
    """The exact shards: another order would make every cache of an earlier version useless."""
    store.load(made)
    limit = list(ORDER.values())[count - 1] + spare
    held = list(ORDER)[: count + spare]
    with warnings.catch_warnings(action="ignore"):  # of a limit below a shard
        dataset = opened(store, tmp_path / "cache", limit)
    outside = sum(sample.shard not in held for sample in sa1b.open(made))
    assert [reads(store, dataset, whole) for _ in range(3)] == [19, outside, outside]
    assert sorted(cached(tmp_path / "cache")) == sorted(held)
    assert taken(tmp_path / "cache") <= limit


def test_the_statistics_count_hits_misses_and_what_the_limit_leaves_out(made, store, tmp_path, expected):
    store.load(made)
    stream = of_store(
        store, tmp_path, "cache", cache_bytes=HALF, global_batch=1
    )  # else neighbours are one read
    outside = sum(sample.shard not in list(ORDER)[:3] for sample in sa1b.open(made))
    for epoch in expected:
        found = sorted(batch.ids.item() for batch in stream)
        assert found == sorted(one for ids, _ in epoch for one in ids)
    counts = {"hits": 19 - outside, "misses": 19 - outside, "outside": 2 * outside}
    assert stream.stats.snapshot()["cache"] == counts


def test_files_are_sparse_and_have_the_digest_in_their_names(made, store, tmp_path):
    store.load(made)
    opened(store, tmp_path / "cache").by_id(300)
    ((name, path),) = cached(tmp_path / "cache").items()
    shards = {one["name"]: one for one in json.loads((made / "dataset.json").read_text())["shards"]}
    assert path.name == f"{name}-{shards[name]['sha256'][:16]}.sparse"
    assert path.parent.name.startswith("s3-bucket")
    assert path.stat().st_size == shards[name]["bytes"]
    assert path.stat().st_blocks * 512 < shards[name]["bytes"]


def test_a_hole_between_two_ranges_that_share_its_blocks_is_requested_before_it_is_needed(
    made, store, tmp_path, whole
):
    store.load(made)
    dataset = opened(store, tmp_path / "cache")
    for image_id, requests in ((100, 1), (102, 1), (101, 1), (101, 0)):
        store.log.clear()
        (pending,) = dataset.submit([dataset.row(image_id)])
        end = time.monotonic() + 60
        while len(store.log) < requests:
            assert time.monotonic() < end
        assert bytes(pending.result()[0]) == whole[image_id][0]
        assert len(store.log) == requests


SIZE = 20480  # of most shards


def changed(path, what, first):
    data = path.read_bytes()
    if what == "removed":
        path.unlink()
    elif what in ("truncated", "emptied", "longer"):
        os.truncate(path, {"truncated": len(data) // 2 + 77, "emptied": 0, "longer": 2 * SIZE}[what])
    elif what == "flipped":
        path.write_bytes(bytes(byte ^ 1 for byte in data))
    else:
        path.write_bytes(bytes(len(data)) if what == "zeros" else first)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("what", ["flipped", "truncated", "emptied", "longer", "zeros", "removed", "swapped"])
def test_damage_of_the_cache_is_read_again_and_replaced(store, filled, tmp_path, whole, what, is_open):
    every = cached(tmp_path / "cache")
    sizes = {path: path.stat().st_size for path in every.values()}
    first = next(iter(every.values())).read_bytes()
    for path in every.values():
        changed(path, what, first)
    dataset = filled if is_open else opened(store, tmp_path / "cache")
    again = reads(store, dataset, whole)
    if what == "longer" or (is_open and what == "removed"):
        assert again == 0
    else:
        assert 0 < again <= 19
        assert (again == 19) == (what not in ("truncated", "swapped"))
    if not is_open:
        assert {path: path.stat().st_size for path in cached(tmp_path / "cache").values()} == sizes
    assert reads(store, dataset, whole) == 0


def test_a_write_that_was_cut_at_any_byte_is_read_again(store, filled, tmp_path, whole):
    path = cached(tmp_path / "cache")["sa1b-000002-0000.tar"]
    data = path.read_bytes()
    for length in (*range(0, len(data), 397), 4095, 4096, 4097):
        with path.open("wb") as file:  # the file that the dataset has open
            file.write(data[:length])
            file.truncate(len(data))
        assert [filled.by_id(image_id).jpeg for image_id in (300, 301, 302)] == [
            whole[image_id][0] for image_id in (300, 301, 302)
        ]
        assert path.read_bytes()[4096:-1024] == data[4096:-1024]


def test_a_read_error_of_the_disk_of_the_cache_is_read_from_the_store(store, filled, whole):
    with failing(errno.EIO, stays=True, ending=".sparse"):
        assert reads(store, filled, whole) == 19
    assert reads(store, filled, whole) == 0


@pytest.mark.parametrize("kind", ["flipped", "short"])
def test_wrong_bytes_of_the_store_are_not_cached(made, store, tmp_path, whole, kind):
    store.load(made)
    dataset = opened(store, tmp_path / "cache")
    if kind == "flipped":
        store.fault(kind, "GET", SHARD, times=EVER)
        with pytest.raises(ShardError, match=store.root):
            dataset[0]
        assert taken(tmp_path / "cache") == 0
        store.faults.clear()
    else:
        store.fault(kind, "GET", SHARD)
    assert [reads(store, dataset, whole) for _ in range(2)] == [19 if kind == "flipped" else 20, 0]


def test_files_of_replaced_shards_and_of_a_larger_limit_are_removed_and_nothing_else(
    made, other, store, filled, tmp_path
):
    folder = tmp_path / "cache"
    before = cached(folder)
    own = folder / next(iter(before.values())).parent
    notes = [own / "notes.txt", own / "my.sparse", folder / f"a-{'1' * 16}.sparse"]
    for path in notes:
        path.write_text("mine")
    with StoreServer() as second:
        second.load(made)
        assert len(list(opened(second, folder))) == 19
        opened(store, folder, HALF)
        assert {path for path in before.values() if path.exists()} == {
            before[name] for name in list(ORDER)[:3]
        }
        store.load(other)
        opened(store, folder)
        assert not any(path.exists() for path in before.values())
        second.log.clear()
        assert len(list(opened(second, folder))) == 19
        assert second.asked("GET", SHARD) == []
    assert [path.read_text() for path in notes] == ["mine"] * 3


def test_a_disk_without_sparse_files_is_a_warning(made, store, tmp_path, whole, monkeypatch):
    store.load(made)
    monkeypatch.setattr(os, "lseek", lambda _, at, whence: at)
    with pytest.warns(UserWarning, match="no sparse files.*the cache is not used"):
        dataset = opened(store, tmp_path / "cache")
    assert reads(store, dataset, whole) == 19
    assert cached(tmp_path / "cache") == {}


def test_a_cache_that_makes_no_sense_is_refused(made, store, tmp_path):
    store.load(made)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"is a file, or is below one; pass a folder"):
            opened(store, folder)
    with pytest.raises(ValueError, match=r"cache='s3://bucket' must be a folder on a local disk, not a URL"):
        opened(store, "s3://bucket")
    with pytest.raises(ValueError, match="is on the same disk as the dataset directory"):
        sa1b.open(made, cache=made.parent / "not" / "there", cache_bytes=ALL)
    assert not (made.parent / "not").exists()


@pytest.mark.parametrize(
    "name", ["../sa1b-000002-0000.tar", "/sa1b-000002-0000.tar", "a/sa1b-000002-0000.tar"]
)
def test_names_that_leave_the_folder_are_not_cached(made, store, tmp_path, name):
    store.load(made)
    text = (made / "dataset.json").read_text().replace("sa1b-000002-0000.tar", name)
    store.put(f"{store.prefix}/dataset.json", text.encode())
    try:
        dataset = opened(store, tmp_path / "deep" / "cache")
        dataset.by_id(300)
    except (ValueError, OSError, sa1b.errors.Sa1bError):
        pass
    assert {path.parent.parent for path in tmp_path.rglob("*.sparse")} <= {tmp_path / "deep" / "cache"}


def test_a_full_disk_is_told_once_and_reading_goes_on(made, store, disk, whole, capsys):
    store.load(made)
    dataset = opened(store, disk)
    (disk / "filler").write_bytes(bytes(20000))
    again = [reads(store, dataset, whole) for _ in range(3)]
    assert 0 < again[1] == again[2] < again[0] == 19
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sa1b: cache {disk}/s3-bucket")
    assert "cannot be written (No space left on device)" in line
    assert line.endswith("Free space on this disk, or use a smaller cache_bytes")
    subprocess.run(["mount", "-o", f"remount,size={2 * ALL}", str(disk)], check=True)
    copy = opened(store, disk)
    assert [reads(store, copy, whole) for _ in range(2)] == [again[2], 0]


def test_a_full_disk_at_the_start_is_a_warning(made, store, disk, whole):
    store.load(made)
    (disk / "filler").write_bytes(bytes(HALF))
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\)\. Free space"):
        dataset = opened(store, disk)
    assert reads(store, dataset, whole) == 19


def test_a_read_only_cache_is_read(made, store, disk, whole):
    store.load(made)
    dataset = opened(store, disk, HALF)
    _, held = reads(store, dataset, whole), reads(store, dataset, whole)
    del dataset
    gc.collect()  # its files are open for writing
    lost = next(iter(cached(disk).values()))
    os.truncate(lost, 600)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.warns(UserWarning, match="Read-only file system.*the data in it are used, nothing is added"):
        dataset = opened(store, disk, HALF)
    with warnings.catch_warnings(action="error"):
        again = [reads(store, dataset, whole) for _ in range(2)]
    assert held < again[0] == again[1] < 19
    with StoreServer() as second:
        second.load(made)
        with pytest.warns(UserWarning, match="Read-only file system.*the cache is not used"):
            dataset = opened(second, disk)
        assert [reads(second, dataset, whole) for _ in range(2)] == [19, 19]


def test_a_folder_that_is_removed_during_the_run(made, store, tmp_path, whole, capsys):
    store.load(made)
    dataset = opened(store, tmp_path / "cache")
    assert dataset[0].jpeg == whole[100][0]
    shutil.rmtree(tmp_path / "cache")
    for _ in range(2):
        assert reads(store, dataset, whole)
    assert capsys.readouterr().err.count("cannot be written (No such file or directory)") == 1


def test_a_cache_works_in_a_forked_child_and_after_pickle(store, filled, whole):
    copy = pickle.loads(pickle.dumps(filled))
    assert reads(store, copy, whole) == 0
    child = os.fork()
    if not child:
        right = False
        try:
            right = {one.image_id: one.jpeg for one in filled} == {i: jpeg for i, (jpeg, _) in whole.items()}
        finally:
            os._exit(not right)
    assert os.waitpid(child, 0)[1] == 0
    assert store.asked("GET", SHARD) == []
    assert reads(store, filled, whole) == 0


def test_processes_share_a_cache_within_its_limit(made, store, tmp_path, whole):
    store.load(made)
    folder, most, children = tmp_path / "cache", 0, []
    for number in range(4):
        if not (child := os.fork()):
            right = False
            try:
                dataset = opened(store, folder, HALF)
                rows = [*range(number, 19), *range(number)]
                right = all(dataset[row].jpeg == list(whole.values())[row][0] for row in rows)
            finally:
                os._exit(not right)
        children.append(child)
    while children:
        most = max(most, taken(folder))
        for child in list(children):
            if (done := os.waitpid(child, os.WNOHANG))[0]:
                assert done[1] == 0
                children.remove(child)
    assert 0 < max(most, taken(folder)) <= HALF
    dataset = opened(store, folder, HALF)
    outside = sum(sample.shard not in list(ORDER)[:3] for sample in sa1b.open(made))
    assert reads(store, dataset, whole) == outside
