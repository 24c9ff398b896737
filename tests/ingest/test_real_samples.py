"""Real annotation files through ingest and back, where a copy lies at hand; nothing real is in the project.

The folder is $SA1B_REAL_SAMPLES, or `shared/real` beside the checkout.
"""

import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from pycocotools import mask as pycocotools

import sa1b
import sa1b.masks
from tests.shards import tiny

FOLDER = Path(os.environ.get("SA1B_REAL_SAMPLES", Path(__file__).parents[3] / "shared" / "real"))
ANNOTATIONS = sorted(FOLDER.glob("sa_*.json"))

pytestmark = pytest.mark.skipif(not ANNOTATIONS, reason=f"no real samples in {FOLDER}")


def jpeg_for(text: bytes) -> bytes:
    """A photograph, if there is one, at the size an annotation file says."""
    image = json.loads(text)["image"]
    photo = sorted(FOLDER.glob("*.jpg"))
    pixels = simplejpeg.decode_jpeg(photo[0].read_bytes()) if photo else np.zeros((8, 8, 3), np.uint8)
    scaled = cv2.resize(pixels, (image["width"], image["height"]))
    return simplejpeg.encode_jpeg(scaled, 95, "RGB", "420")


def test_annotation_files_come_back_unchanged(tmp_path: Path) -> None:
    members = []
    texts = {}
    for path in ANNOTATIONS:
        text = path.read_bytes()
        image_id = json.loads(text)["image"]["image_id"]
        texts[image_id] = text
        members += tiny.pair_members(image_id, jpeg_for(text), text)
    source = tiny.write_tar(tmp_path / "sa_000020.tar", members)
    task = tiny.ingest_tar(source, tmp_path / "root")
    assert task.warnings == task.counts["refused"] == {}
    tiny.read_back(tmp_path / "root")
    ds = sa1b.open(tmp_path / "root")
    originals = dict(members)
    assert len(ds) == len(texts)
    for i, sample in enumerate(ds):
        assert sample.jpeg == originals[f"./sa_{sample.image_id}.jpg"]
        # Byte for byte: the columns alone give the file back as it was written.
        assert json.dumps(ds.annotation_file(i)).encode() == texts[sample.image_id]
        assert sample.annotations.text is None


def test_masks_equal_pycocotools(tmp_path: Path) -> None:
    found = {json.loads(text)["image"]["image_id"]: text for text in map(Path.read_bytes, ANNOTATIONS)}
    pairs = [one for i, text in found.items() for one in tiny.pair_members(i, jpeg_for(text), text)]
    tiny.ingest_tar(tiny.write_tar(tmp_path / "sa_000020.tar", pairs), tmp_path / "root")
    for sample in sa1b.open(tmp_path / "root"):
        masks, runs = json.loads(found[sample.image_id])["annotations"], sample.annotations.runs()
        rles = [mask["segmentation"] for mask in masks]
        assert (sa1b.masks.rasterize(runs) == pycocotools.decode(rles).transpose(2, 0, 1)).all()
        assert (sa1b.masks.area(runs) == [mask["area"] for mask in masks]).all()
        assert [one.decode() for one in sa1b.masks.encode(runs)] == [rle["counts"] for rle in rles]


@pytest.mark.parametrize("name", ["sav_000001_auto.json", "coco_fakesegm100.json"])
def test_other_coco_strings_decode_alike(name: str) -> None:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} beside the real samples in {FOLDER}")
    document = json.loads(path.read_bytes())
    if isinstance(document, list):
        found = [mask["segmentation"] for mask in document]
    else:
        found = [rle for frame in document["masklet"] for rle in frame]
    rles = [rle for rle in found if rle is not None and rle["counts"]]
    assert len(rles) > 500
    for height, width in {tuple(rle["size"]) for rle in rles}:
        same = [rle for rle in rles if rle["size"] == [height, width]]
        runs = sa1b.masks.decode([rle["counts"] for rle in same], height, width)
        # In parts: pycocotools.area of more than 255 masks overflows.
        areas = np.concatenate([pycocotools.area(same[i : i + 200]) for i in range(0, len(same), 200)])
        assert (sa1b.masks.area(runs) == areas).all()
        assert [mask.decode() for mask in sa1b.masks.encode(runs)] == [rle["counts"] for rle in same]
