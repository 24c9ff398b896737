"""What the README shows works as shown."""

import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.published import write_weights
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


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_examples_run(folder: Path) -> None:
    reading, with_webdataset, streaming, joining, predicting = blocks("python")
    with_webdataset = (
        with_webdataset.replace("{0000..0010}", "0000")
        + "\nassert len([s['masks'].bbox for s in dataset]) == 12"
    )
    captions = {"image_id": list(range(223750, 223760)), "caption": [f"image {i}" for i in range(10)]}
    pq.write_table(pa.table(captions), folder / "captions.parquet")
    joining = f"import sa1b\n{joining}\nassert 'caption' in batch.extra"
    write_weights(folder / "sam.safetensors", Sam(PRESETS["tiny"]).state_dict())
    (folder / "sam.safetensors").rename(folder / "run")
    Image.new("RGB", (640, 480)).save(folder / "photo.jpg")
    for code in (reading, with_webdataset, streaming, joining, predicting):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_query_answers_its_question(folder: Path) -> None:
    (query,) = blocks("sql")
    rows = duckdb.sql(query.replace("shards/", f"{folder}/shards/")).fetchall()
    assert sum(row[1] for row in rows) == 36
    assert all(0.9 < row[2] <= 1 for row in rows)


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
