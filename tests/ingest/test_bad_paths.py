"""Bad files and paths among good ones on the command line."""

import errno
from pathlib import Path

import pytest

from sa1b.errors import SourceError, UsageError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.ingest.start_checks import admitted
from sa1b.shards.documents import Options
from sa1b.storage.store import FolderStore
from tests.shards import tiny


def test_a_bad_file_that_is_named_fails_alone(tmp_path: Path) -> None:
    good, bad = tmp_path / "sa_000001.tar", tmp_path / "sa_000002.tar"
    tiny.make_tar(good, range(10))
    bad.write_bytes(bytes(range(256)) * 40)
    summary = reshard([bad, good], tmp_path / "root", Options(), Policy(), IngestRun(quiet=True))
    assert summary.done == ["sa_000001"]
    assert [*summary.failed] == ["sa_000002"]
    assert str(bad) in summary.failed["sa_000002"]
    assert summary.exit_code() == 1
    with pytest.raises(SourceError, match="no such file or folder"):
        reshard([tmp_path / "x.tar", good], tmp_path / "root", Options(), Policy(), IngestRun(quiet=True))


def test_a_name_that_is_too_long_is_refused_by_flag(tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "x.tar", range(3))
    with pytest.raises(UsageError, match=r"--rename .*200 characters; it must have at most 150"):
        admitted([], {tmp_path / "x.tar": "n" * 200})


def test_a_suggested_rename_can_be_pasted(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "x.tar" for folder in ("a b", "c d")]
    for path in paths:
        tiny.make_tar(path, range(3))
    with pytest.raises(SourceError) as error:
        admitted(paths, {})
    assert f"--rename '{paths[1]}=NAME'" in str(error.value)


@pytest.mark.parametrize("how", ["put", "put_if_absent"])
def test_errors_name_the_final_path(tmp_path: Path, how: str) -> None:
    (tmp_path / "dir").mkdir()
    name = "dir/" + "n" * 250  # its temporary path is too long for a file name
    with pytest.raises(OSError, match="too long") as error:
        getattr(FolderStore(tmp_path), how)(name, b"x")
    assert error.value.errno == errno.ENAMETOOLONG
    assert error.value.filename == str(tmp_path / name)
