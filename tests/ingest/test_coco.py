"""Files in COCO's format as sources: every mask equals that of pycocotools, and nothing is lost silently."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image
from pycocotools import mask as pycocotools
from pycocotools.coco import COCO

import sa1b
from sa1b.cli import main
from sa1b.errors import SourceError, UsageError
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from sa1b.sources import coco_pair
from sa1b.sources.coco_file import CocoFile, CocoOptions
from tests import kit
from tests.ingest.at_open import run_changing
from tests.shards import tiny
from tests.shards.tiny import resharded as reshard
from tests.verify.checking import check as verify

view, query, export_command = (partial(kit.called, verb) for verb in ("view", "query", "export"))
FOLDER = Path(os.environ.get("SA1B_REAL_SAMPLES", Path(__file__).parents[3] / "shared" / "real"))
RESULTS = FOLDER / "coco_fakesegm100.json"
HEIGHT, WIDTH = 40, 60


def photo(height: int = HEIGHT, width: int = WIDTH, mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([4 * y % 256, 3 * x % 256, (x + y) % 256], axis=2).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def polygons(shift: float) -> list[list[float]]:
    return [[3 + shift, 2.5, 30, 4 + shift, 20.2, 30], [35, 10, 55.5, 12, 50, 35 - shift, 33, 30]]


def counts(first: int = 100) -> list[int]:
    return [first, 10, 30, 10, HEIGHT * WIDTH - first - 50]


def rle(first: int = 100) -> dict[str, object]:
    size = [HEIGHT, WIDTH]
    found = pycocotools.frPyObjects({"size": size, "counts": counts(first)}, *size)
    return {"size": size, "counts": found["counts"].decode()}


GOOD = [
    {
        "id": 11,
        "image_id": 7,
        "category_id": 3,
        "segmentation": polygons(0),
        "iscrowd": 0,
        "area": 5,
        "bbox": [1],
    },
    {"id": 12, "image_id": 7, "category_id": 3, "segmentation": rle(), "score": 0.75},
    {"id": 13, "image_id": 7, "segmentation": {"size": [HEIGHT, WIDTH], "counts": counts(31)}, "iscrowd": 1},
    {"id": 14, "image_id": 9, "category_id": "x", "segmentation": [polygons(2)[0], [1, 2, 3, 4]]},
    {
        **{"id": 15, "image_id": 9, "segmentation": rle(50), "predicted_iou": 0.9, "stability_score": 0.8},
        **{"point_coords": [[3.5, 20.0]], "crop_box": [0, 0, 30, 40]},
    },
    {"id": 16, "image_id": 20, "segmentation": [[1, 1, 38, 1, 38, 50, 1, 50]]},
]
BAD = {
    "no_segmentation": [{"id": 30, "image_id": 7, "bbox": [1, 2, 3, 4]}, {"id": 31, "image_id": 7, "segmentation": []}],
    "short_polygon": [GOOD[3], {"id": 32, "image_id": 9, "segmentation": [[1, 2, 3, 4]]}],
    "bad_polygon": [
        {"id": 33, "image_id": 9, "segmentation": [[1, 2, 3, 4, 5, "a"]]},
        {"id": 34, "image_id": 9, "segmentation": [[1, 2, 3, 4, 5, 6, 7]]},
    ],
    "bad_score": [
        {"id": 45, "image_id": 7, "segmentation": rle(), "score": "0.9"},
        {"id": 46, "image_id": 9, "segmentation": polygons(0), "predicted_iou": True},
        {"id": 47, "image_id": 9, "segmentation": rle(), "stability_score": [0.5]},
    ],
    "mask_size": [{"id": 35, "image_id": 7, "segmentation": {"size": [WIDTH, HEIGHT], "counts": counts()}}],
    "bad_rle": [
        {"id": 36, "image_id": 7, "segmentation": {"size": [HEIGHT, WIDTH], "counts": [1, 2]}},
        {"id": 37, "image_id": 7, "segmentation": {"size": [HEIGHT, WIDTH], "counts": "abc"}},
        {"id": 38, "image_id": 7, "segmentation": {"size": [HEIGHT, WIDTH], "counts": ""}},
    ],
    "empty_mask": [{"id": 39, "image_id": 7, "segmentation": {"size": [HEIGHT, WIDTH], "counts": [2400]}}],
    "bad_segmentation": [{"id": 40, "image_id": 7, "segmentation": "abc"}],
    "annotation_without_image": [{"id": 41, "image_id": 99, "segmentation": polygons(0)}],
}  # fmt: skip
IMAGES = [
    {"id": 7, "file_name": "a/one.jpg", "height": HEIGHT, "width": WIDTH, "license": 2},
    {"id": 9, "file_name": "two.png", "height": HEIGHT, "width": WIDTH},
    {"id": 20, "file_name": "upright.jpg", "height": WIDTH, "width": HEIGHT},
    {"id": 21, "coco_url": "http://x/a/bare.webp"},
    {"id": 22, "file_name": "gone.jpg"},
    {"id": 23, "file_name": "../photos2/out.jpg"},
    {"id": 24, "file_name": "one.txt"},
    {"id": 25, "file_name": "two.png", "height": 5, "width": 6},
    {"id": 26, "file_name": "deep.png"},
    {"id": 27, "file_name": "cut.jpg"},
]
LOST = {
    "image_missing": 1,
    "image_name": 1,
    "image_unreadable": 1,
    "image_size": 1,
    "image_unsupported": 1,
    "jpeg_truncated": 1,
}


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """A folder with masks.json and photos/, and its dataset directory; exit code of reshard."""
    folder = tmp_path_factory.mktemp("coco")
    photos = folder / "photos"
    saved(photos / "a" / "one.jpg", photo(), quality=90)
    saved(photos / "two.png", photo(mode="RGBA"))
    exif = Image.Exif()
    exif[274] = 6
    saved(photos / "upright.jpg", photo(), exif=exif)
    saved(photos / "a" / "bare.webp", photo(), lossless=True)
    saved(photos / "deep.png", Image.fromarray(np.zeros((4, 4), np.uint16)))
    (photos / "one.txt").write_text("no image")
    (photos / "cut.jpg").write_bytes((photos / "a" / "one.jpg").read_bytes()[:-40])
    annotations = [*GOOD, *(one for reason, found in BAD.items() for one in found if one not in GOOD), 17]
    document = {"images": IMAGES, "annotations": annotations, "categories": [{"id": 3, "name": "cat"}, 5]}
    (folder / "masks.json").write_text(json.dumps(document))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = reshard(
            (str(folder / "masks.json"),), out=str(folder / "root"), images=photos, json_output=True
        )
    assert code == 3, printed.getvalue()
    return folder


def test_every_mask_equals_that_of_pycocotools(coco):
    tiny.read_back(coco / "root")
    ds = sa1b.open(coco / "root")
    assert ds.table.image_id.tolist() == [7, 9, 20, 21]
    reference = {"images": [{**one, "height": HEIGHT, "width": WIDTH} for one in IMAGES], "annotations": GOOD}
    reference["images"][2] |= {"height": WIDTH, "width": HEIGHT}
    (coco / "reference.json").write_text(json.dumps(reference))
    api = COCO(coco / "reference.json")
    found = 0
    for sample in ds:
        for number, runs in zip(
            sample.annotations.mask_id.tolist(), sample.annotations.runs().to_coco(), strict=True
        ):
            one = dict(api.anns[number])
            if number == 14:
                one["segmentation"] = one["segmentation"][:1]
            np.testing.assert_array_equal(pycocotools.decode(runs), pycocotools.decode(api.annToRLE(one)))
            found += 1
    assert found == len(GOOD)


def test_jpegs_keep_their_bytes_and_other_images_their_pixels(coco):
    ds = sa1b.open(coco / "root")
    one, two, upright, bare = ds
    assert one.jpeg == (coco / "photos" / "a" / "one.jpg").read_bytes()
    for sample, expected in (
        (two, photo()),
        (bare, photo()),
        (upright, photo().transpose(Image.Transpose.ROTATE_270)),
    ):
        pixels = simplejpeg.decode_jpeg(sample.jpeg).astype(int)
        assert pixels.shape == np.asarray(expected).shape
        assert np.abs(pixels - np.asarray(expected)).mean() < 4
    assert len(bare.annotations) == 0  # an image without annotations is kept


def test_values_that_coco_lacks_have_defaults_and_the_origin_is_stored(coco):
    one, two, upright, _ = sa1b.open(coco / "root")
    assert one.annotations.predicted_iou.tolist() == [1.0, 0.75, 1.0]
    assert one.annotations.stability_score.tolist() == [1.0, 1.0, 1.0]
    assert sa1b.masks.contains(one.annotations.runs(), one.annotations.point_coords.astype(int)).all()
    document = one.annotations.to_json()
    assert document["annotations"][0]["crop_box"] == [0, 0, WIDTH, HEIGHT]
    provenance = document["provenance"]
    assert provenance["image"] == IMAGES[0]
    assert (provenance["format"], provenance["file"]) == ("coco", "masks.json")
    assert provenance["defaults"] == ["crop_box", "point_coords", "predicted_iou", "stability_score"]
    assert provenance["masks"][0] == {
        **{"id": 11, "category_id": 3, "category": "cat", "iscrowd": 0, "area": 5, "bbox": [1]},
        "segmentation": "polygons",
    }
    assert [mask["segmentation"] for mask in provenance["masks"]] == ["polygons", "rle", "counts"]
    assert provenance["masks"][2]["iscrowd"] == 1
    own = two.annotations.to_json()["annotations"][1]
    assert (own["predicted_iou"], own["stability_score"]) == (0.9, 0.8)
    assert (own["point_coords"], own["crop_box"]) == ([[3.5, 20.0]], [0, 0, 30, 40])
    assert two.annotations.to_json()["provenance"]["encoded"]["from"] == "PNG"
    assert upright.annotations.to_json()["provenance"]["encoded"]["turned_upright"]


def test_everything_that_is_not_stored_is_in_quarantine_with_its_reason(coco):
    folder = coco / "root" / "quarantine" / "masks"
    lines = [json.loads(line) for line in (folder / "refused.jsonl").read_text().splitlines()]
    found: dict[str, list[dict]] = {}
    for line in lines:
        content = (folder / line["file"]).read_bytes()
        if line["reason"] in BAD:
            found.setdefault(line["reason"], []).extend(json.loads(content))
        elif line["reason"] in LOST and line["reason"] != "jpeg_truncated":
            assert set(json.loads(content)) == {"image", "annotations"}
    key = lambda one: str(one["id"]) if isinstance(one, dict) else str(one)  # noqa: E731
    expected = {reason: sorted(ones, key=key) for reason, ones in BAD.items()}
    expected["annotation_without_image"] = [17, *expected["annotation_without_image"]]
    assert {reason: sorted(ones, key=key) for reason, ones in found.items()} == expected
    document = json.loads((coco / "root" / "tasks" / "masks.json").read_text())
    task = SimpleNamespace(**document, warnings=document["counts"]["doubtful"])
    others = {reason: count for reason, count in task.counts["refused"].items() if reason not in BAD}
    assert others == LOST
    assert not task.warnings
    missing = next(line for line in lines if line["reason"] == "image_missing")
    assert "gone.jpg: No such file" in missing["message"]
    cut = next(line for line in lines if line["reason"] == "jpeg_truncated")
    assert cut["message"].startswith("cut.jpg: JPEG of ")
    size = next(line for line in lines if line["reason"] == "image_size")
    assert "two.png: image of 60 x 40, annotated" in size["message"]


def test_a_finished_file_is_skipped_and_its_members_are_found_again(coco, capsys):
    assert (
        reshard((str(coco / "masks.json"),), out=str(coco / "root"), images=coco / "photos", json_output=True)
        == 3
    )
    assert json.loads(capsys.readouterr().out)["skipped"] == ["masks"]
    task = coco / "root" / "tasks" / "masks.json"
    assert json.loads(task.read_text())["source"]["size"] == sum(
        path.stat().st_size
        for path in (
            coco / "masks.json",
            *(coco / "photos" / image.get("file_name", "a/bare.webp") for image in IMAGES),
        )
        if path.exists() and path.parent.name != "photos2"
    )
    before = kit.files(coco / "root")
    for path in (coco / "masks.json", coco / "photos" / "two.png"):
        os.utime(path, (1, 1))  # now its content decides
    assert (
        reshard((str(coco / "masks.json"),), out=str(coco / "root"), images=coco / "photos", json_output=True)
        == 3
    )
    assert json.loads(capsys.readouterr().out)["skipped"] == ["masks"]
    assert {name for name, data in kit.files(coco / "root").items() if data != before[name]} == {
        "tasks/masks.json"
    }


def write(path: Path, images: list[object], annotations: object = ()) -> Path:
    saved(path.parent / "x.png", photo(8, 8))
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def test_files_whose_images_have_the_same_ids_are_told_the_way_out(tmp_path, capsys):
    names = ("m.json", "n.json")
    paths = [str(write(tmp_path / name, [{"id": 1, "file_name": "x.png"}])) for name in names]
    assert reshard(tuple(paths), out=str(tmp_path / "root"), json_output=True) == 1
    message = json.loads(capsys.readouterr().out)["failed"]["n"]
    assert message.endswith("For other images with the same numbers, add --image-ids hash --redo n")
    done = reshard(tuple(paths), out=str(tmp_path / "root"), image_ids="hash", redo=("n",), json_output=True)
    assert done == 0
    assert len(sa1b.open(tmp_path / "root")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file"),
        ("[]", "Expected `object`, got `array`"),
        ('{"images": []}', "missing required field `annotations`"),
        ('{"images": [], "annotations": [NaN]}', r"malformed.* near .*: \[NaN\]}'\. NaN .* write null"),
        ('{"images": [], "annotations": [-Infinity]}', r"near .*: \[-Infinity\]}'\. NaN and Infinity"),
        (
            '{"images": [], "annotations": [1,]}',
            r"trailing comma in array \(byte 33\) near .*\[1,\]}'\); the",
        ),
        ("\xff", "not annotations in COCO's format"),
        (
            '{"images": [{"id": 1, "file_name": "none.jpg"}], "annotations": []}',
            "none of its images is in .*--images",
        ),
        ('{"images": [{"id": 1}], "annotations": []}', "no image has a 'file_name'"),
        (
            '\xef\xbb\xbf{"images": [{"id": 1, "file_name": "none.jpg"}], "annotations": []}',
            "none of its images is in",
        ),
        ('{"images": [{"id": -1, "file_name": "none.jpg"}], "annotations": []}', "has the id '-1'"),
        ('{"images": [{"id": true, "file_name": "none.jpg"}], "annotations": []}', "has the id 'True'"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
            "categories 'a' and 'b' have the id 1, .*; give each category its own id",
        ),
    ],
)
def test_what_is_not_in_cocos_format_is_refused_before_anything_is_written(tmp_path, text, message):
    (tmp_path / "m.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=message):
        reshard((str(tmp_path / "m.json"),), out=str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_flags_of_coco_files_need_one(tmp_path):
    with pytest.raises(UsageError, match="--images .*: only with a file in COCO's format"):
        reshard((str(tmp_path),), out=str(tmp_path / "root"), images=tmp_path)
    path = write(tmp_path / "m.json", [])
    with pytest.raises(UsageError, match="no such folder"):
        reshard((str(path),), out=str(tmp_path / "root"), images=tmp_path / "none")


def test_strange_values_and_damaged_images_are_refused_or_have_defaults(tmp_path):
    tiff = io.BytesIO()
    photo(8, 8).save(tiff, "TIFF")
    data = bytearray(tiff.getvalue())
    entries = int.from_bytes(data[4:8], "little") + 2
    data[entries : entries + 2] = b"\xfe\x00"  # the first tag, its width, becomes another one
    (tmp_path / "bad.tif").write_bytes(data)
    one = {"image_id": 1, "segmentation": [[1, 1, 7, 1, 7, 7]]}
    strange = {
        "score": None,
        "point_coords": [[1, 10**400]],
        "crop_box": [True, 0, 1, 1],
        "mask_id": 2**70,
    }
    names = ("x.png", "a\0b.png", "bad.tif")
    images = [{"id": number, "file_name": name} for number, name in enumerate(names, 1)]
    others = [{**one, "segmentation": [[True] * 3]}, {**one, "id": 8, "score": 10**400}]
    path = write(tmp_path / "m.json", images, [{**one, **strange}, *others])
    assert reshard((str(path),), out=str(tmp_path / "root"), json_output=True) == 3
    reasons = [line["reason"] for line in tiny.lines(tmp_path / "root", "m")]
    assert sorted(reasons) == ["bad_score", "image_name", "image_unreadable", "short_polygon"]
    (mask,) = tiny.read_back(tmp_path / "root")[1][1]["annotations"]
    assert (mask["predicted_iou"], mask["id"], mask["crop_box"]) == (1.0, -1, [0, 0, 8, 8])


def test_an_image_that_changes_during_the_pass_is_detected(tmp_path):
    path, root = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}]), tmp_path / "root"
    words = ["reshard", path, "--out", root]
    done = run_changing(words, "sa1b-m-0000.tar", tmp_path / "x.png", b"?")  # when all is read
    assert done.code == 1
    assert "changed " in done.out
    assert not list(root.glob("*.tar"))


def test_annotations_need_a_few_bytes_each_until_their_image_is_read(tmp_path):
    one = {"image_id": 1, "segmentation": [[0.123456789] * 400]}
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}], [one] * 2000)
    tracemalloc.start()
    file = CocoFile(path, "m", CocoOptions())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file.images[0].annotations) == 2000
    assert used < 2000 * 200 < path.stat().st_size / 20


@pytest.mark.skipif(not RESULTS.exists(), reason=f"no real samples in {FOLDER}")
def test_real_masks_in_results_form_come_back_exactly(tmp_path):
    results = json.loads(RESULTS.read_bytes())
    sizes = {one["image_id"]: one["segmentation"]["size"] for one in results}
    for image_id, (height, width) in sizes.items():
        saved(tmp_path / f"{image_id}.jpg", photo(height, width))
    images = [{"id": image_id, "file_name": f"{image_id}.jpg"} for image_id in sizes]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"images": images, "annotations": results}))
    reshard((str(path),), out=str(tmp_path / "root"), json_output=True)
    stored = {
        (sample.image_id, text["counts"])
        for sample in sa1b.open(tmp_path / "root")
        for text in sample.annotations.runs().to_coco(text=True)
    }
    assert stored == {
        (one["image_id"], one["segmentation"]["counts"])
        for one in results
        if pycocotools.area(one["segmentation"])
    }


@pytest.mark.parametrize("lost", ["shard", "task"])
def test_the_advice_for_a_source_with_hashed_ids_gives_the_same_ids(tmp_path, capsys, lost):
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}])
    root, folder = tmp_path / "root", tmp_path / "pictures"
    folder.mkdir()
    (tmp_path / "x.png").rename(folder / "x.png")
    first = {"images": folder, "image_ids": "hash", "max_pixels": 9999, "json_output": True}
    assert reshard((str(path),), out=str(root), **first) == 0
    ids = sa1b.open(root).table.image_id.tolist()
    if lost == "shard":
        next(root.glob("sa1b-*.tar")).unlink()
    else:
        (root / "tasks" / "m.json").write_text("{")
    (finding, *_) = verify(root, workers=0, quiet=True).findings
    advice, *rebuild = re.findall("`([^`]+)`", finding.remedy)
    assert [one.endswith(f"sa1b index {root}") for one in rebuild] == [True] * (lost == "task")
    assert "PATH/TO/m.json" in advice
    assert advice.endswith("--redo m --image-ids hash --images PATH/TO/IMAGES --max-pixels 9999")
    for other, message in (
        (
            {"max_pixels": 9999},
            "has m with --image-ids hash, this run has --image-ids keep; pass it as before",
        ),
        ({"image_ids": "hash"}, "has m with --max-pixels 9999, this run has --max-pixels 16777216"),
    ):
        with pytest.raises(UsageError, match=message):
            reshard((str(path),), out=str(root), images=folder, redo=("m",), json_output=True, **other)
    printed = advice.replace("PATH/TO/m.json", str(path)).replace("PATH/TO/IMAGES", str(folder))
    words = shlex.split(printed)[shlex.split(printed).index("reshard") :]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert sa1b.open(root).table.image_id.tolist() == ids
    assert verify(root, workers=0, quiet=True).findings == []
    capsys.readouterr()


def test_replacing_a_source_reads_it_as_asked(tmp_path, capsys):
    path, root = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}]), tmp_path / "root"
    assert reshard((str(path),), out=str(root), json_output=True) == 0
    hashed = {"out": str(root), "image_ids": "hash", "replace": True, "json_output": True}
    with pytest.raises(UsageError, match="add --redo m --replace to change it"):  # it has not changed
        reshard((str(path),), **hashed)
    assert sa1b.open(root).table.image_id.tolist() == [1]
    assert reshard((str(path),), redo=("m",), **hashed) == 0
    assert sa1b.open(root).table.image_id.tolist() not in ([1], [])
    write(path, [{"id": 7, "file_name": "x.png"}, {"id": 8, "file_name": "x.png"}])
    assert reshard((str(path),), out=str(root), replace=True, json_output=True) == 0
    assert sa1b.open(root).table.image_id.tolist() == [7, 8]
    capsys.readouterr()


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path):
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}, {"id": 2, "file_name": "y.png"}])
    saved(tmp_path / "y.png", Image.new("L", (9_000, 9_000)))
    kit.flip(tmp_path, "y.png", 5000)  # so that it cannot be decoded
    assert reshard((str(path),), out=str(tmp_path / "root"), json_output=True) == 3
    (refused,) = tiny.lines(tmp_path / "root", "m")
    assert refused["reason"] == "absurd_size"
    assert "9000 x 9000 pixels; --max-pixels 81000000 takes it" in refused["message"]


def test_the_time_of_bad_polygons_is_linear(tmp_path, monkeypatch):
    calls = []
    real = coco_pair.encode_polygons
    monkeypatch.setattr(coco_pair, "encode_polygons", lambda *given: calls.append(given) or real(*given))
    bad = [{"id": i, "segmentation": [[1, 2, 3, 4, 5, 6, 7]]} for i in range(300)]
    good = {"id": 300, "segmentation": polygons(0)}
    pair = coco_pair.coco_pair(1, HEIGHT, WIDTH, [*bad, good], {}, {})
    assert [len(pair.refused["bad_polygon"]), len(calls)] == [300, 301]
    assert len(json.loads(pair.text)["annotations"]) == 1


def test_a_second_list_of_annotations_is_refused(tmp_path):
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png", "annotations": []}])  # not at the top
    text = path.read_text()
    path.write_text(text.rstrip()[:-1] + ', "annotations": []}')
    with pytest.raises(SourceError, match="has the key 'annotations' more than once"):
        reshard((str(path),), out=str(tmp_path / "root"))
    path.write_text(text)
    assert reshard((str(path),), out=str(tmp_path / "root")) == 0


def test_a_file_that_is_truncated_while_it_is_read_ends_no_process(tmp_path):
    one = {"id": 5, "image_id": 1}
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}])
    path.write_text(
        path.read_text().replace('"annotations": []', f'"annotations": [{json.dumps(one)}]') + " " * 100_000
    )
    file = CocoFile(path, "m", CocoOptions())
    os.truncate(path, 10)
    assert [file.annotation(number)["image_id"] for number in file.images[0].annotations] == [1]


def test_categories_are_columns_that_select_masks_and_are_exported(tmp_path, capsys):
    def square(number, category, **more):
        mask = [number, 1, number + 2, 1, number + 2, 5, number, 5]
        return {"id": number, "image_id": 1, "segmentation": [mask], "category_id": category, **more}

    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}])
    document = json.loads(path.read_text())
    document["annotations"] = [square(1, 3, keypoints=[1, 2]), square(3, 7, iscrowd=1), square(5, 3)]
    document["categories"] = [{"id": 3, "name": "dog"}, {"id": 7, "name": "cat"}]
    path.write_text(json.dumps(document))
    root, out = tmp_path / "root", tmp_path / "out"
    assert reshard((str(path),), out=str(root), json_output=True) == 0
    index = pq.read_table(next(root.glob("*.parquet")))
    assert index["category"].to_pylist() == [["dog", "cat", "dog"]]
    assert index["category_id"].to_pylist() == [[3, 7, 3]]
    assert index["iscrowd"].to_pylist() == [[0, 1, 0]]
    assert json.loads(index["fields"][0][0].as_py())["keypoints"] == [1, 2]
    assert verify(root, deep=True, workers=0, quiet=True).findings == []
    assert view(str(root), masks_where="category = 'dog' and area > 0", name="dogs") == 0
    assert "2 of 3" in capsys.readouterr().out
    dataset = sa1b.open(root)
    condition = sa1b.Stream(root, global_batch=1, view="dogs").view.masks_where
    assert condition.masks(dataset[0].annotations).tolist() == [True, False, True]
    kit.run("export", root, "--to", "coco", "--out", out)
    document = json.loads((out / "annotations.json").read_text())
    assert [one["category_id"] for one in document["annotations"]] == [3, 7, 3]
    assert [one["iscrowd"] for one in document["annotations"]] == [0, 1, 0]
    assert document["annotations"][0]["keypoints"] == [1, 2]
    assert [(one["id"], one["name"]) for one in document["categories"]] == [(3, "dog"), (7, "cat")]
    export_command(str(root), to="coco", out=tmp_path / "dogs", view="dogs")
    chosen = json.loads((tmp_path / "dogs" / "annotations.json").read_text())
    del document["annotations"][1]
    document["annotations"][1]["id"] = 2
    assert chosen == document


def test_what_a_file_says_of_categories_and_annotations_comes_back(tmp_path, capsys):
    """From COCO to shards and back; the indexes of an SA-1B source lack the columns of COCO files."""
    names = {1: "no mask", 3: "größe 犬 🐕", 4: "o'neil"}
    categories = [
        {"id": key, "name": name, "supercategory": "tïer", "color": [key]} for key, name in names.items()
    ]
    annotations = [
        {
            "id": number,
            "image_id": 1,
            "segmentation": [[number, 1, number + 2, 1, number + 2, 5, number, 5]],
            "category_id": 3 + number % 2,
            "iscrowd": number % 2,
            "attributes": {"héllo": [number, None]},
        }
        for number in range(1, 5)
    ]
    path = write(tmp_path / "m.json", [{"id": 1, "file_name": "x.png"}])
    text = {**json.loads(path.read_text()), "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(text, ensure_ascii=False))
    tiny.make_tar(tmp_path / "sa_000020.tar", [700])
    root = tmp_path / "root"
    assert reshard((str(path), str(tmp_path / "sa_000020.tar")), out=str(root), json_output=True) == 0
    for lost in ("", "tasks/m.json", "dataset.json"):  # either of these documents has the categories
        if lost:
            (root / lost).unlink()
            kit.run("index", root, "--json")
        assert verify(root, workers=0, quiet=True).findings == []
        capsys.readouterr()
        query(
            str(root),
            "SELECT category, category_id, iscrowd, fields FROM masks ORDER BY mask_id",
            json_output=True,
        )
        rows = json.loads(capsys.readouterr().out)
        found = [row for row in rows if row["category_id"] >= 0]
        assert {row["category"] for row in rows if row not in found} == {""}
        assert [row["category"] for row in found] == [names[one["category_id"]] for one in annotations]
        assert [json.loads(row["fields"])["attributes"] for row in found] == [
            one["attributes"] for one in annotations
        ]
        kit.called(
            "query", root, f"SELECT count(*) AS n FROM masks WHERE category = '{names[3]}'", json_output=True
        )
        assert json.loads(capsys.readouterr().out) == [{"n": 2}]
        assert view(str(root), masks_where=f"category = '{names[3]}'", name="dogs", overwrite=True) == 0
    ids = tmp_path / "ids"
    ids.write_text("1\n")
    for form in ({}, {"images_per_file": 1}):
        export_command(str(root), to="coco", out=tmp_path / repr(form), ids=ids, **form)
        (exported,) = map(json.loads, map(Path.read_text, (tmp_path / repr(form)).glob("annotations*.json")))
        assert exported["categories"] == categories
        kept = ("category_id", "iscrowd", "attributes")
        assert [{key: one[key] for key in kept} for one in exported["annotations"]] == [
            {key: one[key] for key in kept} for one in annotations
        ]
    assert (
        reshard(
            (str(tmp_path / repr({}) / "annotations.json"),),
            out=str(tmp_path / "again"),
            images=tmp_path / repr({}) / "images",
            json_output=True,
        )
        == 0
    )
    kit.run("export", tmp_path / "again", "--to", "coco", "--out", tmp_path / "twice")
    first, second = (
        json.loads((tmp_path / name / "annotations.json").read_text()) for name in (repr({}), "twice")
    )
    assert second == first
    kit.run("export", root, "--to", "coco", "--out", tmp_path / "all")
    every = json.loads((tmp_path / "all" / "annotations.json").read_text())
    assert [(one["id"], one["name"]) for one in every["categories"]][3:] == [(5, "object")]
    assert {one["category_id"] for one in every["annotations"] if one["image_id"] == 700} == {5}


def test_an_image_becomes_the_same_jpeg_in_ingest_and_before_annotation(coco, tmp_path):
    stored = {one.image_id: one.jpeg for one in sa1b.open(coco / "root")}[9]
    (tmp_path / "photos").mkdir()
    shutil.copy(coco / "photos" / "two.png", tmp_path / "photos")
    tiny_model = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "channels": 32}
    model = Sam(ModelConfig(**tiny_model, global_blocks=(0,)))
    write_weights(tmp_path / "sam.safetensors", model.state_dict())
    words = (
        "annotate",
        tmp_path / "photos",
        "--weights",
        tmp_path / "sam.safetensors",
        "--out",
        tmp_path / "out",
    )
    few = ("--points-per-side", 2, "--min-predicted-iou", 0, "--min-stability", 0)
    kit.run(*words, *few, "--quality", 95)
    assert [path.read_bytes() for path in (tmp_path / "out").rglob("*.jpg")] == [stored]


def test_an_image_with_several_phrases_is_stored_once_with_all_of_them(tmp_path: Path) -> None:
    """In the form of SA-Co/Gold: an entry of `images` for each image and phrase, with a string as its id."""
    entries = [
        ("pair_0", "sa_7.jpg", "a cat", [rle(10), rle(100)]),
        ("pair_1", "sa_7.jpg", "a dog", []),  # a phrase without a mask
        ("pair_2", "b/two.jpg", "a cat", [rle(200)]),
        ("pair_3", "sa_7.jpg", "a red ball", [rle(300)]),
    ]
    document = {
        "info": {"version": "1.0"},
        "images": [
            {"id": key, "file_name": name, "text_input": phrase, "height": HEIGHT, "width": WIDTH,
             "queried_category": str(row), "is_instance_exhaustive": 1}
            for row, (key, name, phrase, _) in enumerate(entries)
        ],
        "annotations": [
            {"id": 10 * row + number, "image_id": key, "category_id": 1, "iscrowd": 0, "area": 0.1,
             "bbox": [0.1, 0.1, 0.2, 0.2], "segmentation": mask, "source": "manual"}
            for row, (key, _, _, masks) in enumerate(entries)
            for number, mask in enumerate(masks)
        ],
        "categories": [{"id": 1, "name": "object"}],
    }  # fmt: skip
    (tmp_path / "gold.json").write_text(json.dumps(document))
    for name in ("sa_7.jpg", "b/two.jpg"):
        saved(tmp_path / "images" / name, photo())
    root = tmp_path / "root"
    assert reshard((str(tmp_path / "gold.json"),), out=str(root), images=tmp_path / "images") == 0
    dataset = sa1b.open(root)
    assert len(dataset) == 2
    found = dataset.by_id(7).annotations
    assert found.texts() == ["a cat", "a dog", "a red ball"]
    fields = [json.loads(one) for one in found.origin()["fields"].tolist()]
    assert [(one["text_input"], one["source"]) for one in fields] == [
        ("a cat", "manual"), ("a cat", "manual"), ("a red ball", "manual"),
    ]  # fmt: skip
    rows = kit.rows(root, "SELECT texts FROM images WHERE image_id = 7")
    assert rows == [(["a cat", "a dog", "a red ball"],)]
    first, other = (
        json.loads(fields) for (fields,) in kit.rows(root, "SELECT fields FROM images ORDER BY image_id")
    )
    assert [first, *first.pop("further_entries")] == [document["images"][row] for row in (0, 1, 3)]
    assert other == document["images"][2]
    stream = sa1b.Stream(root, global_batch=2, image_size=32, epochs=1, text="texts")
    (batch,) = sa1b.Loader(stream, quiet=True)
    texts = dict(zip(map(int, batch.ids), batch.extra["texts"], strict=True))
    assert texts.pop(7) in found.texts()
    assert list(texts.values()) == ["a cat"]
    assert not verify(root, deep=True).findings
    assert export_command(str(root), to="coco", out=tmp_path / "again", json_output=True) == 0
    again = json.loads((tmp_path / "again" / "annotations.json").read_text())
    assert sorted(one["text_input"] for one in again["annotations"]) == ["a cat"] * 3 + ["a red ball"]
    document["images"][1]["id"] = "pair_0"
    (tmp_path / "gold.json").write_text(json.dumps(document))
    with pytest.raises(
        SourceError, match="several entries of 'images' have the id 'pair_0'.* an id of its own"
    ):
        reshard((str(tmp_path / "gold.json"),), out=str(tmp_path / "other"), images=tmp_path / "images")
