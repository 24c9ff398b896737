"""Export and gallery of a dataset directory in a bucket equal those of a folder."""

import secrets

import fsspec
import numpy as np
import pytest

from sa1b import Dataset
from tests.export.exporting import export
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return make_root(folder / "shards", two_sources(folder), ROOTS["plain"])


@pytest.fixture
def url(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory, name = fsspec.filesystem("memory"), secrets.token_hex(4)
    memory.put(str(root), f"/{name}/shards", recursive=True)
    yield f"memory://{name}/shards"
    memory.rm(f"/{name}", recursive=True)


def tars(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_the_tars_are_those_of_the_folder(root, url, tmp_path):
    images = Dataset(root).table.image_id[::2].astype(np.uint64)
    for one, name in ((root, "here"), (url, "there")):
        export(one, tmp_path / name, "sa1b", images=images, quiet=True)
    assert len(tars(tmp_path / "here")) == 2
    assert tars(tmp_path / "there") == tars(tmp_path / "here")
    assert len(export(url, tmp_path / "there", "sa1b", images=images, quiet=True).skipped) == 2


def test_the_files_are_those_of_the_folder(root, url, tmp_path):
    for one, name in ((root, "here"), (url, "there")):
        export(one, tmp_path / name, "sam2", quiet=True)
    here, there = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("here", "there")
    )
    assert len(here) == 2 * 19 + 2
    assert there == here
