"""Objects that are replaced while they are read: an error that names them, never the bytes of two objects."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from sa1b.storage.errors import DamageError, MissingError, ReplacedError
from sa1b.storage.reader import Range, Reader
from tests.storage.conftest import UNHURRIED, Store
from tests.storage.service import Service

SIZE = 100_000


@pytest.fixture(params=["s3://data", "s3://carefree", "http"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Reader, Path]]:
    """A reader, and the file of its object; the bucket `carefree` ignores If-Match."""
    root = request.param
    path = tmp_path / ("carefree" if root.endswith("carefree") else "data") / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"a" * SIZE)
    with Service("range_server", tmp_path) as service:
        options = {"key": "KEY", "secret": "secret", "endpoint_url": service.url}
        root, options = (f"{service.url}/data", {}) if root == "http" else (root, options)
        with Reader(root, options=options, retry_policy=UNHURRIED) as reader:
            yield reader, path


def replace(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


def test_a_replaced_object_is_an_error_that_names_it(written: tuple[Reader, Path]) -> None:
    reader, path = written
    assert reader.read_range("a.bin", 0, 10) == b"a" * 10
    replace(path, b"b" * SIZE)
    for _ in range(2):
        with pytest.raises(
            ReplacedError, match=r"/a\.bin: replaced since its first read .*open the dataset again"
        ) as e:
            reader.read_range("a.bin", 10, 10)
        assert e.value.url.endswith("/a.bin")
    with pytest.raises(ReplacedError):
        reader.size("a.bin")
    assert reader.counters().faults == 0
    assert isinstance(pickle.loads(pickle.dumps(e.value)), ReplacedError)


def test_a_shorter_object_is_replaced_not_damaged(written: tuple[Reader, Path]) -> None:
    reader, path = written
    reader.read_range("a.bin", 0, 10)
    replace(path, b"b" * 50)
    with pytest.raises(ReplacedError):
        reader.read_range("a.bin", 90, 10)
    with pytest.raises(ReplacedError):
        reader.read_range("a.bin", 30, 10)


def test_an_object_that_is_removed_is_missing(written: tuple[Reader, Path]) -> None:
    reader, path = written
    reader.read_range("a.bin", 0, 10)
    path.unlink()
    with pytest.raises(MissingError, match="a.bin"):
        reader.read_range("a.bin", 10, 10)


def test_ranges_in_flight_never_mix_two_objects(written: tuple[Reader, Path]) -> None:
    reader, path = written
    reads = reader.read_ranges(Range("a.bin", 100 * i, 100) for i in range(1000))
    found = [next(reads) for _ in range(100)]
    replace(path, b"b" * SIZE)
    with pytest.raises(ReplacedError):
        found.extend(reads)
    assert set(found) == {b"a" * 100}


def test_a_small_object_is_read_again_whole_after_it_was_replaced(written: tuple[Reader, Path]) -> None:
    reader, path = written
    for letter in (b"a", b"b", b"c"):
        replace(path, letter * SIZE)
        assert reader.read_whole("a.bin", SIZE) == letter * SIZE


def test_a_small_object_that_is_replaced_while_it_is_read_is_one_of_both(
    written: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = written
    size = Reader.size

    def replacing(self: Reader, name: str) -> int:
        found = size(self, name)
        if path.read_bytes()[:1] == b"a":
            replace(path, b"b" * (SIZE + 1))
        return found

    monkeypatch.setattr(Reader, "size", replacing)
    assert reader.read_whole("a.bin", 2 * SIZE) == b"b" * (SIZE + 1)


def test_a_new_reader_takes_the_new_object(written: tuple[Reader, Path]) -> None:
    reader, path = written
    reader.read_range("a.bin", 0, 10)
    replace(path, b"b" * SIZE)
    reader.close()
    assert reader.read_range("a.bin", 0, 10) == b"b" * 10


def test_a_store_that_does_not_accept_its_own_etag_is_read(store: Store) -> None:
    ranges = store.ranges(20)
    with Reader("s3://strange", options=store.signed()) as reader:
        assert [reader.read_range(r.name, r.start, r.length, r.crc) for r in ranges] == store.slices(ranges)
        assert reader.counters().faults == 0
        with pytest.raises(DamageError, match="ends at byte"):
            reader.read_range("a.bin", 4_000_000, 10)
