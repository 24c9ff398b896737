"""Checkpoints in a bucket: commit, failures, kills at every request, exclusive runs, files of the run.

The bucket is a folder with the interface of an object store (fsspec's `local://`). tests/train/test_bucket.py has
the training command with a server; test_bucket_ceph.py an outage of a real store.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sa1b.engine.checkpoint import bucket as remote_run
from sa1b.engine.checkpoint import folder as folders
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import RetrievalError
from sa1b.engine.config import Config
from sa1b.engine.settings import CheckpointConfig, ParallelConfig
from sa1b.engine.weights import find_weights, nearest_checkpoint
from sa1b.errors import CheckpointError, UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sam.published import read_tensors
from sa1b.storage import claim
from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.objects import Objects
from sa1b.storage.retry import RetryPolicy
from tests.engine import checkpoint_ranks
from tests.engine.checkpoint_ranks import equal
from tests.engine.launch import launch
from tests.engine.small_run import SmallRun
from tests.engine.test_checkpoint import files_of_at_most

ONE_ATTEMPT = RetryPolicy(deadline=0.0)
AT_ONCE = RetryPolicy(initial_backoff=0.0, max_backoff=0.0)


def store_in(folder: Path, policy: RetryPolicy | None = None) -> BucketStore:
    return BucketStore(
        f"local://{folder}/bucket/run",
        scratch=folder / "scratch",
        options={"auto_mkdir": True},
        retry_policy=policy,
    )


def open_run(folder: Path, machine: str = "a", policy: RetryPolicy | None = None) -> RemoteRun:
    return RemoteRun(store_in(folder, policy), folder / machine)


def write_run(
    folder: Path, steps: tuple[int, ...], policy: RetryPolicy | None = None, **options: Any
) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(open_run(folder, policy=policy), CheckpointConfig(**options))
    for step in steps:
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})
    checkpoints.close()


def resume(folder: Path, machine: str = "b", policy: RetryPolicy | None = None) -> tuple[Any, set[float]]:
    """State and numbers of a run that resumes on another machine, which has no files before and after."""
    small = SmallRun()
    small.become(-1)
    checkpoints = Checkpoints(open_run(folder, machine, policy), CheckpointConfig())
    try:
        return checkpoints.resume(small.model, small.optimizer), small.steps()
    finally:
        checkpoints.close()
        assert not (folder / machine).exists()


def objects(folder: Path) -> list[str]:
    root = folder / "bucket" / "run"
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def complete(*steps: int) -> list[str]:
    names = (".metadata", "__0_0.distcp", "manifest.sha256", "state.json")
    return [f"checkpoints/step-{step:08d}/{name}" for step in steps for name in names]


def object_of(folder: Path, step: int, name: str) -> Path:
    return folder / "bucket" / "run" / "checkpoints" / f"step-{step:08d}" / name


def test_the_newest_are_kept_and_come_back_on_another_machine(tmp_path: Path) -> None:
    write_run(tmp_path, (1, 2, 3, 4), keep_last=2, keep_every=2)
    assert objects(tmp_path) == complete(2, 3, 4)
    assert not (tmp_path / "a").exists()
    assert resume(tmp_path) == ({"steps": 4}, {4.0})
    assert objects(tmp_path) == complete(2, 3, 4)
    assert list((tmp_path / "scratch").rglob("*")) == []


def test_the_objects_are_those_of_a_run_in_a_folder(tmp_path: Path) -> None:
    write_run(tmp_path, (1, 2))
    copy = shutil.copytree(tmp_path / "bucket" / "run", tmp_path / "copy")
    where, weights = find_weights(copy, read_tensors)
    assert where == str(copy / "checkpoints" / "step-00000002")
    assert set(weights["weight"].flatten().tolist()) == {2.0}
    for source in (str(copy), f"local://{tmp_path}/bucket/run"):
        for step, nearest in ((0, 1), (1, 1), (9, 2)):
            found = nearest_checkpoint(source, step)
            assert found == (f"{source}/checkpoints/step-{nearest:08}", nearest)
        assert nearest_checkpoint(found[0], 0) == found
    assert nearest_checkpoint("weights.pth", 3) == ("weights.pth", None)


def test_an_incomplete_checkpoint_is_never_used_and_is_removed_at_the_start(tmp_path: Path) -> None:
    write_run(tmp_path, (1, 2))
    object_of(tmp_path, 2, "manifest.sha256").unlink()
    object_of(tmp_path, 3, "__0_0.distcp").parent.mkdir()
    object_of(tmp_path, 3, "__0_0.distcp").write_bytes(b"part")
    (tmp_path / "bucket" / "run" / "checkpoints" / "notes.txt").write_text("mine")
    assert resume(tmp_path) == ({"steps": 1}, {1.0})
    assert objects(tmp_path) == sorted([*complete(1), "checkpoints/notes.txt"])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json", "manifest.sha256"])
@pytest.mark.parametrize("way", ["changed", "shortened", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_is_used(
    name: str, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path, (1, 2))
    path = object_of(tmp_path, 2, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if way == "missing":
        path.unlink()
    else:
        path.write_bytes(data if way == "changed" else data[:-1])
    assert resume(tmp_path, policy=AT_ONCE) == ({"steps": 1}, {1.0})
    if (name, way) != ("manifest.sha256", "missing"):  # then the checkpoint is incomplete
        assert f"local://{path}" in caplog.text
    write_run(tmp_path, (2,), AT_ONCE)  # the step is reached again
    assert resume(tmp_path) == ({"steps": 2}, {2.0})


def test_if_the_store_cannot_be_reached_no_older_checkpoint_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, (1, 2))
    small = SmallRun()
    run = open_run(tmp_path, "b", ONE_ATTEMPT)
    checkpoints = Checkpoints(run, CheckpointConfig())
    with monkeypatch.context() as outage:
        outage.setattr(remote_run, "fetch", Mock(side_effect=UnavailableError("no route", url="x")))
        with pytest.raises(
            RetrievalError, match="step-00000002: cannot be copied .*no route.*start the same"
        ):
            checkpoints.resume(small.model, small.optimizer)
    assert checkpoints.resume(small.model, small.optimizer) == {"steps": 2}
    checkpoints.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_outage_during_a_save_is_waited_for(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = interrupt(monkeypatch, 30)
    write_run(tmp_path, (1, 2), AT_ONCE, asynchronous=asynchronous)
    assert len(failures) == 30
    assert "failed" not in caplog.text
    assert objects(tmp_path) == complete(1, 2)
    assert resume(tmp_path) == ({"steps": 2}, {2.0})


def interrupt(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """From the first file of a checkpoint on, so many requests that write fail."""
    failures: list[str] = []
    started: list[str] = []
    for name in ("put", "put_file", "delete"):
        request = getattr(Objects, name)

        async def fail(
            self: Objects, system: Any, url: str, *arguments: Any, request: Any = request, **more: Any
        ) -> Any:
            if "checkpoints" in url:
                started.append(url)
            if started and len(failures) < times:
                failures.append(url)
                raise ConnectionError("no route")
            return await request(self, system, url, *arguments, **more)

        monkeypatch.setattr(Objects, name, fail)
    return failures


def test_a_failed_save_is_tolerated_and_what_it_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path, (1,))
    small = SmallRun()
    checkpoints = Checkpoints(
        open_run(tmp_path, policy=ONE_ATTEMPT), CheckpointConfig(asynchronous=False, tolerate=1)
    )
    put = Objects.put

    async def fail(self: Objects, system: Any, url: str, *arguments: Any, **more: Any) -> Any:
        if url.endswith("manifest.sha256"):
            raise ConnectionError("no route")
        return await put(self, system, url, *arguments, **more)

    with monkeypatch.context() as outage:
        outage.setattr(Objects, "put", fail)
        checkpoints.save(2, small.model, small.optimizer, {})
        assert f"checkpoint failed: local://{tmp_path}/bucket/run/checkpoints/step-00000002: " in caplog.text
        assert "no route" in caplog.text
        assert object_of(tmp_path, 2, "__0_0.distcp").exists()
        checkpoints.save(3, small.model, small.optimizer, {})
        assert not object_of(tmp_path, 2, "__0_0.distcp").exists()
        with pytest.raises(CheckpointError, match=r"2 failed in a row; free space in .* or make local://"):
            checkpoints.save(4, small.model, small.optimizer, {})
    checkpoints._failures.clear()
    small.become(4)
    checkpoints.save(4, small.model, small.optimizer, {})
    checkpoints.close()
    assert objects(tmp_path) == complete(1, 4)
    assert resume(tmp_path)[1] == {4.0}


def test_a_full_local_disk_is_tolerated_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(open_run(tmp_path), CheckpointConfig(asynchronous=False))
    with files_of_at_most(2048):
        checkpoints.save(1, small.model, small.optimizer, {})
    assert f"local://{tmp_path}/bucket/run/checkpoints/step-00000001: File too large" in caplog.text
    assert not list((tmp_path / "a" / "checkpoints").iterdir())
    small.become(2)
    checkpoints.save(2, small.model, small.optimizer, {"steps": 2})
    checkpoints.close()
    assert objects(tmp_path) == complete(2)
    assert resume(tmp_path) == ({"steps": 2}, {2.0})


def test_a_local_folder_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a"):
        open_run(tmp_path)
    assert objects(tmp_path) == []  # the claim is free again


def test_a_second_run_is_refused_with_the_process_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_PATIENCE", 0.1)
    monkeypatch.setattr(folders, "_POLL", 0.05)
    first = Checkpoints(open_run(tmp_path), CheckpointConfig())
    with pytest.raises(CheckpointError) as error:
        open_run(tmp_path, "b")
    host = os.uname().nodename
    assert (
        f"--out local://{tmp_path}/bucket/run: in use by another run, process {host}:{os.getpid()}; pass"
        in str(error.value)
    )
    first.close()
    open_run(tmp_path, "b").close()


def test_a_run_on_another_machine_is_taken_over_when_it_has_sent_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_PATIENCE", 0.1)
    monkeypatch.setattr(folders, "_POLL", 0.05)
    run = open_run(tmp_path)
    path = tmp_path / "bucket" / "run" / "run.claim"
    foreign = path.read_text().replace(claim.this_machine(), "0123456789ab").replace("120.0", "1.5")
    run.close()
    path.write_text(foreign)  # its age is 0: it may be alive, and sends no heartbeat
    open_run(tmp_path, "b").close()
    assert not path.exists()


def test_a_run_that_lost_its_claim_commits_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(open_run(tmp_path), CheckpointConfig(asynchronous=False))
    path = tmp_path / "bucket" / "run" / "run.claim"
    token = path.read_text()
    path.write_text(token.replace('"token": "', '"token": "f'))
    checkpoints.save(1, small.model, small.optimizer, {})
    assert "has taken over this --out" in caplog.text
    assert "manifest.sha256" not in str(objects(tmp_path))
    with pytest.raises(CheckpointError, match="taken over"):
        checkpoints.close()


def test_an_object_that_no_run_wrote_is_not_replaced(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket" / "run"
    bucket.mkdir(parents=True)
    (bucket / "config.json").write_text("{}")
    for _ in range(2):  # the URL is free again
        with pytest.raises(UsageError, match=r"config\.json in it is not of a run of this program"):
            open_run(tmp_path)
    assert [path.name for path in bucket.iterdir()] == ["config.json"]


def test_the_files_of_the_run_continue_on_another_machine(tmp_path: Path) -> None:
    small = SmallRun()
    run = open_run(tmp_path)
    (run.folder / "tensorboard").mkdir()
    (run.folder / "tensorboard" / "events").write_text("curves")
    (run.folder / "not-finite.jsonl").write_text("1\n")
    checkpoints = Checkpoints(run, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, small.model, small.optimizer, {})
    bucket = tmp_path / "bucket" / "run"
    assert (bucket / "not-finite.jsonl").read_text() == "1\n"
    assert (bucket / "tensorboard" / "events").read_text() == "curves"
    with (run.folder / "not-finite.jsonl").open("a") as file:
        file.write("2\n")
    checkpoints.close()  # uploads what was added
    assert (bucket / "not-finite.jsonl").read_text() == "1\n2\n"

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "damaged.jsonl").write_text("of an earlier run\n")
    (tmp_path / "b" / "stacks-0.txt").write_text("of a run that was killed\n")
    run = open_run(tmp_path, "b")
    assert (run.folder / "not-finite.jsonl").read_text() == "1\n2\n"
    assert (run.folder / "damaged.jsonl").read_text() == "of an earlier run\n"  # which could not upload it
    assert (bucket / "damaged.jsonl").read_text() == "of an earlier run\n"
    run.close()
    assert (bucket / "stacks-0.txt").read_text() == "of a run that was killed\n"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("https://example.com/run", "https can only be read"),
        ("hf://datasets/a/b/run", "hf can only be read"),
        ("s3:/bucket/run", "did you mean s3://bucket/run"),
        ("s3://bucket/shards/run", "is a dataset directory or inside one"),
    ],
)
def test_urls_that_cannot_be_those_of_a_run_are_refused(out: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--out {out}: .*{message}"):
        config(out=out).check()
    config(scratch=Path("x"), init="s3://bucket/other").check()


def test_scratch_is_for_urls(tmp_path: Path) -> None:
    found = config(out=str(tmp_path / "run"), scratch=tmp_path)
    found.check()
    assert found.folder == tmp_path / "run"  # which needs none
    assert config(out="s3://bucket/run", scratch=tmp_path).folder.parent == tmp_path


def config(**more: Any) -> Config:
    preset = PRESETS["tiny"]
    return replace(preset, data=replace(preset.data, root="s3://bucket/shards"), **more)


def test_a_dataset_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bucket" / "run" / "dataset.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UsageError, match="run: is a dataset directory"):
        open_run(tmp_path)


def test_ranks_on_two_machines_save_and_three_of_one_machine_resume(tmp_path: Path) -> None:
    """Two ranks of FSDP without a common folder, then three of DDP with one."""
    fsdp, ddp = ParallelConfig(mode="fsdp", device="cpu"), ParallelConfig(mode="ddp", device="cpu")
    saved = launch(checkpoint_ranks.save_at_url, 2, tmp_path, fsdp)
    logs = [name for name in objects(tmp_path) if name.endswith(".jsonl")]
    assert logs == ["damaged-1.jsonl", "damaged.jsonl"]
    assert "checkpoints/step-00000001/__1_0.distcp" in objects(tmp_path)
    for (state, tensors), files in launch(checkpoint_ranks.resume_at_url, 3, tmp_path, ddp):
        assert state == {"position": 10}
        assert equal(tensors, saved[0])
        assert files == ["damaged.jsonl"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("uploads", [0, 1])
@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("operation", ["copyfile", "commit_file"])
def test_nothing_is_lost_wherever_the_last_uploads_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, completes: bool, uploads: int
) -> None:
    """Two uploads fail, the run writes between them, and the command is started again as the message says."""
    owner = {"copyfile": shutil}.get(operation, BucketStore)
    work, calls = getattr(owner, operation), 0
    for failing in (1, 2, 3):  # the number of the call that fails
        folder = tmp_path / str(failing)
        run = open_run(folder, policy=ONE_ATTEMPT)
        (run.folder / "damaged.jsonl").write_text("damaged\n")
        (run.folder / "not-finite.jsonl").write_text("0\n")
        for _ in range(uploads):
            run.upload()
            with (run.folder / "not-finite.jsonl").open("a") as file:
                file.write("1\n")
        calls = 0

        def fail(*arguments: Any, failing: int = failing) -> Any:
            nonlocal calls
            calls += 1
            if calls < failing:
                return work(*arguments)
            if completes:
                work(*arguments)
            raise OSError(5, "no upload")

        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, fail)
            with contextlib.suppress(OSError, StorageError):
                run.upload()
            with (run.folder / "not-finite.jsonl").open("a") as file:
                file.write("last\n")
            with contextlib.suppress(CheckpointError):
                run.close()
        run.release()
        again = open_run(folder)
        expected = "0\n" + "1\n" * uploads + "last\n"
        for place in (folder / "bucket" / "run", again.folder):
            assert (place / "not-finite.jsonl").read_text() == expected
            assert (place / "damaged.jsonl").read_text() == "damaged\n"
        again.close()


def test_lines_of_steps_that_another_machine_has_repeated_are_replaced_by_its_lines(tmp_path: Path) -> None:
    one = open_run(tmp_path, "a")
    (one.folder / "not-finite.jsonl").write_text("1\n")
    one.upload()
    (one.folder / "not-finite.jsonl").write_text("1\nnever sent\n")
    one.release()  # killed
    other = open_run(tmp_path, "b")
    with (other.folder / "not-finite.jsonl").open("a") as file:
        file.write("2\n")
    other.close()
    one = open_run(tmp_path, "a")
    assert (one.folder / "not-finite.jsonl").read_text() == "1\n2\n"
    one.close()
    assert (tmp_path / "bucket" / "run" / "not-finite.jsonl").read_text() == "1\n2\n"
