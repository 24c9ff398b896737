"""A disk that is too small: refused before the start, or stopped at once, and never tried for every source."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sa1b.errors import UsageError
from sa1b.ingest import admission
from sa1b.ingest.admission import check_space
from sa1b.shards.manifest import Options
from sa1b.sources.discovery import discover
from sa1b.sources.source import Source
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


def source(path: Path, size: int) -> Source:
    path.write_bytes(tiny.gzip_bytes(b""))
    (found,) = discover([path]).sources
    return Source(found.name, path, "tar", size, found.mtime_ns)


def test_what_smaller_images_need_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 8 * 10**9})())
    one = source(tmp_path / "sa_000001.tar", 10**10)
    with pytest.raises(UsageError, match=r"8,000 MB free, about 14,000.0 MB needed.*--no-space-check"):
        check_space([one], tmp_path, Options(), tmp_path, workers=1)
    check_space([one], tmp_path, Options(image_size=1024, quality=95), tmp_path, workers=1)
