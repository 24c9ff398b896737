"""Damage to dataset.json and the sample table."""

import numpy as np
import pytest

from sa1b import Dataset
from sa1b.errors import ManifestError, TableError
from sa1b.programs.export.export import export
from sa1b.programs.export.source_tars import SourceTars
from sa1b.programs.gallery.verb_gallery import main as gallery
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.locate import locate
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import COLUMNS
from sa1b.verify.layer_check import verify_layer
from sa1b.views.selection import Selection, select
from tests.shards.tiny_source import add_layer
from tests.verify.checking import check_here, edit_json, flip, kinds


def column(root, name, row):
    """Where a value of the sample table lies."""
    count = manifest.read_dataset(root)["totals"]["images"]
    start = 128
    for other, dtype in COLUMNS.items():
        if other == name:
            return start + row * dtype.itemsize
        start += -(-count * dtype.itemsize // 8) * 8
    raise KeyError(name)


def test_a_table_that_is_not_sorted_in_a_directory_with_a_layer(root):
    add_layer(root)
    path, at = root / table_name(root), column(root, "image_id", 3)
    data = bytearray(path.read_bytes())
    data[at : at + 64] = bytes(64)
    path.write_bytes(data)
    report = check_here(root, deep=True)
    assert {"table_digest", "table_order"} <= kinds(report)
    assert "do not match their digest" in report.unchecked["layers"]
    with pytest.raises(TableError, match="do not match their digest"):
        verify_layer(str(root), "round2", quiet=True)


def test_a_sample_table_of_another_root(root):
    write_dataset(root, {"sa_000001": manifest.read_tasks(root)["sa_000001"]})
    other = (root / table_name(root)).read_bytes()
    write_dataset(root, manifest.read_tasks(root))
    (root / table_name(root)).write_bytes(other)
    assert {"table_of_another", "table_row_missing"} <= kinds(check_here(root))


@pytest.mark.parametrize(
    "program",
    [
        lambda root, new: export(root, new, SourceTars(), quiet=True),
        lambda root, new: gallery(str(root), out=new.with_suffix(".html")),
        lambda root, new: select(root, Selection(masks_where="area > 5"), name="a", quiet=True),
        lambda root, new: locate(np.array([103], np.uint64), [str(root)]),
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
