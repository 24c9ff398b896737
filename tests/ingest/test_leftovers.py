"""What a loss of power or a killed process leaves in a dataset directory is removed by the next run."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.shards.staging import make_staging, remove_leftovers
from sa1b.storage.store import FolderStore
from tests import kit
from tests.directories import bucket
from tests.kit import put, run
from tests.shards.tiny_source import pairs, write_source

LONG_AGO = 6 * 3600  # seconds
OTHER = "0" * 12  # a machine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    sources = [
        write_source(folder / f"sa_00000{number}.tar", pairs(range(100 * number, 100 * number + 4)))
        for number in (1, 9)
    ]
    with kit.fault(folder, 0, kit.nothing) as changes:
        names = list[str]()
        changes.before = lambda _, source: names.append(source)
        sa1b.reshard(sources[0], folder / "root", images_per_shard=2, quiet=True)
    found = {one[1] for name in names if (one := re.search(r"\.(\w+)-\d+-[0-9a-f]{8}\.partial$", name))}
    (folder / "machine").write_text(*found)
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "root", tmp_path / "root")


@pytest.fixture
def live(made: Path) -> str:
    """The name of this process in names of files."""
    return f"{(made / 'machine').read_text()}-{os.getpid()}"


@pytest.fixture
def ended(live: str) -> str:
    """The name of a process of this machine that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return f"{live.partition('-')[0]}-{process.pid}"


def aged(path: Path, seconds: float) -> None:
    for one in [*path.rglob("*"), path]:
        then = time.time() - seconds
        os.utime(one, (then, then), follow_symlinks=False)


def staging_of(process: str, parent: Path, end: str = "0" * 16) -> Path:
    """A staging folder with a shard, as a process of this name makes it."""
    folder = parent / f"staging-{process}-{end}"
    put(folder, "owner", f"This folder was made by sa1b: {folder.name}\n".encode())
    put(folder, "sa_000009/sa1b-000009-0000.tar", b"half")
    return folder


def again(made: Path, root: object, *flags: object) -> None:
    """The command that made the directory."""
    run("reshard", made / "sa_000001.tar", "--images-per-shard", 2, "--out", root, *flags)


@pytest.mark.parametrize("words", ["reshard", "reshard --drop sa_000001", "index", "index --tables"])
def test_temporary_files_of_killed_commands_are_listed_and_removed_by_the_next(
    made: Path, root: Path, words: str, live: str, ended: str
) -> None:
    left = [".dataset.json", "tasks/.sa_000001.json", "views/.mine.json", ".samples"]
    left = [f"{name}.{ended}-01234567.partial" for name in left]
    kept = ["tasks/.mine.partial", f".dataset.json.{live}-01234567.partial"]
    kept += [".notes.partial", "tasks/.mine.txt.old-7.partial"]
    for path in (*left[:-1], f"{left[-1]}/samples", *kept):
        put(root, path, b"half")
    notes = "\n".join(run("verify", root, "--json").json["notes"])
    assert [name for name in left if name not in notes] == []
    again(made, root) if words == "reshard" else run(*words.split(), *["--out"] * ("reshard" in words), root)
    assert [name for name in left if (root / name).exists()] == []
    assert [name for name in kept if not (root / name).exists()] == []


@pytest.mark.parametrize(("age", "stays"), [(60, True), (LONG_AGO, False)])
def test_files_of_another_machine_are_removed_once_nobody_writes_to_them(
    made: Path, root: Path, age: float, stays: bool
) -> None:
    # The number of this process: a machine that was started again gives out old numbers again.
    folder = staging_of(f"{OTHER}-{os.getpid()}", root / ".partial")
    names = [f"{name}.{OTHER}-7-0123abcd.partial" for name in (".dataset.json", "tasks/.sa_1.json")]
    names.append("tasks/sa_1.claim")
    for name in names:
        put(root, name, b"")
        aged(root / name, age)
    aged(folder, age)
    again(made, root)
    assert [path.exists() for path in (folder, *(root / name for name in names))] == [stays] * 4


@pytest.mark.parametrize("owner", [None, b"", b"This folder was m", b"\0" * 20])
def test_a_process_killed_before_its_owner_file_was_whole_leaves_nothing(
    made: Path, root: Path, owner: bytes | None, ended: str
) -> None:
    folder = root / ".partial" / f"staging-{ended}-{'0' * 16}"
    folder.mkdir(parents=True)
    if owner is not None:
        (folder / "owner").write_bytes(owner)
    again(made, root)
    assert not folder.parent.exists()


@pytest.mark.parametrize("age", [0, LONG_AGO])
def test_only_folders_with_a_valid_owner_file_are_removed_from_a_folder_of_the_user(
    made: Path, root: Path, tmp_path: Path, age: float, live: str, ended: str
) -> None:
    scratch = tmp_path / "scratch"
    place = scratch / ".partial"
    own, other = staging_of(ended, place), staging_of(live, place)
    kept = ["thesis/data/results.csv", f"host-{os.getpid()}/results.csv", ".partial/notes/owner"]
    kept += [f"staging-{ended}-{'1' * 16}/owner", f".partial/staging-{ended}-{'2' * 16}/results.csv"]
    kept += [f".partial/staging-{ended}-{'3' * 16}/{name}" for name in ("owner", "results.csv")]
    for name in kept:
        put(scratch, name, ended.encode())
    (scratch / "empty").mkdir()
    (place / own.name.replace("staging", "other")).symlink_to(tmp_path)
    (place / f"staging-{ended}-{'4' * 16}").symlink_to(scratch / "thesis")
    aged(scratch, age)
    again(made, bucket(root, "sa_000001"), "--scratch", scratch)
    assert [name for name in kept if not (scratch / name).is_file()] == []
    assert (scratch / "empty").is_dir()
    assert other.is_dir()
    assert not own.exists()


@pytest.mark.parametrize("host", [OTHER, "../../precious", "/precious", "..", "", "unknown", "this machine"])
def test_what_a_taken_over_process_staged_is_removed_and_nothing_outside(
    made: Path, root: Path, tmp_path: Path, host: str, live: str
) -> None:
    outside = tmp_path / "precious-7"
    outside.mkdir()
    staged, other = staging_of(f"{OTHER}-7", root / ".partial"), staging_of(live, root / ".partial")
    process = live if host == "this machine" else f"{host}-7"
    claim = {"host": "node7", "pid": 7, "process": process, "token": "theirs"}
    put(root, "tasks/sa_000009.claim", json.dumps(claim).encode())
    aged(root / "tasks" / "sa_000009.claim", 600)
    run("reshard", made / "sa_000009.tar", "--images-per-shard", 2, "--out", root)
    assert staged.exists() == (host != OTHER)
    assert outside.exists()
    assert other.exists()


def test_another_command_may_remove_the_folder_of_staging_at_any_moment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.partial` goes away before its clock is read, and again before this process has its folder in it."""
    partial = root / ".partial"
    staging_of(f"{OTHER}-1", partial)
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
    root: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    folder = staging_of(ended, root / ".partial")
    scandir = os.scandir

    def late(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    remove_leftovers(root)
    assert not folder.exists()
