"""A dataset directory of small images with a view `masks` of those that have a mask, and exports of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import kit
from tests.integrations import peers
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    made: Path = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    some = ("--images-where", "masks >= 1")
    kit.run("view", made, *some, "--name", "masks")
    kit.run("view", made, *some, "--masks-where", "area_fraction > 0.02", "--name", "large")
    return made


@pytest.fixture(scope="session")
def exported(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write(form: str) -> Path:
        if form not in made:
            made[form] = tmp_path_factory.mktemp("exported") / form
            kit.run("export", root, "--to", form, "--out", made[form])
        return made[form]

    return write


@pytest.fixture
def modules() -> Iterator[None]:
    """What is used of SAM 2's training code, iopath and torch_em: the packages, or what `peers` states."""
    with peers.installed():
        yield
