"""`sa1b locate`: which shard or source contains an image."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sa1b
from sa1b.shards import locate as locations
from tests.cli.verb import called
from tests.shards import tiny

locate = called("locate")
FIRST = {"sa_000020": 223750, "sa_000021": 234937}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("located")
    for name, first in FIRST.items():
        tiny.make_tar(folder / f"{name}.tar", range(first, first + 20, 2))
        tiny.ingest_tar(folder / f"{name}.tar", folder / "root", images_per_shard=4)
    return folder / "root"


def test_one_read_at_the_location_returns_the_image(root: Path) -> None:
    done = locate(root, "sa_234939.jpg", 223750, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["image_id"] for row in document["images"]] == [223750, 234939]
    dataset = sa1b.open(root)
    for row in document["images"]:
        data = Path(row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["jpg_bytes"]]
        assert data == dataset.by_id(row["image_id"]).jpeg
        assert (row["status"], row["source"] in FIRST) == ("stored", True)
        assert row["masks_bytes"] > 0


def test_images_in_none_of_the_shards_are_estimates(root: Path) -> None:
    # 223751 lies in the block of a source, 11187 in that of tar 1 by the usual size of the blocks.
    done = locate(root, 223751, 11187, 99999999999, 223752, "--json")
    assert done.returncode == 3
    rows = {row["image_id"]: row for row in json.loads(done.stdout)["images"]}
    assert {image_id: (row["status"], row["source"]) for image_id, row in rows.items()} == {
        223751: ("estimated", "sa_000020"),
        223752: ("stored", "sa_000020"),
        11187: ("estimated", "sa_000001"),
        99999999999: ("unknown", None),
    }
    shown = locate(root, 223751, 99999999999)
    assert "sa_000020 (estimate)" in shown.stdout
    assert "unknown" in shown.stdout
    assert "0 images stored, 2 not" in shown.stdout


def test_indexes_task_files_and_urls(root: Path) -> None:
    for place in ("tasks/sa_000020.json", "tasks/sa_000020.samples", "dataset.json"):
        assert locate(root / place, 223750, 223768).returncode == 0
    assert locate(root / "tasks/sa_000020.json", 234937).returncode == 3
    index = next(root.glob("sa1b-000020-0001.parquet"))
    (first, *_) = pq.read_table(index)["image_id"].to_pylist()
    assert str(index.with_suffix(".tar")) in locate(index, first).stdout
    assert str(root) in locate(f"file://{root}", 223750).stdout


def test_an_id_file_of_any_form_as_columns(root: Path, tmp_path: Path) -> None:
    ids = sorted(sa1b.open(root).table.image_id.tolist())
    pq.write_table(pa.table({"image_id": ids + ids}), tmp_path / "ids.parquet")
    done = locate(root, "--ids", tmp_path / "ids.parquet", "--tsv")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split("\t")[0] == "image_id"
    assert [int(row.split("\t")[0]) for row in rows] == ids
    assert {row.split("\t")[1] for row in rows} == {"stored"}


def test_a_list_of_links_limits_the_estimates(tmp_path: Path) -> None:
    links = tmp_path / "links.txt"
    links.write_text("sa_000020.tar\thttps://h/a?secret")
    done = locate("--links", links, 223751, 11187, "--tsv")
    assert done.returncode == 3
    assert [row.split("\t")[1:3] for row in done.stdout.splitlines()[1:]] == [
        ["unknown", ""],
        ["estimated", "sa_000020"],
    ]


def test_wrong_arguments(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.parquet").write_text("PAR1")
    (tmp_path / "note.txt").write_text("x")
    for arguments, words in (
        ((), "ROOT or --links: missing"),
        ((223750,), "ROOT or --links: missing"),
        ((root,), "no image id"),
        ((root, "abc"), "abc: no image id"),
        ((root, "--ids", tmp_path / "empty.txt"), "contains no image id"),
        ((root, "--ids", tmp_path / "none.txt"), "no such file"),
        ((tmp_path, 1), "no dataset there"),
        ((tmp_path / "bad.parquet", 1), "not the index of a shard"),
        ((tmp_path / "note.txt", 1), "not an index, task file or dataset directory"),
        ((root, "9999999999999999999"), "not an image id"),
    ):
        done = locate(*arguments)
        assert done.returncode == 2, done.stdout
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_million_ids_use_no_loop_over_ids(root: Path) -> None:
    ids = np.arange(1_000_000, dtype=np.uint64)
    found = locations.locate(ids, [str(root)])
    assert int(found.is_stored.sum()) == 20
    assert int((found.status == locations.UNKNOWN).sum()) == 0
    counts = np.unique(found.source[~found.is_stored].astype(str), return_counts=True)
    assert len(counts[0]) == 1_000_000 // 11187 + 1
