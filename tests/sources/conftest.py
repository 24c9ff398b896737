"""Fixtures of the tests of sources."""

import pytest

from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import StoredStream


@pytest.fixture
def read(tmp_path):
    """Bytes of an archive file -> all items of the reader."""

    def read(data):
        path = tmp_path / "source.tar"
        path.write_bytes(data)
        stream = StoredStream(path)
        try:
            return list(members(stream))
        finally:
            stream.close()

    return read
