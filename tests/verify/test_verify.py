import gzip
import io
import json
import multiprocessing
import shutil
import tarfile
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sa1b.errors import LockedError, ManifestError
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.index import schema
from sa1b.shards.manifest import Options, table_name
from sa1b.shards.sample_table import COLUMNS
from sa1b.storage.publish import lock
from sa1b.verify.verify import verify
from tests.shards.tiny_source import ROOTS, make_root, pairs, two_sources, write_source

PER_SHARD = 3


def check(root, **options):
    """In this process: faster, and what a process of its own runs too."""
    return verify(root, workers=0, quiet=True, **options)


def kinds(report):
    return {finding.kind for finding in report.findings}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return two_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("root"), sources, ROOTS["plain"])


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root")


# Clean


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("deep", [False, True])
def test_what_reshard_wrote_is_clean(name, deep, sources, tmp_path):
    root = make_root(tmp_path, sources, ROOTS[name])
    report = check(root, deep=deep)
    assert report.findings == []
    assert report.notes == []
    assert report.exit_code() == 0
    assert (report.shards, report.images) == (5, 19)
    dataset = manifest.read_dataset(root)
    assert report.masks == dataset["totals"]["masks"]
    assert report.bytes == dataset["totals"]["shard_bytes"] + dataset["totals"]["index_bytes"]


def test_an_image_that_was_odd_in_the_source_is_no_damage(whole):
    doubtful = manifest.read_tasks(whole)["sa_000001"].counts["doubtful"]
    assert doubtful["area"] == 1
    assert check(whole, deep=True).findings == []


def test_shards_that_nothing_claims_are_a_note(root):
    shutil.copy(root / "sa1b-000001-0000.tar", root / "sa1b-000009-0000.tar")
    (root / ".sa1b-000009-0000.parquet.partial").write_bytes(b"")
    report = check(root)
    assert report.exit_code() == 0
    assert "sa1b-000009-0000.tar" in report.notes[0]
    assert ".sa1b-000009-0000.parquet.partial" in report.notes[1]


# Damage to shards: every shard of one root is damaged in another way, and one check names all


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


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
    rows = pq.read_table(index).to_pydict()
    for name, change in columns.items():
        change(rows[name])
    pq.write_table(pa.table(rows, schema=schema(with_runs="runs" in rows)), index)


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
    root = make_root(folder / "root", [source], Options(images_per_shard=PER_SHARD))
    expected = []
    for number, damage in enumerate(DAMAGES):
        tar = root / f"sa1b-000005-{number:04d}.tar"
        index = tar.with_suffix(".parquet")
        rows = pq.read_table(index).to_pydict()
        expected.append((tar.name, rows, damage(tar, index, rows)))
    return verify(root, deep=True, workers=2, quiet=True), expected


@pytest.mark.parametrize("number", range(len(DAMAGES)), ids=[damage.__name__ for damage in DAMAGES])
def test_damage_is_found_and_named(damaged, number):
    report, expected = damaged
    shard, rows, said = expected[number]
    found = [finding for finding in report.findings if finding.shard == shard]
    for kind, images in said.items():
        named = [finding.image_id for finding in found if finding.kind == kind]
        if images is None:
            assert named == [None], kind
        else:
            ids = {rows["image_id"][i] if i < PER_SHARD else i for i in np.atleast_1d(images)}
            assert ids <= set(named), kind
        for finding in found:
            assert finding.message
            assert "tools/" in finding.remedy
            assert finding.offset is not None or finding.image_id is None


@pytest.mark.parametrize(
    "damage", [in_jpg, in_record, in_padding, stamped, index_number, index_runs, index_place]
)
def test_nothing_else_is_named(damaged, damage):
    report, expected = damaged
    shard, _, said = expected[DAMAGES.index(damage)]
    assert {finding.kind for finding in report.findings if finding.shard == shard} <= {*said, "tar_bytes"}


def test_the_check_goes_on_behind_damage(damaged):
    report, expected = damaged
    assert {finding.shard for finding in report.findings} == {shard for shard, _, _ in expected}
    assert report.shards == WHOLE_SHARD + 1
    assert report.exit_code() == 1


def test_offsets_are_where_the_damage_is(damaged):
    report, expected = damaged
    shard, rows, _ = expected[DAMAGES.index(in_jpg)]
    (finding,) = [f for f in report.findings if f.shard == shard and f.kind == "jpg_damaged"]
    assert finding.offset == rows["jpg_offset"][1]


def test_report_reads_as_text_and_as_json(damaged):
    report, _ = damaged
    text = report.table()
    assert "What to do:" in text
    assert "jpg_damaged" in text
    assert text.endswith(f"DAMAGED: {report.root}")
    document = json.loads(json.dumps(report.document()))
    assert document["exit_code"] == 1
    assert len(document["findings"]) == len(report.findings)


def test_numbers_that_were_changed_in_both_places_are_held_against_the_mask(root):
    """The record is the origin of all numbers; only deep sees that they do not fit its masks."""
    task = manifest.read_tasks(root)["sa_000001"]
    task.counts["doubtful"]["area"] = 0
    manifest.write_task(root, task)
    write_dataset(root, manifest.read_tasks(root))
    assert check(root).findings == []
    (finding,) = check(root, deep=True).findings
    assert (finding.kind, finding.image_id) == ("odd_area", 203)


def test_an_undecodable_jpeg_is_found_deep(tmp_path):
    content = pairs(range(1, 4))
    jpg, text = content[2]
    content[2] = (jpg[: len(jpg) // 2] + b"\xff\xd9", text)  # whole by its markers
    source = write_source(tmp_path / "sa_000001.tar", content)
    root = make_root(tmp_path / "root", [source], Options())
    assert check(root).findings == []
    (finding,) = check(root, deep=True).findings
    assert (finding.kind, finding.image_id) == ("jpg_undecodable", 2)


def test_a_kept_annotation_file_is_held_against_the_record(sources, tmp_path):
    root = make_root(tmp_path, sources, ROOTS["keep_json"])
    tar = root / "sa1b-000002-0000.tar"
    with tarfile.open(tar) as members:
        member = members.getmember("sa_301.json")
    data = bytearray(tar.read_bytes())
    place = data.index(b'"area": ', member.offset_data) + 8
    data[place] = ord("1") if data[place] != ord("1") else ord("2")
    tar.write_bytes(data)
    found = check(root).findings
    assert ("json_damaged", 301) in [(finding.kind, finding.image_id) for finding in found]


# Damage to the files of the whole


def column(root, name, row):
    """Where a value of the sample table lies."""
    count = manifest.read_dataset(root)["totals"]["images"]
    start = 128
    for other, dtype in COLUMNS.items():
        if other == name:
            return start + row * dtype.itemsize
        start += -(-count * dtype.itemsize // 8) * 8
    raise KeyError(name)


@pytest.mark.parametrize(
    ("name", "also"), [("jpg_crc32c", "table_row"), ("offset", "table_row"), ("shard", "table_row_missing")]
)
def test_a_byte_of_the_sample_table(root, name, also):
    flip(root / table_name(root), column(root, name, 3))
    found = check(root).findings
    assert "table_digest" in [finding.kind for finding in found]
    assert (also, 103) in [(finding.kind, finding.image_id) for finding in found]
    assert {finding.file for finding in found} == {table_name(root)}
    assert all("tools/index.py" in finding.remedy for finding in found)


def test_an_image_id_of_the_sample_table(root):
    flip(root / table_name(root), column(root, "image_id", 3))
    found = check(root).findings
    assert {"table_digest", "table_ids_digest", "table_order", "table_row_missing"} <= kinds(check(root))
    assert 103 in [finding.image_id for finding in found]


def test_a_byte_of_the_table_header_that_is_not_used(root):
    flip(root / table_name(root), 100)
    assert kinds(check(root)) == {"table_header"}


@pytest.mark.parametrize("content", [b"", b"SA1BTBL1", b"\0" * 1000])
def test_a_sample_table_that_cannot_be_read(root, content):
    (root / table_name(root)).write_bytes(content)
    assert "table_unreadable" in kinds(check(root))


def test_a_missing_sample_table(root):
    (root / table_name(root)).unlink()
    assert kinds(check(root)) == {"table_missing"}


def test_a_sample_table_of_another_root(root):
    write_dataset(root, {"sa_000001": manifest.read_tasks(root)["sa_000001"]})
    other = (root / table_name(root)).read_bytes()
    write_dataset(root, manifest.read_tasks(root))
    (root / table_name(root)).write_bytes(other)
    assert {"table_of_another", "table_row_missing", "dataset_differs"} <= kinds(check(root))


def test_a_number_in_dataset_json(root):
    text = (root / "dataset.json").read_text()
    (root / "dataset.json").write_text(text.replace('"images": 19', '"images": 18'))
    (finding,) = check(root).findings
    assert (finding.kind, finding.file) == ("dataset_differs", "dataset.json")
    assert "totals.images is 18" in finding.message


def test_a_space_in_dataset_json(root):
    text = (root / "dataset.json").read_text()
    (root / "dataset.json").write_text(text.replace('"images": 19', '"images":  19'))
    assert kinds(check(root)) == {"dataset_form"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "sa1b-shards-1"}', b"\xff\xfe"])
def test_a_dataset_json_that_cannot_be_read(root, content):
    (root / "dataset.json").write_bytes(content)
    report = check(root)
    assert kinds(report) == {"dataset_unreadable"}
    assert report.images == 19  # the task files tell what is there


def test_a_missing_dataset_json(root):
    (root / "dataset.json").unlink()
    assert kinds(check(root)) == {"dataset_missing"}


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "sa1b-shards-1"}', b"\xff\xfe"])
def test_a_task_file_that_cannot_be_read(root, content):
    (root / "tasks" / "sa_000002.json").write_bytes(content)
    report = check(root)
    (finding,) = report.findings
    assert (finding.kind, finding.file) == ("task_unreadable", "tasks/sa_000002.json")
    assert report.images == 19  # dataset.json tells what is there


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind": "tar"', '"kind":  "tar"'),
        ('"members"', '"membres"'),
        ('"mtime_ns"', '"mtime"'),
        ('"name": "sa_000002"', '"name": "sa_000003"'),
        ('"pyarrow"', '"pyrow"'),
        ('"sha256": "', '"sha256": "x'),
    ],
)
def test_a_task_file_that_is_not_as_it_is_written(root, old, new):
    path = root / "tasks" / "sa_000002.json"
    path.write_text(path.read_text().replace(old, new, 1))
    found = check(root).findings
    kinds = {finding.kind for finding in found if finding.file == "tasks/sa_000002.json"}
    assert kinds & {"task_damaged", "task_unreadable"}


def test_a_missing_task_file(root):
    (root / "tasks" / "sa_000002.json").unlink()
    assert "dataset_differs" in kinds(check(root))


def test_all_task_files_missing(root):
    shutil.rmtree(root / "tasks")
    assert kinds(check(root)) == {"tasks_missing"}


def test_a_count_in_a_task_file(root):
    task = manifest.read_tasks(root)["sa_000001"]
    task.counts["jpg_bytes"] += 1
    manifest.write_task(root, task)
    found = {(finding.kind, finding.file) for finding in check(root).findings}
    assert found == {("task_counts", "tasks/sa_000001.json"), ("dataset_differs", "dataset.json")}


def test_any_value_in_a_task_file_is_vouched_for_by_the_manifest(root):
    path = root / "tasks" / "sa_000002.json"
    sha256 = manifest.read_task(path).source["sha256"]
    path.write_text(path.read_text().replace(sha256, sha256[::-1]))
    (finding,) = check(root).findings
    assert (finding.kind, finding.file) == ("dataset_differs", "dataset.json")
    assert "sources.sa_000002" in finding.message


def test_a_name_that_leaves_the_root_is_not_opened(root):
    text = (root / "tasks" / "sa_000002.json").read_text()
    (root / "tasks" / "sa_000002.json").write_text(text.replace("sa1b-000002-0000.tar", "../../etc/passwd"))
    assert "shard_name" in kinds(check(root))


# When it cannot check


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no dataset there"):
        check(tmp_path)
    with pytest.raises(ManifestError, match="no dataset there"):
        check(tmp_path / "nowhere")


def test_a_root_that_is_written_to_is_refused(root):
    with lock(root), pytest.raises(LockedError):
        check(root)


def test_a_process_that_dies_is_a_finding_of_its_shard(root):
    """Every process is killed: no shard can be checked, all are named, and the check ends."""
    ended = threading.Event()

    def kill():
        while not ended.is_set():
            for process in multiprocessing.active_children():
                process.kill()
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        report = verify(root, workers=2, quiet=True)
    finally:
        ended.set()
        killer.join()
    assert kinds(report) == {"check_died"}
    assert sorted(finding.shard for finding in report.findings) == manifest_shards(root)
    assert "SIGKILL" in report.findings[0].message


def manifest_shards(root):
    return [shard["name"] for shard in manifest.read_dataset(root)["shards"]]
