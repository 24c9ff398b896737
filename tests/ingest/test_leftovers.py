"""What a loss of power or a killed process leaves in a dataset directory is removed by the next run."""

import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from sa1b.ingest.finish import drop_source, finish
from sa1b.shards.manifest import Options
from sa1b.shards.staging import make_staging, remove_leftovers, remove_staging_of
from sa1b.storage.claim import Holder
from sa1b.storage.store import FolderStore
from tests.shards.tiny_source import make_root, pairs, write_source

LONG_AGO = 6 * 3600  # seconds


@pytest.fixture
def root(tmp_path: Path) -> Path:
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(100, 104)))
    return make_root(tmp_path / "root", [source], Options(images_per_shard=2))


def aged(path: Path, seconds: float) -> None:
    for one in [*path.rglob("*"), path]:
        then = time.time() - seconds
        os.utime(one, (then, then))


@pytest.mark.parametrize("owner", ["before-7", "", "\0" * 20])
@pytest.mark.parametrize(("age", "stays"), [(60, True), (LONG_AGO, False)])
def test_staging_of_before_the_machine_was_started_again_is_removed_once_nobody_writes_to_it(
    root: Path, owner: str, age: float, stays: bool
) -> None:
    # The number of this process: a machine that was started again gives out old numbers again.
    host = socket.gethostname() if owner == "before-7" else "another-host"
    folder = root / ".partial" / f"{host}-{os.getpid()}"
    folder.mkdir(parents=True)
    (folder / "owner").write_text(owner)
    (folder / "sa1b-000009-0000.tar").touch()
    aged(folder, age)
    remove_leftovers(root)
    assert folder.exists() == stays


def test_another_command_may_remove_the_folder_of_staging_at_any_moment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.partial` goes away before its clock is read, and again before this process has its folder in it."""
    partial = root / ".partial"
    (partial / "another-host-1").mkdir(parents=True)
    now, mkdir = FolderStore.now, Path.mkdir

    def now_without(store: FolderStore, folder: str = "") -> float:
        shutil.rmtree(partial, ignore_errors=True)
        return now(store, folder)

    monkeypatch.setattr(FolderStore, "now", now_without)
    remove_leftovers(root)
    assert not partial.exists()
    removed = []

    def mkdir_late(path: Path, *arguments: Any, **options: Any) -> None:
        if path == partial and not removed:
            removed.append(path)  # made here and removed by another command at once
            return
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_late)
    assert make_staging(partial).is_dir()
    assert removed


def test_a_process_may_remove_its_folder_while_another_one_looks_into_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / ".partial" / "another-host-1"
    folder.mkdir(parents=True)
    scandir = os.scandir

    def late(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    remove_leftovers(root)
    assert not folder.exists()


def test_temporary_files_and_claims_of_before_are_removed(root: Path) -> None:
    names = [".dataset.json.before-7-ab.partial", "tasks/.sa_1.json.before-7-ab.partial", "tasks/sa_1.claim"]
    for name in names:
        (root / name).touch()
        aged(root / name, LONG_AGO)
    own = root / "tasks" / f".sa_2.json.{os.getpid()}.partial"
    own.touch()
    remove_leftovers(root)
    assert [name for name in names if (root / name).exists()] == []
    assert own.exists()


def test_a_table_that_dataset_json_does_not_name_is_removed(root: Path) -> None:
    before = sorted(path.name for path in root.iterdir())
    (root / "samples-0123456789abcdef.bin").write_bytes(b"of the dataset before")
    finish(root)
    assert sorted(path.name for path in root.iterdir()) == before


def test_an_index_without_its_shard_goes_with_its_source(root: Path) -> None:
    (root / "sa1b-000001-0007.parquet").write_bytes(b"the shard was removed, its index was not")
    (root / "sa1b-000002-0000.parquet").write_bytes(b"of another source")
    drop_source(root, "sa_000001")
    assert [path.name for path in root.glob("*.parquet")] == ["sa1b-000002-0000.parquet"]


@pytest.mark.parametrize("host", ["node7", "../../precious", "/precious", "..", ""])
def test_what_a_taken_over_process_staged_is_removed_and_nothing_outside(tmp_path: Path, host: str) -> None:
    root, outside = tmp_path / "a" / "root", tmp_path / "precious-7"
    staged = root / ".partial" / "node7-7"
    for folder in (staged, outside):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    remove_staging_of(Holder(host, 7, "another-7", "token", 1000.0), root)
    assert staged.exists() == (host != "node7")
    assert outside.exists()
    assert root.exists()
