"""Damage to dataset.json and the sample table."""

import numpy as np
import pytest

from sa1b.errors import ManifestError, TableError
from sa1b.programs.export.export import export
from sa1b.programs.export.source_tars import SourceTars
from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.programs.plan.order_reads import streams
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.locate import locate
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import COLUMNS
from sa1b.verify.layer_check import verify_layer
from sa1b.views.selection import Selection, select
from tests.shards.tiny_source import add_layer
from tests.verify.checking import check, edit_json, flip, kinds


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
    assert all("sa1b index" in finding.remedy for finding in found)


def test_an_image_id_of_the_sample_table(root):
    flip(root / table_name(root), column(root, "image_id", 3))
    found = check(root).findings
    assert {"table_digest", "table_ids_digest", "table_order", "table_row_missing"} <= kinds(check(root))
    assert 103 in [finding.image_id for finding in found]


def test_a_table_that_is_not_sorted_in_a_directory_with_a_layer(root):
    add_layer(root)
    path, at = root / table_name(root), column(root, "image_id", 3)
    data = bytearray(path.read_bytes())
    data[at : at + 64] = bytes(64)
    path.write_bytes(data)
    report = check(root, deep=True)
    assert {"table_digest", "table_order"} <= kinds(report)
    assert "do not match their digest" in report.unchecked["layers"]
    with pytest.raises(TableError, match="do not match their digest"):
        verify_layer(str(root), "round2", quiet=True)


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
    assert {"table_of_another", "table_row_missing"} <= kinds(check(root))


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


@pytest.mark.parametrize(
    "program",
    [
        lambda root, new: export(root, new, SourceTars(), quiet=True),
        lambda root, new: write_gallery(str(root), new.with_suffix(".html"), Choice(), quiet=True),
        lambda root, new: select(root, Selection(masks_where="area > 5"), name="a", quiet=True),
        lambda root, new: locate(np.array([103], np.uint64), [str(root)]),
        lambda root, new: streams(str(root), None, (1,), {"global_batch": 2}),
    ],
)
def test_programs_that_read_the_whole_table_verify_it_first(root, tmp_path, program):
    """A shard that is not in dataset.json."""
    flip(root / table_name(root), column(root, "shard", 3) + 1)
    with pytest.raises(TableError, match="do not match their digest; run `.* to rebuild it"):
        program(root, tmp_path / "new")


@pytest.mark.parametrize(
    ("part", "key", "message"),
    [
        ("options", "image_size", "damaged: options has no image_size"),
        ("totals", "doubtful", r"damaged: .*doubtful"),
    ],
)
def test_what_dataset_json_lacks_is_damage(root, part, key, message):
    edit_json(root / "dataset.json", lambda document: document[part].pop(key))
    with pytest.raises(ManifestError, match=message):
        Dataset(root)
