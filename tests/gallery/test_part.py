"""Galleries of a view or of the images with warnings, and the files that they read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.programs.gallery import inputs
from sa1b.programs.gallery.members import NEVER, Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import Options
from sa1b.storage.reader import Reader
from sa1b.views.selection import Selection, select
from tests.cli.verb import runner
from tests.gallery.test_gallery import Page, charts_of
from tests.shards.tiny_source import make_root, odd_pairs, pairs, write_source

IMAGES = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 shards of three images."""
    folder = tmp_path_factory.mktemp("part")
    source = write_source(folder / "sa_000001.tar", pairs(range(100, 100 + IMAGES)))
    return make_root(folder / "root", [source], Options(images_per_shard=3))


@pytest.fixture
def page(tmp_path: Path) -> Callable[[], Page]:
    return lambda: Page((tmp_path / "page.html").read_text())


tool = runner("gallery")


def test_the_images_of_a_dataset_come_from_its_table_and_distributions_from_some_of_its_indexes(
    root: Path, tmp_path: Path, page: Callable[[], Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = write_gallery(root, tmp_path / "page.html", Choice(count=5), quiet=True)
    assert full.surveyed is None
    everything = charts_of(page())
    monkeypatch.setattr(inputs, "SURVEYED_SHARDS", 4)
    read = []
    original = inputs._batches

    def batches(reader: Reader, shard: str, columns: tuple[str, ...]) -> object:
        read.append(shard)
        return original(reader, shard, columns)

    monkeypatch.setattr(inputs, "_batches", batches)
    summary = write_gallery(root, tmp_path / "page.html", Choice(count=5), quiet=True)
    shards = [f"sa1b-000001-{part:04d}.tar" for part in (0, 6, 13, 19)]
    assert read == shards
    assert (summary.shown, summary.images, summary.masks) == (full.shown, IMAGES, full.masks)
    assert summary.surveyed == (4, 20)
    assert "over 4 of 20 shards" in summary.table()
    some = page()
    assert any("distributions over 4 of 20 shards" in text for text in some.texts)
    assert ", ".join(shards) in some.texts
    assert charts_of(some) != everything
    read.clear()
    write_gallery(root, tmp_path / "page.html", Choice(count=5), survey_all=True, quiet=True)
    assert len(read) == 20
    assert charts_of(page()) == everything


def test_ids_need_no_index_but_those_of_the_survey(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "SURVEYED_SHARDS", 1)
    moved = [path.rename(tmp_path / path.name) for path in sorted(root.glob("*.parquet"))[1:]]
    try:
        summary = write_gallery(root, tmp_path / "page.html", Choice(ids=(150, 101)), quiet=True)
        assert sorted(summary.shown) == [101, 150]
        with pytest.raises(ShardError, match="missing; run `.*sa1b index .*`"):
            write_gallery(root, tmp_path / "page.html", Choice(), survey_all=True, quiet=True)
    finally:
        for path in moved:
            path.rename(root / path.name)


def test_a_sample_of_a_view(root: Path, tmp_path: Path, page: Callable[[], Page]) -> None:
    wanted = select(root, Selection(subset="40%", masks_where="area > 9"), name="some", quiet=True).view
    table = Dataset(root).table
    ids = wanted.image_ids(table).tolist()
    done = tool(root, "--view", "some", "--count", 100, "--out", tmp_path / "page.html", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert sorted(summary["shown"]) == ids
    assert summary["images"] == len(ids)
    assert summary["masks"] == sum(len(Dataset(root).by_id(image_id).annotations) for image_id in ids)
    texts = page().texts
    assert f"some, {wanted.digest}" in texts
    assert "area > 9 (all masks are shown)" in texts
    few = tool(root, "--view", wanted.digest[:9], "--count", 3, "--out", tmp_path / "page.html", "--json")
    order = Choice().best(np.array(ids, np.uint64))[:3]
    assert sorted(json.loads(few.stdout)["shown"]) == sorted(ids[i] for i in order)
    outside = next(i for i in range(100, 100 + IMAGES) if i not in ids)
    refused = tool(root, "--view", "some", "--id", outside, "--out", tmp_path / "page.html")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"--id {outside}: not in " in refused.stderr
    assert "or not in the chosen part of it" in refused.stderr
    for part in ("--view some", "--warnings"):
        refused = tool(root / "sa1b-000001-0000.tar", *part.split())
        assert refused.returncode == 2
        assert "not a dataset directory; pass one, or omit --" in refused.stderr


def test_images_kept_with_warnings_are_shown_with_the_reasons(
    tmp_path: Path, page: Callable[[], Page]
) -> None:
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(100, 109)) | odd_pairs(200))
    root = make_root(tmp_path / "root", [source], Options(images_per_shard=5))
    folder = root / "quarantine" / "sa_000001"
    kept = folder / "warnings.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    lines.append({"reason": "odd", "image_id": 104, "message": "<b>too</b> blue"})
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = write_gallery(root, tmp_path / "page.html", Choice(), warnings=True, quiet=True)
    assert sorted(summary.shown) == sorted({line["image_id"] for line in lines})
    assert summary.images == len(summary.shown)
    found = page()
    for line in lines:
        assert line["reason"] in found.texts
        assert f" {line['message']}" in found.texts
    view = select(root, Selection(images_where="image_id < 200"), name="low", quiet=True).view
    images = view.image_ids(Dataset(root).table)
    part = write_gallery(root, tmp_path / "page.html", Choice(images=images), warnings=True, quiet=True)
    assert part.shown == [104]
    kept.write_text('{"reason": "odd"}\n')
    with pytest.raises(ManifestError, match=r"warnings.jsonl, line 1: damaged"):
        write_gallery(root, tmp_path / "page.html", Choice(), warnings=True, quiet=True)


def test_a_directory_without_warnings_says_so(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no image has a warning"):
        write_gallery(root, tmp_path / "page.html", Choice(), warnings=True, quiet=True)


def test_ranks_of_ids_are_their_order() -> None:
    choice = Choice(ids=(7, 3, 2**62))
    assert choice.ranks([3, 4, 7, 2**62, 0]).tolist() == [1, NEVER, 0, 2, NEVER]
    assert choice.best(np.array([2, 3, 7, 9], np.uint64)).tolist() == [2, 1]
    assert Choice(count=1).best(np.empty(0, np.uint64)).tolist() == []
