"""Commands that write one result on a disk that is full: one line names the file, and nothing is left of it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.disks import small_disk
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

SIZE = 16 << 10  # bytes of the full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system."""
    with small_disk(tmp_path / "disk", SIZE) as folder:
        yield folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full disk")
    source = write_source(folder / "sa_000001.tar", pairs(range(40)))
    return make_root(folder / "root", [source], ROOTS["plain"])


@pytest.mark.parametrize(
    ("verb", "out", "more"),
    [
        ("gallery", "page.html", ()),
        ("export", "tars", ("--to", "sa1b", "--plain")),
        ("export", "files", ("--to", "sam2", "--workers", "2")),
        ("view", "views", ("--subset", "90%")),
        ("synthesize", "source", ("--tars", "1", "--images-per-tar", "3", "--long-side", "320")),
    ],
)
def test_a_full_disk_is_one_line_and_the_same_command_works_once_there_is_space(
    verb: str, out: str, more: tuple[str, ...], root: Path, disk: Path
) -> None:
    first = [str(disk / out)] if verb == "synthesize" else [str(root), "--out", str(disk / out)]
    command = [sys.executable, "-m", "sa1b", verb, *first, *more, "--json"]
    if verb == "view":  # its files are small
        (disk / "filler").write_bytes(bytes(SIZE))
    done = processes.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(f"error: {disk / out}")) == (2, True), line
    assert line.endswith(": no space left on device; free space on this disk")
    left = [path for path in disk.rglob("*") if path.is_file()]
    assert [path.name for path in left if path.name not in ("filler", ".export.jsonl")] == []
    subprocess.run(["mount", "-o", f"remount,size={64 << 20}", str(disk)], check=True)
    done = processes.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
