"""Dataset directories to copy: small ones, with views and quarantine, and buckets in memory."""

import secrets
import shutil

import fsspec
import numpy as np
import pytest

from sa1b.shards.dataset import Dataset
from sa1b.storage.bucket import BucketStore
from sa1b.storage.store import FolderStore
from sa1b.views.view import write_view
from tests.shards.tiny_source import ROOTS, add_layer, make_root, two_sources


@pytest.fixture(scope="package")
def sources(tmp_path_factory):
    return two_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="package")
def made(sources, tmp_path_factory):
    """A dataset directory with two sources, five shards, a quarantine, two views and a layer."""
    root = make_root(tmp_path_factory.mktemp("copied") / "root", sources, ROOTS["plain"])
    table = Dataset(root).table
    write_view(root, table, np.arange(1, len(table), dtype=np.uint32), name="most")
    write_view(root, table, np.flatnonzero(table.shard == 2)[:2].astype(np.uint32), name="two")
    add_layer(root)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "root")


@pytest.fixture
def bucket(tmp_path):
    """A function that makes an empty bucket in memory."""
    names = []

    def make():
        names.append(secrets.token_hex(4))
        return BucketStore(f"memory://{names[-1]}/shards", scratch=tmp_path / "scratch")

    yield make
    memory = fsspec.filesystem("memory")
    for name in names:
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)


@pytest.fixture(params=["folder", "bucket"])
def target(request, bucket, tmp_path):
    return FolderStore(tmp_path / "copy") if request.param == "folder" else bucket()
