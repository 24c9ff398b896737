"""The repr of a stream, a loader, a batch and statistics."""

import json
import pickle
from pathlib import Path

import pytest

import sa1b
from sa1b.views.predicate import mask_predicate
from sa1b.views.view import open_view, whole, write_view
from tests.stream.recorded import make_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("forms"), 6)


def test_text_forms_of_the_stream(root: Path, tmp_path: Path) -> None:
    stream = sa1b.Stream(root, global_batch=4, image_size=32, masks=2, damage_log=tmp_path / "damaged.jsonl")
    loader = sa1b.Loader(stream, threads=1, dense=8, quiet=True)
    digest = stream.view.digest
    stream_text = (
        f"Stream({str(root)!r}, View({digest[:12]}: 6 images): 2 steps an epoch of 4 images, rank 0 of 1, "
    )
    assert repr(stream) == f"{stream_text}position 0)"
    assert repr(loader) == f"Loader({stream!r}: threads 1, prefetch 2, cpu, masks at 8 pixels)"
    assert repr(loader.stats()).endswith("nothing was read yet")
    batch, _ = list(loader)
    assert repr(batch) == "Batch(images [4, 3, 32, 32]; 8 masks; dense [8, 8, 8]; cpu; position 4)"
    assert repr(batch.masks) == (
        f"RaggedMasks(8 masks of 4 images, {len(batch.masks.runs):,} runs, frame of 32 pixels, cpu)"
    )
    assert repr(stream) == f"{stream_text}position 6)"


def test_a_batch_without_images_or_masks_and_one_with_columns(root: Path, tmp_path: Path) -> None:
    table = tmp_path / "captions.jsonl"
    table.write_text("".join(f'{{"image_id": {i}, "caption": "{i}"}}\n' for i in range(500, 506)))
    options = {"image_size": 32, "damage_log": tmp_path / "damaged.jsonl"}
    stream = sa1b.Stream(root, global_batch=6, masks=0, join={"caption": str(table)}, **options)
    assert repr(next(iter(stream))) == "Batch(images [6, 3, 32, 32]; 0 masks; cpu; position 6; extra caption)"
    stream = sa1b.Stream(root, global_batch=5, rank=0, world_size=5, **options)
    _, last = stream  # one image for five ranks
    assert repr(last) == "Batch(images [0, 3, 32, 32]; 0 masks; cpu; position 6)"


def test_statistics_print_as_a_table_and_stay_a_dict(root: Path, tmp_path: Path) -> None:
    stream = sa1b.Stream(root, global_batch=4, image_size=32, damage_log=tmp_path / "damaged.jsonl")
    loader = sa1b.Loader(stream, threads=1, quiet=True)
    assert len(list(loader)) == 2
    found = loader.stats()
    assert json.loads(json.dumps(found)) == dict(found)
    assert pickle.loads(pickle.dumps(found)) == found
    lines = repr(found).splitlines()
    assert lines[0].split() == ["stage", "items", "MB", "busy", "s", "waiting"]
    assert [line.split()[:2] for line in lines[1:6]] == [
        ["read", "6"], ["pick", "6"], ["decode", "6"], ["collate", "2"], ["device", "2"],
    ]  # fmt: skip
    assert lines[6].startswith(f"{found['limiting']} limits: ")
    assert lines[7].startswith("the caller waited ")
    assert repr(stream.stats) == repr(stream.stats.snapshot())


def test_the_text_of_a_view_opens_it(root: Path) -> None:
    dataset = sa1b.open(root)
    condition = mask_predicate("area > 4")
    view = write_view(
        root, dataset.table, dataset.table.image_id.argsort()[:3].astype("u4"), masks_where=condition
    )
    shown = repr(view)
    assert shown == f"View({view.digest[:12]}: 3 images, masks with {condition.text})"
    digest = shown.removeprefix("View(").partition(":")[0]
    assert open_view(root, dataset.table, digest).digest == view.digest
    everything = whole(dataset.table)
    assert repr(everything) == f"View({everything.digest[:12]}: 6 images)"
