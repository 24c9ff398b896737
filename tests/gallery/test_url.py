"""The gallery of a dataset directory in a bucket: that of the folder."""

import re
import secrets

import fsspec
import pytest

from sa1b.errors import ManifestError, ShardError
from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    return make_root(folder / "shards", two_sources(folder), ROOTS["plain"])


@pytest.fixture
def memory():
    return fsspec.filesystem("memory")


@pytest.fixture
def url(root, tmp_path, monkeypatch, memory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = secrets.token_hex(4)
    memory.put(str(root), f"/{name}/shards", recursive=True)
    yield f"memory://{name}/shards"
    memory.rm(f"/{name}", recursive=True)


def page(source, out, **options):
    write_gallery(source, out, Choice(count=5), quiet=True, **options)
    return re.sub(r"sa1b gallery [0-9a-f]{16}", "", out.read_text())  # the mark of its input


@pytest.mark.parametrize("warnings", [False, True])
def test_the_page_is_that_of_the_folder(root, url, tmp_path, warnings):
    here = page(root, tmp_path / "here.html", warnings=warnings)
    assert page(url, tmp_path / "there.html", warnings=warnings) == here
    page(url, tmp_path / "there.html", warnings=warnings)  # a page of the same URL is replaced


def test_a_missing_index_and_a_missing_dataset_are_named(url, tmp_path, memory):
    memory.rm_file(f"{url.removeprefix('memory:/')}/sa1b-000001-0001.parquet")
    with pytest.raises(ShardError, match=f"{url}/sa1b-000001-0001.parquet: missing"):
        page(url, tmp_path / "page.html")
    with pytest.raises(ManifestError, match=f"{url}/none: no dataset"):
        page(f"{url}/none", tmp_path / "page.html")
