"""The training command with --out at a URL: the results are those of a run in a folder."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.disks import small_disk
from tests.processes import REPOSITORY
from tests.storage.service import Service
from tests.train.command import assert_same_state, checkpoint_steps, losses, newest, start, starts
from tests.train.matrix import MODES
from tests.train.mishap import Mishap
from tests.train.test_failing_rank import WAITS

Whole = Callable[..., Path]
SLOW = ((), (pytest.mark.slow,))
PLACES = ("write", "writing thread")
RUN = "s3://data/run"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the objects of the run at the URL; a copy of a run is the folder of a run."""
    (tmp_path / "store" / "data").mkdir(parents=True)
    with Service("object_server", tmp_path / "store") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield tmp_path / "store" / "data" / "run"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_run_at_a_url_is_that_of_a_folder_and_its_weights_can_be_used(
    root: Path, whole: Whole, bucket: Path, tmp_path: Path
) -> None:
    scratch = ("--scratch", str(tmp_path / "scratch"))
    first = start(root, RUN, *scratch)
    assert first.codes == [0], first.outputs
    assert losses(bucket) == losses(whole("none", 1))
    assert_same_state(bucket, whole("none", 1))
    assert [name for name in files(bucket) if not name.startswith("checkpoints/")] == [
        "config.json",
        "metrics.jsonl",
    ]
    assert checkpoint_steps(bucket) == checkpoint_steps(whole("none", 1))
    assert files(tmp_path / "scratch") == []

    refused = start(root, RUN, *scratch, "--resume", "no")
    assert refused.codes == [2]
    assert refused.outputs[0].splitlines()[-1].startswith(f"error: --resume no: --out {RUN} has checkpoints")

    assert "run.claim" not in files(bucket)
    before = files(tmp_path / "scratch")  # of the refused run
    one = ("--optim.steps", "1", "--optim.warmup", "0")
    initial = start(root, tmp_path / "next", "--init", RUN, *scratch, *one)
    assert initial.codes == [0], initial.outputs

    for source, flags in ((RUN, scratch), (bucket, ())):
        target = tmp_path / f"{len(flags)}.safetensors"
        command = [sys.executable, "-m", "sa1b", "convert", source, "--out", target, *flags, "--json"]
        done = processes.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == str(newest(bucket))
    assert (tmp_path / "2.safetensors").read_bytes() == (tmp_path / "0.safetensors").read_bytes()
    assert files(tmp_path / "scratch") == before


def test_a_killed_run_of_two_machines_continues_on_two_others(
    root: Path, whole: Whole, bucket: Path, tmp_path: Path
) -> None:
    def machines(*names: str) -> list[tuple[str, str]]:
        return [("--scratch", str(tmp_path / "scratch" / name)) for name in names]

    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction"}
    mishap = {"what": "kill", "rank": 0, "step": 3, "moment": "agreed", "once": str(tmp_path / "once")}
    kill = Mishap(mishap)
    often = ("--checkpoint.every", "1")
    killed = start(root, RUN, *often, of_rank=machines("a", "b"), mishap=kill, **given)
    assert killed.codes[0] == -9
    assert checkpoint_steps(bucket)[-1] in (2, 3)
    assert "run.claim" in files(bucket)
    again = start(root, RUN, of_rank=machines("c", "d"), **given)
    assert again.codes == [0, 0], again.outputs
    assert len(starts(bucket)) == 2
    assert losses(bucket) == losses(whole("ddp", 2, "reconstruction"))
    assert_same_state(bucket, whole("ddp", 2, "reconstruction"))
    assert "run.claim" not in files(bucket)
    assert not [path for name in "cd" for path in files(tmp_path / "scratch" / name)]


def test_a_store_that_is_full_is_named_and_the_same_command_continues(
    root: Path, whole: Whole, bucket: Path, tmp_path: Path
) -> None:
    full = bucket.parent.with_suffix(".full")
    flags = ("--scratch", str(tmp_path / "scratch"), "--checkpoint.tolerate", "0")
    mishap = {"what": "command", "step": 3, "command": ["touch", str(full)]}
    ended = start(root, RUN, *flags, mishap=mishap, model="reconstruction")
    assert ended.codes == [1], ended.outputs
    last = ended.outputs[0].splitlines()[-1]
    assert "QuotaExceeded" in last
    assert "the store is full: free space in it, or raise its quota" in last
    assert "Traceback" not in ended.outputs[0]
    full.unlink()
    again = start(root, RUN, *flags, model="reconstruction")
    assert again.codes == [0], again.outputs
    assert losses(bucket) == losses(whole("none", 1, "reconstruction"))
    assert_same_state(bucket, whole("none", 1, "reconstruction"))


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW[mode != "grad_op"]) for mode in MODES])
@pytest.mark.parametrize("place", ["upload", *(pytest.param(one, marks=SLOW[1]) for one in PLACES)])
def test_a_rank_that_raises_while_a_checkpoint_is_written_to_a_url(
    root: Path, whole: Whole, bucket: Path, tmp_path: Path, mode: str, place: str
) -> None:
    kind, own, of_ranks = MODES[mode]
    ranks = min(of_ranks)
    flags = ("--scratch", str(tmp_path / "scratch"), "--data.micro-batch", "1", *own, *of_ranks[ranks])
    mishap = Mishap({"what": "raise", "at": place, "rank": ranks - 1, "error": "KeyError"})
    model = "reconstruction"
    ended = start(root, RUN, *flags, *WAITS, ranks=ranks, mode=kind, mishap=mishap, model=model)
    assert ended.codes == [1] * ranks, ended.outputs
    where = "error" if ranks == 1 else f"error on rank {ranks - 1}"
    reason = (
        "KeyError: 'no more'" if place == "writing thread" else f"{RUN}/checkpoints/step-00000004: KeyError"
    )
    assert ended.outputs[-1].count(f"{where}: {reason}") == 1, ended.outputs
    assert ended.outputs[-1].count("Traceback") == (place == "writing thread")
    if place == "writing thread" and ranks > 1:  # of the other places all ranks know the error
        assert ended.outputs[0].count("ends because another rank ended or does not answer") == 1
        assert "no more" not in ended.outputs[0]
    again = start(root, RUN, *flags, ranks=ranks, mode=kind, model=model)
    assert again.codes == [0] * ranks, again.outputs
    assert losses(bucket) == pytest.approx(losses(whole("none", 1, model)), rel=1e-4)
    assert "run.claim" not in files(bucket)
    assert files(tmp_path / "scratch") == []


def test_a_url_that_cannot_be_written_is_refused_before_training(
    root: Path, bucket: Path, tmp_path: Path
) -> None:
    ended = start(root, "s3://denied/run", "--scratch", str(tmp_path / "scratch"))
    assert ended.codes == [2]
    last = ended.outputs[0].splitlines()[-1]
    assert last.startswith("error: --out s3://denied/run: cannot be written: ")
    assert "Writing needs permission to get, put, list and delete objects below s3://denied/run" in last


def test_a_scratch_folder_without_space_for_a_checkpoint_is_named_before_training(
    root: Path, bucket: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        (disk / "filler").write_bytes(bytes(int(0.97 * shutil.disk_usage(disk).free)))
        ended = start(root, RUN, "--scratch", str(disk / "scratch"))
        assert ended.codes == [1], ended.outputs
        last = ended.outputs[0].splitlines()[-1]
        assert "for a checkpoint; pass a folder on a larger disk with --scratch" in last
    assert files(bucket) == []
