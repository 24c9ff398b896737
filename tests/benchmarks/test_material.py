"""All contenders get the same images, bytes and masks."""

from pathlib import Path

import pytest

import sa1b
from benchmarks import material
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.task import Place, Task, choices, pairs
from sa1b.shards.documents import Options
from tests.shards import tiny

IMAGES, LIMIT = 6, 5
SMALL = Task(size=16, image_size=64, masks=LIMIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    tiny.synthesize(folder / "sa_000000.tar", images=IMAGES, first_id=1, long_side=96)
    return folder


@pytest.fixture(scope="module")
def root(folder: Path) -> Path:
    return material.root_of(folder / "sa_000000.tar", folder / "root", Options(), (LIMIT, material.MASKS))


def test_a_copy_of_some_samples_has_their_bytes(root: Path, tmp_path: Path) -> None:
    dataset = sa1b.open(root)
    copy = sa1b.open(material.copied(dataset, [1, 4], tmp_path / "copy"))
    assert copy.table.image_id.tolist() == dataset.table.image_id[[1, 4]].tolist()
    for row, source_row in enumerate((1, 4)):
        assert copy[row].jpeg == dataset[source_row].jpeg
        assert copy.annotation_file(row) == dataset.annotation_file(source_row)


def test_own_shards_become_material_of_both_sizes(root: Path, tmp_path: Path) -> None:
    made = material.make(tmp_path, 4, root)
    assert list(made.roots) == ["original", "1024"]
    assert [pair.jpeg for pair in pairs(made.root)] == [sa1b.open(root)[i].jpeg for i in (0, 1, 3, 5)]
    assert material.statistics(made)["images"] == 4


def test_the_noted_masks_are_those_the_stream_takes(root: Path, tmp_path: Path) -> None:
    stream = sa1b.Stream(root, global_batch=IMAGES, masks=LIMIT, damage_log=tmp_path / "damage.jsonl")
    batch = next(iter(stream))
    noted = choices(root, LIMIT)
    for i, image_id in enumerate(batch.ids.tolist()):
        of_image = sa1b.open(root).by_id(image_id).annotations.mask_id
        taken = batch.mask_ids[batch.masks.image == i]
        assert of_image[noted[image_id]].tolist() == taken.tolist()


@pytest.mark.parametrize(("start", "images"), [(0.0, 6), (0.34, 4)])
@pytest.mark.parametrize("name", ["extracted files", "webdataset"])
def test_another_loader_goes_on_within_an_epoch(
    name: str, root: Path, tmp_path: Path, start: float, images: int
) -> None:
    contender = CONTENDERS[name]
    assert contender.convert is not None
    contender.convert(pairs(root), tmp_path)
    batches = contender.batches(Place(root, tmp_path), SMALL, 0, start)
    ids = [image_id for batch in batches for image_id in batch.ids]
    assert len(ids) == len(set(ids)) == images
