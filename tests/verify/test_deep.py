"""What only some checks see: decoding (deep), annotation files kept verbatim, and processes that die."""

import json
import random
import shutil
import tarfile
from dataclasses import replace
from multiprocessing.process import BaseProcess

import cv2
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg

from sa1b.errors import BadSample
from sa1b.shards import jpeg, manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.index import IndexReader
from sa1b.shards.quarantine import WARNINGS
from sa1b.verify.verify import verify
from tests.shards.tiny_source import make_root, pairs, write_source
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


def test_an_undecodable_jpeg_is_found_deep(tmp_path):
    content = pairs(range(1, 4))
    jpg, text = content[2]
    content[2] = (jpg[: len(jpg) // 2] + b"\xff\xd9", text)  # whole by its markers
    source = write_source(tmp_path / "sa_000001.tar", content)
    root = make_root(tmp_path / "root", [source], Options())
    assert check_here(root).findings == []
    (finding,) = check_here(root, deep=True).findings
    assert (finding.kind, finding.image_id) == ("jpg_undecodable", 2)


@pytest.mark.parametrize("subsampling", ["420", "444", "Gray", "progressive"])
def test_damage_of_a_jpeg_is_found_without_its_pixels(subsampling):
    """The check decodes at an eighth of the size. It must accept and refuse the same files as `decode`."""
    pixels = np.random.default_rng(1).integers(0, 256, (30, 41, 3), np.uint8).repeat(2, 0).repeat(2, 1)
    if subsampling == "progressive":
        data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    elif subsampling == "Gray":
        data = cv2.imencode(".jpg", pixels[..., 0])[1].tobytes()
    else:
        data = simplejpeg.encode_jpeg(pixels, 75, "RGB", subsampling)
    assert jpeg.check_decodes(data) == (60, 82)
    chance = random.Random(2)
    refused = 0
    for _ in range(200):
        changed = bytearray(data)
        place = chance.randrange(20, len(data))
        changed[place : place + chance.choice((0, 1, 1, 9))] = chance.randbytes(chance.choice((0, 1, 1, 9)))
        results = []
        for check_file in (lambda data: jpeg.decode(data).shape[:2], jpeg.check_decodes):
            try:
                jpeg.frame(bytes(changed), 10_000)
                results.append(check_file(bytes(changed)))
            except BadSample as error:
                results.append(str(error))
        assert results[0] == results[1]
        refused += isinstance(results[0], str)
    assert 20 < refused < 200


def test_a_kept_annotation_file_is_compared_with_the_record(roots, tmp_path):
    root = shutil.copytree(roots["keep_json"], tmp_path / "root")
    tar = root / "sa1b-000002-0000.tar"
    with tarfile.open(tar) as members:
        member = members.getmember("sa_301.json")
    data = bytearray(tar.read_bytes())
    place = data.index(b'"area": ', member.offset_data) + 8
    data[place] = ord("1") if data[place] != ord("1") else ord("2")
    tar.write_bytes(data)
    found = check_here(root).findings
    assert ("json_damaged", 301) in [(finding.kind, finding.image_id) for finding in found]


def test_shards_whose_processes_are_killed_are_not_checked_and_not_damaged(root, monkeypatch):
    """As the kernel kills for lack of memory: all shards are named, none as damaged, and the check ends."""
    start = BaseProcess.start

    def start_and_kill(self):
        start(self)
        self.kill()

    monkeypatch.setattr(BaseProcess, "start", start_and_kill)
    report = verify(root, workers=2, quiet=True)
    assert (report.findings, report.exit_code(), report.shards) == ([], 2, 0)
    assert sorted(report.unchecked) == manifest_shards(root)
    assert all("SIGKILL" in why for why in report.unchecked.values())
    assert f"NOT CHECKED: {root}" in report.table()
    assert "restore" not in report.table()


def test_a_check_without_threads_names_no_damage(root, monkeypatch):
    def refuse(self, *arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(IndexReader, "numbers", refuse)
    report = check_here(root)
    assert (report.findings, report.exit_code()) == ([], 2)
    assert sorted(report.unchecked) == manifest_shards(root)


def manifest_shards(root):
    return [shard["name"] for shard in manifest.read_dataset(root)["shards"]]


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
