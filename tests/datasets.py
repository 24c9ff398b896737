"""Fixtures of a small dataset directory, as a folder and as a bucket in memory; a conftest imports those it uses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

import sa1b
from tests.kit import run
from tests.shards.tiny_source import annotation, pairs, two_sources


def add_layer(root: object, folder: Path, name: str, ids: list[int], *flags: str) -> None:
    """Add a layer with further masks of these images, by files in `folder`."""
    folder.mkdir()
    for one in ids:
        text = json.dumps(annotation(one, np.random.default_rng(one)))
        (folder / f"sa_{one}.json").write_text(text)
    run("layer", "add", root, folder, "--name", name, *flags)


def add_view(root: object, ids: list[int], name: str, *flags: object) -> None:
    listed = Path(str(root)).with_name(f"{name}.txt")
    listed.write_text("\n".join(map(str, ids)))
    run("view", root, "--ids", listed, "--name", name, *flags)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tars: 16 pairs, seven of which are odd but readable, and one undecodable image; and three pairs."""
    return two_sources(tmp_path_factory.mktemp("sources"), {250: (b"no jpeg", pairs([250])[250][1])})


@pytest.fixture(scope="session")
def dataset(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sources in five shards, with a quarantine, warnings, the views `two` and `most`, and a layer.

    `two` has images of the third shard only, `most` has images of all shards. For tests that only read.
    """
    folder = tmp_path_factory.mktemp("dataset")
    root = folder / "root"
    sa1b.reshard(sources, root, images_per_shard=5, workers=1, quiet=True)
    samples = list(sa1b.open(root))
    ids = sorted(sample.image_id for sample in samples)
    add_view(root, ids[1:], "most")
    add_view(root, [one.image_id for one in samples if "000001-0002" in one.shard][:2], "two")
    add_layer(root, folder / "round2", "round2", ids[:3])
    return root


@pytest.fixture
def root(dataset: Path, tmp_path: Path) -> Path:
    """A copy of `dataset` that the test may change."""
    return shutil.copytree(dataset, tmp_path / "root")


@pytest.fixture
def bucket(dataset: Path) -> Iterator[str]:
    """`dataset` in a bucket in memory, which the test may change."""
    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/given/shards", recursive=True)
    yield "memory://given/shards"
    memory.rm("/given", recursive=True)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a command writes: a folder that is not there yet, and an empty bucket in memory."""
    yield str(tmp_path / "out") if request.param == "folder" else "memory://out/shards"
    memory = fsspec.filesystem("memory")
    if memory.exists("/out"):
        memory.rm("/out", recursive=True)
