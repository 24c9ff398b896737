"""One run of CI draws the same examples as the next; elsewhere every run draws new ones."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from sa1b import workers
from tests import forked_workers

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _workers_of_tests() -> Iterator[None]:
    """Workers of a test's own process start fast: see forked_workers.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_CONTEXT", workers._CONTEXT)
        forked_workers.use_server()
        yield
