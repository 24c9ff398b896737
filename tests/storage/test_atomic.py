"""Files are replaced atomically, devices and pipes never."""

import os
import socket
import stat
from pathlib import Path

import pytest

from sa1b.errors import UsageError
from sa1b.storage.atomic import write_whole


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link_to_a_device(path: Path) -> None:
    path.symlink_to(os.devnull)


@pytest.mark.parametrize("make", [pipe, listener, link_to_a_device])
def test_what_is_no_file_is_not_replaced(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("page.html")
    assert callable(make)
    make(path)
    before = path.lstat()
    with pytest.raises(UsageError, match=r"^page\.html: a device, pipe or socket, not a file; name another"):
        write_whole(path, b"new")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert [other.name for other in Path().iterdir()] == ["page.html"]


def test_a_file_and_a_link_to_a_file_are_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    for path in (target, link):
        write_whole(path, b"new")
        assert path.read_bytes() == b"new"
        assert stat.S_ISREG(path.lstat().st_mode)
