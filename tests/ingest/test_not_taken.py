"""What is found beside the sources and is none: listed by name, with an exit code, unless a pattern names it."""

import json
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.shards import tiny
from tests.shards.tiny import make_tar

IDS = range(100, 104)
REPOSITORY = Path(__file__).parents[2]


def reshard(*arguments):
    command = [sys.executable, "tools/reshard.py", *map(str, arguments)]
    return processes.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=120)


@pytest.fixture
def downloads(tmp_path):
    """A tar in a folder below, and two files that are no sources."""
    folder = tmp_path / "in"
    make_tar(folder / "batch1" / "sa_000020.tar", IDS)
    (folder / "notes.txt").write_text("notes")
    (folder / "batch1" / "sa_000021.tar.gz.part").write_bytes(b"\x1f\x8b\x08")
    return folder


def test_what_is_not_taken_is_listed_and_makes_the_exit_code_3(downloads, tmp_path):
    done = reshard(downloads, "--out", tmp_path / "root")
    assert done.returncode == 3, done.stderr
    assert "not taken: 2 paths; exclude with --ignore PATTERN" in done.stdout
    assert f"{downloads / 'notes.txt'}: neither a tar nor a member of a pair" in done.stdout
    assert f"{downloads / 'batch1' / 'sa_000021.tar.gz.part'}: a partial download" in done.stdout
    assert tiny.read_back(tmp_path / "root").keys() == set(IDS)


def test_patterns_leave_it_out(downloads, tmp_path):
    done = reshard(downloads, "--out", tmp_path / "root", "--ignore", "*.txt", "--ignore", "batch1/*.part")
    assert done.returncode == 0, done.stderr
    assert "not taken" not in done.stdout


def test_twenty_are_listed_and_all_are_in_the_document(downloads, tmp_path):
    for number in range(28):
        (downloads / f"page{number:02d}.html").write_text("<html>")
    done = reshard(downloads, "--out", tmp_path / "root")
    assert done.returncode == 3
    assert "not taken: 30 paths" in done.stdout
    assert "page17.html" in done.stdout
    assert "page18.html" not in done.stdout
    assert "and 10 more, all printed with --json" in done.stdout
    done = reshard(downloads, "--out", tmp_path / "root", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], len(document["not_taken"])) == (3, 3, 30)
    assert document["not_taken"][0] == {
        "path": str(downloads / "batch1" / "sa_000021.tar.gz.part"),
        "reason": "a partial download",
    }


def test_files_of_the_run_itself_are_not_listed(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    (tmp_path / "md5.txt").write_text("")
    arguments = (
        tmp_path,
        "--out",
        tmp_path / "root",
        "--md5",
        tmp_path / "md5.txt",
        "--spill",
        tmp_path / "spill",
    )
    for _ in range(2):
        done = reshard(*arguments)
        assert done.returncode == 0, done.stdout
        assert "not taken" not in done.stdout


@pytest.mark.parametrize("out", ["in", "in/.", "in/batch1/..", "link"])
def test_the_output_folder_is_no_source(downloads, tmp_path, out):
    (tmp_path / "link").symlink_to(downloads)
    before = sorted(downloads.rglob("*"))
    done = reshard(downloads, "--out", tmp_path / out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --out {tmp_path / out}: is SOURCE too, and shards must not be mixed with sources; "
        "pass another --out\n"
    )
    assert sorted(downloads.rglob("*")) == before


def test_an_output_folder_inside_a_source_contains_no_source(downloads, tmp_path):
    before = sorted(downloads.rglob("*"))
    done = reshard(downloads, "--out", downloads / "batch1")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is inside SOURCE {downloads} and contains sa_000020.tar, which would not be" in done.stderr
    done = reshard(tmp_path, "--out", downloads)
    assert "contains batch1/sa_000020.tar" in done.stderr
    assert sorted(downloads.rglob("*")) == before
    for _ in range(2):  # its own files are no sources
        done = reshard(downloads, "--out", downloads / "shards", "--ignore", "*.txt", "--ignore", "*.part")
        assert done.returncode == 0, done.stderr
    assert tiny.read_back(downloads / "shards").keys() == set(IDS)


def test_an_output_folder_above_a_source_does_not_write_to_it(downloads, tmp_path):
    downloads.rename(tmp_path / "tasks")
    done = reshard(tmp_path / "tasks", "--out", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "tasks: is in a folder that reshard writes; move it, or pass another --out" in done.stderr
    (tmp_path / "tasks").rename(downloads)
    for _ in range(2):
        done = reshard(downloads, "--out", tmp_path)
        assert done.returncode == 3, done.stderr
    assert tiny.read_back(tmp_path).keys() == set(IDS)
