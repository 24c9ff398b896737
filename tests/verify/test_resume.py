"""A check that is interrupted and resumed with --state."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sa1b.errors import UsageError
from sa1b.verify import verify as verify_module
from tests.directories import bucket
from tests.verify.checking import check_here, flip

REPOSITORY = Path(__file__).parents[2]


class Stopped(BaseException):
    pass


def checked_shards(monkeypatch, stop_after=99):
    """Record the names of the checked shards, and interrupt after some of them."""
    real, names = verify_module.check_shard, []

    def counted(expected, *arguments, **options):
        if len(names) == stop_after:
            raise Stopped
        names.append(expected.info.name)
        return real(expected, *arguments, **options)

    monkeypatch.setattr(verify_module, "check_shard", counted)
    return names


def without_time(report):
    # The server of the workers has the PATH of the test that started it, and so "sa1b" or "python -m sa1b".
    text = re.sub("`[^` ]+ -m sa1b ", "`sa1b ", json.dumps(report.document()))
    return {**json.loads(text), "seconds": 0}


@pytest.fixture
def damaged(root):
    """Damage the first and the last shard, and the numbers of an image in an index."""
    flip(root / "sa1b-000001-0000.tar", 2000)
    flip(root / "sa1b-000002-0000.parquet", 100)
    return root


@pytest.mark.parametrize("deep", [False, True])
def test_the_report_is_the_same_after_an_interruption(damaged, tmp_path, monkeypatch, deep):
    state = tmp_path / "state"
    expected = check_here(damaged, deep=deep)
    assert len(expected.findings) >= 2
    with monkeypatch.context() as patch:
        checked_shards(patch, 3)
        with pytest.raises(Stopped):
            check_here(damaged, deep=deep, state=state)
    assert state.exists()
    names = checked_shards(monkeypatch)
    report = check_here(damaged, deep=deep, state=state)
    assert names == ["sa1b-000001-0003.tar", "sa1b-000002-0000.tar"]
    assert without_time(report) == without_time(expected)
    assert not state.exists()


@pytest.mark.parametrize(
    "change", ["shard", "index", "time", "time in a bucket", "task", "deep", "line", "name", "number"]
)
def test_what_changed_since_is_checked_again(root, tmp_path, monkeypatch, change):
    state, where = tmp_path / "state", bucket(root) if "bucket" in change else root
    with monkeypatch.context() as patch:
        checked_shards(patch, 1)
        with pytest.raises(Stopped):
            check_here(where, state=state)
    shard = root / "sa1b-000001-0000.tar"
    if change == "shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif change == "index":
        shard.with_suffix(".parquet").unlink()
    elif change.startswith("time"):
        os.utime(shard)
    elif change == "task":
        text = (root / "dataset.json").read_text()
        (root / "dataset.json").write_text(text.replace('"keep_json": false', '"keep_json": true'))
    elif change == "line":
        state.write_bytes(state.read_bytes()[:-10])
    elif change == "name":  # of a value, so that the line is JSON of another form
        state.write_bytes(state.read_bytes().replace(b'"masks":', b'"masts":'))
    elif change == "number":
        state.write_bytes(state.read_bytes().replace(b'"images": ', b'"images": 1'))
    names = checked_shards(monkeypatch)
    report = check_here(where, state=state, deep=change == "deep")
    assert len(names) == 5
    assert report.images == 19


def test_processes_record_too_and_a_killed_check_goes_on(damaged, tmp_path):
    state = tmp_path / "state"
    expected = check_here(damaged)
    program = (
        "import sys, time; from pathlib import Path; from sa1b.verify import verify\n"
        "real = verify.check_shard\n"
        "def slow(expected, *arguments, **options):\n"
        "    if expected.source == 'sa_000002': time.sleep(600)\n"
        "    return real(expected, *arguments, **options)\n"
        "verify.check_shard = slow\n"
        "verify.verify(Path(sys.argv[1]), workers=0, state=Path(sys.argv[2]), quiet=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(damaged), str(state)], cwd=REPOSITORY)
    while not state.exists() or state.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    report = verify_module.verify(damaged, workers=2, state=state, quiet=True)
    assert without_time(report) == without_time(expected)


def test_a_state_inside_the_dataset_or_of_another_kind_is_refused(root, tmp_path):
    with pytest.raises(UsageError, match="is inside"):
        check_here(root, state=root / "state")
    other = tmp_path / "notes.txt"
    other.write_text("not a record")
    with pytest.raises(UsageError, match="not a record"):
        check_here(root, state=other)
    assert other.read_text() == "not a record"
