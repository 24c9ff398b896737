"""Uninterrupted runs, made once for all processes of a test run."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import IMAGES, add_views, make_root, train_to_end

Shared = Callable[[str, Callable[[Path], object]], Path]
Whole = Callable[..., Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """A function that returns a folder by its name, which the first process that asks for it has filled."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the processes have a folder each below it

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder = base / f"train-{name}"
        with (base / f"train-{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:  # the position was set before the lock was acquired
                shutil.rmtree(folder, ignore_errors=True)  # what a failure has left
                folder.mkdir()
                make(folder)
                lock.write("complete")
        return folder

    return folder_of


@pytest.fixture(scope="session")
def parted(shared: Shared) -> Path:
    """A root with the views "train" and "held-out", which share no image."""
    return shared("parted", lambda folder: add_views(make_root(folder, IMAGES))) / "root"


@pytest.fixture(scope="session")
def root(shared: Shared) -> Path:
    return shared("root", lambda folder: make_root(folder, IMAGES)) / "root"


@pytest.fixture(scope="session")
def whole(root: Path, shared: Shared) -> Whole:
    """The folder of an uninterrupted run in a mode on so many ranks."""

    def run(mode: str, ranks: int, model: str = "sam", *flags: str) -> Path:
        def make(folder: Path) -> None:
            train_to_end(root, folder / "run", *flags, ranks=ranks, mode=mode, model=model)

        return shared("-".join((mode, str(ranks), model, *flags)), make) / "run"

    return run
