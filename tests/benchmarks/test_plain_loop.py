"""The two loaders of benchmarks/plain_loop.py: the same images and masks; the loop trains and scores."""

from pathlib import Path

import numpy as np
import pytest

import sa1b
from benchmarks import material, plain_loop
from benchmarks.peers import extracted_files
from benchmarks.peers.task import pairs
from sa1b.shards.documents import Options
from tests.shards import tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain-loop")
    tiny.synthesize(folder / "sa_000000.tar", images=plain_loop.BATCH, first_id=1, long_side=320)
    return material.root_of(folder / "sa_000000.tar", folder / "root", Options())


def test_extracted_files_give_the_masks_boxes_and_points_of_the_shards(root: Path, tmp_path: Path) -> None:
    extracted_files.convert(pairs(root), tmp_path)
    stream = sa1b.Stream(
        root, global_batch=1, epochs=1, image_size=plain_loop.SIZE, masks=1000, order="sequential"
    )
    expected = list(sa1b.Loader(stream, dense=plain_loop.TARGET, quiet=True))
    files = plain_loop.ExtractedFiles(tmp_path)
    samples = [files[files.paths.index(tmp_path / f"sa_{int(batch.ids[0])}.jpg")] for batch in expected]
    images, targets, keys = plain_loop.collate(samples)
    assert len(np.unique(keys)) == plain_loop.BATCH
    assert len(np.unique(targets.keys)) == len(targets.masks)
    for i, batch in enumerate(expected):
        difference = (images[i].int() - batch.images[0].int()).abs()
        assert difference.float().mean() < 2  # another decoder and another resizing
        assert targets.sizes[i].tolist() == batch.framed_sizes[0].tolist()
        own = (targets.image == i).nonzero().flatten().tolist()
        assert len(own) == min(plain_loop.MASKS, len(batch.masks))
        assert batch.dense is not None
        for j in own:
            # OpenCV rounds the size of a reduced mask; this package samples the padded square.
            differing = (batch.dense != targets.masks[j]).float().mean(dim=(1, 2))
            near = (batch.boxes - targets.boxes[j]).abs().amax(dim=1) < 1
            assert differing[near].min() < 0.01
            x, y = ((targets.points[j] + 0.5) * plain_loop.TARGET / plain_loop.SIZE - 0.5).round().int()
            assert targets.weights[j] == targets.masks[j, y, x]


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_a_run_is_scored_until_its_budget_has_ended(root: Path, tmp_path: Path, kind: str) -> None:
    extracted_files.convert(pairs(root), tmp_path)
    load = {"shards": plain_loop.from_shards, "files": plain_loop.from_files}[kind]
    batches = load(root if kind == "shards" else tmp_path, 0)
    scored = list(plain_loop.train(batches, root, 1e-3, 0))
    batches.close()
    assert scored[-1].seconds >= 1e-3
    assert scored[-1].images == plain_loop.BATCH * len(scored)
    assert 0 <= scored[-1].scores["miou_box"] <= 1
