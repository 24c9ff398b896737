import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

TOOL = Path(__file__).parents[2] / "tools" / "verify.py"


def run(*arguments):
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    source = write_source(folder / "sa_000001.tar", pairs(range(8)))
    return make_root(folder / "root", [source], ROOTS["plain"])


def test_clean(whole):
    done = run(whole, "--deep", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert f"Clean: {whole}" in done.stdout


def test_damage_as_json(whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "root")
    (root / "sa1b-000001-0001.tar").unlink()
    done = run(root, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert document["exit_code"] == 1
    (finding,) = document["findings"]
    assert (finding["kind"], finding["shard"]) == ("tar_missing", "sa1b-000001-0001.tar")
    assert "tools/reshard.py" in finding["remedy"]


def test_cannot_run(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
