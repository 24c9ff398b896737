"""Fixtures of the tests in this folder."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sa1b.stream.loader import _note
from tests.storage.service import Service


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The lines that loaders log in the test, each once: `said.messages`."""
    _note.cache_clear()
    caplog.set_level(logging.INFO, "sa1b")
    return caplog


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder with a short path: a socket's path has at most 107 bytes, and `tmp_path` alone may be
    longer.
    """
    with tempfile.TemporaryDirectory(prefix="sa1b-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def server(bucket: Path) -> Iterator[Service]:
    with Service("range_server", bucket) as service:
        yield service
