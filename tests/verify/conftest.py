"""Small dataset directories: made once for a file of tests, copied for each test that changes them."""

import shutil

import pytest

from tests.directories import short_commands, tars, whole
from tests.shards.tiny_source import ROOTS, make_root, two_sources

__all__ = ["short_commands", "tars", "whole"]


@pytest.fixture(scope="package")
def sources(tmp_path_factory):
    return two_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="package")
def roots(sources, tmp_path_factory):
    """A dataset directory for each of the options that reshard can be asked for."""
    folder = tmp_path_factory.mktemp("roots")
    return {name: make_root(folder / name, sources, options) for name, options in ROOTS.items()}


@pytest.fixture
def root(roots, tmp_path):
    """A copy of the plain one."""
    return shutil.copytree(roots["plain"], tmp_path / "root")


@pytest.fixture(params=ROOTS)
def each_root(request, roots, tmp_path):
    """A copy of each."""
    return shutil.copytree(roots[request.param], tmp_path / "root")
