"""Uninterrupted runs, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import make_root, train_to_end


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder of an uninterrupted run in a mode on so many ranks."""
    made: dict[tuple[str, int], Path] = {}

    def run(mode: str, ranks: int) -> Path:
        if (mode, ranks) not in made:
            out = tmp_path_factory.mktemp("whole") / "run"
            made[mode, ranks] = train_to_end(root, out, ranks=ranks, mode=mode)
        return made[mode, ranks]

    return run
