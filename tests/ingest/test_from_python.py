"""`sa1b.reshard`: the command from Python, with the same options and the same shards."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.arguments import BadType, BadValue
from sa1b.errors import UsageError
from tests import kit
from tests.cli.verb import called


def test_it_makes_the_shards_of_the_command_and_says_what_it_did(tar: Path, tmp_path: Path) -> None:
    found = sa1b.reshard(tar, tmp_path / "a", images_per_shard=4, keep_json=True, quiet=True)
    assert (found.exit_code, found.images, found.shards) == (0, 10, 3)
    assert (found.done, found.skipped, found.failed) == (["sa_000001"], [], {})
    stored = sa1b.open(tmp_path / "a")
    assert (
        found.document["masks"]
        == found.masks
        == sum(len(sample.runs) for sample in map(stored.__getitem__, range(10)))
    )
    assert "Complete: " in found.text
    again = sa1b.reshard([str(tar)], str(tmp_path / "a"), images_per_shard=4, keep_json=True, quiet=True)
    assert (again.exit_code, again.images, again.done, again.skipped) == (0, 10, [], ["sa_000001"])
    done = called("reshard")(tar, "--out", tmp_path / "b", "--images-per-shard", 4, "--keep-json")
    assert done.returncode == 0
    for shard in (tmp_path / "a").glob("*.tar"):
        assert shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes()


def test_a_source_that_fails_is_in_the_result(tar: Path, tmp_path: Path) -> None:
    md5 = tmp_path / "md5"
    md5.write_text(f"{'0' * 32}  {tar.name}\n")
    found = sa1b.reshard(tar, tmp_path / "second", md5=str(md5), quiet=True)
    assert found.exit_code == 1
    assert "md5" in found.failed["sa_000001"]


def test_finish_and_drop_give_the_figures_of_the_dataset(tar: Path, tmp_path: Path) -> None:
    assert sa1b.reshard(tar, tmp_path / "root", task="0/1", quiet=True).exit_code == 0
    finished = sa1b.reshard((), tmp_path / "root", finish=True)
    assert (finished.exit_code, finished.images, finished.skipped) == (0, 10, ["sa_000001"])
    dropped = sa1b.reshard((), tmp_path / "root", drop="sa_000001")
    assert (dropped.images, dropped.shards) == (0, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"worker": 2}, BadType, r"reshard\(worker=...\): no such argument; did you mean 'workers'?"),
        ({"json_output": True}, BadType, "no such argument"),
        ({"workers": "two"}, BadValue, "workers='two' must be int or NoneType"),
        ({"keep_json": 1}, BadValue, "keep_json=1 must be bool"),
        ({"on_error": "skip"}, BadValue, "on_error='skip' must be 'quarantine' or 'stop'"),
        ({"accept": [3]}, BadValue, "accept=3 must be str"),
        ({"workers": 0}, UsageError, "--workers 0: must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(
    tar: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")):
        sa1b.reshard(tar, tmp_path / "root", **options)
    assert not (tmp_path / "root").exists()


def test_an_interruption_ends_the_caller_too(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with kit.fault(root, 2, kit.interrupt), pytest.raises(KeyboardInterrupt):
        sa1b.reshard(tar, root, quiet=True)
    assert sa1b.reshard(tar, root, quiet=True).skipped == ["sa_000001"]


def test_every_type_of_an_option_can_be_passed(tar: Path, tmp_path: Path) -> None:
    (tmp_path / "root" / "tasks").mkdir(parents=True)
    url, options = f"local://{tmp_path}/root", {"max_rate": 3, "image_size": None, "quiet": True}
    accept = ("area", "bbox")
    made = sa1b.reshard([str(tar)], url, scratch=str(tmp_path / "scratch"), accept=accept, **options)
    assert made.exit_code == 0
    dropped = sa1b.reshard((), url, scratch=tmp_path / "scratch", drop="sa_000001", quiet=True)
    assert dropped.images == 0


def test_a_script_needs_no_guard(tar: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sa1b\nprint(sa1b.reshard({str(tar)!r}, 'root', quiet=True).exit_code)\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
