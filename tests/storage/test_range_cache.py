"""The local cache: what it holds is a formula, its bytes are verified, and nothing that happens to it matters."""

import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from sa1b.storage import range_cache
from sa1b.storage.errors import UnavailableError
from sa1b.storage.range_cache import CacheCounts, RangeCache, StoredObject, choose, file_name, open_cache
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import Crc
from tests import processes
from tests.disks import small_disk
from tests.storage.cache_reader import (
    CONTENT,
    NAMES,
    RANGE,
    RANGES,
    ROOT,
    Memory,
    check_all,
    objects,
    opened,
    parts,
    read,
)
from tests.storage.service import REPOSITORY

SIZE = RANGE * RANGES  # bytes of an object
BLOCKS = -(-SIZE // 4096) * 4096  # that it takes on disk
ALL = len(NAMES) * BLOCKS
FULL = len(NAMES) * RANGES  # ranges


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system with space for four objects."""
    with small_disk(tmp_path / "disk", 4 * BLOCKS) as folder:
        yield folder


def taken(folder: Path) -> int:
    """Bytes that the files below a folder take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.sparse"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.sparse"))


def test_what_is_cached_is_a_formula_of_names_and_limit() -> None:
    """The exact objects: another order would make every cache of an earlier version useless."""
    shards = [StoredObject(f"sa1b-000020-{number:04d}.tar", 4096, "0" * 64) for number in range(8)]
    expected = [2, 0, 6, 3, 5, 1, 4, 7]
    assert [int(one.name[12:16]) for one in choose(shards, 8 * 4096)] == expected
    for seed in range(20):
        random.Random(seed).shuffle(shards)
        limit = random.Random(seed).randrange(9 * 4096)
        assert [int(one.name[12:16]) for one in choose(shards, limit)] == expected[: limit // 4096]
    changed = [StoredObject(one.name, 4000 + number, "1" * 64) for number, one in enumerate(shards)]
    assert [one.name for one in choose(changed, 4 * 4096)] == [one.name for one in choose(shards, 4 * 4096)]


def test_the_objects_of_a_limit_never_take_more(tmp_path: Path) -> None:
    for limit in (BLOCKS, 3 * BLOCKS, 5 * BLOCKS - 1, ALL):
        cache = opened(tmp_path / str(limit), limit)
        check_all(cache, Memory())
        assert limit - BLOCKS < taken(tmp_path / str(limit)) <= limit


def test_a_range_is_read_from_the_store_once(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, 4 * BLOCKS), Memory()
    check_all(cache, origin)
    assert cache.counts() == CacheCounts(hits=0, misses=4 * RANGES, outside=FULL - 4 * RANGES)
    again = Memory()
    check_all(cache, again)
    cache.close()
    check_all(cache, again)
    assert again.reads == 2 * (FULL - 4 * RANGES)
    assert cache.counts().hits == 2 * 4 * RANGES


def test_a_missing_range_is_requested_before_it_is_needed(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    begun = []
    for _ in range(2):  # neighbours first: they share blocks with the range between them
        for number in (0, 2, 1):
            start = number * RANGE
            pending = cache.submit(origin, NAMES[0], start, RANGE, parts(NAMES[0], start, RANGE))
            begun.append(origin.reads)
            pending.result()
    assert begun == [1, 2, 3, 3, 3, 3]


def test_files_are_sparse_and_have_the_digest_in_their_names(tmp_path: Path) -> None:
    cache = opened(tmp_path, ALL)
    read(cache, Memory(), NAMES[3], 5)
    (path,) = files(tmp_path)
    assert path.name == f"{NAMES[3]}-{'0' * 16}.sparse"
    assert path.parent.name.startswith("s3-bucket-root-")
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 <= RANGE + 2 * 4096


def test_ranges_without_a_crc_are_not_cached(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    nothing: tuple[Crc, ...] = (None, ())
    for crc in nothing:
        for _ in range(2):
            assert cache.submit(origin, NAMES[0], 0, 100, crc).result() == CONTENT[NAMES[0]][:100]
    assert (origin.reads, files(tmp_path), cache.counts()) == (4, [], CacheCounts())


def test_a_range_beyond_the_size_of_the_object_is_not_cached(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    crc = parts(NAMES[0], SIZE - 50, 50)
    cache.submit(origin, NAMES[0], SIZE - 50, 100, crc).result()
    assert (origin.reads, files(tmp_path), cache.counts().outside) == (1, [], 1)


def test_a_hole_between_two_ranges_that_share_its_blocks_is_a_miss(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    for number in (0, 2, 1, 1):
        assert read(cache, origin, NAMES[0], number) == CONTENT[NAMES[0]][RANGE * number :][:RANGE]
    assert (origin.reads, cache.counts().hits) == (3, 1)


@pytest.mark.parametrize("what", ["flipped", "truncated", "emptied", "longer", "zeros", "removed", "swapped"])
def test_damage_of_the_cache_is_read_again_and_replaced(tmp_path: Path, what: str) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    check_all(cache, origin)
    every = files(tmp_path)
    for path in every:
        data = bytearray(path.read_bytes())
        if what == "flipped":
            for number in range(RANGES):
                data[number * RANGE + random.Random(path.name).randrange(RANGE)] ^= 1
            path.write_bytes(data)
        elif what in ("truncated", "emptied", "longer"):
            os.truncate(path, {"truncated": SIZE // 2 + 77, "emptied": 0, "longer": 2 * SIZE}[what])
        elif what == "zeros":
            path.write_bytes(bytes(SIZE))
        elif what == "removed":
            path.unlink()
        elif path != every[0]:
            path.write_bytes(every[0].read_bytes())
    cache.close()
    again = Memory()
    check_all(cache, again)
    share = {"longer": 0, "swapped": FULL - RANGES, "truncated": FULL // 2}.get(what, FULL)
    assert again.reads == share
    assert [path.stat().st_size for path in files(tmp_path)] == [SIZE] * len(NAMES)
    repaired = Memory()
    check_all(cache, repaired)
    assert repaired.reads == 0


def test_a_file_that_is_truncated_while_it_is_open_is_filled_again(tmp_path: Path) -> None:
    cache = opened(tmp_path, ALL)
    check_all(cache, Memory())
    for path in files(tmp_path):
        os.truncate(path, 1000)
    for expected in (FULL, 0):
        origin = Memory()
        check_all(cache, origin)
        assert origin.reads == expected


def test_a_write_that_was_cut_at_any_byte_is_a_miss(tmp_path: Path) -> None:
    choice = random.Random(3)
    for length in (1, 4095, 4096, RANGE - 1, *(choice.randrange(RANGE) for _ in range(60))):
        cache, origin = opened(tmp_path / str(length), ALL), Memory()
        path = Path(cache.folder) / file_name(StoredObject(NAMES[0], SIZE, "0" * 64))
        with path.open("wb") as file:
            file.truncate(SIZE)
            file.seek(RANGE)
            file.write(CONTENT[NAMES[0]][RANGE:][:length])
        assert read(cache, origin, NAMES[0], 1) == CONTENT[NAMES[0]][RANGE:][:RANGE]
        assert origin.reads == 1


def test_a_read_error_of_the_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    check_all(cache, origin)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("sa1b.storage.local.os.pread", fail)
    check_all(cache, origin)
    assert origin.reads == 2 * FULL


def test_damage_in_the_store_is_not_cached(tmp_path: Path) -> None:
    class Failing(Memory):
        def submit(self, name: str, start: int, length: int, crc: Crc) -> "Future[bytes]":
            future: Future[bytes] = Future()
            future.set_exception(UnavailableError("gone"))
            return future

    cache = opened(tmp_path, ALL)
    with pytest.raises(UnavailableError, match="gone"):
        read(cache, Failing(), NAMES[0], 0)
    assert (taken(tmp_path), cache.counts()) == (0, CacheCounts())


def test_a_cancelled_read_writes_nothing(tmp_path: Path) -> None:
    cache, origin = opened(tmp_path, ALL), Memory()
    assert cache.submit(origin, NAMES[0], 0, RANGE, parts(NAMES[0], 0, RANGE)).cancel() is False
    assert taken(tmp_path) == 0


def test_replaced_objects_and_those_of_a_larger_limit_are_removed_and_nothing_else(tmp_path: Path) -> None:
    cache = opened(tmp_path, ALL)
    check_all(cache, Memory())
    other = open_cache(tmp_path, ALL, "s3://bucket/other", objects())
    assert other is not None
    check_all(other, Memory())
    folder = Path(cache.folder)
    own = [folder / "notes.txt", folder / "my.sparse", tmp_path / f"a-{'1' * 16}.sparse"]
    for path in own:
        path.write_text("mine")
    before = set(files(tmp_path))
    one = objects()
    replaced = [StoredObject(one[0].name, SIZE, "1" * 64), *one[1:]]
    assert open_cache(tmp_path, ALL, ROOT, replaced) is not None
    assert before - set(files(tmp_path)) == {folder / file_name(one[0])}
    assert open_cache(tmp_path, 2 * BLOCKS, ROOT, one) is not None
    kept = {file_name(chosen) for chosen in choose(one, 2 * BLOCKS)}
    assert {path.name for path in folder.glob("sa1b*")} == kept - {file_name(one[0])}
    assert len(list(Path(other.folder).iterdir())) == len(NAMES)
    assert [path.read_text() for path in own] == ["mine"] * 3


def test_a_limit_below_an_object_is_a_warning_with_the_limit_to_pass(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cache_bytes=1,000 is less than a shard; pass at least 244,096"):
        assert open_cache(tmp_path / "cache", 1000, ROOT, objects()) is None
    assert open_cache(tmp_path / "cache", 244_096, ROOT, objects()) is not None


def test_a_disk_without_sparse_files_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_holes(_: int, at: int, whence: int) -> int:
        return at

    monkeypatch.setattr(range_cache.os, "lseek", no_holes)
    with pytest.warns(UserWarning, match="no sparse files.*the cache is not used"):
        assert open_cache(tmp_path, ALL, ROOT, objects()) is None


def test_a_cache_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache='s3://bucket' must be a folder on a local disk, not a URL"):
        open_cache("s3://bucket", ALL, ROOT, objects())
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"is a file, or is below one; pass a folder"):
            open_cache(path, ALL, ROOT, objects())
    with pytest.raises(ValueError, match="is on the same disk as the dataset directory"):
        open_cache(tmp_path / "not" / "there", ALL, str(tmp_path), objects())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_that_leave_the_folder_are_not_cached(tmp_path: Path) -> None:
    bad = [StoredObject(name, SIZE, "0" * 64) for name in ("../a.tar", "/a.tar", "a/b.tar")]
    with pytest.warns(UserWarning, match="the cache is not used"):
        assert open_cache(tmp_path, ALL, ROOT, bad) is None


def test_a_full_disk_is_told_once_and_reading_goes_on(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = opened(disk, ALL)
    (disk / "filler").write_bytes(bytes(BLOCKS))
    for _ in range(2):
        check_all(cache, Memory())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sa1b: cache {cache.folder}: cannot be written (No space left on device)")
    assert line.endswith("Free space on this disk, or use a smaller cache_bytes")
    origin = Memory()
    check_all(cache, origin)
    assert 0 < origin.reads < FULL  # what was written before is still read from the cache
    subprocess.run(["mount", "-o", f"remount,size={2 * ALL}", str(disk)], check=True)
    for reads in (origin.reads, 0):  # another process fills the rest
        origin = Memory()
        check_all(pickle.loads(pickle.dumps(cache)) if reads else opened(disk, ALL), origin)
        assert origin.reads == reads


def test_a_full_disk_at_the_start_is_a_warning(disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(4 * BLOCKS))
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\)\. Free space"):
        cache = open_cache(disk, ALL, ROOT, objects())
    assert cache is not None
    check_all(cache, Memory())


def test_a_read_only_cache_is_read(disk: Path) -> None:
    cache = opened(disk, 3 * BLOCKS)
    check_all(cache, Memory())
    os.truncate(files(disk)[0], SIZE // 2)
    cache.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.warns(UserWarning, match="Read-only file system.*the data in it are used, nothing is added"):
        again = open_cache(disk, 3 * BLOCKS, ROOT, objects())
    assert again is not None
    origin = Memory()
    with warnings.catch_warnings(action="error"):
        check_all(again, origin)
    assert origin.reads == FULL - 3 * RANGES + RANGES // 2
    with pytest.warns(UserWarning, match="Read-only file system.*the cache is not used"):
        assert open_cache(disk, ALL, "s3://bucket/other", objects()) is None


def test_a_folder_that_is_removed_during_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = opened(tmp_path / "cache", ALL)
    read(cache, Memory(), NAMES[0], 0)
    shutil.rmtree(tmp_path / "cache")
    check_all(cache, Memory())
    cache.close()
    check_all(cache, Memory())
    assert capsys.readouterr().err.count("cannot be written (No such file or directory)") == 1


def test_a_cache_works_in_a_forked_child_and_after_pickle(tmp_path: Path) -> None:
    cache = opened(tmp_path, ALL)
    check_all(cache, Memory())
    copy: RangeCache = pickle.loads(pickle.dumps(cache))
    origin = Memory()
    check_all(copy, origin)
    child = os.fork()
    if not child:
        try:
            check_all(cache, origin)
            os._exit(int(origin.reads != 0 or cache.counts() != CacheCounts(hits=FULL)))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.counts() == CacheCounts(misses=FULL)


def test_a_reader_takes_ranges_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")  # as on macOS
    (tmp_path / "root").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "root" / name).write_bytes(content)
    with Reader(tmp_path / "root") as reader:
        reader.cache = opened(tmp_path / "cache", ALL)
        item = Range(NAMES[0], RANGE, RANGE, parts(NAMES[0], RANGE, RANGE))
        expected = CONTENT[NAMES[0]][RANGE:][:RANGE]
        assert [reader.submit(item).result() for _ in range(3)] == [expected] * 3
        assert list(reader.read_ranges([item])) == [expected]
        assert reader.counters().reads == 1
        assert reader.submit(Range(NAMES[0], 0, 0, 0)).result() == b""


def start(folder: Path, limit: int, seed: int, lines: str) -> processes.Process:
    """A reader that has its first lines of input."""
    command = [sys.executable, "-m", "tests.storage.cache_reader", str(folder), str(limit), str(seed)]
    process = processes.Process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    send(process, lines)
    return process


def send(process: processes.Process, lines: str) -> None:
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.flush()


def test_eight_processes_share_a_cache_within_its_limit(tmp_path: Path) -> None:
    limit = 5 * BLOCKS
    running = [start(tmp_path, limit, seed, "\n") for seed in range(8)]
    for process in running:  # all have begun
        assert process.stdout is not None
        assert process.stdout.readline()
    for process in running:
        send(process, "all\n")
    most = 0
    while any(process.poll() is None for process in running):
        most = max(most, taken(tmp_path))
        time.sleep(0.001)
    for process in running:
        process.communicate()
    assert [process.returncode for process in running] == [0] * 8
    assert 0 < max(most, taken(tmp_path)) <= limit
    origin = Memory()
    check_all(opened(tmp_path, limit), origin)
    assert origin.reads == FULL - 5 * RANGES


def test_a_killed_process_leaves_nothing_to_repair(tmp_path: Path) -> None:
    choice = random.Random(11)
    for folder in (tmp_path / "0", tmp_path / "1"):
        for seed in range(4):
            process = start(folder, ALL, seed, "\n")
            assert process.stdout is not None
            assert process.stdout.readline()
            send(process, "\n" * choice.randrange(2, 30))
            time.sleep(choice.random() / 1000)  # 1 ms: some reads
            process.kill()
            process.communicate()
        origins = Memory(), Memory()
        for origin in origins:
            check_all(opened(folder, ALL), origin)
        assert FULL - 4 * 30 <= origins[0].reads < FULL
        assert origins[1].reads == 0
        assert all(path.suffix == ".sparse" for path in folder.rglob("*") if path.is_file())
