"""Bad files and paths among good ones on the command line."""

from pathlib import Path

import pytest

import sa1b
from sa1b.errors import SourceError
from tests.shards import tiny


def test_a_bad_file_that_is_named_fails_alone(tmp_path: Path) -> None:
    good, bad = tmp_path / "sa_000001.tar", tmp_path / "sa_000002.tar"
    tiny.make_tar(good, range(10))
    bad.write_bytes(bytes(range(256)) * 40)
    made = sa1b.reshard([bad, good], tmp_path / "root", quiet=True)
    assert (made.exit_code, made.done, [*made.failed]) == (1, ["sa_000001"], ["sa_000002"])
    assert str(bad) in made.failed["sa_000002"]
    with pytest.raises(SourceError, match=r"x\.tar: no such file or folder"):
        sa1b.reshard([tmp_path / "x.tar", good], tmp_path / "root", quiet=True)
