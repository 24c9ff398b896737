"""`sa1b.Stream`: its sequence is that of the formula, for any ranks, workers and interruptions."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
import sa1b.masks
from sa1b import Stream
from sa1b.masks import raster
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import open_table
from sa1b.stream.damage_log import DamageLimitError, DamageLog
from sa1b.stream.plan import ResumeError
from tests.shards import tiny

IMAGES = 23
SMALL = {"image_size": 64, "masks": 5, "flip": 0.5}
ENDLESS: dict[str, Any] = {**SMALL, "epochs": None}
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    tiny.synthesize(folder / "sa_000001.tar", images=IMAGES, first_id=100, long_side=160)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
    return folder / "root"


def take(stream: Stream, count: int, **loader: object) -> list[sa1b.Batch]:
    found = []
    for batch in DataLoader(stream, batch_size=None, **loader):
        found.append(batch)
        if len(found) == count:
            break
    return found


def assert_equal(one: sa1b.Batch, other: sa1b.Batch) -> None:
    assert one.position == other.position
    for name in (*one.__slots__, "images"):
        a, b = getattr(one, name), getattr(other, name)
        if name == "buffer":
            continue  # holds the other tensors, if the batch has one
        assert isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor), name
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b), name
    for name in ("runs", "offsets", "image", "sizes"):
        assert torch.equal(getattr(one.masks, name), getattr(other.masks, name))


def test_an_epoch_holds_every_image_once_and_the_next_another_order(root: Path) -> None:
    ids = torch.cat([b.ids for b in take(Stream(root, global_batch=1, **ENDLESS), 3 * IMAGES)]).reshape(
        3, IMAGES
    )
    for epoch in ids:
        assert epoch.sort().values.tolist() == list(range(100, 100 + IMAGES))
    assert not torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[1], ids[2])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_do_not_change_the_sequence(root: Path, workers: int) -> None:
    expected = take(Stream(root, global_batch=8, micro_batch=3, **ENDLESS), 9)
    stream = Stream(root, global_batch=8, micro_batch=3, **ENDLESS)
    for one, other in zip(expected, take(stream, 9, num_workers=workers), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(way, marks=pytest.mark.slow) for way in ("spawn", "forkserver"))]
)
def test_workers_however_they_are_started(root: Path, context: str) -> None:
    expected = take(Stream(root, global_batch=4, **ENDLESS), 4)
    found = take(Stream(root, global_batch=4, **ENDLESS), 4, num_workers=2, multiprocessing_context=context)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 7), (1, 2), (2, 2), (3, 1), (3, 2), (7, 1)])
def test_a_step_is_the_same_set_of_samples_at_any_world_size(root: Path, world_size: int, micro: int) -> None:
    whole = take(Stream(root, global_batch=7, rank=0, world_size=1, **ENDLESS), 5)
    parts = [
        Stream(root, global_batch=7, micro_batch=micro, rank=r, world_size=world_size, **ENDLESS)
        for r in range(world_size)
    ]
    per_step = math.ceil(math.ceil(7 / world_size) / micro)
    batches = [take(part, 5 * per_step) for part in parts]
    for step, one in enumerate(whole):
        pieces = [b for rank in batches for b in rank[step * per_step : (step + 1) * per_step]]
        assert torch.equal(torch.cat([b.ids for b in pieces]), one.ids)
        assert torch.equal(torch.cat([b.images for b in pieces]), one.images)
        assert torch.equal(torch.cat([b.masks.runs for b in pieces]), one.masks.runs)
        assert torch.equal(torch.cat([b.points for b in pieces]), one.points)
        # Where every rank stands after the step is the same.
        assert {rank[(step + 1) * per_step - 1].position for rank in batches} == {one.position}


def test_a_resumed_stream_is_the_rest_of_the_sequence(root: Path) -> None:
    stream = Stream(root, global_batch=6, micro_batch=2, **ENDLESS)
    batches = take(stream, 21, num_workers=2)
    for stopped in (0, 2, 5, 14):
        state = json.loads(json.dumps(stream.state_dict(batches[stopped])))
        again = Stream(root, global_batch=6, micro_batch=2, **ENDLESS)
        again.load_state_dict(state)
        # An unfinished step is repeated completely.
        first = (stopped + 1) // 3 * 3
        for one, other in zip(batches[first : first + 3], take(again, 3), strict=True):
            assert_equal(one, other)


def test_an_iteration_that_is_closed_has_ended_and_the_next_one_continues(root: Path) -> None:
    options = {"global_batch": 4, **ENDLESS}
    whole = [batch.ids.tolist() for batch in take(Stream(root, **options), 5)]
    stream = Stream(root, **options)
    unused = iter(stream)
    unused.close()
    assert next(unused, None) is None
    batches = iter(stream)
    assert [next(batches).ids.tolist() for _ in range(2)] == whole[:2]
    batches.close()
    assert next(batches, None) is None
    assert [batch.ids.tolist() for batch in take(stream, 3)] == whole[2:]


def test_world_size_and_batch_may_change_in_the_middle_of_an_epoch(root: Path) -> None:
    seen: list[int] = []
    position = 0
    for world_size, batch, steps in ((4, 8, 1), (2, 8, 1), (3, 5, 2), (1, 3, 1)):
        ranks = [
            Stream(root, global_batch=batch, rank=rank, world_size=world_size, **ENDLESS)
            for rank in range(world_size)
        ]
        for stream in ranks:
            stream.position = position
        taken = [take(stream, steps) for stream in ranks]
        for step in range(steps):
            seen += [i for rank in taken for i in rank[step].ids.tolist()]
        position = taken[0][-1].position
    first_epoch = torch.cat([b.ids for b in take(Stream(root, global_batch=1, **ENDLESS), 29)])
    assert seen == first_epoch.tolist()


def test_a_state_of_other_images_or_another_seed_is_refused(root: Path, tmp_path: Path) -> None:
    stream = Stream(root, global_batch=4, **SMALL)
    state = stream.state_dict()
    with pytest.raises(ResumeError, match="with seed 5, this stream 0|with seed 0, this stream 5"):
        Stream(root, global_batch=4, seed=5, **SMALL).load_state_dict(state)
    with pytest.raises(ResumeError, match=rf"0{{12}}\) than all .* \({state['ids_sha256'][:12]}\)"):
        stream.load_state_dict({**state, "ids_sha256": "0" * 64})


def test_a_state_of_another_block_size_or_order_is_refused_with_the_argument(root: Path) -> None:
    state = Stream(root, global_batch=8, block_size=4, **SMALL).state_dict()
    with pytest.raises(ResumeError, match=r"block_size 4, this stream 1.*pass block_size=4"):
        Stream(root, global_batch=8, **SMALL).load_state_dict(state)
    with pytest.raises(ResumeError, match="epochs 1, this stream None.*pass epochs=1"):
        Stream(root, global_batch=8, block_size=4, **ENDLESS).load_state_dict(state)
    evaluation = Stream(root, global_batch=8, order="sequential", **SMALL)
    with pytest.raises(ResumeError, match="order sequential, this stream shuffle.*pass order='sequential'"):
        Stream(root, global_batch=8, **SMALL).load_state_dict(evaluation.state_dict())
    # Without blocks both forms have one sequence.
    state = Stream(root, global_batch=8, **SMALL).state_dict()
    Stream(root, global_batch=4, **ENDLESS).load_state_dict(state)


@pytest.mark.parametrize(
    "changed", [{"masks": 6}, {"strategy": "area"}, {"flip": 0.25}, {"image_size": 32}, {"resize": "stretch"}]
)
def test_other_options_than_those_of_a_state_are_named_in_a_warning(
    root: Path, changed: dict[str, Any]
) -> None:
    state = json.loads(json.dumps(Stream(root, global_batch=8, **SMALL).state_dict()))
    other = Stream(root, global_batch=8, **{**SMALL, **changed})
    ((name, value),) = changed.items()
    with pytest.warns(UserWarning, match=f"other options: {name} [^,]*, now {value}. The sequence"):
        other.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Stream(root, global_batch=4, **SMALL).load_state_dict(state)
    state["options"]["decoder"] = "cpu"  # before the resampling had a version
    with pytest.warns(UserWarning, match="other options: decoder cpu, now cpu-2. The sequence"):
        Stream(root, global_batch=4, **SMALL).load_state_dict(state)


def test_evaluation_takes_every_sample_once_and_marks_the_filling(root: Path) -> None:
    ranks = [
        Stream(root, global_batch=6, order="sequential", rank=r, world_size=3, **SMALL) for r in range(3)
    ]
    batches = [take(stream, 99) for stream in ranks]
    assert {len(found) for found in batches} == {4}  # as many on every rank
    ids = torch.cat([b.ids[b.valid] for found in batches for b in found])
    assert ids.sort().values.tolist() == list(range(100, 100 + IMAGES))
    assert sum(int((~b.valid).sum()) for found in batches for b in found) == 24 - IMAGES


def test_an_unknown_strategy_is_refused_with_the_known_ones(root: Path) -> None:
    with pytest.raises(ValueError, match="strategy='best' must be one of uniform, area, quality, coverage"):
        Stream(root, global_batch=4, strategy="best")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"order": "random"}, "order='random' must be 'shuffle' or 'sequential'"),
        ({"micro_batch": 0}, "micro_batch=0 must be at least 1"),
        ({"deadline": -1.0}, "deadline=-1.0 must be a number above 0"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"image_size": 0}, "image_size=0 must be at least 1"),
        ({"masks": -1}, "masks=-1 must be at least 0"),
        ({"flip": 2.0}, "flip=2.0 must be from 0 to 1"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(
    root: Path, argument: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sa1b.Stream(root, **{"global_batch": 4, **SMALL, **argument})


def test_more_ranks_than_samples_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="global_batch=4: has 4 samples for 5 ranks"):
        Stream(root, global_batch=4, rank=0, world_size=5, **SMALL)


@pytest.mark.parametrize("size", [512, 256])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_masks_lie_on_their_objects_after_every_transform(root: Path, size: int, flip: float) -> None:
    """The outline of a drawn object is where the picture changes: gradients there beat those elsewhere."""
    ratios = []
    for batch in take(Stream(root, global_batch=1, image_size=size, masks=99, flip=flip, **{}), 8):
        picture = batch.images[0].float().mean(0).numpy()
        gradient = np.hypot(*np.gradient(picture))
        height, width = batch.source_sizes[0].tolist()
        inner = np.zeros_like(gradient, bool)
        inner[2 : size * height // max(height, width) - 2, 2 : size * width // max(height, width) - 2] = True
        for mask in batch.masks.dense().numpy().astype(bool):
            edge = mask ^ np.roll(mask, 1, 0) | mask ^ np.roll(mask, 1, 1)
            if (edge & inner).sum() > 40:
                ratios.append(gradient[edge & inner].mean() / gradient[inner].mean())
    assert len(ratios) > 50
    assert np.median(ratios) > 2
    mirrored = [r for r in ratios if r < 1]
    assert len(mirrored) < 0.2 * len(ratios)


def test_boxes_and_points_fit_the_masks(root: Path) -> None:
    for batch in take(Stream(root, global_batch=4, image_size=320, masks=8, flip=0.5), 6):
        dense = batch.masks.dense().numpy()
        assert dense.shape == (len(batch.masks), 320, 320)
        for mask, box, point in zip(dense, batch.boxes.tolist(), batch.points.tolist(), strict=True):
            ys, xs = np.nonzero(mask)
            assert box == pytest.approx([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], abs=2.5)
            x, y = int(point[0]), int(point[1])
            assert mask[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].any()


def test_dense_masks_are_those_of_the_reference_raster(root: Path) -> None:
    (batch,) = take(Stream(root, global_batch=5, image_size=128, masks=6, flip=1.0), 1)
    ds = sa1b.open(root)
    for size in (128, 32):
        dense = batch.masks.dense(size).numpy()
        on_torch = sa1b.stream.ragged.raster_torch.rasterize_frame(
            batch.masks.runs, batch.masks.offsets, batch.masks.sizes[:, 0], batch.masks.sizes[:, 1], 128, size
        )
        assert (dense == on_torch.numpy()).all()
        for i, image_id in enumerate(batch.ids.tolist()):
            annotations = ds.by_id(image_id).annotations
            own = batch.masks.image == i
            indices = batch.mask_index[own].numpy()
            assert (annotations.mask_id[indices] == batch.mask_ids[own].numpy()).all()
            flipped = sa1b.masks.flip_horizontal(annotations.runs(indices))
            assert (dense[own.numpy()] == raster.rasterize_frame(flipped, 128, size)).all()


def test_images_are_channels_last_and_padded_with_zeros(root: Path) -> None:
    (batch,) = take(Stream(root, global_batch=6, image_size=96, masks=2), 1)
    assert batch.images.shape == (6, 3, 96, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    for image, (height, width) in zip(batch.images, batch.source_sizes.tolist(), strict=True):
        rows, columns = (round(96 * side / max(height, width)) for side in (height, width))
        assert image[:, rows + 1 :].sum() == image[:, :, columns + 1 :].sum() == 0
        assert image[:, : rows - 1, : columns - 1].float().std() > 5


def damage(root: Path, rows: range) -> None:
    table = open_table(root / table_name(root))
    shards = sa1b.open(root).shards
    for row in rows:
        with (root / shards[int(table.shard[row])]).open("r+b") as file:
            file.seek(int(table.offset[row]) + 50)
            byte = file.read(1)[0]
            file.seek(int(table.offset[row]) + 50)
            file.write(bytes([byte ^ 255]))


def test_a_damaged_sample_is_written_down_and_replaced_alike_everywhere(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    damage(tmp_path / "root", range(1))
    healthy = take(Stream(root, global_batch=1, **SMALL), IMAGES)
    damage_log = tmp_path / "damage_log.jsonl"
    found = take(Stream(tmp_path / "root", global_batch=1, damage_log=damage_log, **SMALL), IMAGES)
    (line,) = [json.loads(text) for text in damage_log.read_text().splitlines()]
    where = next(i for i, batch in enumerate(healthy) if batch.ids.tolist() == [100])
    assert (line["image_id"], line["position"], line["rank"]) == (100, where, 0)
    assert line["shard"].startswith("sa1b-000001-")
    assert "sa_100.jpg is damaged" in line["reason"]
    for i, (one, other) in enumerate(zip(healthy, found, strict=True)):
        assert torch.equal(one.ids, other.ids) == (i != where)
    again = take(
        Stream(tmp_path / "root", global_batch=1, damage_log=tmp_path / "other", **SMALL),
        IMAGES,
        num_workers=2,
    )
    for one, other in zip(found, again, strict=True):
        assert_equal(one, other)


def test_too_much_damage_ends_the_stream_and_names_the_damage_log(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    damage(tmp_path / "root", range(18))
    damage_log = tmp_path / "damage_log.jsonl"
    with pytest.raises(DamageLimitError, match=f"rank 0: 11 damaged samples.*{damage_log}"):
        take(Stream(tmp_path / "root", global_batch=1, damage_log=damage_log, **SMALL), IMAGES)


def test_damage_of_before_a_restart_is_held_against_all_that_was_read(tmp_path: Path) -> None:
    def damage_at(damage_log: DamageLog, position: int) -> None:
        damage_log.damaged(shard="s", offset=1, image_id=2, position=position, read=position, reason="r")

    first = DamageLog(tmp_path / "damage_log", 0)
    for position in range(0, 20_000, 2000):
        damage_at(first, position)
    damage_at(DamageLog(tmp_path / "damage_log", 0), 20_000)  # the 11th of 20,000: within 0.1 %
    with pytest.raises(DamageLimitError, match="12 damaged samples"):
        damage_at(DamageLog(tmp_path / "damage_log", 0), 5_000)


def test_an_evaluation_never_takes_a_substitute(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    damage(tmp_path / "root", range(1))
    stream = Stream(tmp_path / "root", global_batch=4, order="sequential", damage_log=tmp_path / "l", **SMALL)
    batches = take(stream, 99)
    ids, valid = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "valid"))
    assert 100 in ids[~valid]
    assert ids[valid].tolist() == list(range(101, 100 + len(sa1b.open(root))))
