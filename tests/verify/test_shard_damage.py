"""Damage to shards and indexes: every shard of one dataset directory is damaged in another way, and one check
names all of it."""

import gzip
import io
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.directories import reshard
from tests.kit import run
from tests.shards.tiny_source import pairs, write_source
from tests.verify.checking import flip

PER_SHARD = 3


def in_jpg(tar, index, rows):
    flip(tar, rows["jpg_offset"][1] + 300)
    return {"jpg_damaged": 1, "tar_sha256": None}


def in_record(tar, index, rows):
    flip(tar, rows["masks_offset"][2] + rows["masks_bytes"][2] // 2)
    return {"masks_damaged": 2, "tar_sha256": None}


def in_header(tar, index, rows):
    flip(tar, rows["jpg_offset"][1] - 512 + 5)
    return {"bad_header": 1, "jpg_missing": 1, "tar_sha256": None}


def in_padding(tar, index, rows):
    flip(tar, rows["masks_offset"][0] + -(-rows["masks_bytes"][0] // 512) * 512 - 1)
    return {"padding": 0, "tar_sha256": None}


def in_end(tar, index, rows):
    flip(tar, tar.stat().st_size - 1)
    return {"bad_header": None, "zero_blocks": None, "tar_sha256": None}


def rewrite(tar, change):
    """The members again, with `change(list of (TarInfo, bytes))` applied."""
    with tarfile.open(tar) as old:
        members = [(member, old.extractfile(member).read()) for member in old]
    change(members)
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as new:
        for member, data in members:
            new.addfile(member, io.BytesIO(data))


def swapped(tar, index, rows):
    def swap(members):
        members[2], members[3] = members[3], members[2]

    rewrite(tar, swap)
    return {"member_order": 1, "jpg_misplaced": 1, "masks_misplaced": 1, "tar_sha256": None}


def stamped(tar, index, rows):
    def stamp(members):
        members[4][0].mtime = 1_700_000_000
        members[4][0].uname = "root"

    rewrite(tar, stamp)
    return {"header": 2, "tar_sha256": None}


def link(tar, index, rows):
    def add(members):
        members.append((tarfile.TarInfo("passwd"), b""))
        members[-1][0].type = tarfile.SYMTYPE

    rewrite(tar, add)
    return {"unexpected_member": None}


def twice(tar, index, rows):
    def add(members):
        members += members[4:6]

    rewrite(tar, add)
    return {"duplicate": 2, "member_order": 2}


def truncated(tar, index, rows):
    tar.write_bytes(tar.read_bytes()[: rows["jpg_offset"][1] + 100])
    return {"member_truncated": 1, "tar_bytes": None, "pair_missing": [1, 2]}


def cut_between(tar, index, rows):
    tar.write_bytes(tar.read_bytes()[: rows["jpg_offset"][2] - 512])
    return {"no_end_marker": 2, "tar_bytes": None, "pair_missing": 2}


def empty(tar, index, rows):
    tar.write_bytes(b"")
    return {"no_end_marker": 0, "tar_bytes": None, "pair_missing": [0, 1, 2]}


def removed(tar, index, rows):
    tar.unlink()
    return {"tar_missing": None}


def compressed(tar, index, rows):
    tar.write_bytes(gzip.compress(tar.read_bytes()))
    return {"tar_compressed": None}


def folder(tar, index, rows):
    tar.unlink()
    tar.mkdir()
    return {"tar_unreadable": None}


def index_flipped(tar, index, rows):
    flip(index, index.stat().st_size - 3)  # parquet's own magic
    return {"index_sha256": None, "index_unreadable": None}


def index_pages(tar, index, rows):
    column = pq.ParquetFile(index).metadata.row_group(0).column(16)  # a column of numbers per mask
    data = bytearray(index.read_bytes())
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    index.write_bytes(data)
    return {"index_sha256": None, "index_unreadable": [0, 1, 2]}


def index_garbage(tar, index, rows):
    index.write_bytes(np.random.default_rng(0).bytes(5000))
    return {"index_bytes": None, "index_unreadable": None}


def index_empty(tar, index, rows):
    index.write_bytes(b"")
    return {"index_bytes": None, "index_unreadable": None}


def index_removed(tar, index, rows):
    index.unlink()
    return {"index_missing": None}


def index_of_another_kind(tar, index, rows):
    pq.write_table(pa.table({"image_id": [1, 2, 3]}), index)
    return {"index_bytes": None, "index_unreadable": None}


def edit(index, **columns):
    """The same index with other values."""
    schema = pq.read_schema(index)
    rows = pq.read_table(index).to_pydict()
    for name, change in columns.items():
        change(rows[name])
    pq.write_table(pa.table(rows, schema=schema), index)


def index_number(tar, index, rows):
    edit(index, predicted_iou=lambda column: column[1].__setitem__(0, 0.5))
    return {"index_bytes": None, "index_numbers": 1}


def index_runs(tar, index, rows):
    def shift(column):
        column[2][0][0] += 1
        column[2][0][1] -= 1

    edit(index, runs=shift)
    return {"index_bytes": None, "index_runs": 2}


def index_place(tar, index, rows):
    edit(index, jpg_crc32c=lambda column: column.__setitem__(1, 7))
    return {"index_bytes": None, "index_row": 1}


def index_image_size(tar, index, rows):
    edit(index, image_width=lambda column: column.__setitem__(1, 7))
    return {"index_bytes": None, "index_image_size": 1}


def index_other_image(tar, index, rows):
    edit(index, image_id=lambda column: column.__setitem__(1, 7))
    return {"index_bytes": None, "index_row_missing": 1, "index_row_extra": 7}


DAMAGES = [
    in_jpg, in_record, in_header, in_padding, in_end, swapped, stamped, link, twice, truncated, cut_between,
    empty, removed, compressed, folder, index_flipped, index_pages, index_garbage, index_empty, index_removed,
    index_of_another_kind, index_number, index_runs, index_place, index_image_size, index_other_image,
]  # fmt: skip
WHOLE_SHARD = len(DAMAGES)  # the shard behind them stays as it is


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The report on a root in which every shard is damaged, and what it must say of each."""
    folder = tmp_path_factory.mktemp("damaged")
    ids = range(1000, 1000 + PER_SHARD * (len(DAMAGES) + 1))
    source = write_source(folder / "sa_000005.tar", pairs(ids, seed=5))
    root = folder / "root"
    reshard(root, source, images_per_shard=PER_SHARD)
    expected = []
    for number, damage in enumerate(DAMAGES):
        tar = root / f"sa1b-000005-{number:04d}.tar"
        index = tar.with_suffix(".parquet")
        rows = pq.read_table(index).to_pydict()
        expected.append((tar.name, rows, damage(tar, index, rows)))
    return run("verify", root, "--deep", "--workers", 2, "--json", code=1).json, expected


@pytest.mark.parametrize("number", range(len(DAMAGES)), ids=[damage.__name__ for damage in DAMAGES])
def test_damage_is_found_and_named(damaged, number):
    report, expected = damaged
    shard, rows, said = expected[number]
    found = [finding for finding in report["findings"] if finding["shard"] == shard]
    for kind, images in said.items():
        named = [finding["image_id"] for finding in found if finding["kind"] == kind]
        if images is None:
            assert named == [None], kind
        else:
            ids = {rows["image_id"][i] if i < PER_SHARD else i for i in np.atleast_1d(images)}
            assert ids <= set(named), kind
        for finding in found:
            assert finding["message"]
            assert re.search(
                r"sa1b (reshard|index) .*sa1b-000005-\d{4}|sa1b reshard .*sa_000005", finding["remedy"]
            )
            assert finding["offset"] is not None or finding["image_id"] is None


@pytest.mark.parametrize(
    "damage", [in_jpg, in_record, in_padding, stamped, index_number, index_runs, index_place]
)
def test_nothing_else_is_named(damaged, damage):
    report, expected = damaged
    shard, _, said = expected[DAMAGES.index(damage)]
    assert {finding["kind"] for finding in report["findings"] if finding["shard"] == shard} <= {
        *said,
        "tar_bytes",
    }


def test_the_check_goes_on_behind_damage(damaged):
    report, expected = damaged
    assert {finding["shard"] for finding in report["findings"]} == {shard for shard, _, _ in expected}
    assert report["shards"] == WHOLE_SHARD + 1
    assert report["exit_code"] == 1


def test_offsets_are_where_the_damage_is(damaged):
    report, expected = damaged
    shard, rows, _ = expected[DAMAGES.index(in_jpg)]
    (finding,) = [f for f in report["findings"] if f["shard"] == shard and f["kind"] == "jpg_damaged"]
    assert finding["offset"] == rows["jpg_offset"][1]
