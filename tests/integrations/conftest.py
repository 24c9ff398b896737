"""A dataset directory of small images with a view `masks` of those that have a mask, and exports of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sa1b.programs.export.export import export
from sa1b.programs.export.export_format import Format
from sa1b.views.selection import Selection, select
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    made: Path = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    select(made, Selection(images_where="masks >= 1"), name="masks", quiet=True)
    chosen = Selection(masks_where="area_fraction > 0.02", images_where="masks >= 1")
    select(made, chosen, name="large", quiet=True)
    return made


@pytest.fixture(scope="session")
def exported(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], Path]:
    made: dict[str, Path] = {}

    def write(form: Format) -> Path:
        if form.kind not in made:
            made[form.kind] = tmp_path_factory.mktemp("exported") / form.kind
            export(root, made[form.kind], form, quiet=True)
        return made[form.kind]

    return write
