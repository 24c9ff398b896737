"""Documents of a dataset and a view with a changed byte: refused by name, or without any effect."""

from pathlib import Path

import numpy as np
import pytest

import sa1b
from sa1b.errors import ManifestError, TableError
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import open_table
from sa1b.views.predicate import mask_predicate
from sa1b.views.view import write_view
from tests.stream.test_damage import IMAGES, RECIPE, copy, epoch, flipped, healthy, root

__all__ = ["copy", "healthy", "root"]  # fixtures


def test_every_changed_byte_of_the_tables_header_is_refused_or_changes_nothing(
    copy: Path, healthy: list[str], tmp_path: Path
) -> None:
    refused = 0
    for offset in range(128):
        with flipped(copy / table_name(copy), offset, 1 << offset % 8):
            try:
                found = epoch(copy, tmp_path / "damage_log")
            except (TableError, ManifestError) as error:
                refused += table_name(copy) in str(error)
            else:
                assert found == (healthy, []), offset
    assert refused >= 8 + 4 + 4 + 8 + 32 + 32  # magic, version, size, count and both digests


def test_a_views_document_that_says_something_else_is_refused(copy: Path, tmp_path: Path) -> None:
    """Every byte of it: the batches are those of the view, or there are none."""
    table = open_table(copy / table_name(copy))
    condition = mask_predicate("area >= 200")
    view = write_view(copy, table, np.arange(IMAGES, dtype=np.uint32), masks_where=condition, name="large")
    document = copy / "views" / f"{view.digest}.json"
    expected = epoch(copy, tmp_path / "damage_log", view="large")
    for offset in range(document.stat().st_size):
        with flipped(document, offset, 1 << offset % 7):
            try:
                found = epoch(copy, tmp_path / "damage_log", view="large")
            except (ManifestError, ValueError):
                continue
        assert found == expected, offset


def test_a_damaged_id_is_refused_where_it_would_change_the_order_of_runs(copy: Path, tmp_path: Path) -> None:
    with (
        flipped(copy / table_name(copy), 128 + 8 * 7, 64),
        pytest.raises((TableError, ManifestError), match=r"samples-\w+\.bin"),
    ):
        sa1b.Stream(copy, global_batch=4, block_size=2, damage_log=tmp_path / "damage_log", **RECIPE)


def test_a_manifest_without_a_key_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    text = (copy / "dataset.json").read_text()
    (copy / "dataset.json").write_text(text.replace('"columns_sha256"', '"columns_sha255"'))
    with pytest.raises(ManifestError, match="dataset.json"):
        epoch(copy, tmp_path / "damage_log")
