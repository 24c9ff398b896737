"""A stream of a damaged dataset returns the right batch, logs the damaged sample, or raises an error."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import ManifestError, ShardError, TableError
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import COLUMNS, SampleTable, open_table
from sa1b.storage.errors import MissingError, StorageError
from sa1b.stream.damage_log import DamageLimitError, DamageLog
from sa1b.verify.verify import verify
from sa1b.views.view import write_view
from tests.shards import tiny
from tests.storage.service import Service
from tests.stream.recorded import FIRST_ID, RECIPE, digest, make_root, sequence

IMAGES, BATCH = 12, 3
SHARD = "sa1b-000001-0001.tar"  # the middle shard of three

examples = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("damage"), IMAGES)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A dataset directory that a test may damage."""
    return shutil.copytree(root, tmp_path / "root")


@pytest.fixture(scope="module")
def healthy(root: Path) -> list[str]:
    """The digests of one epoch, from the formula of the order."""
    return [digest(b) for b in sequence(root, IMAGES // BATCH, global_batch=BATCH, micro_batch=BATCH)]


@contextmanager
def flipped(path: Path, offset: int, bits: int) -> Iterator[None]:
    """The file with one byte changed."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[offset] ^ bits]))
    yield
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data[offset : offset + 1])
    assert path.read_bytes() == data


def epoch(root: Path, damage_log: Path, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The digests of one epoch's batches, and the lines of the damage_log."""
    damage_log.unlink(missing_ok=True)
    stream = sa1b.Stream(root, global_batch=BATCH, damage_log=damage_log, **{**RECIPE, **options})
    found = [digest(batch) for batch in islice(stream, IMAGES // BATCH)]
    lines = damage_log.read_text().splitlines() if damage_log.exists() else []
    return found, [json.loads(line) for line in lines]


def rows_at(table: SampleTable, shard: int, offset: int) -> list[int]:
    """The samples whose jpg or mask record holds this byte of a shard."""
    ends = table.offset + table.jpg_bytes
    masks = np.array([table.masks_offset(row) for row in range(len(table))])
    in_jpg = (table.offset <= offset) & (offset < ends)
    in_masks = (masks <= offset) & (offset < masks + table.masks_bytes)
    return np.flatnonzero((table.shard == shard) & (in_jpg | in_masks)).tolist()


def a_byte(file: Path, seed: int, first: int = 0) -> tuple[int, int]:
    """Offset (from `first` on) and bits of a change, from a seed."""
    draw = random.Random(seed)
    return draw.randrange(first, file.stat().st_size), draw.randrange(1, 256)


# Any byte


@settings(examples, max_examples=25)
@given(shard=st.integers(0, 2), seed=st.integers(0, 2**64))
def test_a_changed_byte_of_a_shard_is_in_the_damage_log_or_in_no_sample(
    root: Path, healthy: list[str], tmp_path_factory: pytest.TempPathFactory, shard: int, seed: int
) -> None:
    path = root / sa1b.open(root).shards[shard]
    table = open_table(root / table_name(root))
    offset, bits = a_byte(path, seed)
    with flipped(path, offset, bits):
        found, lines = epoch(root, tmp_path_factory.getbasetemp() / "damage_log")
    # Headers and padding are in no sample; `sa1b verify` finds damage there.
    owners = rows_at(table, shard, offset)
    assert {line["image_id"] for line in lines} == set(table.image_id[owners].tolist())
    for line in lines:
        (row,) = owners
        assert (line["shard"], line["offset"]) == (path.name, int(table.offset[row]))
    replaced = {line["position"] // BATCH for line in lines}
    assert [i for i in range(len(healthy)) if found[i] != healthy[i]] == sorted(replaced)


@settings(examples, max_examples=40)
@given(file=st.sampled_from(["samples", "dataset.json"]), seed=st.integers(0, 2**64))
def test_a_changed_byte_of_the_manifest_or_of_the_table_gives_no_other_batch(
    root: Path, healthy: list[str], tmp_path_factory: pytest.TempPathFactory, file: str, seed: int
) -> None:
    path = root / (table_name(root) if file == "samples" else file)
    offset, bits = a_byte(path, seed)
    with flipped(path, offset, bits):
        try:
            found, lines = epoch(root, tmp_path_factory.getbasetemp() / "damage_log")
        except Exception:
            return  # refused, at the start or at the first sample that it concerns
    replaced = {line["position"] // BATCH for line in lines}
    assert {i for i in range(len(healthy)) if found[i] != healthy[i]} <= replaced


@pytest.mark.parametrize("column", list(COLUMNS))
def test_a_damaged_column_of_the_table_is_refused_as_such_and_not_taken_for_damaged_samples(
    copy: Path, healthy: list[str], tmp_path: Path, column: str
) -> None:
    table = open_table(copy / table_name(copy))
    start = (copy / table_name(copy)).read_bytes().index(getattr(table, column).tobytes())
    width = COLUMNS[column].itemsize
    for byte in range(width):
        with (
            flipped(copy / table_name(copy), start + 7 * width + byte, 132),
            pytest.raises((TableError, ManifestError), match=r"samples-\w+\.bin"),
        ):
            epoch(copy, tmp_path / "damage_log")
    # A damaged table is no damage of the samples.
    assert not (tmp_path / "damage_log").exists()
    assert epoch(copy, tmp_path / "damage_log") == (healthy, [])


# Each part of a dataset


@pytest.mark.parametrize("part", ["jpg", "masks"])
def test_a_changed_byte_of_a_sample_is_named_with_shard_offset_and_image(
    copy: Path, healthy: list[str], tmp_path: Path, part: str
) -> None:
    table = open_table(copy / table_name(copy))
    row = int(np.flatnonzero(table.shard == 1)[2])
    offset = int(table.offset[row]) if part == "jpg" else table.masks_offset(row)
    with flipped(copy / SHARD, offset + 40, 1):
        found, lines = epoch(copy, tmp_path / "damage_log")
        for loader in (
            sa1b.Loader(stream_of(copy, tmp_path / "other"), quiet=True),
            DataLoader(stream_of(copy, tmp_path / "other"), batch_size=None, num_workers=2),
        ):
            assert [digest(batch) for batch in islice(loader, len(found))] == found
    assert found != healthy
    (line,) = lines
    assert (line["shard"], line["offset"]) == (SHARD, int(table.offset[row]))
    assert line["image_id"] == int(table.image_id[row])
    assert f"sa_{line['image_id']}.{part}" in line["reason"]


def stream_of(root: Path, damage_log: Path) -> sa1b.Stream:
    return sa1b.Stream(root, global_batch=BATCH, damage_log=damage_log, **RECIPE)


def test_a_changed_byte_of_a_shard_index_touches_no_sample_and_verify_names_it(
    copy: Path, healthy: list[str], tmp_path: Path
) -> None:
    index = copy / SHARD.replace(".tar", ".parquet")
    for seed in range(8):
        offset, bits = a_byte(index, seed)
        with flipped(index, offset, bits):
            assert epoch(copy, tmp_path / "damage_log") == (healthy, [])
            report = verify(copy, workers=0, quiet=True)
            assert {finding.file for finding in report.findings} == {index.name}
    assert verify(copy, workers=0, quiet=True).findings == []


def test_a_cut_shard_costs_the_samples_behind_the_cut_and_no_other(
    copy: Path, healthy: list[str], tmp_path: Path
) -> None:
    """This includes damage that other readers of tars do not detect: in the header of a mask record."""
    table = open_table(copy / table_name(copy))
    inside = np.flatnonzero(table.shard == 1)
    middle = int(inside[np.argsort(table.offset[inside])[2]])
    for cut in (table.masks_offset(middle) - 512, table.masks_offset(middle) + 10, int(table.offset[middle])):
        shutil.copyfile(copy / SHARD, tmp_path / "whole")
        with (copy / SHARD).open("r+b") as file:
            file.truncate(cut)
        found, lines = epoch(copy, tmp_path / "damage_log")
        lost = inside[table.offset[inside] >= table.offset[middle]]
        assert {line["image_id"] for line in lines} == set(table.image_id[lost].tolist())
        assert {line["shard"] for line in lines} == {SHARD}
        replaced = {line["position"] // BATCH for line in lines}
        assert [i for i in range(len(healthy)) if found[i] != healthy[i]] == sorted(replaced)
        shutil.copyfile(tmp_path / "whole", copy / SHARD)


@pytest.mark.parametrize("protocol", ["http", "s3"])
@pytest.mark.parametrize("size", [0, 1024])
def test_an_object_that_is_shorter_than_listed_stops_the_stream(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, size: int
) -> None:
    """Its upload was incomplete: the store is damaged, not single samples. A file is damaged sample by sample."""
    with (copy / SHARD).open("r+b") as file:
        file.truncate(size)
    (copy.parent / "bucket").mkdir()
    copy.rename(copy.parent / "bucket" / "root")
    with Service("range_server", copy.parent) as server:
        root = f"{server.url}/bucket/root" if protocol == "http" else "s3://bucket/root"
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(StorageError, match=f"{SHARD}: {size:,} bytes, .* listed in dataset.json"):
            epoch(root, tmp_path / "damage_log")
    assert not (tmp_path / "damage_log").exists()


def test_a_missing_shard_stops_the_stream_with_its_name_and_replaces_nothing(
    copy: Path, tmp_path: Path
) -> None:
    (copy / SHARD).unlink()
    with pytest.raises(MissingError, match=SHARD) as error:
        epoch(copy, tmp_path / "damage_log")
    assert any("at position" in note for note in error.value.__notes__)
    assert not (tmp_path / "damage_log").exists()


def test_a_shard_in_place_of_another_gives_none_of_its_samples(copy: Path, tmp_path: Path) -> None:
    """A complete and readable file with other bytes than recorded."""
    dataset = sa1b.open(copy)
    shutil.copyfile(copy / SHARD.replace("0001.tar", "0000.tar"), copy / SHARD)
    for row in np.flatnonzero(dataset.table.shard == 1).tolist():
        with pytest.raises(ShardError, match=f"sa_{dataset.table.image_id[row]}.*{SHARD}"):
            dataset[row]


@pytest.mark.parametrize("read", ["stream", "loader"])
def test_a_damaged_sample_of_an_evaluation_is_black_not_valid_and_logged_once(
    copy: Path, tmp_path: Path, read: str
) -> None:
    shutil.copyfile(copy / SHARD.replace("0001.tar", "0000.tar"), copy / SHARD)
    table = sa1b.open(copy).table
    damaged = set(table.image_id[table.shard == 1].tolist())
    seen: dict[int, bool] = {}
    for _ in range(2):  # evaluated twice
        stream = sa1b.Stream(
            copy, global_batch=5, order="sequential", damage_log=tmp_path / "damage_log", **RECIPE
        )
        for batch in stream if read == "stream" else sa1b.Loader(stream, quiet=True):
            for i, position in enumerate(batch.positions.tolist()):
                image_id = int(batch.ids[i])
                filled_up = position >= IMAGES
                assert image_id == table.image_id[min(position, IMAGES - 1)]  # no substitute
                assert bool(batch.valid[i]) == (not filled_up and image_id not in damaged)
                if image_id in damaged:
                    assert not batch.images[i].any()
                    assert not (batch.masks.image == i).any()
                seen[image_id] = image_id in damaged
    assert len(seen) == IMAGES
    assert 0 < sum(seen.values()) < IMAGES
    lines = [json.loads(line) for line in (tmp_path / "damage_log").read_text().splitlines()]
    assert sorted(line["image_id"] for line in lines) == sorted(damaged)
    assert {line["shard"] for line in lines} == {SHARD}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": "sa1b-shards-9"}'])
def test_a_manifest_that_is_none_is_refused_by_name(copy: Path, tmp_path: Path, content: bytes) -> None:
    (copy / "dataset.json").write_bytes(content)
    with pytest.raises(ManifestError, match="dataset.json"):
        epoch(copy, tmp_path / "damage_log")


@pytest.mark.parametrize("size", [0, 50, 128, 500, -1])
def test_a_cut_table_is_refused_by_name(copy: Path, tmp_path: Path, size: int) -> None:
    data = (copy / table_name(copy)).read_bytes()
    (copy / table_name(copy)).write_bytes(data[:size])
    with pytest.raises((TableError, ManifestError), match=r"samples-\w+\.bin"):
        epoch(copy, tmp_path / "damage_log")


def test_every_changed_byte_of_a_views_rows_is_refused(copy: Path, tmp_path: Path) -> None:
    view = write_view(
        copy, open_table(copy / table_name(copy)), np.arange(1, 10, dtype=np.uint32), name="nine"
    )
    rows = copy / "views" / f"{view.digest}.rows"
    for offset in range(rows.stat().st_size):
        with flipped(rows, offset, 1 << offset % 8), pytest.raises(ManifestError, match=rows.name):
            epoch(copy, tmp_path / "damage_log", view="nine")
    rows.write_bytes(rows.read_bytes()[:-4])
    with pytest.raises(ManifestError, match=rows.name):
        epoch(copy, tmp_path / "damage_log", view="nine")


# Complete files that are not images


def test_half_a_picture_is_never_trained_on(tmp_path: Path) -> None:
    """A JPEG that was truncated in the source matches its checksum; a lenient decoder would fill the rest with grey."""
    members = tiny.pairs(range(FIRST_ID, FIRST_ID + 4), None)
    name, jpeg = members[2]
    members[2] = name, jpeg[: len(jpeg) // 2] + b"\xff\xd9"
    root = tmp_path / "root"
    tiny.ingest_tar(tiny.write_tar(tmp_path / "sa_000001.tar", members), root)
    stream = sa1b.Stream(root, global_batch=4, damage_log=tmp_path / "damage_log", **RECIPE)
    (batch,) = islice(stream, 1)
    (line,) = [json.loads(text) for text in (tmp_path / "damage_log").read_text().splitlines()]
    assert line["image_id"] == FIRST_ID + 1
    assert "does not decode" in line["reason"]
    assert FIRST_ID + 1 not in batch.ids.tolist()


# A damage log that cannot be written


def unwritable(path: Any, *arguments: Any, **more: Any) -> int:
    raise OSError(30, "Read-only file system", str(path))


@pytest.mark.parametrize("read", ["stream", "loader"])
def test_damage_in_a_read_only_folder_is_printed_and_reading_goes_on(
    copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, read: str
) -> None:
    """The user root can write into any folder, so the test replaces the log's folder by a file."""
    table = open_table(copy / table_name(copy))
    shard = copy / SHARD
    data = bytearray(shard.read_bytes())
    for row in np.flatnonzero(table.shard == 1)[:2].tolist():
        data[table.offset[row] + 40] ^= 1
    shard.write_bytes(data)
    expected, lines = epoch(copy, tmp_path / "damage_log")
    assert len(lines) >= 2
    (tmp_path / "file").touch()
    stream = stream_of(copy, tmp_path / "file" / "damage_log")
    found = list(stream if read == "stream" else sa1b.Loader(stream, quiet=True))
    assert [digest(batch) for batch in found] == expected
    printed = caplog.messages
    (said,) = [line for line in printed if "cannot be written" in line]
    assert f"{tmp_path / 'file' / 'damage_log'} (" in said
    assert "damage_log=" in said
    listed = [line.removeprefix("sa1b: damaged sample ") for line in printed if "damaged sample {" in line]
    by_position = sorted(map(json.loads, listed), key=lambda line: line["position"])
    assert by_position == sorted(lines, key=lambda line: line["position"])
    assert stream.damage_log.entries() == list(map(json.loads, listed))


def test_damage_that_is_not_written_counts_towards_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sa1b.storage.atomic.os.open", unwritable)
    log = DamageLog(tmp_path / "damage_log", 0)
    for i in range(10):
        log.damaged(shard="s", offset=i, image_id=i, position=i, read=100, reason="r")
    with pytest.raises(
        DamageLimitError, match="rank 0: 11 damaged samples.*listed in the log of this process"
    ):
        log.damaged(shard="s", offset=1, image_id=99, position=11, read=100, reason="r")


def test_a_line_that_a_full_disk_cut_off_is_logged_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = DamageLog(tmp_path / "damaged.jsonl", rank=0)
    line = {"shard": "a.tar", "offset": 0, "position": 0, "read": 0, "reason": "crc"}
    log.damaged(image_id=1, **line)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
    log.damaged(image_id=2, **line)
    assert '"image_id": 2' in caplog.text
    assert [entry["image_id"] for entry in log.entries()] == [1, 2]
    assert [entry["image_id"] for entry in DamageLog(log.path, rank=0).entries()] == [1]


@pytest.mark.parametrize("name", ["sa1b-damaged.jsonl", "mine.jsonl"])
def test_lines_of_other_runs_and_programs_are_not_counted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also of a file that the user names, and in a worker process that begins later."""
    monkeypatch.chdir(tmp_path)
    log = tmp_path / name
    log.write_bytes(b'{"rank": 0, "image_id": 1}\n' * 50 + b"hello\n[]\n7\n\x00\xff\n{")  # no end of the line
    stream = sa1b.Stream(root, global_batch=2, damage_log=name)
    for i in range(10):
        (stream if i < 5 else pickle.loads(pickle.dumps(stream))).damage_log.damaged(
            shard="s", offset=1, image_id=1, position=i, read=4, reason="r"
        )
    with pytest.raises(DamageLimitError, match="11 damaged samples"):
        pickle.loads(pickle.dumps(stream)).damage_log.damaged(
            shard="s", offset=1, image_id=2, position=3, read=4, reason="r"
        )


def test_a_log_that_is_a_pipe_or_a_folder_blocks_nothing(root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for path in (tmp_path / "pipe", tmp_path):
        DamageLog(path, 0).damaged(shard="s", offset=1, image_id=2, position=3, read=4, reason="r")
    os.close(reader)
