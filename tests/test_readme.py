"""The README names every column of the index and every tool."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import read_tasks
from tests.shards import tiny

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root named `shards`, made from one source named as in the README."""
    path = tmp_path_factory.mktemp("readme")
    tiny.make_tar(path / "sa_000020.tar", range(223750, 223762))
    tiny.ingest_tar(path / "sa_000020.tar", path / "shards")
    write_dataset(path / "shards", read_tasks(path / "shards"))
    return path


def test_every_index_column_is_documented(folder: Path) -> None:
    columns = set(pq.read_schema(next((folder / "shards").glob("*.parquet"))).names)
    table = README[README.index("| index column") :].split("\n\n")[0]
    documented = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert documented == columns


def test_every_tool_is_named() -> None:
    tools = {path.name for path in (Path(__file__).parents[1] / "tools").glob("*.py")} - {
        "__init__.py",
        "demo.py",
    }
    assert {tool for tool in tools if f"`{tool}" not in README} == set()
