import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

TOOL = Path(__file__).parents[2] / "tools" / "view.py"


def run(*arguments):
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    source = write_source(folder / "sa_000001.tar", pairs(range(40)))
    return make_root(folder / "root", [source], ROOTS["plain"])


def test_the_example(root):
    done = run(
        root,
        "--masks-where", "stability_score >= 0.96 and area_fraction < 0.9",
        "--images-where", "masks >= 2 and width >= 64",
        "--held-out", "20%", "--name", "good", "--workers", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (root / "views").glob("*.json")
    document = json.loads(path.read_text())
    assert f"images  {document['images']} of 40" in done.stdout
    assert document["ids_sha256"] in done.stdout
    assert f"Written: {path}" in done.stdout
    assert document["names"] == ["good"]


def test_json(root):
    shown = [run(root, "--subset", "50%", *split, "--json") for split in ([], ["--held-out", "50%"])]
    documents = [json.loads(done.stdout) for done in shown]
    assert documents[0] == documents[1]
    assert [done.stderr for done in shown] == ["", ""]
    held_out = json.loads(run(root, "--held-out", "50%", "--split", "held-out", "--json").stdout)
    assert held_out["images"] + documents[0]["images"] == documents[0]["of_images"] == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--masks-where", "stability > 1"], "did you mean stability_score?"),
        (["--images-where", "__import__('os')"], "is a function call"),
        (["--subset", "60%", "--held-out", "41%"], "--subset 60% and --held-out 41% overlap"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--images-where", "masks > 1000"], "no image is left"),
    ],
)
def test_refusals_are_one_line(root, arguments, message):
    done = run(root, *arguments, "--json")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_no_root(tmp_path):
    done = run(tmp_path, "--subset", "1%")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
