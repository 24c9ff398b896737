"""What a loss of power or a killed process leaves in a dataset directory is removed by the next run."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sa1b.cli import main
from sa1b.shards.documents import Options
from sa1b.shards.staging import make_staging, remove_leftovers, remove_staging_of, staging_place
from sa1b.storage.atomic import temporary_path, this_machine, this_process
from sa1b.storage.claim import Holder
from sa1b.storage.open import open_store
from sa1b.storage.store import FolderStore
from sa1b.verify.verify import verify
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


def staging_of(process: str, parent: Path) -> Path:
    """A staging folder with a shard, as a process of this name makes it."""
    folder = make_staging(parent)
    other = folder.rename(parent / f"staging-{process}-{folder.name[-16:]}")
    (other / "owner").write_text((other / "owner").read_text().replace(folder.name, other.name))
    (other / "sa_000009").mkdir()
    (other / "sa_000009" / "sa1b-000009-0000.tar").touch()
    return other


def ended() -> str:
    """The name of a process of this machine that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return this_process(process.pid)


@pytest.mark.parametrize(
    "words", ["reshard --finish --out", "reshard --drop sa_000001 --out", "index", "index --tables"]
)
def test_temporary_files_of_killed_commands_are_listed_and_removed_by_the_next(
    root: Path, words: str
) -> None:
    process = ended()
    left = [".dataset.json", "tasks/.sa_000001.json", "views/.mine.json", ".samples"]
    left = [f"{name}.{process}-01234567.partial" for name in left]
    mine, live = root / "tasks/.mine.partial", temporary_path(root / "dataset.json")
    (root / "views").mkdir()
    (root / left[-1]).mkdir()
    for path in (*(root / name for name in left[:-1]), root / left[-1] / "samples", mine, live):
        path.write_bytes(b"half")
    notes = "\n".join(verify(root, quiet=True).notes)
    assert [name for name in left if name not in notes] == []
    with pytest.raises(SystemExit) as ended_with:
        main([*words.split(), str(root)])
    assert ended_with.value.code in (0, None)
    assert [name for name in left if (root / name).exists()] == []
    assert mine.exists()
    assert live.exists()


@pytest.mark.parametrize(("age", "stays"), [(60, True), (LONG_AGO, False)])
def test_staging_of_another_machine_is_removed_once_nobody_writes_to_it(
    root: Path, age: float, stays: bool
) -> None:
    # The number of this process: a machine that was started again gives out old numbers again.
    folder = staging_of(f"{'0' * 12}-{os.getpid()}", root / ".partial")
    aged(folder, age)
    remove_leftovers(root)
    assert folder.exists() == stays


@pytest.mark.parametrize("owner", [None, b"", b"This folder was m", b"\0" * 20])
def test_a_process_killed_before_its_owner_file_was_whole_leaves_nothing(
    root: Path, owner: bytes | None
) -> None:
    folder = root / ".partial" / f"staging-{ended()}-{'0' * 16}"
    folder.mkdir(parents=True)
    if owner is not None:
        (folder / "owner").write_bytes(owner)
    remove_leftovers(root)
    assert not folder.parent.exists()


@pytest.mark.parametrize("age", [0, LONG_AGO])
def test_only_folders_with_a_valid_owner_file_are_removed_from_a_folder_of_the_user(
    root: Path, tmp_path: Path, age: float
) -> None:
    spill = tmp_path / "scratch"
    store, place = open_store(root), staging_place(open_store(root), spill)
    process = ended()
    own, live = staging_of(process, place), make_staging(place)
    kept = ["thesis/data/results.csv", f"host-{os.getpid()}/results.csv", ".sa1b-spill/notes/owner"]
    kept += [f"staging-{process}-{'1' * 16}/owner", f".sa1b-spill/staging-{process}-{'2' * 16}/results.csv"]
    kept += [f".sa1b-spill/staging-{process}-{'3' * 16}/{name}" for name in ("owner", "results.csv")]
    for name in kept:
        (spill / name).parent.mkdir(parents=True, exist_ok=True)
        (spill / name).write_text(process)
    (spill / "empty").mkdir()
    (place / own.name.replace("staging", "other")).symlink_to(tmp_path)
    (place / f"staging-{process}-{'4' * 16}").symlink_to(spill / "thesis")
    (root / ".notes.partial").touch()
    (root / "tasks" / ".mine.txt.old-7.partial").touch()
    aged(spill, age)
    aged(root, age)
    remove_leftovers(store, spill)
    assert [name for name in kept if not (spill / name).is_file()] == []
    assert (spill / "empty").is_dir()
    assert live.is_dir()
    assert not own.exists()
    assert (root / ".notes.partial").exists()
    assert (root / "tasks" / ".mine.txt.old-7.partial").exists()


def test_containers_of_one_host_name_and_number_do_not_share_a_folder(tmp_path: Path) -> None:
    assert make_staging(tmp_path) != make_staging(tmp_path)


def test_another_command_may_remove_the_folder_of_staging_at_any_moment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.partial` goes away before its clock is read, and again before this process has its folder in it."""
    partial = root / ".partial"
    staging_of(f"{'0' * 12}-1", partial)
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
    folder = staging_of(ended(), root / ".partial")
    scandir = os.scandir

    def late(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    remove_leftovers(root)
    assert not folder.exists()


def test_temporary_files_and_claims_of_before_are_removed(root: Path) -> None:
    names = [".dataset.json", "tasks/.sa_1.json"]
    names = [*(f"{name}.{'0' * 12}-7-0123abcd.partial" for name in names), "tasks/sa_1.claim"]
    for name in names:
        (root / name).touch()
        aged(root / name, LONG_AGO)
    own = temporary_path(root / "tasks" / "sa_2.json")
    own.touch()
    remove_leftovers(root)
    assert [name for name in names if (root / name).exists()] == []
    assert own.exists()


@pytest.mark.parametrize(
    "host", ["0" * 12, "../../precious", "/precious", "..", "", "unknown", this_machine()]
)
def test_what_a_taken_over_process_staged_is_removed_and_nothing_outside(tmp_path: Path, host: str) -> None:
    root, outside = tmp_path / "a" / "root", tmp_path / "precious-7"
    outside.mkdir()
    staged, live = (staging_of(process, root / ".partial") for process in (f"{'0' * 12}-7", this_process()))
    remove_staging_of(
        Holder("node7", 7, f"{host}-{os.getpid() if host == this_machine() else 7}", "token", 1000.0), root
    )
    assert staged.exists() == (host != "0" * 12)
    assert outside.exists()
    assert live.exists()
