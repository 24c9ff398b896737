import json
import shutil

import pytest

from tests.cli.verb import runner
from tests.shards.tiny_source import ROOTS, make_root, odd_pairs, pairs, write_source

run = runner("verify")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    source = write_source(folder / "sa_000001.tar", pairs(range(8)) | odd_pairs(200))
    return make_root(folder / "root", [source], ROOTS["plain"])


def test_clean(whole, tmp_path):
    done = run(whole, "--deep", "--workers", 2, "--state", tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert f"Clean: {whole}" in done.stdout
    assert not (tmp_path / "state").exists()


def test_damage_as_json(whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "root")
    (root / "sa1b-000001-0001.tar").unlink()
    done = run(root, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert document["exit_code"] == 1
    (finding,) = document["findings"]
    assert (finding["kind"], finding["shard"]) == ("tar_missing", "sa1b-000001-0001.tar")
    assert "sa1b reshard" in finding["remedy"]


def test_warnings(whole):
    done = run(whole, "--warnings")
    assert done.returncode == 0, done.stderr
    assert "area: 1 image\n  sa_000001  image 203: mask 0: area" in done.stdout
    listed = json.loads(run(whole, "--warnings", "--json").stdout)
    assert listed["counts"]["area"] == 1
    assert [one["image_id"] for one in listed["warnings"]["area"]] == [203]


def test_cannot_run(whole, tmp_path):
    for arguments in (
        (tmp_path,),
        (tmp_path, "--warnings"),
        (whole, "--warnings", "--deep"),
        (whole, "--workers", 0),
        (whole, "--state", whole / "state"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
