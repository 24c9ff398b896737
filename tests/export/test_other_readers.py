"""Exports read back by the programs they are for: pycocotools, the label rules of ultralytics, `datasets`."""

import io
import json

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as pycocotools
from pycocotools.coco import COCO

import sa1b
from sa1b.errors import ShardError, UsageError
from sa1b.masks import rasterize
from tests import kit
from tests.export.exporting import export
from tests.export.exporting import main as command
from tests.shards import tiny
from tests.shards.tiny import resharded as reshard
from tests.shards.tiny_source import ROOTS, make_root, pairs, two_sources, write_source

LAYOUTS = {
    "coco": "coco --images-per-file 8",
    "one": "coco",
    "polygons": "coco --images-per-file 8 --segmentation polygons",
    "yolo": "yolo-seg --images-per-file 8",
    "parquet": "parquet --images-per-file 8",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Folders `root` and one for each layout, written by two workers."""
    folder = tmp_path_factory.mktemp("formats")
    root = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    for name, layout in LAYOUTS.items():
        summary = export(root, folder / name, layout, workers=2 if name == "one" else 1, quiet=True)
        assert (len(summary.parts), summary.images) == (1 if name == "one" else 3, 19)
        assert summary.bytes > sum(len(sample.jpeg) for sample in sa1b.open(root))
    return folder


def samples(folder):
    return {sample.image_id: sample for sample in sa1b.open(folder / "root")}


@pytest.mark.parametrize("segmentation", ["coco", "one", "polygons"])
def test_coco_reads_the_same_masks_boxes_and_images(exported, segmentation, capsys):
    expected = samples(exported)
    for path in sorted((exported / segmentation).glob("annotations*.json")):
        api = COCO(path)
        for image in api.loadImgs(api.getImgIds()):
            sample = expected.pop(image["id"])
            assert (exported / segmentation / "images" / image["file_name"]).read_bytes() == sample.jpeg
            assert (image["height"], image["width"]) == (sample.annotations.height, sample.annotations.width)
            found = api.loadAnns(api.getAnnIds(image["id"]))
            assert len(found) == len(sample.annotations)
            for one, mask, mask_id in zip(
                found, sample.masks(), sample.annotations.mask_id.tolist(), strict=True
            ):
                np.testing.assert_array_equal(api.annToMask(one), mask)
                run_lengths = api.annToRLE(one)
                assert one["bbox"] == pycocotools.toBbox(run_lengths).tolist()
                assert (one["area"], one["mask_id"]) == (pycocotools.area(run_lengths), mask_id)
                assert (one["category_id"], one["iscrowd"]) == (1, 0)
        assert sorted(api.anns) == list(range(1, len(api.anns) + 1))
    assert not expected


def test_reshard_makes_the_same_masks_of_the_export(exported, tmp_path, capsys):
    for name in ("coco", "polygons"):
        paths = [str(path) for path in sorted((exported / name).glob("annotations*.json"))]
        root = tmp_path / name
        code = reshard(tuple(paths), out=str(root), images=exported / name / "images", json_output=True)
        assert code == 0
        for sample in sa1b.open(root):
            before = samples(exported)[sample.image_id]
            assert sample.jpeg == before.jpeg
            np.testing.assert_array_equal(sample.masks(), before.masks())
            for column in ("mask_id", "point_coords", "crop_box", "predicted_iou"):
                np.testing.assert_array_equal(
                    getattr(sample.annotations, column), getattr(before.annotations, column)
                )


def test_lines_of_labels_are_the_masks(exported):
    """Ultralytics splits a line at spaces; with more than 6 words, the first is the class, the others x y in
    turn, all from 0 to 1. It finds the labels of an image by replacing the folder and the ending."""
    folder = exported / "yolo"
    expected = samples(exported)
    names = json.loads((folder / "data.yaml").read_text().split("train: ")[1].splitlines()[0])
    lines = [line for name in names for line in (folder / name).read_text().splitlines()]
    assert len(lines) == 19
    ious = []
    for line in lines:
        path = folder / line
        sample = expected.pop(int(path.stem.removeprefix("sa_")))
        assert path.read_bytes() == sample.jpeg
        height, width = sample.annotations.height, sample.annotations.width
        text = (folder / "labels" / f"{path.stem}.txt").read_text().splitlines()
        masks = [mask for mask in sample.masks() if mask.any()]
        assert len(text) == len(masks)
        for words, mask in zip((one.split() for one in text), masks, strict=True):
            assert len(words) > 6
            assert words[0] == "0"
            points = np.array(words[1:], np.float32).reshape(-1, 2)
            assert points.min() >= 0
            assert points.max() <= 1
            pixels = np.round(points * [width, height])
            found = pycocotools.frPyObjects([pixels.reshape(-1).tolist()], height, width)
            np.testing.assert_array_equal(pycocotools.decode(pycocotools.merge(found)), mask)
            painted = cv2.fillPoly(np.zeros((height, width), np.uint8), [pixels.astype(np.int32)], 1)
            ious.append((painted & mask).sum() / (painted | mask).sum())
            assert (painted >= mask).all()  # the loss that the module's docstring names: only surplus pixels
    assert not expected


def test_train_and_val_of_ultralytics_are_the_images_of_two_views(exported, tmp_path):
    root = str(exported / "root")

    def view(name, where, masks="area < 200"):
        kit.run("view", root, "--images-where", where, "--masks-where", masks, "--name", name)
        return name

    view("train", "image_id < 110"), view("held-out", "image_id > 200")
    for train in ("train", None):
        out = tmp_path / str(train)
        command(root, to="yolo-seg", out=out, view=train, val_view="held-out", images_per_file=6)
        lists = dict(line.split(": ", 1) for line in (out / "data.yaml").read_text().splitlines())
        ids = {}
        for name in ("train", "val"):
            lines = [line for one in json.loads(lists[name]) for line in (out / one).read_text().split()]
            ids[name] = {int(line.split("sa_")[1].removesuffix(".jpg")) for line in lines}
        held_out = {one for one in samples(exported) if one > 200}
        others = {one for one in samples(exported) if one < 110 or train is None} - held_out
        assert ids == {"train": others, "val": held_out}
        for number in ids["train"] | ids["val"]:
            expected = [mask.sum() for mask in samples(exported)[number].masks()]
            text = (out / "labels" / f"sa_{number}.txt").read_text()
            assert len(text.splitlines()) == sum(0 < area < 200 for area in expected)
    others = {"held-out": "are also in", view("any", "image_id < 110", "area < 3"): "another condition"}
    for other, why in others.items():
        with pytest.raises(UsageError, match=f"--val-view held-out: .*{why}.* --view {other}; make both"):
            command(root, to="yolo-seg", out=tmp_path / "no", view=other, val_view="held-out")
    assert not (tmp_path / "no").exists()


def test_datasets_reads_images_and_masks(exported, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(str(exported / "parquet"), cache_dir=str(tmp_path), split="train")
    assert isinstance(found.features["image"], datasets.Image)
    expected = samples(exported)
    for row in found:
        sample = expected.pop(row["image_id"])
        image = Image.open(io.BytesIO(sample.jpeg)).convert(row["image"].mode)
        np.testing.assert_array_equal(np.asarray(row["image"]), np.asarray(image))
        size = [row["height"], row["width"]]
        masks = [pycocotools.decode({"size": size, "counts": mask["counts"]}) for mask in row["masks"]]
        np.testing.assert_array_equal(np.array(masks).reshape(-1, *size), sample.masks())
        assert [mask["id"] for mask in row["masks"]] == sample.annotations.mask_id.tolist()
    assert not expected
    raw = found.cast_column("image", datasets.Image(decode=False))
    assert raw[0]["image"]["bytes"] == samples(exported)[raw[0]["image_id"]].jpeg


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_run_skips_complete_files_and_an_interrupted_one_is_completed(exported, tmp_path, name):
    layout = LAYOUTS[name]
    again = export(exported / "root", exported / name, layout, quiet=True)
    assert (again.bytes_written, again.images, again.skipped) == (0, 19, again.parts)
    files = [path for path in (exported / name).rglob("*") if path.is_file() and path.name != ".export.jsonl"]
    whole = {path: path.read_bytes() for path in files}
    max(whole, key=lambda path: path.name != "annotations.json").unlink()
    left = export(exported / "root", exported / name, layout, quiet=True)
    assert len(left.skipped) == len(again.parts) - 1
    assert {path: path.read_bytes() for path in files} == whole


def test_a_damaged_image_leaves_no_file_that_looks_complete(tmp_path):
    root = make_root(
        tmp_path / "root", [write_source(tmp_path / "sa_000001.tar", pairs(range(8)))], ROOTS["plain"]
    )
    shard = root / "sa1b-000001-0001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:600] + bytes([whole[600] ^ 1]) + whole[601:])
    for name, layout in LAYOUTS.items():
        with pytest.raises(ShardError, match=r"repair .* and run the same command again"):
            export(root, tmp_path / name, layout.split()[0], quiet=True)
        assert [path.name for path in (tmp_path / name).rglob("*")] == [".export.jsonl"]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path):
    root = make_root(
        tmp_path / "root", [write_source(tmp_path / "sa_000001.tar", pairs(range(3)))], ROOTS["image_size"]
    )
    for name in ("coco", "parquet"):
        with pytest.raises(UsageError, match="--image-size 32"):
            export(root, tmp_path / name, LAYOUTS[name], quiet=True)
        assert not (tmp_path / name).exists()
    assert export(root, tmp_path / "yolo", "yolo-seg", quiet=True).images == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"already has data\.yaml"):
        export(root, tmp_path / "mine", "yolo-seg", quiet=True)


def test_a_mask_without_pixels_can_be_read_by_pycocotools(tmp_path):
    document = tiny.document(7)
    height, width = tiny.SIZE
    document["annotations"][0]["segmentation"]["counts"] = tiny.counts_from([height * width], height, width)
    members = [*tiny.pairs([5]), *tiny.pair_members(7, text=tiny.encode(document))]
    tar = tiny.write_tar(tmp_path / "sa_000001.tar", members)
    make_root(tmp_path / "root", [tar], ROOTS["plain"])
    export(tmp_path / "root", tmp_path / "out", "coco --segmentation polygons", workers=1, quiet=True)
    coco = COCO(str(tmp_path / "out" / "annotations.json"))
    expected = rasterize(sa1b.open(tmp_path / "root").by_id(7).runs)
    found = [coco.annToMask(one) for one in coco.imgToAnns[7]]
    np.testing.assert_array_equal(np.stack(found), expected)
    assert not expected[0].any()
