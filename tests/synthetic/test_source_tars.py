import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import time

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg
from pycocotools import mask as coco_mask

from sa1b.programs.synthetic.phrases import colour_name
from sa1b.programs.synthetic.scene import draw, plan
from sa1b.programs.synthetic.source_tars import (
    IDS_PER_TAR,
    PHRASES,
    _scene,
    annotate,
    mask_runs,
    scene,
    write_tar,
    write_tars,
)
from tests import processes

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

COMMAND = [sys.executable, "-m", "sa1b", "synthesize"]
SMALL = {"images": 6, "first_id": 11_188, "seed": 3, "long_side": 320}


def read(path):
    with tarfile.open(path) as tar:
        return [(member, tar.extractfile(member).read() if member.isfile() else b"") for member in tar]


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "sa_000001.tar"
    return path, write_tar(path, **SMALL)


@pytest.fixture(scope="module")
def scenes():
    """Six scenes of 640 pixels: (picture, annotation file)."""
    made = [scene(image_id, 1, 640) for image_id in range(100, 106)]
    return [(simplejpeg.decode_jpeg(jpeg), annotations) for jpeg, annotations in made]


def test_tar_has_the_form_of_the_download(tar):
    path, summary = tar
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    members = read(path)
    assert members[0][0].isdir()
    assert members[0][0].name == "."  # tarfile strips the slash of "./"
    names = [member.name for member, _ in members[1:]]
    ids = range(SMALL["first_id"], SMALL["first_id"] + SMALL["images"])
    assert sorted(names) == sorted(f"./sa_{i}.{suffix}" for i in ids for suffix in ("jpg", "json"))
    assert names != sorted(names)
    assert any(a.split(".")[1] != b.split(".")[1] for a, b in zip(names[::2], names[1::2], strict=True))
    assert {(m.uid, m.gid, m.mode, m.mtime) for m, _ in members[1:]} == {(0, 0, 0o644, members[0][0].mtime)}
    assert summary.images == SMALL["images"]
    assert summary.tar_bytes == path.stat().st_size
    assert summary.jpeg_bytes == sum(len(data) for m, data in members if m.name.endswith(".jpg"))
    assert summary.json_bytes == sum(len(data) for m, data in members if m.name.endswith(".json"))


def test_plain_tar_is_the_gzip_one_unpacked(tar, tmp_path):
    write_tar(tmp_path / "plain.tar", compress=False, **SMALL)
    assert (tmp_path / "plain.tar").read_bytes() == gzip.decompress(tar[0].read_bytes())


def test_directory_entry_can_be_left_out(tmp_path):
    write_tar(tmp_path / "a.tar", directory=False, **SMALL)
    assert all(member.isfile() for member, _ in read(tmp_path / "a.tar"))


def test_same_arguments_give_the_same_bytes(tar, tmp_path):
    write_tar(tmp_path / "again.tar", **SMALL)
    assert (tmp_path / "again.tar").read_bytes() == tar[0].read_bytes()
    write_tar(tmp_path / "other.tar", **{**SMALL, "seed": 4})
    assert (tmp_path / "other.tar").read_bytes() != tar[0].read_bytes()


def test_picture_depends_on_its_id_seed_and_size_alone(tar):
    members = {member.name: data for member, data in read(tar[0])}
    jpeg, annotations = scene(11_190, seed=3, long_side=320)
    assert members["./sa_11190.jpg"] == jpeg
    assert members["./sa_11190.json"] == json.dumps(annotations).encode()


def test_simple_scenes_have_a_few_large_masks_that_cover_what_is_drawn(tmp_path):
    write_tars(tmp_path, tars=1, images_per_tar=8, long_side=480, simple=True)
    members = {member.name: data for member, data in read(tmp_path / "sa_000000.tar")}
    jpeg, annotations = scene(3, long_side=480, simple=True)
    assert members["./sa_3.jpg"] == jpeg
    assert members["./sa_3.json"] == json.dumps(annotations).encode()
    assert jpeg != scene(3, long_side=480)[0]
    files = [json.loads(data) for name, data in members.items() if name.endswith(".json")]
    for file in files:
        masks, size = file["annotations"], file["image"]["width"] * file["image"]["height"]
        assert 4 <= len(masks) <= 16
        assert sum(mask["area"] for mask in masks) > 0.1 * size
    areas = [mask["area"] for file in files for mask in file["annotations"]]
    assert np.median(areas) > 0.01 * 480 * 320


def test_bytes_do_not_depend_on_workers(tmp_path):
    digests = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        ticks = []
        summary = write_tars(
            out, tars=3, images_per_tar=2, long_side=160, workers=workers, progress=ticks.append
        )
        assert (summary.tars, summary.images, sum(ticks)) == (3, 6, 6)
        assert sorted(path.name for path in out.iterdir()) == [f"sa_00000{i}.tar" for i in range(3)]
        digests.append([hashlib.sha256(path.read_bytes()).digest() for path in sorted(out.iterdir())])
    assert digests[0] == digests[1]
    assert f"./sa_{1 + 2 * IDS_PER_TAR}.jpg" in {m.name for m, _ in read(tmp_path / "1" / "sa_000002.tar")}


def test_phrases_describe_each_mask_and_leave_the_tars_unchanged(tmp_path):
    for workers in (1, 2):
        out = tmp_path / str(workers)
        write_tars(
            out, tars=2, images_per_tar=3, long_side=160, workers=workers, phrases=True, compress=False
        )
    write_tars(tmp_path / "plain", tars=2, images_per_tar=3, long_side=160, workers=1, compress=False)
    for name in ("sa_000000.tar", "sa_000001.tar"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert (tmp_path / "1" / PHRASES).read_bytes() == (tmp_path / "2" / PHRASES).read_bytes()
    rows = pq.read_table(tmp_path / "1" / PHRASES).to_pylist()
    ids = [
        (document["image"]["image_id"], mask["id"])
        for name in ("sa_000000.tar", "sa_000001.tar")
        for member, data in read(tmp_path / "1" / name)
        if member.name.endswith(".json")
        for document in [json.loads(data)]
        for mask in document["annotations"]
    ]
    assert [(row["image_id"], row["mask_id"]) for row in rows] == sorted(ids)
    for row in rows:
        parts = [row[name] for name in ("size", "colour", "texture", "shape")]
        assert row["text"] == row["texts"][0] == " ".join(parts)
        assert all(part in text for part in parts for text in row["texts"])
    assert len({row["text"] for row in rows}) > len(rows) / 2
    with pytest.raises(FileExistsError, match=r"phrases\.parquet: already exists.*--overwrite"):
        write_tars(tmp_path / "1", tars=1, first_tar=5, images_per_tar=1, long_side=64, phrases=True)


def test_colours_of_objects_are_those_of_their_pixels(scenes):
    """The mean colour of an object is near the one that its phrase is about."""
    picture, annotations = scenes[0]
    *_, shapes = _scene(100, 1, 640, False)
    near = []
    for mask, shape in zip(annotations["annotations"], shapes, strict=True):
        if mask["area"] > 400:
            own = coco_mask.decode(mask["segmentation"]).astype(bool)
            near.append(np.abs(np.median(picture[own], 0) - shape.look.colour).max() < 40)
    assert np.mean(near) > 0.8


@pytest.mark.parametrize(
    ("colour", "name"),
    [
        ((10, 10, 12), "black"), ((245, 245, 240), "white"), ((80, 82, 84), "dark grey"),
        ((220, 20, 30), "bright red"), ((90, 40, 10), "dark brown"), ((20, 130, 40), "green"),
        ((30, 60, 150), "blue"), ((220, 120, 200), "bright pink"),
    ],
)  # fmt: skip
def test_colours_have_names(colour, name):
    assert colour_name(colour) == name


def test_existing_tars_are_refused_before_anything_is_drawn(tmp_path):
    (tmp_path / "sa_000001.tar").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"sa_000001\.tar.*--overwrite"):
        write_tars(tmp_path, tars=2, images_per_tar=1, long_side=160)
    assert [path.name for path in tmp_path.iterdir()] == ["sa_000001.tar"]
    write_tars(tmp_path, tars=2, images_per_tar=1, long_side=160, overwrite=True)
    assert tarfile.is_tarfile(tmp_path / "sa_000001.tar")


def test_failed_worker_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "sa_000001.tar").mkdir()  # a file cannot replace a folder
    with pytest.raises(IsADirectoryError, match=r"sa_000001\.tar"):
        write_tars(tmp_path, tars=2, images_per_tar=1, long_side=160, workers=2, overwrite=True)
    assert not list(tmp_path.glob("*.partial"))


def test_two_writers_of_one_tar_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "sa_000000.tar"

    def write_too(_):
        if not path.exists():
            write_tar(path, images=1, first_id=1, long_side=160)

    write_tar(path, images=2, first_id=1, long_side=160, progress=write_too)
    with tarfile.open(path) as tar:
        assert sum(name.endswith(".jpg") for name in tar.getnames()) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_the_form_of_the_real_files(tar):
    texts = [data.decode() for member, data in read(tar[0]) if member.name.endswith(".json")]
    boxes, crops, ids = [], set(), []
    for text in texts:
        content = json.loads(text)
        assert text == json.dumps(content)  # one line, default separators
        assert list(content) == ["image", "annotations"]
        assert list(content["image"]) == ["image_id", "width", "height", "file_name"]
        assert content["image"]["file_name"] == f"sa_{content['image']['image_id']}.jpg"
        for annotation in content["annotations"]:
            assert list(annotation) == [
                "bbox", "area", "segmentation", "predicted_iou", "point_coords", "crop_box", "id",
                "stability_score",
            ]  # fmt: skip
            assert list(annotation["segmentation"]) == ["size", "counts"]
            for score in ("predicted_iou", "stability_score"):
                assert annotation[score] == float(np.float32(annotation[score]))
            assert annotation["predicted_iou"] >= 0.88
            assert 0.95 <= annotation["stability_score"] <= 1
            crops.add(type(annotation["crop_box"][0]))
            ids.append(annotation["id"])
        kinds = ["".join({type(v).__name__ for v in a["bbox"]}) for a in content["annotations"]]
        n_int = kinds.count("int")
        assert 1 <= n_int <= 5
        assert kinds == ["float"] * (len(kinds) - n_int) + ["int"] * n_int  # the last few
        boxes += kinds
    assert crops == {int, float}
    assert len(set(ids)) == len(ids)


def test_some_scores_exceed_one_and_some_ids_two_to_the_thirty():
    files = [scene(image_id, 0, 160)[1] for image_id in range(1, 40)]
    annotations = [annotation for content in files for annotation in content["annotations"]]
    ids = [annotation["id"] for annotation in annotations]
    assert max(annotation["predicted_iou"] for annotation in annotations) > 1
    assert max(ids) > 2**30
    assert len(set(ids)) == len(ids)


def test_masks_agree_with_their_numbers(scenes):
    for picture, content in scenes:
        height, width = content["image"]["height"], content["image"]["width"]
        assert picture.shape == (height, width, 3)
        for annotation in content["annotations"]:
            mask = coco_mask.decode(annotation["segmentation"])
            assert mask.shape == (height, width)
            assert coco_mask.encode(mask)["counts"].decode() == annotation["segmentation"]["counts"]
            rows, columns = np.nonzero(mask)
            assert annotation["area"] == len(rows) >= 20
            left, top = columns.min(), rows.min()
            assert annotation["bbox"] == [left, top, columns.max() - left, rows.max() - top]
            ((x, y),) = annotation["point_coords"]
            assert (x * 16) % 1 == (y * 16) % 1 == 0
            assert mask[int(y), int(x)] == 1
            cx, cy, cw, ch = annotation["crop_box"]
            assert cx <= left
            assert cy <= top
            assert columns.max() < cx + cw <= width
            assert rows.max() < cy + ch <= height


@pytest.mark.parametrize(
    ("x", "y", "mask"),
    [
        (0, 0, np.ones((7, 5))),  # the whole image
        (0, 0, np.ones((7, 2))),  # whole columns run on into each other, from the first pixel
        (3, 0, np.ones((7, 2))),  # to the last pixel
        (4, 6, np.ones((1, 1))),
        (1, 2, np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]])),
        (0, 0, np.random.default_rng(0).integers(0, 2, (7, 5))),
    ],
)
def test_mask_runs_are_those_of_the_pixels(x, y, mask):
    full = np.zeros((7, 5), np.uint8)
    full[y : y + mask.shape[0], x : x + mask.shape[1]] = mask
    runs = mask_runs(mask.astype(np.uint8), x, y, 7, 5)
    assert runs.dtype == np.uint32
    assert np.repeat(np.arange(len(runs)) % 2, runs).reshape(5, 7).T.tolist() == full.tolist()
    assert (runs[1:] > 0).all()


def test_masks_end_at_edges_of_the_picture(scenes):
    """The picture changes far more along the outlines of masks than elsewhere: masks sit on what is drawn."""
    for picture, content in scenes:
        smooth = cv2.GaussianBlur(picture, (0, 0), 1.0).astype(np.float32)
        slope = np.hypot(cv2.Sobel(smooth, -1, 1, 0), cv2.Sobel(smooth, -1, 0, 1)).max(2)
        along = []
        for annotation in content["annotations"]:
            mask = np.pad(coco_mask.decode(annotation["segmentation"]), 1, mode="edge")
            outline = (cv2.dilate(mask, np.ones((3, 3))) != cv2.erode(mask, np.ones((3, 3))))[1:-1, 1:-1]
            along.append(slope[outline].mean() / slope.mean())
        assert np.median(along) > 3
        assert np.mean(np.array(along) > 1.3) > 0.9


def test_jpegs_are_as_in_sa1b():
    tables = set()
    for image_id in range(12):
        jpeg, content = scene(image_id, 0, 160)
        size = content["image"]["height"], content["image"]["width"]
        assert simplejpeg.decode_jpeg_header(jpeg) == (*size, "YCbCr", "420")
        assert b"\xff\xc0" in jpeg  # baseline
        assert b"Exif" not in jpeg
        tables.add(jpeg[jpeg.index(b"\xff\xdb") :][5:69])
    assert len(tables) == 2


def test_tiny_pictures_are_refused_and_small_ones_drawn():
    with pytest.raises(ValueError, match="at least 32"):
        scene(1, 0, 31)
    for image_id in range(5):
        jpeg, content = scene(image_id, 0, 32)
        assert max(simplejpeg.decode_jpeg(jpeg).shape) == 32
        assert content["annotations"]


def test_plans_follow_the_laws_of_sa1b():
    plans = [plan(np.random.default_rng([0, i])) for i in range(4000)]
    assert np.mean([len(p.areas) for p in plans]) == pytest.approx(100, rel=0.1)
    assert np.mean([p.quality == 95 for p in plans]) == pytest.approx(0.63, abs=0.03)
    assert np.mean([(p.width, p.height) == (2250, 1500) for p in plans]) > 0.5
    assert {min(p.width, p.height) for p in plans} == {1080, 1500}
    small = np.mean([len(plan(np.random.default_rng([0, i]), 640).areas) for i in range(4000)])
    assert small == pytest.approx(40, rel=0.15)


@pytest.mark.slow
def test_calibration_at_full_size():
    """Within a tenth of the real data; statistics per mask, as the number of masks varies much by image."""
    jpegs, areas, runs, text, decoding = {95: [], 75: []}, [], 0, 0, []
    for image_id in range(1, 49):
        rng = np.random.default_rng([0, image_id, 0])
        outlook = plan(rng)
        picture, shapes = draw(rng, outlook)
        jpeg = simplejpeg.encode_jpeg(picture, quality=outlook.quality, colorsubsampling="420")
        jpegs[outlook.quality].append(len(jpeg))
        content, count, _ = annotate(rng, image_id, outlook.height, outlook.width, shapes)
        areas += [a["area"] / (outlook.height * outlook.width) for a in content["annotations"]]
        runs += count
        text += len(json.dumps(content))
        start = time.perf_counter()
        simplejpeg.decode_jpeg(jpeg)
        decoding.append(time.perf_counter() - start)
    per_image = np.mean([len(plan(np.random.default_rng([0, i])).areas) for i in range(4000)])
    share = 0.63
    measured = {
        "q95": np.mean(jpegs[95]),
        "q75": np.mean(jpegs[75]),
        "JPEG": share * np.mean(jpegs[95]) + (1 - share) * np.mean(jpegs[75]),
        "JSON": text / len(areas) * per_image,
        "runs": runs / len(areas),
        "median area": np.median(areas),
        "spread of areas": (np.quantile(np.log(areas), 0.84) - np.quantile(np.log(areas), 0.16)) / 2,
        "mean area": np.mean(areas),
    }
    print({name: f"{value:.6g}" for name, value in measured.items()}, f"decode {np.mean(decoding):.4f} s")
    targets = {
        "q95": 1.29e6,
        "q75": 0.52e6,
        "JPEG": 1.0e6,
        "JSON": 63e3,
        "runs": 320,
        "median area": np.exp(-6.21),
        "spread of areas": 1.59,
        "mean area": 0.0093,
    }
    assert measured == pytest.approx(targets, rel=0.1)


def run_tool(*arguments, **options):
    return processes.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, **options
    )


def test_tool_writes_tars_and_says_what(tmp_path):
    options = [
        "--tars",
        1,
        "--images-per-tar",
        3,
        "--first-tar",
        7,
        "--long-side",
        160,
        "--plain",
        "--simple",
    ]
    done = run_tool(tmp_path, *options, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["images"], summary["tars"]) == (3, 1)
    assert summary["masks"] <= 3 * 16
    assert not (tmp_path / "sa_000007.tar").read_bytes().startswith(b"\x1f\x8b")
    again = run_tool(tmp_path, *options)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert "runs" in run_tool(tmp_path, *options, "--overwrite").stdout


@pytest.mark.parametrize("tars", [1, 2])
def test_interrupt_leaves_no_partial_file(tmp_path, tars):
    command = [*COMMAND, str(tmp_path), "--tars", str(tars), "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob("*.partial")):
            time.sleep(0.05)
        process.send_signal(2)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert not list(tmp_path.iterdir())


def test_importing_brings_no_torch():
    code = "import sys, sa1b.programs.synthetic.source_tars; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tars", "0"), "--tars 0: must be at least 1"),
        (("--workers", "0"), "--workers 0: must be at least 1"),
        (("--first-tar", "-1"), "--first-tar -1: must be at least 0"),
        (("--seed", "-1"), "--seed -1: must be at least 0"),
        (("--images-per-tar", "0"), f"--images-per-tar 0: must be from 1 to {IDS_PER_TAR}"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_written(tmp_path, flags, message):
    done = run_tool(tmp_path / "source", *flags)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "source").exists()
