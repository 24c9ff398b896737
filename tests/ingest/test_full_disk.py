"""A disk that is too small: refused before the start, or stopped at once, and never tried for every source."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

from sa1b.errors import UsageError
from sa1b.ingest.finish import drop_source
from sa1b.ingest.start_checks import check_space
from sa1b.shards import commit
from sa1b.shards.documents import Options
from sa1b.shards.manifest import known_tasks
from sa1b.sources.discovery import discover
from sa1b.sources.source import Source
from sa1b.sources.tar_reader import TAR
from sa1b.verify.verify import verify
from tests import processes
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
        (name,) = known_tasks(root).keys() - left
        done = reshard("--out", root, "--drop", name)
        assert done.returncode == 0, done.stderr
        assert list(known_tasks(root)) == left
        if left:
            report = verify(root, quiet=True)
            assert (report.images, report.findings, report.notes) == (5 * len(left), [], [])
    assert sorted(root.rglob("*.*")) == []


def test_a_drop_on_a_full_disk_that_is_interrupted_is_completed(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        tiny.make_tar(tmp_path / "in" / f"sa_0000{number:02d}.tar", range(100 * number, 100 * number + 5))
    root = small_disk / "root"
    assert reshard(tmp_path / "in", "--out", root, "--no-space-check").returncode == 0
    fill(small_disk)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drop_source(root, "sa_000001")
    assert not list(root.glob("sa1b-000001-*"))
    assert list(drop_source(root, "sa_000001").tasks) == ["sa_000000"]
    assert (verify(root, quiet=True).images, verify(root, quiet=True).findings) == (5, [])


def fill(disk: Path) -> None:
    with (disk / f"filler{disk_usage(disk).free}").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
    assert disk_usage(disk).free == 0


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def source(path: Path, size: int) -> Source:
    path.write_bytes(tiny.gzip_bytes(b""))
    (found,) = discover([path]).sources
    return Source(found.name, path, TAR, size, found.mtime_ns)


def test_what_smaller_images_need_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 8 * 10**9})())
    one = source(tmp_path / "sa_000001.tar", 10**10)
    with pytest.raises(UsageError, match=r"8,000 MB free, about 14,000.0 MB needed.*--no-space-check"):
        check_space([one], tmp_path, Options(), tmp_path, workers=1)
    check_space([one], tmp_path, Options(image_size=1024, quality=95), tmp_path, workers=1)
