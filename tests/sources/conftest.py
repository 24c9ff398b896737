"""Fixtures of the tests of sources."""

import json
import shutil

import pytest

import sa1b
from tests.sources.items import item


@pytest.fixture
def read(tmp_path):
    """Bytes of an archive file without a pair -> its members and damage by offset."""

    def read(data):
        folder = tmp_path / "read"
        folder.mkdir()
        (folder / "source.tar").write_bytes(data)
        sa1b.reshard(folder / "source.tar", folder, workers=1, quiet=True)
        quarantine = folder / "quarantine" / "source"
        text = (quarantine / "refused.jsonl").read_text() if quarantine.exists() else ""
        found = [item(line, quarantine) for line in map(json.loads, text.splitlines())]
        shutil.rmtree(folder)
        return sorted(found, key=lambda item: item.offset)

    return read
