"""Predicted masks beside the true masks on the gallery's page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sa1b.errors import UsageError
from sa1b.masks import coco, geometry
from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import read_tasks
from sa1b.shards.predictions import Predicted, read_predictions
from tests.gallery.test_gallery import Page
from tests.shards.tiny import ingest_tar


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicted")
    synthetic.write_tar(folder / "sa_000001.tar", images=5, first_id=100, long_side=160)
    ingest_tar(folder / "sa_000001.tar", folder / "root")
    write_dataset(folder / "root", read_tasks(folder / "root"))
    return folder / "root"


def drawn(root: Path, image_id: int, mask_ids: list[int] | None = None) -> Predicted:
    """The mirrored true masks as predictions."""
    annotations = Dataset(root).by_id(image_id).annotations
    chosen = np.flatnonzero(np.isin(annotations.mask_id, mask_ids or annotations.mask_id))[::-1]
    points = np.stack((chosen + 0.25, chosen + 1.5), axis=1)
    runs = geometry.flip_horizontal(annotations.runs(chosen))
    return Predicted(annotations.mask_id[chosen], points, chosen / 100, chosen / 50, runs)


def test_a_file_gives_back_what_was_written(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(drawn(root, 103).line(103) + drawn(root, 101).line(101))
    found = read_predictions(file)
    assert list(found) == [103, 101]
    for image_id, one in found.items():
        other = drawn(root, image_id)
        for name in ("mask_id", "points", "iou"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert coco.encode(one.runs) == coco.encode(other.runs)


def test_the_page_shows_the_images_of_the_file_with_both_masks_in_one_order(
    root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "predictions.jsonl"
    few = Dataset(root).by_id(101).annotations.mask_id[:3].tolist()
    file.write_text(drawn(root, 103).line(103) + drawn(root, 101, few).line(101))
    summary = write_gallery(root, tmp_path / "page.html", Choice(), predictions=file, quiet=True)
    assert sorted(summary.shown) == [101, 103]
    other = tmp_path / "other.jsonl"  # of an evaluation on another dataset directory
    other.write_text(file.read_text().replace('"image_id": 103', '"image_id": 999'))
    with pytest.raises(UsageError, match=f"^--predictions {other}: its images 999 are not in {root}; pass"):
        write_gallery(root, tmp_path / "other.html", Choice(), predictions=other, quiet=True)
    page = Page((tmp_path / "page.html").read_text())
    for image_id in (101, 103):
        data = page.pictures[image_id]
        own = drawn(root, image_id, few if image_id == 101 else None)
        at = [own.mask_id.tolist().index(mask_id) for mask_id in data["mask_id"]]
        assert sorted(at) == list(range(len(own.mask_id)))  # only masks that the model has predicted
        assert data["area"] == sorted(data["area"], reverse=True)
        size = data["height"], data["width"]
        true = Dataset(root).by_id(image_id).annotations
        rows = [true.mask_id.tolist().index(mask_id) for mask_id in data["mask_id"]]
        for name, runs in (("counts", true.runs(np.array(rows))), ("predicted", own.runs.select(at))):
            assert data[name] == [text.decode() for text in coco.encode(geometry.resize(runs, *size))]
        assert data["iou"] == own.iou[at].tolist()
        assert data["point_coords"] == own.points[at].tolist()


def test_phrases_are_listed_with_what_was_found_for_them(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    one = drawn(root, 103)
    phrases = tuple(f"<b>phrase {mask_id}" for mask_id in one.mask_id.tolist())
    found = replace(one, iou=np.where(np.arange(len(phrases)) % 2, 0.25, 1.0), phrases=phrases)
    file.write_text(found.line(103))
    assert read_predictions(file)[103].phrases == phrases
    write_gallery(root, tmp_path / "page.html", Choice(), predictions=file, quiet=True)
    page = Page((tmp_path / "page.html").read_text())
    data = page.pictures[103]
    assert data["phrases"] == [f"<b>phrase {mask_id}" for mask_id in data["mask_id"]]
    buttons = [attributes for name, attributes in page.tags if "data-number" in attributes]
    assert [one["class"] for one in buttons] == ["found" if iou == 1 else "other" for iou in data["iou"]]
    text = " ".join(page.texts)
    assert "True masks and their phrases, then the regions that the model found. Every mask" in text
    assert f"{phrases[0]}" in text
    file.write_text(found.line(103).replace('"phrase": "<b>phrase', '"other": "', 1))
    with pytest.raises(UsageError, match="line 1 is no prediction"):
        read_predictions(file)


def test_masks_without_a_prediction_are_counted_and_drawn_apart(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    true = Dataset(root).by_id(101).annotations
    areas = geometry.area(true.runs())
    asked = np.argsort(-areas)[:3]
    file.write_text(drawn(root, 101, true.mask_id[asked].tolist()).line(101) + drawn(root, 103).line(103))
    write_gallery(root, tmp_path / "page.html", Choice(), predictions=file, quiet=True)
    page = Page((tmp_path / "page.html").read_text())
    rest = np.sort(np.delete(areas, asked))
    text = " ".join(page.texts)
    assert f"mean IoU {asked.mean() / 100:.3f}, 3 of {len(true)} masks" in text
    outlines = f"Filtered: {len(rest)} masks of {rest[0]:,} to {rest[-1]:,} px without a prediction;"
    assert f"{outlines} the button Masks without a prediction shows them." in text
    assert [one["aria-pressed"] for _, one in page.tags if one.get("data-layer") == "unscored"] == ["false"]
    assert "Every mask of the image has a prediction." in text
    data = page.pictures[101]
    others = coco.decode(data["filtered"], data["height"], data["width"])
    expected = true.runs(np.setdiff1d(np.arange(len(true)), asked))
    assert sorted(geometry.area(others)) == sorted(
        geometry.area(geometry.resize(expected, data["height"], data["width"]))
    )
    assert page.pictures[103]["filtered"] == []


def test_without_predictions_nothing_is_drawn_beside(root: Path, tmp_path: Path) -> None:
    write_gallery(root, tmp_path / "page.html", Choice(), quiet=True)
    page = Page((tmp_path / "page.html").read_text())
    assert not any(attributes.get("data-layer") == "unscored" for _, attributes in page.tags)
    assert all("predicted" not in data for data in page.pictures.values())
    assert not any("twin" in str(attributes.get("class")) for _, attributes in page.tags)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no predictions"),
        ("{}\n", "line 1 is no prediction"),
        ('{"image_id": 1, "masks": []}\n', "line 1 is no prediction"),
        ("not json\n", r"line 1 is no prediction \(JSONDecodeError: Expecting value"),
    ],
)
def test_another_file_is_refused_with_its_line(
    root: Path, tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=f"other.jsonl: {problem}"):
        write_gallery(root, tmp_path / "page.html", Choice(), predictions=file, quiet=True)
    assert not (tmp_path / "page.html").exists()


def test_predictions_for_another_size_are_counted_as_such(root: Path, tmp_path: Path) -> None:
    one = drawn(root, 102)
    document = json.loads(one.line(102))
    for mask, text in zip(document["masks"], coco.encode(geometry.resize(one.runs, 7, 9)), strict=True):
        mask["segmentation"] = {"size": [7, 9], "counts": text.decode()}
    file = tmp_path / "predictions.jsonl"
    file.write_text(drawn(root, 101).line(101) + json.dumps(document) + "\n")
    summary = write_gallery(root, tmp_path / "page.html", Choice(), predictions=file, quiet=True)
    assert summary.shown == [101]
    assert summary.skipped == {"predictions_differ": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"image_id": 103', f'"image_id": {1 << 63}'),
        ('"image_id": 103', '"image_id": 1e999'),
        ('"image_id": 103', f'"image_id": {"[" * 100_000}'),
        ('"mask_id": ', '"mask_id": 9999999999999999999'),
        ('"point": [', '"point": [1, '),
        ('"counts": "', '"counts": "\\u001b'),
    ],
)
def test_a_line_that_is_no_prediction_is_named(root: Path, tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "predictions.jsonl"
    lines = drawn(root, 101).line(101), drawn(root, 103).line(103)
    assert old in lines[1]
    file.write_text(lines[0] + lines[1].replace(old, new))
    with pytest.raises(UsageError, match="predictions.jsonl: line 2 is no prediction"):
        read_predictions(file)
