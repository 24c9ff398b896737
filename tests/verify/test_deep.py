"""What only some checks see: decoding (deep), and a process without memory."""

import json
import random
from dataclasses import replace

import cv2
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg

import sa1b
from sa1b.errors import BadSample
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.index import IndexReader
from sa1b.shards.quarantine import WARNINGS
from tests.directories import reshard
from tests.kit import run
from tests.shards.tiny_source import pairs, write_source
from tests.verify.checking import check_here


def test_numbers_that_were_changed_in_both_places_are_compared_with_the_mask(root):
    """Index and sample table take their numbers from the record; only --deep compares them with the masks."""
    task = replace(manifest.read_tasks(root)["sa_000001"], quarantine=None)
    task.counts["doubtful"]["area"] = 0
    manifest.write_task(root, task)
    write_dataset(root, manifest.read_tasks(root))
    warnings = root / "quarantine" / "sa_000001" / WARNINGS
    lines = warnings.read_text().splitlines(keepends=True)
    warnings.write_text("".join(line for line in lines if json.loads(line)["reason"] != "area"))
    assert check_here(root).findings == []
    (finding,) = check_here(root, deep=True).findings
    assert (finding.kind, finding.image_id) == ("odd_area", 203)


def jpegs(subsampling):
    """JPEGs of one form with changed bytes."""
    pixels = np.random.default_rng(1).integers(0, 256, (24, 32, 3), np.uint8).repeat(2, 0).repeat(2, 1)
    if subsampling == "progressive":
        data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    elif subsampling == "Gray":
        data = cv2.imencode(".jpg", pixels[..., 0])[1].tobytes()
    else:
        data = simplejpeg.encode_jpeg(pixels, 75, "RGB", subsampling)
    chance = random.Random(2)
    for _ in range(60):
        changed = bytearray(data)
        place = chance.randrange(20, len(data))
        changed[place : place + chance.choice((0, 1, 1, 9))] = chance.randbytes(chance.choice((0, 1, 1, 9)))
        yield bytes(changed)
    yield data[: len(data) // 2] + b"\xff\xd9"  # whole by its markers


def is_decodable(sample):
    try:
        return sample.image.shape[:2] == (48, 64)
    except BadSample:
        return False


@pytest.mark.parametrize("subsampling", ["420", "444", "Gray", "progressive"])
def test_a_deep_check_names_the_images_that_readers_cannot_decode(tmp_path, subsampling):
    """It decodes at an eighth of the size. It must accept and refuse the same files as readers do."""
    files, root = list(jpegs(subsampling)), tmp_path / "root"
    texts = pairs(range(len(files)))
    content = {number: (data, texts[number][1]) for number, data in enumerate(files)}
    reshard(root, write_source(tmp_path / "sa_000001.tar", content), images_per_shard=100)
    assert run("verify", root, "--json").json["findings"] == []
    found = {one["image_id"] for one in run("verify", root, "--deep", "--json", code=1).json["findings"]}
    samples = list(sa1b.open(root))
    assert found == {sample.image_id for sample in samples if not is_decodable(sample)}
    assert 0 < len(found) < len(samples)
    assert len(files) - 1 in found


@pytest.mark.parametrize("where", ["open", "numbers", "runs"])
def test_a_process_without_memory_names_no_damage(root, monkeypatch, where):
    """Arrow's error is one of those that a damaged index gives, too."""

    def refuse(self, *arguments):
        raise pa.ArrowMemoryError("malloc of size 4096 failed")

    monkeypatch.setattr(IndexReader, {"open": "__init__"}.get(where, where), refuse)
    report = check_here(root, deep=True)
    assert (report.findings, report.exit_code()) == ([], 2)
    assert set(report.unchecked.values()) == {"not enough memory to check it"}
    assert "fewer --workers" in report.table()
