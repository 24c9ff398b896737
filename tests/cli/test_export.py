import json
import sys

import pytest

from tests import processes
from tests.cli.verb import called, runner
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

run = runner("export")


@pytest.fixture
def root(tmp_path):
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(8)))
    return make_root(tmp_path / "root", [source], ROOTS["plain"])


def test_export(root, tmp_path):
    done = run(root, "--to", "sa1b", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"Complete: {tmp_path / 'out'}" in done.stdout
    again = run(root, "--to", "sa1b", "--out", tmp_path / "out", "--overwrite", "--json")
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(again.stdout)["parts"] == ["sa_000001.tar"]


@pytest.mark.parametrize(
    ("to", "names"),
    [
        ("coco", {"images", "parts", "annotations.json"}),
        ("yolo-seg", {"images", "labels", "data.yaml", "images-0000.txt"}),
        ("parquet", {"train-00000-of-00001.parquet"}),
    ],
)
def test_formats_of_other_readers(root, tmp_path, to, names):
    done = run(root, "--to", to, "--out", tmp_path / "out", "--json")
    assert (done.returncode, json.loads(done.stdout)["images"]) == (0, 8)
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {".export.jsonl"}


def test_a_view_and_workers(root, tmp_path):
    view = ("view", str(root), "--images-where", "image_id >= 5", "--name", "last")
    processes.run([sys.executable, "-m", "sa1b", *view], check=True, capture_output=True)
    out = ("--out", tmp_path / "out", "--json")
    done = run(root, "--to", "sa1b", *out, "--view", "last", "--workers", 2, "--images-per-tar", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["images"] == 3
    assert json.loads(done.stdout)["parts"] == ["sa_000001-0000.tar", "sa_000001-0001.tar"]
    again = run(root, "--to", "sa1b", *out, "--view", "last", "--workers", 2, "--images-per-tar", 2)
    assert json.loads(again.stdout)["skipped"] == ["sa_000001-0000.tar", "sa_000001-0001.tar"]
    unknown = run(root, "--to", "sa1b", *out, "--view", "first")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "'first' is no view" in unknown.stderr


def test_what_cannot_be_done(root, tmp_path):
    out = ("--out", tmp_path / "out")
    refused = called("export")
    missing = refused(root, *out)
    flag = "--to {sa1b,folders,images,sam2,efficientvit,webdataset,coco,yolo-seg,parquet}"
    assert missing.stderr.startswith(f"error: {flag}: missing; see ")
    for arguments in (
        (root, "--to", "voc", *out),
        (tmp_path, "--to", "sa1b", *out),
        (root, "--to", "sa1b", *out, "--images-per-tar", 0),
        (root, "--to", "coco", *out, "--images-per-file", 0),
        (root, "--to", "parquet", *out, "--segmentation", "polygons"),
    ):
        done = refused(*arguments)
        assert done.returncode == 2
        assert done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
