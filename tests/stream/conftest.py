"""Fixtures of the tests in this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder with a short path: a socket's path has at most 107 bytes, and `tmp_path` alone may be
    longer.
    """
    with tempfile.TemporaryDirectory(prefix="sa1b-") as folder:
        yield Path(folder)
