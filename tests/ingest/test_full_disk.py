"""A disk that is too small: refused before the start, or stopped at once, and never tried for every source."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

from tests import kit, processes
from tests.shards import tiny

REPOSITORY = Path(__file__).parents[2]


def reshard(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "tools/reshard.py", *map(str, arguments)]
    return processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_a_full_disk_stops_the_run_instead_of_failing_each_source(small_disk: Path, tmp_path: Path) -> None:
    for number in range(12):
        tiny.make_tar(tmp_path / "in" / f"sa_0000{number:02d}.tar", range(100 * number, 100 * number + 60))
    refused = reshard(tmp_path / "in", "--out", small_disk / "root")
    assert refused.returncode == 2
    assert "--no-space-check" in refused.stderr
    done = reshard(tmp_path / "in", "--out", small_disk / "root", "--no-space-check", "--json")
    assert done.returncode == 1, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert 0 < len(found["done"]) < 11
    (name,) = found["failed"]  # one, not each of those that were still to come
    assert "No space left on device" in found["failed"][name]
    assert str(small_disk) in found["failed"][name]
    text = reshard(tmp_path / "in", "--out", small_disk / "root", "--no-space-check")
    assert "Stopped: the disk is full" in text.stdout
    assert "Traceback" not in text.stdout + text.stderr


def test_dropping_a_source_needs_no_free_disk(small_disk: Path, tmp_path: Path) -> None:
    for number in range(3):
        tiny.make_tar(tmp_path / "in" / f"sa_0000{number:02d}.tar", range(100 * number, 100 * number + 5))
    root = small_disk / "root"
    assert reshard(tmp_path / "in", "--out", root, "--no-space-check").returncode == 0
    for left in (["sa_000000", "sa_000002"], ["sa_000002"], []):
        fill(small_disk)
        (name,) = {path.stem for path in root.glob("tasks/*.json")} - {*left}
        kit.run("reshard", "--out", root, "--drop", name)
        assert sorted(path.stem for path in root.glob("tasks/*.json")) == left
        if left:
            assert checked(root) == (5 * len(left), [], [])
    assert sorted(root.rglob("*.*")) == []


def checked(root: Path) -> tuple[object, ...]:
    report = kit.run("verify", root, "--json").json
    return report["images"], report["findings"], report["notes"]


def test_a_drop_on_a_full_disk_that_is_interrupted_is_completed(small_disk: Path, tmp_path: Path) -> None:
    for number in range(2):
        tiny.make_tar(tmp_path / "in" / f"sa_0000{number:02d}.tar", range(100 * number, 100 * number + 5))
    root = small_disk / "root"
    assert reshard(tmp_path / "in", "--out", root, "--no-space-check").returncode == 0
    fill(small_disk)
    words = ("reshard", "--out", root, "--drop", "sa_000001")
    # Before the first file that takes space gets its name.
    assert kit.started(*words, base=root, at=1, what=kit.interrupt).wait(60)
    assert not list(root.glob("sa1b-000001-*"))
    kit.run(*words)
    assert checked(root) == (5, [], [])


def fill(disk: Path) -> None:
    with (disk / f"filler{disk_usage(disk).free}").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
    assert disk_usage(disk).free == 0


@pytest.mark.parametrize(
    ("free", "options", "flag"),
    [
        (3.0, {}, "--out"),
        (3.0, {"image_size": 1024}, ""),
        (3.0, {"annotations_only": True}, ""),
        (0.6, {"annotations_only": True, "keep_json": True}, "--out"),
        (0.6, {"annotations_only": True}, ""),
        (3.0, {"scratch": "scratch", "workers": 1}, ""),  # at a URL: for the sources in work only
        (3.0, {"scratch": "scratch", "workers": 3}, "--scratch"),
    ],
)
def test_space_is_needed_for_what_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, options: dict[str, Any], flag: str
) -> None:
    """`free`: in sizes of one of the three tars."""
    tars = [tmp_path / "in" / f"sa_00000{number}.tar" for number in range(3)]
    for number, tar in enumerate(tars):
        tiny.make_tar(tar, range(10 * number, 10 * number + 5), gzip=False)
    (tmp_path / "root" / "tasks").mkdir(parents=True)
    out, words = tmp_path / "root", kit.flags(options)
    if "scratch" in options:
        out, words[1] = f"local://{tmp_path}/root", tmp_path / "scratch"
    usage = type("Usage", (), {"free": int(free * tars[0].stat().st_size)})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    done = kit.run("reshard", *tars, "--out", out, *words, code=None)
    assert ("MB free" in done.err) == bool(flag), done.err
    assert flag in done.err
