import json
import shutil

import pytest

from tests.cli.verb import called, runner
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

run = runner("index")


@pytest.fixture
def root(tmp_path):
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(8)))
    return make_root(tmp_path / "root", [source], ROOTS["plain"])


def test_a_root(root):
    written = (root / "dataset.json").read_bytes()
    (root / "dataset.json").unlink()
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert f"Complete: {root / 'dataset.json'}" in done.stdout
    assert (root / "dataset.json").read_bytes() == written


def test_tables(root):
    written = (root / "dataset.json").read_bytes()
    (root / "dataset.json").unlink()
    for shard in root.glob("*.tar"):
        shard.write_bytes(b"")  # the shards are not read
    done = run(root, "--tables")
    assert done.returncode == 0, done.stderr
    assert (root / "dataset.json").read_bytes() == written


def test_workers(root):
    for index in root.glob("*.parquet"):
        index.unlink()
    done = run(root, "--workers", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["shards"], document["images"], document["complete"]) == (2, 8, True)


def test_shards_as_json(root):
    shards = sorted(root.glob("*.tar"))
    shards[1].write_bytes(b"")
    done = run(*shards, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert document["shards"] == 1
    assert list(document["failed"]) == [shards[1].name]


def test_what_cannot_be_done(root, tmp_path):
    shutil.rmtree(tmp_path / "nothing", ignore_errors=True)
    for arguments in (
        (),
        (root, root),
        (tmp_path / "nothing",),
        (root / "dataset.json",),
        (root, "--workers", 0),
        (*root.glob("*.tar"), "--tables"),
    ):
        done = called("index")(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
