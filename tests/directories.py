"""A dataset directory with every kind of file, made by commands alone; of its copies a test changes files."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import sa1b
from tests.datasets import add_layer, add_view
from tests.shards.tiny_source import pairs, two_sources

SOURCES = {"sa_000001": [*range(100, 109), *range(200, 207)], "sa_000002": [300, 301, 302]}
IDS = [*SOURCES["sa_000001"], *SOURCES["sa_000002"]]


@pytest.fixture
def short_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in messages begin with "sa1b", as where the environment of this Python is activated."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tars: 17 pairs, seven of them odd but readable and one of them undecodable; and three pairs."""
    return two_sources(tmp_path_factory.mktemp("tars"), {250: (b"no jpeg", pairs([250])[250][1])})


@pytest.fixture(scope="session")
def whole(tars: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sources in five shards, with a quarantine, warnings, the view `most` and the layer `round2`."""
    folder = tmp_path_factory.mktemp("whole")
    reshard(folder / "root", *tars)
    add_view(folder / "root", IDS[1:], "most")
    add_layer(folder / "root", folder / "masks", "round2", [100, 300], "--existing", "replace")
    return folder / "root"


def bucket(folder: Path, *sources: str) -> str:
    """The URL of a folder as a bucket: through fsspec, which makes no folders by itself."""
    for name in ("tasks", "views", *(f"quarantine/{source}" for source in sources or SOURCES)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return f"local://{folder}"


def reshard(root: object, *sources: object, **options: object) -> Any:
    """`sa1b.reshard` with five images in a shard, in this process."""
    return sa1b.reshard(sources, root, quiet=True, **{"workers": 1, "images_per_shard": 5, **options})


def images(root: object, **options: Any) -> dict[int, tuple[bytes, object]]:
    """Image id -> JPEG and annotation file of a directory."""
    return {
        sample.image_id: (sample.jpeg, sample.annotations.to_json()) for sample in sa1b.open(root, **options)
    }
