"""The gallery: one page with exact masks, which is the same for every kind of input."""

import base64
import gzip
import html
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sa1b.errors import ManifestError, ShardError, SourceError, UsageError
from sa1b.masks import coco, geometry, raster
from sa1b.programs.gallery import members
from sa1b.programs.gallery.chart import MAX_BARS, Distribution, Survey, charts
from sa1b.programs.gallery.inputs import GallerySummary
from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.programs.gallery.picture import SORTS
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards import jpeg
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import read_tasks
from sa1b.storage.errors import MissingError
from tests import processes
from tests.gallery.browser import BROWSER, dump_dom
from tests.shards.tiny import SIZE, document, encode, ingest_tar, pair, pairs, tar_bytes, write_tar

IMAGES, FIRST_ID, LONG_SIDE = 14, 100, 160


@dataclass
class Page(HTMLParser):
    """The contents of a page: every tag with its attributes, texts by tag, the data of every image."""

    text: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    pictures: dict[int, dict[str, Any]] = field(default_factory=dict)
    jpegs: dict[int, bytes] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.image_id = 0
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("class") == "picture":
            self.image_id = int(str(found["id"]).removeprefix("sa_"))
        if tag == "img" and "src" in found:
            self.jpegs[self.image_id] = base64.b64decode(str(found["src"]).split(",")[1])

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"type": "application/json"}) and data.strip():
            self.pictures[self.image_id] = json.loads(data)
        else:
            self.texts.append(data)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images as a source tar, a folder of pairs, a dataset directory, and shards without indexes."""
    folder = tmp_path_factory.mktemp("gallery")
    tar = folder / "sa_000003.tar"
    synthetic.write_tar(tar, images=IMAGES, first_id=FIRST_ID, long_side=LONG_SIDE)
    root, alone, extracted = folder / "root", folder / "alone", folder / "pairs"
    ingest_tar(tar, root, images_per_shard=5, keep_json=True)
    write_dataset(root, read_tasks(root))
    alone.mkdir()
    for shard in root.glob("*.tar"):
        shutil.copy(shard, alone)
    with tarfile.open(tar) as opened:
        opened.extractall(extracted, filter="data")
    return {"tar": tar, "root": root, "alone": alone, "pairs": extracted}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Page, GallerySummary]]:
    """Write a gallery and read it back."""

    def write(path: Path, choice: Choice | None = None, **options: Any) -> tuple[Page, GallerySummary]:
        summary = write_gallery(
            path, tmp_path / "gallery.html", choice or Choice(), quiet=True, overwrite=True, **options
        )
        data = summary.page.read_bytes()
        assert summary.bytes == len(data)
        page = Page(data.decode())
        assert list(page.pictures) == summary.shown
        return page, summary

    return write


def test_the_page_needs_nothing_else(inputs, make) -> None:
    page, summary = make(inputs["root"])
    assert summary.shown
    assert not re.search(r"https?:|@import|url\(|\bimport\(|fetch\(|XMLHttp", page.text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert name not in ("srcset", "action", "data", "poster", "background")
            assert name != "src" or str(value).startswith("data:image/jpeg;base64,")
            assert name != "href" or str(value).startswith("#")
    policies = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert [str(policy).startswith("default-src 'none'; img-src data:;") for policy in policies] == [True]


def test_every_kind_of_input_shows_the_same(inputs, make) -> None:
    choice = Choice(count=6, seed=3)
    page, summary = make(inputs["root"], choice)
    assert len(summary.shown) == 6
    for kind in ("tar", "pairs", "alone"):
        other, of_other = make(inputs[kind], choice)
        assert other.pictures == page.pictures
        assert other.jpegs == page.jpegs
        assert (of_other.images, of_other.masks) == (summary.images, summary.masks)
        assert (of_other.shown, of_other.skipped) == (summary.shown, {})
        assert charts_of(other) == charts_of(page)
    shard = sorted(inputs["root"].glob("*.tar"))[0]
    indexed, of_indexed = make(shard)
    unindexed, of_unindexed = make(inputs["alone"] / shard.name)
    assert of_indexed.images == of_unindexed.images == 5
    assert indexed.pictures == unindexed.pictures


def charts_of(page: Page) -> list[str]:
    return re.findall(r'<figure class="chart">.*?</figure>', page.text, re.DOTALL)


@pytest.mark.parametrize("max_side", [64, 100, 1000])
def test_embedded_masks_are_the_raster_at_display_size(inputs, make, max_side: int) -> None:
    page, summary = make(inputs["tar"], Choice(count=4), max_side=max_side)
    dataset = Dataset(inputs["root"])
    for image_id, data in page.pictures.items():
        sample = dataset.by_id(image_id)
        height, width = sample.image.shape[:2]
        if max_side < LONG_SIDE:
            height, width = jpeg.scaled_size(height, width, max_side)
        frame = jpeg.frame(page.jpegs[image_id])
        assert (frame.height, frame.width) == (data["height"], data["width"]) == (height, width)
        order = np.argsort(-geometry.area(sample.runs), kind="stable")
        shown = coco.decode(data["counts"], height, width)
        assert np.array_equal(raster.rasterize(shown), raster.rasterize(sample.runs, height, width)[order])
        annotations = sample.annotations
        assert (data["source_width"], data["source_height"]) == (annotations.width, annotations.height)
        for name in ("mask_id", "area", "bbox", "predicted_iou", "stability_score", "point_coords"):
            assert np.array_equal(data[name], getattr(annotations, name)[order])
        assert np.array_equal(data["crop_box"], annotations.crop_box[order])
        assert np.array_equal(data["runs_count"], annotations.runs_count[order])
        assert data["area"] == sorted(data["area"], reverse=True)  # small masks are drawn last
    assert summary.longer_side == max_side


def test_masks_stay_exact_on_shards_with_smaller_pictures(inputs, make, tmp_path: Path) -> None:
    ingest_tar(inputs["tar"], tmp_path / "root", image_size=96, quality=90)
    write_dataset(tmp_path / "root", read_tasks(tmp_path / "root"))
    page, _ = make(tmp_path / "root", Choice(ids=(FIRST_ID,)))
    data = page.pictures[FIRST_ID]
    assert max(data["height"], data["width"]) == 96
    runs = Dataset(inputs["root"]).by_id(FIRST_ID).runs
    order = np.argsort(-geometry.area(runs), kind="stable")
    shown = raster.rasterize(coco.decode(data["counts"], data["height"], data["width"]))
    assert np.array_equal(shown, raster.rasterize(runs, data["height"], data["width"])[order])


def test_the_same_input_gives_the_same_bytes_and_the_seed_chooses(inputs, make) -> None:
    page, summary = make(inputs["tar"], Choice(count=5))
    again, _ = make(inputs["tar"], Choice(count=5))
    assert again.text == page.text
    others = {tuple(make(inputs["root"], Choice(count=5, seed=seed))[1].shown) for seed in range(4)}
    assert len(others) > 1
    more = make(inputs["tar"], Choice(count=8))[1].shown
    assert set(summary.shown) < set(more)


def test_the_choice_is_uniform() -> None:
    ids = np.arange(1, 10_001)
    chosen = np.concatenate([ids[np.argsort(Choice(seed=seed).ranks(ids))[:100]] for seed in range(30)])
    counts, _ = np.histogram(chosen, 10, (1, 10_001))
    assert counts.min() > 240
    assert counts.max() < 360


@pytest.mark.parametrize("sort", list(SORTS))
def test_sort_orders_the_pictures(inputs, make, sort: str) -> None:
    page, summary = make(inputs["root"], Choice(count=IMAGES), sort=sort)
    dataset = Dataset(inputs["root"])
    numbers: dict[str, Callable[[Any], float]] = {
        "stability_score": lambda a: a.stability_score.mean(),
        "predicted_iou": lambda a: a.predicted_iou.mean(),
        "masks": lambda a: -len(a),
        "area": lambda a: -(a.area / (a.width * a.height)).mean(),
        "image_id": lambda a: a.image_id,
    }
    found = [numbers[sort](dataset.by_id(image_id).annotations) for image_id in summary.shown]
    assert len(found) == IMAGES
    assert found == sorted(found)
    assert [attributes["value"] for tag, attributes in page.tags if "selected" in attributes] == [sort]


def test_wrong_options_are_named(inputs, make) -> None:
    with pytest.raises(
        UsageError, match=r"--sort size: must be one of stability_score, predicted_iou, masks, area"
    ):
        make(inputs["root"], sort="size")
    for kind in ("root", "tar", "pairs"):
        with pytest.raises(UsageError, match=r"--id 7, 8: not in .*; .* the input has 14 images"):
            make(inputs[kind], Choice(ids=(FIRST_ID, 7, 8)))
    with pytest.raises(UsageError, match="--count"):
        make(inputs["root"], Choice(count=0))
    with pytest.raises(UsageError, match="--max-side"):
        make(inputs["root"], max_side=1001)
    with pytest.raises(SourceError, match="no such file"):
        make(inputs["root"] / "missing")


@pytest.mark.parametrize("kind", ["root", "tar", "alone"])
def test_ids_pick_images(inputs, make, kind: str) -> None:
    ids = (FIRST_ID + 9, FIRST_ID + 2)
    _, summary = make(inputs[kind], Choice(ids=ids), sort="image_id")
    assert summary.shown == sorted(ids)
    assert summary.images == IMAGES


def test_the_page_stays_below_its_limit(inputs, make) -> None:
    _, whole = make(inputs["tar"])
    assert (whole.longer_side, whole.quality, whole.left_out) == (1000, 88, 0)
    page, lowered = make(inputs["tar"], max_side=160, max_bytes=whole.bytes * 2 // 3)
    assert lowered.bytes <= whole.bytes * 2 // 3
    assert lowered.quality < 88
    assert (lowered.left_out, len(lowered.shown)) == (0, IMAGES)
    assert f"JPEG quality {lowered.quality}" in page.text
    page, fewer = make(inputs["tar"], max_bytes=whole.bytes // 3)
    assert fewer.bytes <= whole.bytes // 3
    assert 0 < len(fewer.shown) == IMAGES - fewer.left_out < IMAGES
    assert f"{fewer.left_out} more do not fit" in page.text
    assert str(fewer.left_out) in fewer.table()


def test_names_from_outside_are_text(make, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&'\".tar"
    evil = 'sa_"><script>alert(1)</script><!--PICTURES-->\x07é.jpg'
    path = write_tar(tmp_path / name, [*pairs([1, 2]), (evil, b"x")])
    page, summary = make(path)
    assert summary.skipped == {"unexpected_name": 1}
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json"}] * 2 + [{}]
    assert not [attributes for _, attributes in page.tags if any(key.startswith("on") for key in attributes)]
    assert sum(tag == "img" for tag, _ in page.tags) == 2
    assert f"Masks of {name}" in page.texts
    assert any(evil in text for text in page.texts)


def test_bad_members_are_skipped_and_counted(make, tmp_path: Path) -> None:
    good = pairs(range(1, 9))
    image, text = pair(20)
    wrong_size = encode(document(23, size=(SIZE[0], SIZE[1] + 1)))
    bad = [
        ("./sa_20.jpg", image[: len(image) // 2]),
        ("./sa_20.json", text),
        ("./sa_21.json", b"{"),
        ("./sa_21.jpg", image),
        ("./sa_22.jpg", image),
        ("./sa_23.jpg", image),
        ("./sa_23.json", wrong_size),
        ("./readme.txt", b"hello"),
        good[0],
    ]
    path = tmp_path / "sa_000001.tar"
    path.write_bytes(gzip.compress(tar_bytes([*bad[:4], *good, *bad[4:]], end=b"")))
    page, summary = make(path)
    assert sorted(summary.shown) == list(range(1, 9))
    assert (summary.images, summary.masks) == (8, 24)
    reasons = "duplicate image_size invalid_json jpeg_truncated no_end_marker unexpected_name unpaired"
    assert summary.skipped == dict.fromkeys(reasons.split(), 1)
    assert "7 skipped" in page.text
    assert "sa_22.jpg: its partner is missing" in page.text
    with pytest.raises(UsageError, match=r"none of the --id images can be shown; .*ends"):
        make(path, Choice(ids=(20,)))


def test_pictures_that_do_not_decode_make_room_for_the_next(make, tmp_path: Path) -> None:
    order = make(write_tar(tmp_path / "good.tar", pairs(range(1, 9))), Choice(count=4))[1].shown
    wanted = sorted(order, key=lambda image_id: int(Choice().ranks([image_id])[0]))[0]
    whole = pair(wanted)[0]
    cut = [
        (name, whole[: len(whole) // 2] + b"\xff\xd9") if name == f"./sa_{wanted}.jpg" else (name, data)
        for name, data in pairs(range(1, 9))
    ]
    _, summary = make(write_tar(tmp_path / "bad.tar", cut), Choice(count=4))
    assert summary.skipped == {"jpeg_broken": 1}
    assert len(summary.shown) == 4
    assert wanted not in summary.shown
    assert set(order) - {wanted} < set(summary.shown)


def test_the_page_says_how_its_images_were_chosen(inputs, make) -> None:
    for choice, text in (
        (Choice(count=2, seed=5), f"2 of {IMAGES} images, chosen at random with seed 5; at most"),
        (Choice(ids=(FIRST_ID,)), f"1 of {IMAGES} images, chosen by id; at most"),
        (Choice(count=100), f"{IMAGES} of {IMAGES} images; at most"),
    ):
        page = make(inputs["root"], choice)[0].text
        assert text in page
        assert "<th>Shard</th>" in page
        assert "parts" not in page


def test_a_folder_may_hold_sources_and_shards(inputs, make, tmp_path: Path) -> None:
    write_tar(tmp_path / "sources" / "zzz.tar", pairs([1, 2]))
    for shard in inputs["alone"].glob("*.tar"):
        shutil.copy(shard, tmp_path / "sources")
    page, summary = make(tmp_path / "sources")
    assert (summary.images, summary.skipped) == (IMAGES + 2, {})
    assert {1, 2} < set(summary.shown)
    assert "4 files" in page.text


def test_damage_in_a_shard_is_skipped_and_the_next_image_taken(inputs, make, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(inputs["root"], root)
    first, second = make(root, Choice(count=1))[1].shown, make(root, Choice(count=2))[1].shown
    sample = Dataset(root).by_id(first[0])
    with (root / sample.shard).open("r+b") as file:
        file.seek(sample.offset + len(sample.jpeg) // 2)
        file.write(b"damage")
    page, summary = make(root, Choice(count=1))
    assert summary.skipped == {"damaged": 1}
    assert summary.shown == [image_id for image_id in second if image_id != first[0]]
    assert f"sa_{first[0]} in {sample.shard} at offset {sample.offset:,}" in page.text
    index = next(root.glob("*.parquet"))
    pq.write_table(pa.table({"image_id": [1]}), index)
    with pytest.raises(ShardError, match=rf"has no column area; run `.*sa1b index {root}` to rebuild it"):
        make(root)
    index.unlink()
    with pytest.raises(ShardError, match=rf"missing; run `.*sa1b index {root}` to rebuild it"):
        make(root)


def test_what_waits_is_bounded_and_the_most_wanted_stay(make, tmp_path: Path, monkeypatch) -> None:
    ids = range(1, 41)
    apart = sorted(pairs(ids), key=lambda member: member[0].endswith("json"))  # all images come first
    path = write_tar(tmp_path / "sa_000001.tar", apart)
    wanted = make(path, Choice(count=3))[1].shown
    limit = sum(len(pair(image_id)[0]) for image_id in ids) // 8
    monkeypatch.setattr(members, "WAITING_BYTES", limit)
    _, summary = make(path, Choice(count=3))
    assert summary.shown == wanted
    assert (summary.images, summary.masks) == (40, 120)
    monkeypatch.setattr(members, "WAITING_BYTES", 0)
    assert make(path, Choice(count=3))[1].shown == []
    assert make(path, Choice(ids=(5,)))[1].shown == [5]


def test_odd_annotations_are_shown(make, tmp_path: Path) -> None:
    odd = document(1)
    odd["annotations"][0] |= {"predicted_iou": float("nan"), "area": -5, "id": 2**60 + 1}
    del odd["annotations"][1]["stability_score"], odd["annotations"][1]["bbox"]
    empty = document(2, masks=0)
    files = [(f"sa_{i}.jpg", pair(i)[0]) for i in (1, 2)]
    path = write_tar(
        tmp_path / "sa_000001.tar", [*files, ("sa_1.json", encode(odd)), ("sa_2.json", encode(empty))]
    )
    page, summary = make(path)
    assert summary.shown == [1, 2]  # the image without masks has no score and is last
    data = page.pictures[1]
    at = data["mask_id"].index(str(2**60 + 1))  # JavaScript would round its last digits
    assert (data["predicted_iou"][at], data["area"][at]) == (None, -5)
    assert [None] * 4 in data["bbox"]
    assert None in data["stability_score"]
    assert page.pictures[2]["counts"] == []
    assert "1 masks without a value" in page.text


def distribution(log: bool = False, bins: int = 1500, low: float = 0.0, step: float = 0.001) -> Distribution:
    return Distribution("Title", "axis", "masks", low, step, np.zeros(bins, np.int64), log)


def test_bars_hold_every_value_once() -> None:
    values = np.random.default_rng(0).uniform(0.88, 1.03, 10_000).round(3)
    counted = distribution()
    counted.add(values[:3000])
    counted.add(np.append(values[3000:], [np.nan, 1.7, -0.1]))
    edges, counts = counted.bars()
    assert (counts.sum(), counted.missing, counted.outside, counted.known) == (10_000, 1, 2, 10_002)
    assert len(counts) <= MAX_BARS
    assert np.array_equal(counts, np.histogram(values, edges - 1e-7)[0])


def test_bars_of_logarithms() -> None:
    counted = distribution(log=True, bins=190, low=-9, step=0.05)
    counted.add(np.array([0.01, 0.011, 0.1, 1.0, 0.0]))
    edges, counts = counted.bars()
    assert (counts.sum(), counted.outside) == (4, 1)
    assert (edges[0], counts[0]) == (pytest.approx(-2), 2)
    assert edges[-1] > 0


def test_charts_count_everything(inputs, make) -> None:
    page, summary = make(inputs["root"])
    found = charts_of(page)
    assert len(found) == 4
    for chart, expected in zip(found, (summary.images, *[summary.masks] * 3), strict=True):
        counts = re.findall(r"<title>[^<]*: ([\d,]+) (?:images|masks)</title>", chart)
        assert sum(int(count.replace(",", "")) for count in counts) == expected
        assert chart.count("<text") > 6  # numbers on both axes and their names
    assert "no values" in charts(Survey())
    survey = Survey()
    survey.area.add(np.array([2.5e-7, 0.25]))
    assert "mean 13 %, from 0.000025 % to 25 %" in charts(survey)
    # Charts and most facts are collapsed: a telephone shows images first, and the script opens the charts.
    collapsed = [attributes for tag, attributes in page.tags if tag == "details"]
    assert collapsed == [{}, {}, {"class": "charts"}]
    for label in ("Quarantined", "Kept with warnings"):
        assert f"<dt>{label}</dt><dd>0</dd>" in page.text


def test_a_missing_shard_is_named_with_the_way_out(inputs, make, tmp_path: Path) -> None:
    root = shutil.copytree(inputs["root"], tmp_path / "root")
    shard = next(root.glob("*.tar"))
    shard.unlink()
    with pytest.raises(MissingError) as refused:
        make(root)
    assert str(refused.value).startswith(f"{shard}: the shard is missing; `")
    assert str(refused.value).endswith(f" verify {root}` says how to restore it")


def test_a_file_without_images_is_refused(make, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(SourceError, match=r"notes\.txt: contains no image that can be shown \(.+\); pass"):
        make(tmp_path / "notes.txt")
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(ManifestError, match=r"dataset\.json: a file; pass its folder"):
        make(tmp_path / "dataset.json")


def test_only_a_page_of_the_same_input_is_replaced(inputs, tmp_path: Path) -> None:
    out = tmp_path / "gallery.html"
    write_gallery(inputs["root"], out, Choice(count=2), quiet=True)
    write_gallery(inputs["root"] / ".." / "root", out, Choice(count=3), quiet=True)
    page = out.read_bytes()
    assert str(inputs["root"]).encode() not in page
    with pytest.raises(UsageError, match=r"--out .*gallery.html: exists and is a page of another input"):
        write_gallery(inputs["alone"], out, Choice(count=2), quiet=True)
    assert out.read_bytes() == page
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(UsageError, match=r"not written by this command; .* --overwrite"):
        write_gallery(inputs["root"], tmp_path / "mine.html", Choice(count=2), quiet=True)
    assert (tmp_path / "mine.html").read_text() == "mine"
    with pytest.raises(UsageError, match="is a folder"):
        write_gallery(inputs["root"], tmp_path, Choice(count=2), quiet=True, overwrite=True)
    with pytest.raises(UsageError, match="is the input"):
        write_gallery(inputs["tar"], inputs["tar"], Choice(count=2), quiet=True, overwrite=True)
    with pytest.raises(UsageError, match="is a file of the dataset directory .*root; choose another --out"):
        write_gallery(inputs["root"], inputs["root"] / "dataset.json", Choice(), quiet=True, overwrite=True)
    write_gallery(inputs["alone"], out, Choice(count=2), quiet=True, overwrite=True)
    write_gallery(inputs["alone"], out, Choice(count=2), quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gallery.html", "mine.html"]


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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_drawn_outlines_are_the_edges_of_the_raster(inputs, make, tmp_path: Path) -> None:
    """A browser runs the page's script; every outline must be the boundary of the mask's pixels."""
    page, _ = make(inputs["root"], Choice(count=6), max_side=100)
    probe = """<pre id="probe"></pre><script>document.querySelector("#probe").textContent = JSON.stringify(
        pictures.map((each) => [each.id, build(each).paths.map((path) => path.getAttribute("d"))]));</script>"""
    file = tmp_path / "probe.html"
    file.write_text(page.text.replace("</body>", f"{probe}</body>"))
    dom = dump_dom(file, tmp_path / "profile")
    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert match is not None
    drawn = json.loads(html.unescape(match[1]))
    assert len(drawn) == 6
    for name, paths in drawn:
        data = page.pictures[int(name.removeprefix("sa_"))]
        height, width = data["height"], data["width"]
        masks = raster.rasterize(coco.decode(data["counts"], height, width)).astype(int)
        for mask, path in zip(masks, paths, strict=True):
            vertical, horizontal = edges_of(path, height, width)
            padded = np.pad(mask, 1)
            assert np.array_equal(vertical, abs(np.diff(padded[1:-1], axis=1)))
            assert np.array_equal(horizontal, abs(np.diff(padded[:, 1:-1], axis=0)))


def edges_of(path: str, height: int, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often a path follows each pixel edge: vertical [height, width + 1], horizontal [height + 1, width]."""
    vertical = np.zeros((height, width + 1), np.int64)
    horizontal = np.zeros((height + 1, width), np.int64)
    x = y = 0
    start = (0, 0)
    for letter, numbers in re.findall(r"([MHVz])([\d ]*)", path):
        values = [int(value) for value in numbers.split()]
        if letter == "M":
            x, y = start = (values[0], values[1])
            continue
        to = {"H": (values[0] if values else 0, y), "V": (x, values[0] if values else 0), "z": start}[letter]
        assert to[0] == x or to[1] == y
        vertical[min(y, to[1]) : max(y, to[1]), x] += 1
        horizontal[y, min(x, to[0]) : max(x, to[0])] += 1
        x, y = to
    return vertical, horizontal
