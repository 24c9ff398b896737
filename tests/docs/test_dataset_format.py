"""docs/dataset-format.md is complete: a reader written from it alone reads the files of `sa1b`."""

import json
import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import sa1b
from sa1b.shards.annotation import Annotations
from sa1b.shards.documents import check_dataset, check_task
from tests.docs import second_reader
from tests.shards import tiny_source

PAGE = (Path(__file__).parents[2] / "docs" / "dataset-format.md").read_text()


@pytest.fixture(scope="module", params=tiny_source.ROOTS)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    options = tiny_source.ROOTS[request.param]
    return tiny_source.make_root(folder / "shards", tiny_source.two_sources(folder), options)


def test_the_reader_imports_nothing_of_the_package() -> None:
    assert not re.search(r"^(from|import) (sa1b|tests)", Path(second_reader.__file__).read_text(), re.M)


def test_every_image_is_the_same_as_with_the_package(root: Path) -> None:
    dataset = sa1b.open(root)
    images = list(second_reader.read_directory(root))
    assert len(images) == len(dataset) > 0
    for image, sample in zip(images, dataset, strict=True):
        annotations = sample.annotations
        assert (image.image_id, image.jpeg) == (sample.image_id, sample.jpeg)
        for name, column in image.columns.items():
            if name != "json":
                own = getattr(annotations, name)
                assert np.array_equal(column.astype(own.dtype), own, equal_nan=own.dtype.kind == "f"), name
        assert (image.columns["json"].tobytes() if "json" in image.columns else None) == annotations.text
        pixels = image.masks
        assert [int(mask.sum()) for mask in pixels] == [int(runs[1::2].sum()) for runs in sample.runs]
        runs = [np.asarray(second_reader.runs_of(string)) for string in _strings(annotations)]
        assert all(np.array_equal(one, other) for one, other in zip(runs, sample.runs, strict=True))
        assert json.dumps(image.document) == json.dumps(
            annotations.to_json()
        )  # compares types and key order too


def _strings(annotations: Annotations) -> list[bytes]:
    ends = np.cumsum(annotations.rle_bytes, dtype=np.int64)
    return [part.tobytes() for part in np.split(annotations.rle, ends[:-1])] if len(ends) else []


def test_every_shard_and_index_is_as_described(root: Path) -> None:
    manifest = json.loads((root / "dataset.json").read_text())
    keep_json, with_runs = (manifest["options"][name] for name in ("keep_json", "index_runs"))
    endings = ["jpg", "masks", "json"] if keep_json else ["jpg", "masks"]
    if manifest["options"].get("annotations_only"):
        endings = ["masks"]
    for shard in manifest["shards"]:
        names, rows = second_reader.read_shard(root, shard["name"])
        assert names == [f"sa_{row['image_id']}.{ending}" for row in rows for ending in endings]
        assert shard["images"] == len(rows)
        assert shard["masks"] == sum(len(row["area"]) for row in rows)
        assert all(("runs" in row) == with_runs for row in rows)
        data = (root / shard["name"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), sha256(data).hexdigest())
        assert len(data) % 10_240 == 0


def test_the_digests_of_sources_and_rows_are_as_described(root: Path) -> None:
    manifest = json.loads((root / "dataset.json").read_text())
    for name, digest in manifest["sources"].items():
        text = (root / "tasks" / f"{name}.json").read_text()
        task = json.loads(text)
        assert text == json.dumps(task, indent=1) + "\n"
        del task["format"], task["source"]["mtime_ns"], task["source"]["md5"]
        assert sha256((json.dumps(task, indent=1) + "\n").encode()).hexdigest() == digest
        rows = (root / "tasks" / f"{name}.samples").read_bytes()
        assert task["samples"] == {"bytes": len(rows), "sha256": sha256(rows).hexdigest()}


def _documented(heading: str) -> set[str]:
    """Names in the first column of the tables below a heading."""
    section = re.split(r"^##+ ", PAGE.split(f"## {heading}\n")[1], flags=re.M)[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`\.?([\w.\[\]]+)`", row)}


def test_every_field_that_is_written_is_documented(root: Path) -> None:
    manifest = json.loads((root / "dataset.json").read_text())
    check_dataset(manifest)
    documented = {part.removesuffix("[]") for name in _documented("dataset.json") for part in name.split(".")}
    nested = [manifest["options"], manifest["samples"], manifest["shards"][0]]
    assert {*manifest, *(name for part in nested for name in part)} <= documented
    task = json.loads((root / "tasks" / "sa_000001.json").read_text())
    check_task(task, "sa_000001")
    documented = {part for name in _documented("Task files") for part in name.split(".")}
    assert {*task, *task["source"], *task["counts"]} <= documented
    index = pq.read_schema(next(root.glob("*.parquet"))).names
    assert {*index, "runs"} == _documented("Index")
    for image in second_reader.read_directory(root):
        assert set(image.columns) <= _documented("Mask record")
