"""The page that `sa1b gallery` writes, read as a browser reads it: what it shows of a dataset directory."""

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sa1b
import sa1b.masks
from tests import processes
from tests.datasets import add_view
from tests.kit import flip, refused, run
from tests.shards import tiny
from tests.shards.tiny_source import annotation, write_source

IMAGES, FIRST_ID, LONG_SIDE = 14, 100, 160
NUMBERS = "mask_id area bbox predicted_iou stability_score point_coords crop_box runs_count"


class Page(HTMLParser):
    """The contents of a page: tags with their attributes, texts, and the data and the JPEG of every image."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.texts = text, list[tuple[str, dict[str, str | None]]](), list[str]()
        form = r'<figure class="picture" id="sa_(\d+)".*?;base64,(.*?)".*?<script [^>]*>(.*?)</script>'
        parts = re.findall(form, text, re.DOTALL)
        self.pictures: dict[int, dict[str, Any]] = {int(one): json.loads(data) for one, _, data in parts}
        self.jpegs = {int(one): base64.b64decode(jpeg) for one, jpeg, _ in parts}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset directory of 14 images of 160 pixels, with masks of all sizes, in three shards."""
    folder = tmp_path_factory.mktemp("scenes")
    tar, root = folder / "sa_000003.tar", folder / "root"
    tiny.synthesize(tar, images=IMAGES, first_id=FIRST_ID, long_side=LONG_SIDE)
    run("reshard", tar, "--out", root, "--images-per-shard", 5, "--workers", 1)
    return root


@pytest.fixture
def inputs(scenes: Path) -> dict[str, Path]:
    return {"root": scenes}


def made(root: object, tmp_path: Path, *words: object) -> tuple[Page, dict[str, Any]]:
    """The page of a gallery, and its summary."""
    out = tmp_path / "page.html"
    summary = run("gallery", root, "--out", out, "--overwrite", "--json", *words).json
    page = Page(out.read_text())
    assert list(page.pictures) == summary["shown"]
    return page, summary


def test_the_page_needs_nothing_else(scenes: Path, tmp_path: Path) -> None:
    page, _ = made(scenes, tmp_path)
    assert not re.search(r"https?:|@import|url\(|\bimport\(|fetch\(|XMLHttp", page.text)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert name not in ("srcset", "action", "data", "poster", "background")
            assert name != "src" or str(value).startswith("data:image/jpeg;base64,")
            assert name != "href" or str(value).startswith("#")
    (policy,) = [str(attributes["content"]) for _, attributes in page.tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert str(scenes) not in page.text  # pages are sent to others


@pytest.mark.parametrize(("stored", "max_side"), [(160, 64), (160, 1000), (96, 1000)])
def test_masks_are_those_of_the_source(scenes: Path, tmp_path: Path, stored: int, max_side: int) -> None:
    root = scenes
    if stored < LONG_SIDE:
        root = tmp_path / "root"
        run("export", scenes, "--to", "sa1b", "--out", tmp_path / "tars")
        run("reshard", tmp_path / "tars", "--out", root, "--image-size", stored, "--workers", 1)
    page, summary = made(root, tmp_path, "--count", 4, "--max-side", max_side)
    assert (summary["longer_side"], summary["quality"], len(summary["shown"])) == (max_side, 88, 4)
    for image_id, data in page.pictures.items():
        sample, pixels = sa1b.open(scenes).by_id(image_id), sa1b.open(root).by_id(image_id).pil
        one, order = sample.annotations, np.argsort(-sa1b.masks.area(sample.runs), kind="stable")
        height, width = sa1b.masks.framed_size(one.height, one.width, min(stored, max_side))
        with Image.open(io.BytesIO(page.jpegs[image_id])) as shown:
            assert (shown.height, shown.width) == (data["height"], data["width"]) == (height, width)
            reduced = np.asarray(pixels.resize((width, height), Image.Resampling.BOX), np.int64)
            assert abs(np.asarray(shown, np.int64) - reduced).mean() < 12
        masks = sa1b.masks.rasterize(sa1b.masks.decode(data["counts"], height, width))
        assert np.array_equal(masks, sa1b.masks.rasterize(sample.runs, height, width)[order])
        assert (data["source_width"], data["source_height"]) == (one.width, one.height)
        for name in NUMBERS.split():
            assert np.array_equal(data[name], getattr(one, name)[order])


def test_the_same_command_gives_the_same_bytes_and_says_how_it_chose(scenes: Path, tmp_path: Path) -> None:
    page, summary = made(scenes, tmp_path, "--count", 5)
    assert made(scenes, tmp_path, "--count", 5)[0].text == page.text
    others = {tuple(made(scenes, tmp_path, "--count", 5, "--seed", seed)[1]["shown"]) for seed in range(4)}
    assert len(others) > 1
    assert set(summary["shown"]) < set(made(scenes, tmp_path, "--count", 8)[1]["shown"])
    for words, text in (
        (("--count", 2, "--seed", 5), f"2 of {IMAGES} images, chosen at random with seed 5; at most"),
        (("--id", FIRST_ID + 9, "--id", FIRST_ID), f"2 of {IMAGES} images, chosen by id; at most"),
        (("--count", 100), f"{IMAGES} of {IMAGES} images; at most"),
    ):
        assert text in made(scenes, tmp_path, *words)[0].text


def test_sort_orders_the_images(scenes: Path, tmp_path: Path) -> None:
    numbers: dict[str, Callable[[Any], float]] = {
        "stability_score": lambda one: one.stability_score.mean(),
        "predicted_iou": lambda one: one.predicted_iou.mean(),
        "masks": lambda one: -len(one),
        "area": lambda one: -(one.area / (one.width * one.height)).mean(),
        "image_id": lambda one: one.image_id,
    }
    for sort, number in numbers.items():
        page, summary = made(scenes, tmp_path, "--sort", sort)
        found = [number(sa1b.open(scenes).by_id(image_id).annotations) for image_id in summary["shown"]]
        assert len(found) == IMAGES
        assert found == sorted(found)
        assert [attributes["value"] for _, attributes in page.tags if "selected" in attributes] == [sort]


def test_what_cannot_be_shown_is_named(scenes: Path, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for words, names in {
        ("--sort", "size"): "--sort size",
        ("--count", 101): "--count 101",
        ("--max-side", 1001): "--max-side 1001",
        ("--id", FIRST_ID, 7, 8): "--id 7, 8: not in",
        ("--id", *range(101)): "--id",
        ("--view", "none"): "none",
        ("--layers", "none"): "none",
        ("--warnings",): "no image has a warning",
        ("--predictions", "none.jsonl"): "none.jsonl",
    }.items():
        refused("gallery", scenes, "--out", out, *words, names=names)
    (tmp_path / "notes.txt").write_text("notes")
    for path in (tmp_path / "notes.txt", tmp_path / "none", tmp_path, root / "dataset.json"):
        refused("gallery", path, "--out", out, names=str(path))
    next(root.glob("*.tar")).unlink()
    refused("gallery", root, "--out", out, names="the shard is missing; ")
    flip(root, next(root.glob("*.bin")).name, 200)
    refused("gallery", root, "--out", out, names="to rebuild")
    assert not out.exists()


def test_only_a_page_of_the_same_input_is_replaced(scenes: Path, dataset: Path, tmp_path: Path) -> None:
    out, mine = tmp_path / "page.html", tmp_path / "mine.html"
    run("gallery", scenes, "--out", out, "--count", 2)
    run("gallery", scenes / ".." / "root", "--out", out, "--count", 3)
    page = out.read_bytes()
    refused("gallery", dataset, "--out", out, names="exists and is a page of another input")
    assert out.read_bytes() == page
    mine.write_text("mine")
    refused("gallery", scenes, "--out", mine, names="not written by this command")
    assert mine.read_text() == "mine"
    refused("gallery", scenes, "--out", tmp_path, "--overwrite", names="--out")
    document = scenes / "dataset.json"
    before = document.read_bytes()
    refused("gallery", scenes, "--out", document, "--overwrite", names="is a file of the dataset")
    assert document.read_bytes() == before
    run("gallery", dataset, "--out", out, "--overwrite")
    run("gallery", dataset, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "page.html"]


def test_a_damaged_image_is_named_and_the_next_one_taken(root: Path, tmp_path: Path) -> None:
    first, second = (made(root, tmp_path, "--count", count)[1]["shown"] for count in (1, 2))
    sample = sa1b.open(root).by_id(first[0])
    flip(root, sample.shard, sample.offset + len(sample.jpeg) // 2)
    page, summary = made(root, tmp_path, "--count", 1)
    assert summary["skipped"] == {"damaged": 1}
    assert summary["shown"] == [image_id for image_id in second if image_id != first[0]]
    assert re.search(f"1 skipped.*sa_{first[0]}", page.text, re.DOTALL)
    refused("gallery", root, "--out", tmp_path / "page.html", "--id", *first, names=f"sa_{first[0]}")


def test_a_page_has_at_most_20_mb(tmp_path: Path) -> None:
    random, content = np.random.default_rng(0), {}
    for image_id in range(1, 13):  # masks of noise, which no encoder makes small
        noise = random.integers(0, 2, (24, 400, 400), np.uint8).astype(np.bool_)
        strings = sa1b.masks.encode(sa1b.masks.Runs.from_pixels(noise))
        document, jpeg = annotation(image_id, random), io.BytesIO()
        document["image"] |= {"width": 400, "height": 400}
        document["annotations"] = [
            document["annotations"][0]
            | {"id": number, "segmentation": {"size": [400, 400], "counts": string.decode()}}
            for number, string in enumerate(strings)
        ]
        Image.fromarray(random.integers(0, 256, (400, 400, 3), np.uint8)).save(jpeg, "JPEG")
        content[image_id] = jpeg.getvalue(), json.dumps(document).encode()
    tar = write_source(tmp_path / "sa_000001.tar", content)
    run("reshard", tar, "--out", tmp_path / "noise", "--workers", 1)
    for side, fits in ((380, True), (1000, False)):
        page, summary = made(tmp_path / "noise", tmp_path, "--max-side", side)
        left_out, longer_side, quality = (summary[name] for name in ("left_out", "longer_side", "quality"))
        assert summary["bytes"] < 20e6
        assert (left_out == 0, longer_side < side, quality < 88) == (fits, True, True)
        assert 0 <= left_out == 12 - len(summary["shown"]) < 8
        assert f"{left_out} more do not fit" in page.text or fits
        assert f"at most {longer_side:,} px, JPEG quality {quality}" in page.text


def test_histograms_count_every_mask_of_the_images(scenes: Path, dataset: Path, tmp_path: Path) -> None:
    page, summary = made(scenes, tmp_path)
    charts = re.findall(r'<figure class="chart">.*?</figure>', page.text, re.DOTALL)
    masks = sum(len(data["counts"]) for data in page.pictures.values())
    assert masks == summary["masks"]
    for chart, expected in zip(charts, (IMAGES, masks, masks, masks), strict=True):
        counts = re.findall(r"<title>[^<]*: ([\d,]+) (?:images|masks)</title>", chart)
        assert sum(int(count.replace(",", "")) for count in counts) == expected
    mean = np.concatenate([data["stability_score"] for data in page.pictures.values()]).mean()
    assert f"mean {mean:.4g}" in charts[3]
    page, summary = made(dataset, tmp_path, "--count", 100)  # one mask has no score, and one image no mask
    assert sum(None in data["stability_score"] for data in page.pictures.values()) == 1
    assert [image_id for image_id, data in page.pictures.items() if not data["counts"]] == summary["shown"][
        -1:
    ]
    assert "1 masks without a value" in page.text


def test_a_view_and_its_layers(root: Path, tmp_path: Path) -> None:
    outside, *ids = sorted(sample.image_id for sample in sa1b.open(root))
    page, summary = made(root, tmp_path, "--view", "most", "--count", 100)
    assert (sorted(summary["shown"]), summary["images"]) == (ids, len(ids))
    assert any(text.startswith("most, ") for text in page.texts)
    refused("gallery", root, "--view", "most", "--id", outside, names=f"--id {outside}: not in")
    add_view(root, ids, "new", "--layers", "round2", "--masks-where", "area > 9")
    for words in (("--view", "new"), ("--layers", "round2")):
        page, _ = made(root, tmp_path, "--count", 100, *words)
        assert "round2 (" in page.text
        for image_id, data in page.pictures.items():
            masks = sa1b.open(root, layers=["round2"]).by_id(image_id).annotations.mask_id
            assert sorted(data["mask_id"]) == sorted(masks)
    assert "area > 9 (all masks are shown)" in made(root, tmp_path, "--view", "new")[0].texts


def test_images_with_warnings_are_shown_with_the_reasons_and_names_are_text(
    root: Path, tmp_path: Path
) -> None:
    name = "<img src=x onerror=alert(1)>&'\"<!--PICTURES-->"
    root = root.rename(tmp_path / name)
    file = next(root.glob("quarantine/*/warnings.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines.append({"reason": "<b>", "image_id": 104, "message": '"></script><script>alert(1)</script>\x07é'})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, summary = made(root, tmp_path, "--warnings", "--count", 100)
    assert sorted(summary["shown"]) == sorted({line["image_id"] for line in lines})
    for line in lines:
        assert line["reason"] in page.texts
        assert f" {line['message']}" in page.texts
    assert f"Masks of {name}" in page.texts
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json"}] * len(page.pictures) + [{}]
    assert not [attributes for _, attributes in page.tags if any(key.startswith("on") for key in attributes)]
    assert sum(tag == "img" for tag, _ in page.tags) == len(page.pictures)
    add_view(root, [103, 104], "few")
    assert made(root, tmp_path, "--warnings", "--view", "few")[1]["shown"] == [104]


def test_the_page_of_a_url_is_that_of_the_folder(dataset: Path, bucket: str, tmp_path: Path) -> None:
    for words in ((), ("--warnings",), ("--view", "two")):
        here, there = (
            re.sub(r"sa1b gallery [0-9a-f]{16}", "", made(one, tmp_path, "--count", 5, *words)[0].text)
            for one in (shutil.copytree(dataset, tmp_path / "shards", dirs_exist_ok=True), bucket)
        )
        assert there == here
    run("gallery", bucket, "--out", tmp_path / "page.html")  # of the same URL
    refused("gallery", f"{bucket}/none", "--out", tmp_path / "other.html", names="none: no dataset")


def line(root: Path, image_id: int, chosen: list[int] | None = None, **more: Any) -> str:
    """The mirrored true masks as predictions, a line of predictions.jsonl; `more`: further keys of each mask."""
    one = sa1b.open(root).by_id(image_id).annotations
    rows = np.arange(len(one))[::-1] if chosen is None else np.array(chosen)
    runs = sa1b.masks.flip_horizontal(one.runs(rows))
    masks = [
        {
            "mask_id": int(one.mask_id[row]),
            "point": [row + 0.25, row + 1.5],
            "iou": float(row / 100),
            "predicted_iou": float(row / 50),
            "segmentation": {"size": [one.height, one.width], "counts": string.decode()},
        }
        | more
        for row, string in zip(rows.tolist(), sa1b.masks.encode(runs), strict=True)
    ]
    return json.dumps({"image_id": image_id, "masks": masks}) + "\n"


def shown(root: Path, tmp_path: Path, *lines: str) -> tuple[Page, dict[str, Any]]:
    (tmp_path / "predictions.jsonl").write_text("".join(lines))
    return made(root, tmp_path, "--predictions", tmp_path / "predictions.jsonl")


def test_the_images_of_the_file_are_shown_with_both_masks_in_one_order(scenes: Path, tmp_path: Path) -> None:
    page, summary = shown(scenes, tmp_path, line(scenes, 103), line(scenes, 101, [2, 0, 1]))
    assert sorted(summary["shown"]) == [101, 103]
    assert "the first in predictions.jsonl, whatever their scores" in page.text
    for image_id, count in ((101, 3), (103, len(sa1b.open(scenes).by_id(103).annotations))):
        data = page.pictures[image_id]
        true = sa1b.open(scenes).by_id(image_id).annotations
        rows = np.array([true.mask_id.tolist().index(mask_id) for mask_id in data["mask_id"]])
        assert len(rows) == count  # only masks that the model has predicted
        assert data["area"] == sorted(data["area"], reverse=True)
        runs = true.runs(rows)
        for name, one in (("counts", runs), ("predicted", sa1b.masks.flip_horizontal(runs))):
            resized = sa1b.masks.resize(one, data["height"], data["width"])
            assert data[name] == [text.decode() for text in sa1b.masks.encode(resized)]
        assert np.allclose(data["iou"], rows / 100)
        assert np.allclose(data["model_iou"], rows / 50)
        assert np.allclose(data["point_coords"], np.stack((rows + 0.25, rows + 1.5), axis=1))
    assert sum('class="stage twin"' in text for text in page.text.split("<figure")) == 2
    for words, image_id in ((("--count", 1), 103), (("--id", 101), 101)):
        some = made(scenes, tmp_path, "--predictions", tmp_path / "predictions.jsonl", *words)[1]
        assert some["shown"] == [image_id]


def test_masks_without_a_prediction_are_counted_and_drawn_apart(scenes: Path, tmp_path: Path) -> None:
    true = sa1b.open(scenes).by_id(101).annotations
    areas = sa1b.masks.area(true.runs())
    asked = np.argsort(-areas)[:2]
    page, _ = shown(scenes, tmp_path, line(scenes, 101, asked.tolist()), line(scenes, 103))
    rest = np.sort(np.delete(areas, asked))
    text = " ".join(page.texts)
    assert f"mean IoU {asked.mean() / 100:.3f}, 2 of {len(true)} masks" in text
    assert f"{len(rest)} masks of {rest[0]:,} to {rest[-1]:,} px without a prediction" in text
    assert [one["aria-pressed"] for _, one in page.tags if one.get("data-layer") == "unscored"] == ["false"]
    data = page.pictures[101]
    size = data["height"], data["width"]
    expected = sa1b.masks.resize(true.runs(np.setdiff1d(np.arange(len(true)), asked)), *size)
    assert sorted(data["filtered"]) == sorted(text.decode() for text in sa1b.masks.encode(expected))
    assert page.pictures[103]["filtered"] == []
    page, _ = shown(scenes, tmp_path, line(scenes, 103))
    assert not any(one.get("data-layer") == "unscored" for _, one in page.tags)


def test_phrases_are_listed_with_what_was_found_for_them(scenes: Path, tmp_path: Path) -> None:
    document = json.loads(line(scenes, 103))
    true = [mask["mask_id"] for mask in document["masks"]]
    for number, mask in enumerate(document["masks"]):
        mask |= {"phrase": f"</script><b>phrase {mask['mask_id']}", "iou": 1.0 if number % 2 else 0.25}
    page, _ = shown(scenes, tmp_path, json.dumps(document) + "\n")
    data = page.pictures[103]
    assert data["phrases"] == [f"</script><b>phrase {mask_id}" for mask_id in data["mask_id"]]
    assert data["iou"] == [1.0 if row % 2 else 0.25 for row in map(true.index, data["mask_id"])]
    assert sum(tag == "script" for tag, _ in page.tags) == 2


def test_predictions_for_another_size_are_counted_as_such(scenes: Path, tmp_path: Path) -> None:
    small = sa1b.masks.encode(sa1b.masks.resize(sa1b.open(scenes).by_id(102).runs, 7, 9))[0].decode()
    other = line(scenes, 102, [0], segmentation={"size": [7, 9], "counts": small})
    summary = shown(scenes, tmp_path, line(scenes, 101), other)[1]
    assert (summary["shown"], summary["skipped"]) == ([101], {"predictions_differ": 1})


def test_a_line_that_is_no_prediction_is_named(scenes: Path, tmp_path: Path) -> None:
    file, second = tmp_path / "predictions.jsonl", line(scenes, 103)
    for old, new in (
        ('"image_id": 103', f'"image_id": {1 << 63}'),
        ('"image_id": 103', f'"image_id": {"[" * 100_000}'),
        ('"mask_id": ', '"mask_id": 9999999999999999999'),
        ('"point": [', '"point": [1, '),
        ('"counts": "', '"counts": "\\u001b'),
        ('"masks": [', '"masks": [], "others": ['),
        ('"iou"', '"phrase": "a disc", "iou"'),
    ):
        assert old in second
        file.write_text(line(scenes, 101) + second.replace(old, new, 1))
        refused("gallery", scenes, "--predictions", file, names=f"{file}: line 2 is no prediction")
    file.write_text("")
    refused("gallery", scenes, "--predictions", file, names="has no predictions")
    file.write_text(second.replace("103", "999", 1))  # of an evaluation on another dataset directory
    refused("gallery", scenes, "--predictions", file, names=f"{file}: its images 999")


def test_command_line(inputs, tmp_path: Path) -> None:
    words = ["-m", "sa1b", "gallery", str(inputs["root"]), "--out", str(tmp_path / "page.html")]
    command = [sys.executable, *words]
    here = Path(__file__).parents[2]
    done = processes.run(
        [*command, "--id", "103", "104", "--id", "101", "--json"], capture_output=True, cwd=here, check=True
    )
    summary = json.loads(done.stdout)
    assert (sorted(summary["shown"]), done.stderr) == ([101, 103, 104], b"")
    assert summary["bytes"] == (tmp_path / "page.html").stat().st_size
    wrong = processes.run([*command, "--id", "1"], capture_output=True, cwd=here, check=False, text=True)
    assert wrong.returncode == 2
    assert re.match(r"error: --id \d+: not in ", wrong.stderr)
    assert wrong.stderr.count("\n") == 1
