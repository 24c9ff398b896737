"""`sa1b synthesize`: tars in the form of the download, whose images, masks and phrases belong together."""

import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg
from pycocotools import mask as coco_mask

from tests import kit
from tests.kit import refused, run

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

# Images, flags, and digest of all files.
CASES = {
    "full size": (1, (), "7ad0c110d6f84f7cf1dbc60f175bd53e"),
    "small": (2, ("--long-side", 640, "--first-tar", 3), "135d68fcdfa9e6c600d33e12608ec0a2"),
    "simple": (4, ("--long-side", 320, "--simple"), "419a1e7e42362fa42187fda7dbe2dba7"),
    "phrases": (4, ("--long-side", 480, "--tars", 2, "--phrases"), "3bf51a68d7c0cd759ff4506befb260b2"),
    "seed": (4, ("--long-side", 320, "--seed", 7), "8352cd7a4be8e4a26fea95265de5fca1"),
    "plain": (6, ("--long-side", 32, "--plain"), "2eb3d7d402b63cdbd491773ac4593380"),
}
MADE_WITH = ["numpy 2.4.6", "opencv-python-headless 5.0.0.93", "simplejpeg 1.9.0", "pyarrow 26.0.1"]
OTHER = [known for known in MADE_WITH if version(known.split()[0]) != known.split()[1]]


def made(folder: Path, images: int, *flags: object, tars: int = 1) -> Path:
    run("synthesize", folder, "--tars", tars, "--images-per-tar", images, "--workers", 1, *flags)
    return folder


def members(path: Path) -> dict[str, bytes]:
    """Name -> bytes, in the order of the tar."""
    with tarfile.open(path) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Members of a tar of 24 images."""
    folder = made(tmp_path_factory.mktemp("small"), 24, "--long-side", 320, "--first-tar", 1)
    return members(folder / "sa_000001.tar")


@pytest.mark.skipif(bool(OTHER), reason=f"not installed: {', '.join(OTHER)}")
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_that_were_recorded(name: str, tmp_path: Path) -> None:
    images, flags, digest = CASES[name]
    found = kit.files(made(tmp_path, images, *flags))
    data = b"".join(found[file] for file in sorted(found))
    assert hashlib.sha256(data).hexdigest()[:32] == digest


def test_bytes_do_not_depend_on_workers_and_gzip_is_plain_tar(tmp_path: Path) -> None:
    flags = ("--long-side", 160, "--phrases")
    one = made(tmp_path / "1", 2, *flags, tars=3)
    two = made(tmp_path / "2", 2, *flags, "--workers", 2, tars=3)
    assert kit.files(one) == kit.files(two)
    plain = made(tmp_path / "plain", 2, "--long-side", 160, "--plain", tars=3)
    for name, data in kit.files(plain).items():
        assert gzip.decompress(kit.files(one)[name]) == data
    assert f"./sa_{1 + 2 * 11_187}.jpg" in members(plain / "sa_000002.tar")


def test_tar_and_summary_have_the_form_of_the_download(tmp_path: Path) -> None:
    flags = ("--tars", 1, "--images-per-tar", 6, "--long-side", 160, "--first-tar", 1)
    summary = run("synthesize", tmp_path, *flags, "--json").json
    path = tmp_path / "sa_000001.tar"
    with tarfile.open(path) as tar:
        first, *rest = tar.getmembers()
    assert (first.isdir(), first.name) == (True, ".")  # tarfile strips the slash of "./"
    names = [one.name for one in rest]
    ids = range(11_188, 11_194)
    assert sorted(names) == sorted(f"./sa_{i}.{suffix}" for i in ids for suffix in ("jpg", "json"))
    assert any(a.split(".")[1] != b.split(".")[1] for a, b in zip(names[::2], names[1::2], strict=True))
    assert {(one.uid, one.gid, one.mode, one.mtime) for one in rest} == {(0, 0, 0o644, first.mtime)}
    found = members(path)
    assert (summary["tars"], summary["images"], summary["tar_bytes"]) == (1, 6, path.stat().st_size)
    for kind, ending in (("jpeg_bytes", ".jpg"), ("json_bytes", ".json")):
        assert summary[kind] == sum(len(data) for name, data in found.items() if name.endswith(ending))


def test_jpeg_and_json_have_the_form_of_the_real_files(small: dict[str, bytes]) -> None:
    crops, ids, scores, lasts, tables = set(), [], [], [], set()
    for data in (data for name, data in small.items() if name.endswith(".jpg")):
        assert simplejpeg.decode_jpeg_header(data)[2:] == ("YCbCr", "420")
        assert (b"\xff\xc0" in data, b"Exif" in data) == (True, False)  # baseline
        tables.add(data[data.index(b"\xff\xdb") :][5:69])
    assert len(tables) == 2  # qualities
    names = "bbox area segmentation predicted_iou point_coords crop_box id stability_score"
    for text in (data.decode() for name, data in small.items() if name.endswith(".json")):
        content = json.loads(text)
        assert text == json.dumps(content)  # one line, default separators
        assert list(content["image"]) == ["image_id", "width", "height", "file_name"]
        for annotation in content["annotations"]:
            assert " ".join(annotation) == names
            for score in ("predicted_iou", "stability_score"):
                assert annotation[score] == float(np.float32(annotation[score]))
            assert annotation["predicted_iou"] >= 0.88
            assert 0.95 <= annotation["stability_score"] <= 1
            crops.add(type(annotation["crop_box"][0]))
            ids.append(annotation["id"])
            scores.append(annotation["predicted_iou"])
        kinds = ["".join({type(value).__name__ for value in one["bbox"]}) for one in content["annotations"]]
        lasts.append(kinds.count("int"))
        assert kinds == ["float"] * (len(kinds) - lasts[-1]) + ["int"] * lasts[-1]
    assert (min(lasts), max(lasts), crops) == (1, 5, {int, float})
    assert len(set(ids)) == len(ids)
    assert (max(scores) > 1, max(ids) > 2**30) == (True, True)


def test_masks_agree_with_their_numbers_and_end_at_edges_of_the_image(small: dict[str, bytes]) -> None:
    for name in [name for name in small if name.endswith(".json")][:6]:
        content, pixels = json.loads(small[name]), simplejpeg.decode_jpeg(small[name.replace("json", "jpg")])
        height, width = content["image"]["height"], content["image"]["width"]
        assert pixels.shape == (height, width, 3)
        smooth = cv2.GaussianBlur(pixels, (0, 0), 1.0).astype(np.float32)
        slope = np.hypot(cv2.Sobel(smooth, -1, 1, 0), cv2.Sobel(smooth, -1, 0, 1)).max(2)
        along = []
        for annotation in content["annotations"]:
            mask = coco_mask.decode(annotation["segmentation"])
            assert mask.shape == (height, width)
            assert coco_mask.encode(mask)["counts"].decode() == annotation["segmentation"]["counts"]
            rows, columns = np.nonzero(mask)
            assert annotation["area"] == len(rows) >= 20
            left, top, right, bottom = columns.min(), rows.min(), columns.max(), rows.max()
            assert annotation["bbox"] == [left, top, right - left, bottom - top]
            ((x, y),) = annotation["point_coords"]
            assert (x * 16) % 1 == (y * 16) % 1 == 0
            assert mask[int(y), int(x)] == 1
            cx, cy, cw, ch = annotation["crop_box"]
            assert cx <= left <= right < cx + cw <= width
            assert cy <= top <= bottom < cy + ch <= height
            mask = np.pad(mask, 1, mode="edge")
            outline = (cv2.dilate(mask, np.ones((3, 3))) != cv2.erode(mask, np.ones((3, 3))))[1:-1, 1:-1]
            along.append(slope[outline].mean() / slope.mean())
        assert np.median(along) > 2


def test_phrases_describe_each_mask_and_leave_the_tars_unchanged(tmp_path: Path) -> None:
    out = made(tmp_path / "out", 3, "--long-side", 160, "--phrases", tars=2)
    without = kit.files(made(tmp_path / "without", 3, "--long-side", 160, tars=2))
    assert without.items() < kit.files(out).items()
    rows = pq.read_table(out / "phrases.parquet").to_pylist()
    texts = [
        json.loads(data) for name in without for key, data in members(out / name).items() if "json" in key
    ]
    ids = sorted((one["image"]["image_id"], mask["id"]) for one in texts for mask in one["annotations"])
    assert [(row["image_id"], row["mask_id"]) for row in rows] == ids
    for row in rows:
        parts = [row[name] for name in ("size", "colour", "texture", "shape")]
        assert row["text"] == row["texts"][0] == " ".join(parts)
        assert all(part in text for part in parts for text in row["texts"])
    assert len({row["text"] for row in rows}) > len(rows) / 2
    refused("synthesize", out, "--first-tar", 5, "--phrases", names="phrases.parquet")


def test_existing_tars_are_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "sa_000001.tar").write_bytes(b"precious")
    few = ("--images-per-tar", 1, "--long-side", 64)
    assert "--overwrite" in refused("synthesize", tmp_path, *few, names="sa_000001.tar").err
    assert kit.files(tmp_path) == {"sa_000001.tar": b"precious"}
    run("synthesize", tmp_path, *few, "--overwrite")
    (tmp_path / "sa_000001.tar").unlink()
    (tmp_path / "sa_000001.tar").mkdir()  # a file cannot replace a folder
    refused("synthesize", tmp_path, *few, "--overwrite", "--workers", 2, names="sa_000001.tar")
    assert not list(tmp_path.glob("*.partial"))


def test_an_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sa1b", "synthesize", str(tmp_path), "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob("*.partial")):
            time.sleep(0.05)
        process.send_signal(2)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag", ["--tars=0", "--workers=0", "--first-tar=-1", "--seed=-1", "--images-per-tar=0", "--long-side=31"]
)
def test_wrong_numbers_are_refused_before_anything_is_written(tmp_path: Path, flag: str) -> None:
    refused("synthesize", tmp_path / "source", flag, names=flag.partition("=")[0])
    assert not (tmp_path / "source").exists()


@pytest.mark.slow
def test_statistics_of_full_size_are_within_a_tenth_of_those_of_sa1b(tmp_path: Path) -> None:
    summary = run("synthesize", tmp_path, "--tars", 1, "--images-per-tar", 200, "--json").json
    found = members(tmp_path / "sa_000000.tar").items()
    texts = [json.loads(data) for name, data in found if name.endswith(".json")]
    sizes = np.array([len(data) for name, data in found if name.endswith(".jpg")])
    pixels = [text["image"]["width"] * text["image"]["height"] for text in texts]
    areas = [one["area"] / of for text, of in zip(texts, pixels, strict=True) for one in text["annotations"]]
    low, high = np.quantile(np.log(areas), [0.16, 0.84])
    assert summary["masks"] / 200 == pytest.approx(96, rel=0.1)
    assert summary["json_bytes"] / 200 == pytest.approx(63e3, rel=0.1)
    assert summary["runs"] / summary["masks"] == pytest.approx(320, rel=0.1)
    assert sizes.mean() == pytest.approx(1.0e6, rel=0.1)
    assert np.median(areas) == pytest.approx(np.exp(-6.21), rel=0.1)
    assert (high - low) / 2 == pytest.approx(1.59, rel=0.1)
