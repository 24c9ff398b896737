"""A copy that is killed at any point is completed by the same command, with the same bytes."""

import json
import random
import sys

import pytest

from tests import processes
from tests.processes import REPOSITORY


def killed(settings, folder):
    """What copy_runs.py found."""
    (folder / "settings.json").write_text(json.dumps(settings))
    done = processes.run(
        [sys.executable, "-m", "tests.transfer.copy_runs", str(folder / "settings.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def points(count, last, seed):
    """Steps at which a copy is killed, in all parts of it."""
    found = random.Random(seed)
    return sorted({1 + int(last * (number + found.random()) / count) for number in range(count)})


@pytest.mark.parametrize(("workers", "count"), [(2, 5), pytest.param(1, 15, marks=pytest.mark.slow)])
def test_a_copy_to_a_folder_that_is_killed_is_completed(root, tmp_path, workers, count):
    settings = {"root": str(root), "dest": str(tmp_path / "copies"), "scratch": str(tmp_path / "scratch")}
    whole = killed({**settings, "points": [10**9]}, tmp_path)
    assert whole["wrong"] == []
    at = points(count, whole["steps"], workers)
    found = killed({**settings, "points": at, "workers": workers}, tmp_path)
    assert found["wrong"] == []
    assert found["killed"] >= len(at) - 1


@pytest.mark.slow
def test_a_copy_to_a_folder_is_killed_at_every_step(root, tmp_path):
    settings = {"root": str(root), "dest": str(tmp_path / "copies"), "scratch": str(tmp_path / "scratch")}
    whole = killed({**settings, "points": [10**9]}, tmp_path)
    found = killed({**settings, "points": list(range(1, whole["steps"] + 1))}, tmp_path)
    assert (found["wrong"], found["killed"]) == ([], whole["steps"])


@pytest.mark.parametrize(
    ("of", "to"),
    [("", "local://"), ("local://", ""), pytest.param("local://", "local://", marks=pytest.mark.slow)],
)
def test_a_copy_from_or_to_a_bucket_that_is_killed_is_completed(root, tmp_path, of, to):
    """Buckets of fsspec's local file system."""
    settings = {
        "root": f"{of}{root}",
        "of_root": {"auto_mkdir": True} if of else {},
        "dest": f"{to}{tmp_path}/copies",
        "options": {"auto_mkdir": True} if to else {},
        "scratch": str(tmp_path / "scratch"),
    }
    whole = killed({**settings, "points": [10**9]}, tmp_path)
    assert whole["wrong"] == []
    found = killed({**settings, "points": (at := points(3, whole["steps"], 3))}, tmp_path)
    assert found["wrong"] == []
    assert found["killed"] >= len(at) - 1
