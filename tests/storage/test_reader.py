"""Ranges from a folder, from memory and from a small S3 server: the same bytes, the same errors."""

import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c
import pytest

from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import (
    DamageError,
    DeniedError,
    ExpiredError,
    MissingError,
    StorageError,
    UnavailableError,
)
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage.conftest import SIZE, Store, WaitedTime
from tests.storage.service import REPOSITORY

KINDS = ("folder", "file", "memory", "s3", "http")


@pytest.fixture(params=KINDS)
def reader(request: pytest.FixtureRequest, store: Store) -> Iterator[Reader]:
    """A reader of the same objects for every kind of root."""
    folder = store.folder / "data"
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        for path in folder.rglob("*.bin"):
            memory.pipe(f"/data/{path.relative_to(folder)}", path.read_bytes())
    root = {
        "folder": folder,
        "file": f"file://{folder}",
        "memory": "memory://data",
        "s3": "s3://data",
        "http": f"http://127.0.0.1:{store.port}/data",
    }[request.param]
    options = store.options() if request.param == "s3" else None
    with Reader(root, options=options, attempt_timeout=60) as reader:
        yield reader


def test_ranges_are_exact(reader: Reader, store: Store) -> None:
    ranges = store.ranges(30)
    for item, expected in zip(ranges, store.slices(ranges), strict=True):
        assert reader.read_range(item.name, item.start, item.length, item.crc) == expected
    counters = reader.counters()
    assert (counters.reads, counters.attempts, counters.faults) == (30, 30, 0)
    assert counters.bytes == sum(item.length for item in ranges)


def test_many_ranges_are_returned_in_their_order(reader: Reader, store: Store) -> None:
    ranges = [*store.ranges(100, seed=5), Range("a.bin", 7, 0), Range("empty.bin", 0, 0)]
    assert list(reader.read_ranges(ranges)) == store.slices(ranges)


def test_edges_first_byte_last_byte_and_the_whole(reader: Reader, store: Store) -> None:
    data = store.bytes()
    assert reader.read_range("a.bin", 0, 1) == data[:1]
    assert reader.read_range("a.bin", SIZE - 1, 1) == data[-1:]
    assert reader.read_range("a.bin", 0, SIZE) == data
    assert reader.read_range("a.bin", SIZE, 0) == b""


def test_names_may_hold_folders_blanks_and_letters(reader: Reader, store: Store) -> None:
    if reader.root.startswith("http"):
        pytest.skip("the names of an http root are taken as they stand in a URL")
    name = "deep/b c+ü.bin"
    assert reader.read_range(name, 10, 100) == store.bytes(name)[10:110]


def test_a_missing_object_is_an_error_of_its_own_at_once(reader: Reader) -> None:
    with pytest.raises(
        MissingError, match=r"missing\.bin: no such (file; check the path|object \(.+\); check the URL)$"
    ):
        reader.read_range("missing.bin", 0, 10)
    assert (reader.counters().attempts, reader.counters().waited) == (1, 0)


def test_a_range_behind_the_end_is_damage_naming_object_and_sizes(reader: Reader) -> None:
    for start in (SIZE - 5, SIZE + 5):
        with pytest.raises(DamageError, match="a.bin.*ends at byte 4,000,000") as caught:
            reader.read_range("a.bin", start, 10)
        assert (caught.value.expected, caught.value.found) == (start + 10, SIZE)


@pytest.mark.parametrize("start", [2**62, 2**63 - 1, 2**64 - 1])
def test_a_range_where_no_file_can_end_is_damage(store: Store, start: int) -> None:
    with Reader(store.folder / "data") as reader:
        with pytest.raises(DamageError, match=r"a\.bin"):
            reader.read_range("a.bin", start, 10)
        with pytest.raises(DamageError, match=r"a\.bin"):
            reader.submit(Range("a.bin", start, 10)).result()


def test_a_wrong_crc_that_stays_is_damage(reader: Reader, store: Store) -> None:
    right = int(google_crc32c.value(store.bytes()[100:200]))
    with pytest.raises(DamageError, match="in two separate reads") as caught:
        reader.read_range("a.bin", 100, 100, right ^ 1)
    assert (caught.value.expected, caught.value.found) == (right ^ 1, right)
    assert caught.value.url.endswith("data/a.bin")
    assert reader.counters().crc == 2


def test_sizes_and_small_objects(reader: Reader, store: Store) -> None:
    assert reader.size("a.bin") == SIZE
    assert reader.read_whole("a.bin", SIZE) == store.bytes()
    with pytest.raises(StorageError, match="at most 1,000 expected"):
        reader.read_whole("a.bin", 1000)
    if not reader.root.startswith("http"):  # s3fs and this server agree on empty objects, plain http may not
        assert reader.read_whole("empty.bin", 10) == b""


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a.bin", "deep/../../a.bin"])
def test_names_outside_of_the_root_are_refused(reader: Reader, name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of an object"):
        reader.read_range(name, 0, 1)


def test_negative_ranges_are_refused(reader: Reader) -> None:
    for start, length in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="are not a range"):
            reader.read_range("a.bin", start, length)


def test_the_first_failing_range_fails_in_its_turn(reader: Reader, store: Store) -> None:
    ranges = store.ranges(20)
    bad = ranges[10]
    assert bad.crc is not None
    reads = reader.read_ranges([*ranges[:10], replace(bad, crc=bad.crc ^ 1), *ranges[11:]])
    assert [next(reads) for _ in range(10)] == store.slices(ranges[:10])
    with pytest.raises(DamageError, match="crc32c"):
        next(reads)


def test_no_more_is_in_flight_than_prefetch_allows(reader: Reader, store: Store) -> None:
    taken: list[Range] = []

    def requested() -> Iterator[Range]:
        for item in store.ranges(50):
            taken.append(item)
            yield item

    reads = reader.read_ranges(requested(), prefetch=5)
    for done in range(10):
        next(reads)
        assert len(taken) == done + 5
    reads.close()


def test_threads_share_a_reader(reader: Reader, store: Store) -> None:
    ranges = store.ranges(120, seed=9)
    found: dict[int, bytes] = {}

    def work(first: int) -> None:
        for i in range(first, len(ranges), 6):
            item = ranges[i]
            found[i] = reader.read_range(item.name, item.start, item.length, item.crc)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(ranges))] == store.slices(ranges)


def test_a_reader_used_and_pickled_reads_again(reader: Reader, store: Store) -> None:
    reader.read_range("a.bin", 0, 10)
    with pickle.loads(pickle.dumps(reader)) as copy:
        assert copy.read_range("a.bin", 5, 10) == store.bytes()[5:15]
        assert copy.counters().reads == 1
    assert b"fsspec" not in pickle.dumps(reader)


def test_a_closed_reader_opens_again(reader: Reader, store: Store) -> None:
    reader.read_range("a.bin", 0, 10)
    reader.close()
    reader.close()
    assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
    assert reader.counters().reads == 1


def test_nothing_is_left_of_a_closed_reader(reader: Reader, store: Store) -> None:
    gc.collect()  # readers and files of earlier tests that nobody closed
    threads = set(threading.enumerate())
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pickle.loads(pickle.dumps(reader)) as copy:
        reads = copy.read_ranges(store.ranges(60))
        next(reads)
        copy.read_range("a.bin", 0, 10)
    assert set(threading.enumerate()) <= threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    reads.close()


def test_nothing_is_left_of_a_reader_once_it_is_unreferenced(store: Store) -> None:
    before = set(threading.enumerate())
    reader = Reader("s3://data", options=store.options())
    reader.read_range("a.bin", 0, 10)
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} >= {"sa1b-storage"}
    del reader
    assert not own & set(threading.enumerate())


# ---- responses of stores


def test_a_store_that_denies_access_is_an_error_that_names_where_keys_are_looked_up(store: Store) -> None:
    with Reader("s3://denied", options=store.options()) as reader:
        with pytest.raises(DeniedError, match="s3://denied/a.bin: access denied.*AWS_ACCESS_KEY_ID"):
            reader.read_range("a.bin", 0, 10)
        assert reader.counters().attempts == 1


def test_no_credentials_at_all_is_denied(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    with Reader("s3://data") as reader, pytest.raises(DeniedError, match="NoCredentials"):
        reader.read_range("a.bin", 0, 10)


def test_expired_keys_are_looked_up_again_and_fresh_ones_are_used(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    keys.write_text(text.format("EXPIRED"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    with Reader("s3://data") as reader:
        with pytest.raises(ExpiredError, match="expired.*~/.aws/credentials"):
            reader.read_range("a.bin", 0, 10)
        keys.write_text(text.format("FRESH"))
        assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
        assert reader.counters().expired == 2


def test_expired_keys_are_named_whatever_is_requested_first(store: Store, tmp_path: Path) -> None:
    """The response to HEAD has the status 400 and no document."""
    options = {**store.options(), "key": "EXPIRED", "secret": "secret", "anon": False}
    with Reader("s3://data", options=options) as reader:
        with pytest.raises(ExpiredError, match="expired.*ExpiredToken"):
            reader.size("a.bin")
        with pytest.raises(ExpiredError, match="expired.*ExpiredToken"):
            reader.names("deep")
    with pytest.raises(ExpiredError, match="expired.*ExpiredToken"):
        BucketStore("s3://data", scratch=tmp_path, options=options).size("a.bin")


def test_a_store_that_always_sends_less_is_unavailable_not_damage(store: Store, waited: WaitedTime) -> None:
    with (
        Reader("s3://brief", options=store.options(), retry_policy=waited.policy(20)) as reader,
        pytest.raises(
            UnavailableError, match="s3://brief/a.bin, bytes 100 to 200.*50 bytes received"
        ) as caught,
    ):
        reader.read_range("a.bin", 100, 100)
    assert caught.value.counters.short > 2


def test_a_closed_port_is_unavailable_at_the_deadline(waited: WaitedTime) -> None:
    options = {"anon": True, "endpoint_url": "http://127.0.0.1:9"}
    with (
        Reader("s3://data", options=options, retry_policy=waited.policy(20)) as reader,
        pytest.raises(UnavailableError, match="Connect"),
    ):
        reader.read_range("a.bin", 0, 10)
    assert waited.now == pytest.approx(20)


# ---- local disks


def test_an_input_output_error_is_retried_until_it_passes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [errno.EIO, errno.ESTALE, errno.EIO]
    pread = os.pread

    def failing(descriptor: int, length: int, start: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "disk")
        return pread(descriptor, length, start)

    monkeypatch.setattr(os, "pread", failing)
    slept: list[float] = []
    with Reader(store.folder / "data", retry_policy=RetryPolicy(sleep=slept.append)) as reader:
        assert reader.read_range("a.bin", 3, 10) == store.bytes()[3:13]
        assert reader.counters().device == len(slept) == 3


def test_an_input_output_error_that_stays_is_unavailable_with_the_path(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 1

    with (
        Reader(store.folder / "data", retry_policy=RetryPolicy(clock=lambda: now[0], sleep=sleep)) as reader,
        pytest.raises(UnavailableError, match=f"{store.folder}/data/a.bin.*Input/output error"),
    ):
        reader.read_range("a.bin", 3, 10)
    assert now[0] >= 300


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_disk_that_never_answers_is_unavailable_after_the_deadline(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ends, original = threading.Event(), getattr(os, call)

    def blocking(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            ends.wait()
        return original(*given)

    def not_in_memory(*_: Any) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, call, blocking)
    monkeypatch.setattr(os, "preadv", not_in_memory)
    with Reader(store.folder / "data", deadline=0.2) as reader:
        reason = (
            rf"{store.folder}/data/a.bin.*: unavailable: 1 attempts in 0.2 s; last: no answer within 0.2 s "
        )
        with monkeypatch.context() as hasty:
            hasty.setattr("sa1b.storage.retry._MIN_TIMEOUT", 0.2)
            with pytest.raises(UnavailableError, match=reason + "from the disk or the server of its mount"):
                reader.read_range("a.bin", 3, 10)
            with pytest.raises(UnavailableError, match=reason):
                reader.submit(Range("a.bin", 3, 10)).result()
        ends.set()
        assert reader.read_range("a.bin", 3, 10) == store.bytes()[3:13]


def test_a_range_in_memory_is_read_by_the_calling_thread(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    original, asked = os.pread, []

    def pread(*given: Any) -> bytes:
        threads.append(threading.current_thread())
        return original(*given)

    def preadv(descriptor: int, buffers: list[bytearray], place: int, flags: int) -> int:
        asked.append((len(buffers[0]), place, flags))
        if len(asked) == 2:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")  # as a mount of NFS
        return 1

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    with Reader(store.folder / "data") as reader:
        for _ in range(2):
            assert reader.read_range("a.bin", 3, 10) == store.bytes()[3:13]
    assert asked == [(1, 12, 8)] * 2
    assert [one is threading.current_thread() for one in threads] == [True, False]


def test_sizes_and_names_of_a_disk_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    for name in ("stat", "is_dir"):
        monkeypatch.setattr(Path, name, lambda *_: ends.wait())
    monkeypatch.setattr("sa1b.storage.retry._MIN_TIMEOUT", 0.2)
    with Reader(tmp_path, deadline=0.2) as reader:
        with pytest.raises(UnavailableError, match="a.bin: unavailable: 1 attempts in 0.2 s"):
            reader.size("a.bin")
        with pytest.raises(UnavailableError, match="views: unavailable: 1 attempts in 0.2 s"):
            reader.names("views")
        ends.set()


@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "named pipe"), (os.mkdir, "folder")])
def test_a_named_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    make(tmp_path / "a.bin")
    with Reader(tmp_path) as reader:
        with pytest.raises(
            StorageError, match=f"{tmp_path}/a.bin: is a {what}, not a file; restore the file"
        ):
            reader.read_range("a.bin", 0, 10)
        with pytest.raises(StorageError, match=f"is a {what}"):
            reader.submit(Range("a.bin", 0, 10))


def test_a_file_replaced_by_a_longer_one_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"short")
    with Reader(tmp_path) as reader:
        assert reader.read_range("a.bin", 0, 5) == b"short"
        (tmp_path / "temporary").write_bytes(b"a longer one")
        (tmp_path / "temporary").replace(path)
        assert reader.read_range("a.bin", 2, 10) == b"longer one"


def test_a_file_replaced_by_another_of_its_size_is_read_again_after_a_wrong_crc(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with Reader(tmp_path, retry_policy=RetryPolicy(sleep=lambda seconds: None)) as reader:
        assert reader.read_range("a.bin", 0, 3) == b"old"
        (tmp_path / "temporary").write_bytes(b"new")
        (tmp_path / "temporary").replace(path)
        assert reader.read_range("a.bin", 0, 3, int(google_crc32c.value(b"new"))) == b"new"


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    for i in range(600):
        (tmp_path / f"{i}.bin").write_bytes(i.to_bytes(4, "big"))
    gc.collect()  # files of earlier tests that nobody closed
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Reader(tmp_path) as reader:
        ranges = [Range(f"{i % 600}.bin", 0, 4) for i in range(1200)]
        assert [int.from_bytes(data, "big") for data in reader.read_ranges(ranges)] == [*range(600)] * 2
        assert len(list(Path("/proc/self/fd").iterdir())) - before < 300
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_file_system_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(protocol: str) -> type:
        raise ImportError("Install adlfs to access Azure")

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    with (
        Reader("az://data") as reader,
        pytest.raises(StorageError, match=r"az://data: Install adlfs .*; run pip install 'sa1b\[azure\]'"),
    ):
        reader.read_range("a.bin", 0, 1)


def test_an_unreadable_local_file_is_denied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    words = r"Permission denied\); change its permissions"
    with Reader(store.folder / "data") as reader, pytest.raises(DeniedError, match=words):
        reader.read_range("a.bin", 0, 1)


# ---- imports


def test_local_reads_import_no_file_system_of_fsspec(store: Store) -> None:
    script = (
        "import sys, sa1b.storage.reader as r, sa1b.storage.cache, sa1b.storage.atomic\n"
        f"r.Reader({str(store.folder / 'data')!r}).read_range('a.bin', 0, 10)\n"
        "r.Reader('s3://data')\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert not set(done.stdout.split()) & {"fsspec", "s3fs", "botocore", "aiohttp", "torch", "numpy"}


def test_a_folder_that_may_not_be_listed_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "views").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with Reader(tmp_path) as reader, pytest.raises(DeniedError, match=r"views: .*change its permissions"):
        reader.names("views")
