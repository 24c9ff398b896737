"""The sample table: 36 bytes a sample, sorted, mapped, checked."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.errors import TableError
from sa1b.shards import sample_table as table


def columns(ids: list[int]) -> dict[str, np.ndarray]:
    count = len(ids)
    draw = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {"image_id": np.array(ids, np.uint64)}
    for name, dtype in table.COLUMNS.items():
        found.setdefault(name, draw.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True))
    return found


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 2**64 - 1), max_size=40, unique=True))
def test_round_trip_sorts_by_id(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("table") / "samples.bin"
    given_columns = columns(ids)
    path.write_bytes(table.encode(given_columns))
    assert path.stat().st_size - 128 <= 36 * len(ids) + 7 * 7
    found = table.open_table(path, check=True)
    order = np.argsort(given_columns["image_id"])
    for name in table.COLUMNS:
        assert (getattr(found, name) == given_columns[name][order]).all()


def test_the_digests_name_the_set_of_images_and_the_content() -> None:
    one, other = columns([1, 2, 3]), columns([3, 1, 2])
    a, b = table.digests(table.encode(one)), table.digests(table.encode(other))
    assert a["ids_sha256"] == b["ids_sha256"]
    assert a["columns_sha256"] != b["columns_sha256"]


def test_an_id_that_stands_twice_is_named() -> None:
    with pytest.raises(ValueError, match="image id 7 occurs twice"):
        table.encode(columns([3, 7, 7]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "empty file"),
        (lambda data: data[:100], "not a sample table"),
        (lambda data: b"x" + data[1:], "not a sample table"),
        (lambda data: data[:-1], "bytes, .* expected for 3 samples"),
        (lambda data: data + b"\0", "bytes, .* expected for 3 samples"),
        (lambda data: data[:8] + b"\x09" + data[9:], "version 9"),
        (lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:], "do not match their digest"),
    ],
)
def test_damage_is_named_with_the_file(damage, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.bin"
    path.write_bytes(damage(table.encode(columns([1, 2, 3]))))
    with pytest.raises(TableError, match=message) as error:
        table.open_table(path, check=True)
    assert str(path) in str(error.value)


def test_masks_offset_is_where_tar_puts_it() -> None:
    arrays = {name: np.zeros(3, dtype) for name, dtype in table.COLUMNS.items()}
    arrays["offset"][:] = 512
    arrays["jpg_bytes"][:] = [1, 512, 513]
    found = table.SampleTable(**arrays, ids_digest="", digest="")
    assert [found.masks_offset(i) for i in range(3)] == [1536, 1536, 2048]
