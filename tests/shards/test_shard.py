"""A shard: what its documents say about it, and that no changed byte of the tar's structure passes."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sa1b
from sa1b.errors import ShardError
from sa1b.shards.shard import seal
from tests.kit import run
from tests.shards import tiny
from tests.shards.tiny_source import make_root, pairs, write_source

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "keep_json"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shard")
    source = write_source(folder / "sa_000001.tar", pairs(range(3)))
    return make_root(folder / "root", [source], {"keep_json": request.param}) / "sa1b-000001-0000.tar"


@pytest.fixture
def shard(written: Path, tmp_path: Path) -> Path:
    for path in (written, written.with_suffix(".parquet")):
        shutil.copy(path, tmp_path)
    return tmp_path / written.name


def test_the_task_file_has_digests_and_the_largest_quantities_of_an_image(written: Path) -> None:
    task = json.loads((written.parent / "tasks/sa_000001.json").read_text())
    samples = list(sa1b.open(written.parent))
    every = [sample.annotations for sample in samples]
    (entry,) = task["shards"]
    for path, prefix in ((written, ""), (written.with_suffix(".parquet"), "index_")):
        data = path.read_bytes()
        assert entry[f"{prefix}bytes"] == len(data)
        assert entry[f"{prefix}sha256"] == hashlib.sha256(data).hexdigest()
    assert (entry["images"], entry["masks"]) == (len(samples), sum(map(len, every)))
    assert task["largest"] == {
        "masks": max(map(len, every)),
        "runs": max(len(one.runs().runs) for one in every),
        "rle_bytes": max(len(one.rle) for one in every),
        "jpg_bytes": max(len(sample.jpeg) for sample in samples),
        "masks_bytes": max(pq.read_table(written.with_suffix(".parquet"))["masks_bytes"].to_pylist()),
    }


CHANGES: dict[str, Callable[[Members], Any]] = {
    "no_jpg": lambda members: members.pop(0),
    "no_masks": lambda members: members.pop(1),
    "no_last_masks": lambda members: members.remove([one for one in members if "masks" in one[0]][-1]),
    "order": lambda members: members.insert(0, members.pop(1)),
    "jpg_alone_at_the_end": lambda members: members.append(members[0]),
    "jpg_twice": lambda members: members.insert(1, members[0]),
    "foreign": lambda members: members.append(("notes.txt", b"x")),
    "masks_of_another": lambda members: members.insert(1, members.pop(3)),
    "last_of_another": lambda members: members.__setitem__(slice(2, 6), [members[i] for i in (5, 3, 4, 2)]),
    "records_exchanged": lambda members: members.__setitem__(1, (members[1][0], members[3][1])),
}


def rewritten(shard: Path, change: Callable[[Members], Any]) -> bytes:
    """The shard with other members."""
    with tarfile.open(shard) as old:
        members = [(one.name, old.extractfile(one).read()) for one in old]
    change(members)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            new.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_a_shard_of_another_structure_gets_no_index(written: Path, tmp_path: Path) -> None:
    """A changed byte of headers, padding or the end of the tar, a cut, more bytes, or other members."""
    data, structure = written.read_bytes(), set(range(written.stat().st_size))
    with tarfile.open(written) as tar:
        for member in tar:
            structure -= set(range(member.offset_data, member.offset_data + member.size))
    places = sorted(structure)
    cuts = (0, 1, 511, 512, 700, -1, -512, -1024, -10240)
    wrong = [
        *(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] for at in places[:: len(places) // 40]),
        *(data[:length] for length in cuts),
        data + b"\0",
        tiny.checksummed(data[:136] + b"1" + data[137:512]) + data[512:],  # another time
        *(rewritten(written, change) for change in CHANGES.values()),
    ]
    assert rewritten(written, len) == data
    names = [f"sa1b-000001-{number:04d}.tar" for number in range(len(wrong) + 1)]
    for name, content in zip(names, [data, *wrong], strict=True):
        (tmp_path / name).write_bytes(content)
    done = run("index", *(tmp_path / name for name in names), "--json", code=1)
    assert sorted(done.json["failed"]) == names[1:]
    (index,) = tmp_path.glob("*.parquet")
    assert index.read_bytes() == written.with_suffix(".parquet").read_bytes()


def test_sealing_finds_a_byte_that_does_not_read_back(shard: Path) -> None:
    row = pq.read_table(shard.with_suffix(".parquet")).to_pylist()[1]
    data = shard.read_bytes()
    for ending in ("jpg", "masks"):
        at = row[f"{ending}_offset"] + row[f"{ending}_bytes"] // 2
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ShardError, match=r"image \d differs from the index in \w+_crc32c.*check disk"):
            seal(shard)
    shard.write_bytes(data)
    seal(shard)


def test_sealing_finds_an_index_that_lacks_an_image_or_has_one_more(shard: Path) -> None:
    index = shard.with_suffix(".parquet")
    rows = pq.read_table(index)
    for other in (rows.slice(0, 2), pa.concat_tables([rows, rows.slice(0, 1)])):
        pq.write_table(other, index)
        with pytest.raises(ShardError, match="is in the (tar|index) and not in the (index|tar)"):
            seal(shard)
