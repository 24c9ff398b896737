"""Six tiny images, and layers of them that commands make; a test file imports the fixtures that it uses."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import sa1b
from tests.kit import files, flags, run
from tests.shards import tiny

IDS = range(1, 7)
Changes = Mapping[
    int, tuple[Sequence[int], Sequence[int]]
]  # image id -> ids of its new masks, of hidden ones


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    tiny.make_tar(folder / "sa_000020.tar", IDS)
    sa1b.reshard(folder / "sa_000020.tar", folder / "shards", workers=1, quiet=True)
    return folder / "shards"


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that gets layers and views; its other files stay as they are."""
    copy = shutil.copytree(made, tmp_path / "shards")
    yield copy
    assert files(copy).items() >= files(made).items()


def mask_ids(image_id: int) -> list[int]:
    return [mask["id"] for mask in tiny.document(image_id)["annotations"]]


def ids_of(dataset: sa1b.Dataset, image_id: int) -> list[int]:
    return dataset.by_id(image_id).annotations.mask_id.tolist()


def masks_of(root: object, image_id: int, *layers: str) -> list[int]:
    return ids_of(sa1b.open(root, layers=layers), image_id)


def two(image_id: int) -> Changes:
    """A mask that is added, one that is replaced, one that is hidden."""
    ids = mask_ids(image_id)
    return {image_id: ([5, ids[1]], [ids[0]])}


def folder_of(path: Path, *documents: Any) -> Path:
    path.mkdir(parents=True)
    for one in documents:
        (path / f"sa_{one['image']['image_id']}.json").write_bytes(tiny.encode(one))
    return path


def add_files(root: object, name: str, *documents: Any, **options: Any) -> Any:
    """Add a layer of annotation files; what `sa1b layer add --json` says."""
    with tempfile.TemporaryDirectory() as folder:
        files = folder_of(Path(folder) / "masks", *documents)
        return run("layer", "add", root, files, "--name", name, "--json", *flags(options)).json


def masks(image_id: int, *ids: int) -> dict[str, Any]:
    """An annotation file with masks of these ids."""
    found = tiny.document(image_id, 9, masks=max(1, len(ids)))
    found["annotations"] = [mask | {"id": i} for mask, i in zip(found["annotations"], ids, strict=False)]
    return found


def add(root: object, name: str, changes: Changes, *, on: str | None = None, **options: Any) -> Any:
    """Add a layer whose masks replace those with their ids; what `sa1b layer add --json` says."""
    hides = any(hidden for _, hidden in changes.values())
    dataset, documents = sa1b.open(root, layers=[] if on is None else [on]), []
    for image_id, (ids, hidden) in changes.items():
        documents.append(masks(image_id, *ids))
        if hides:  # the file has all masks that are left
            stored = dataset.by_id(image_id).annotations.to_json()["annotations"]
            documents[-1]["annotations"] += [mask for mask in stored if mask["id"] not in (*ids, *hidden)]
    return add_files(root, name, *documents, existing="hide" if hides else "replace", on=on, **options)
