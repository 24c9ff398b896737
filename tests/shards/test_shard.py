"""The walk over a shard: what it yields, and that no changed byte of the tar's structure passes."""

import hashlib
import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sa1b.errors import ShardError
from sa1b.shards.documents import Options
from sa1b.shards.index_file import index_path
from sa1b.shards.manifest import LARGEST, read_tasks
from sa1b.shards.shard import Largest, index_row, seal, tar_size, walk_shard
from tests.shards.tiny_source import make_root, pairs, write_source

SHARD = "sa1b-000001-0000.tar"


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "keep_json"])
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    source = write_source(folder / "sa_000001.tar", pairs(range(3)))
    return make_root(folder / "root", [source], Options(keep_json=request.param)) / SHARD


@pytest.fixture
def shard(written, tmp_path):
    for path in (written, index_path(written)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / SHARD


def walk(shard):
    return list(walk_shard(shard, hashlib.sha256()))


def test_images_come_with_their_places_and_checksums(written):
    digest, counted = hashlib.sha256(), []
    images = list(walk_shard(written, digest, counted.append))
    data = written.read_bytes()
    assert digest.digest() == hashlib.sha256(data).digest()
    assert sum(counted) == len(data)
    last = images[-1].json or images[-1].masks
    end = last.offset + len(last.data)
    assert tar_size(end + -end % 512) == len(data)
    rows = pq.read_table(index_path(written)).to_pylist()
    for row, image in zip(rows, images, strict=True):
        assert image.image_id == row["image_id"]
        for ending, member in image.members().items():
            found = (member.offset, len(member.data), member.crc32c)
            assert found == tuple(row[f"{ending}_{what}"] for what in ("offset", "bytes", "crc32c"))
            assert data[member.offset :][: len(member.data)] == member.data
        made = index_row(written, image)
        assert (made.image_width, made.annotations.image_id) == (row["image_width"], row["image_id"])


def test_largest_is_that_of_the_task_file(written):
    largest = Largest()
    for image in walk(written):
        largest.see(index_row(written, image))
    assert largest.values == read_tasks(written.parent)["sa_000001"].largest
    assert list(largest.values) == list(LARGEST)


def test_every_byte_that_is_no_content_is_checked(shard):
    """Any change of headers, padding or the end of the tar stops the walk."""
    data = shard.read_bytes()
    content = [False] * len(data)
    for image in walk(shard):
        for member in (image.jpg, image.masks, image.json):
            if member is not None:
                content[member.offset : member.offset + len(member.data)] = [True] * len(member.data)
    structure = [offset for offset, inside in enumerate(content) if not inside]
    for offset in structure[:: max(1, len(structure) // 400)]:
        shard.write_bytes(data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        with pytest.raises(ShardError, match=f"{SHARD}, offset"):
            walk(shard)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 700, -1, -512, -1024, -10240])
def test_a_cut_is_found(shard, length):
    data = shard.read_bytes()
    shard.write_bytes(data[:length])
    with pytest.raises(ShardError, match=", offset"):
        walk(shard)


def test_bytes_after_the_end_are_found(shard):
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(ShardError, match="does not end after"):
        walk(shard)


def rewrite(shard, change):
    with tarfile.open(shard) as old:
        members = [(member.name, old.extractfile(member).read()) for member in old]
    change(members)
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as new:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


@pytest.fixture
def plain(tmp_path):
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(3)))
    return make_root(tmp_path / "root", [source], Options()) / SHARD


CHANGES = {
    "no_jpg": lambda members: members.pop(0),
    "no_masks": lambda members: members.pop(1),
    "no_last": lambda members: members.pop(),
    "order": lambda members: members.insert(0, members.pop(1)),
    "jpg_alone_at_the_end": lambda members: members.append(members[0]),
    "jpg_twice": lambda members: members.insert(1, members[0]),
    "foreign": lambda members: members.append(("notes.txt", b"x")),
    "masks_of_another": lambda members: members.insert(1, members.pop(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_members_that_are_no_images_are_found(plain, change):
    rewrite(plain, CHANGES[change])
    with pytest.raises(ShardError, match=", offset"):
        walk(plain)


# Sealing


def test_sealing_returns_what_was_recorded(written):
    (info,) = read_tasks(written.parent)["sa_000001"].shards
    assert seal(written) == info


def test_sealing_finds_a_byte_that_does_not_read_back(shard):
    image = walk(shard)[1]
    for member in image.members().values():
        data = shard.read_bytes()
        at = member.offset + len(member.data) // 2
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ShardError, match=r"image \d differs from the index in \w+_crc32c.*check disk"):
            seal(shard)
        shard.write_bytes(data)
    seal(shard)


def test_sealing_finds_an_index_that_lacks_an_image_or_has_one_more(shard):
    index = index_path(shard)
    rows = pq.read_table(index)
    for other in (rows.slice(0, 2), pa.concat_tables([rows, rows.slice(0, 1)])):
        pq.write_table(other, index)
        with pytest.raises(ShardError, match="is in the (tar|index) and not in the (index|tar)"):
            seal(shard)
