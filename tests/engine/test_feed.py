"""The input of a step: its pixels, keys and weights do not depend on world size or micro-batch."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sa1b
from sa1b.engine.settings import with_flags
from sa1b.errors import UsageError
from sa1b.masks.grid import framed, framed_size
from sa1b.masks.raster_torch import framed_sizes
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from tests.engine.stream_root import IMAGE_SIZE, Micro, feed_of, make_root, prepared
from tests.shards import tiny
from tests.train.command import FIRST_ID


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("feed"))


def steps_of(
    root: Path, out: Path, steps: int, rank: int = 0, world_size: int = 1, **data: int
) -> list[list[Micro]]:
    feed = feed_of(root, out, rank, world_size, **data)
    seed = data.get("seed", 3)
    found = [[prepared(batch, seed) for batch in feed.step()] for _ in range(steps)]
    feed.close()
    return found


def masks_of(micros: list[Micro]) -> dict[tuple[int, int], tuple[int, bytes, list[float], int]]:
    """By image and mask: key, pixels, box and point of the mask, and key of the image."""
    found = {}
    for micro in micros:
        targets = micro.targets
        for number, image in enumerate(targets.image.tolist()):
            name = (int(micro.batch.ids[image]), int(micro.batch.mask_ids[number]))
            assert name not in found
            numbers = [*targets.boxes[number].tolist(), *targets.points[number].tolist()]
            pixels = targets.masks[number].numpy().tobytes()
            found[name] = (int(targets.keys[number]), pixels, numbers, int(micro.image_keys[image]))
    return found


def test_targets_are_the_raster_of_the_masks_in_the_annotation(root: Path, tmp_path: Path) -> None:
    dataset = sa1b.open(root)
    rows = {int(image_id): row for row, image_id in enumerate(dataset.table.image_id)}
    feed = feed_of(root, tmp_path, flip=0.0)
    compared = 0
    for micro in map(prepared, itertools.chain(feed.step(), feed.step())):
        size = micro.targets.masks.shape[-1]
        for number, image in enumerate(micro.targets.image.tolist()):
            annotations = dataset[rows[int(micro.batch.ids[image])]].annotations
            which = annotations.mask_id.tolist().index(int(micro.batch.mask_ids[number]))
            height, width = annotations.height, annotations.width
            lengths = annotations.runs([which]).runs
            pixels = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(width, height).T
            down, across = (axis.sources() for axis in framed((height, width), IMAGE_SIZE, size))
            expected = pixels[down][:, across] * (down >= 0)[:, None] * (across >= 0)
            assert np.array_equal(micro.targets.masks[number].numpy(), expected)
            compared += int(expected.any())
    feed.close()
    assert compared > 10


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 2), (2, 3), (3, 2), (5, 1)])
def test_masks_and_keys_are_the_same_at_any_world_size_and_micro_batch(
    root: Path, tmp_path: Path, world_size: int, micro_batch: int
) -> None:
    whole = steps_of(root, tmp_path, 6)
    ranks = [
        steps_of(root, tmp_path, 6, rank, world_size, micro_batch=micro_batch) for rank in range(world_size)
    ]
    for step, micros in enumerate(whole):
        pieces = [micro for rank in ranks for micro in rank[step]]
        assert torch.equal(torch.cat([micro.batch.ids for micro in pieces]), micros[0].batch.ids)
        assert masks_of(pieces) == masks_of(micros)
        assert torch.equal(torch.cat([micro.targets.weights for micro in pieces]), micros[0].targets.weights)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(2, 2), (4, 1)])
def test_ranks_have_equally_many_micro_batches_even_where_some_are_empty(
    root: Path, tmp_path: Path, world_size: int, micro_batch: int
) -> None:
    ranks = [
        steps_of(root, tmp_path, 2, rank, world_size, micro_batch=micro_batch) for rank in range(world_size)
    ]
    for step in range(2):
        assert len({len(rank[step]) for rank in ranks}) == 1
    sizes = {len(micro.batch.ids) for rank in ranks for micros in rank for micro in micros}
    assert 0 in sizes


def test_keys_differ_by_mask_by_visit_and_by_seed(root: Path, tmp_path: Path) -> None:
    found = steps_of(root, tmp_path, 10)  # two epochs
    keys = [int(key) for micros in found for micro in micros for key in micro.targets.keys]
    visits = [int(key) for micros in found for micro in micros for key in micro.image_keys]
    ids = [int(key) for micros in found for micro in micros for key in micro.batch.ids]
    assert len(set(ids)) < len(ids)
    assert len(set(keys)) == len(keys)
    assert len(set(visits)) == len(visits)
    others = steps_of(root, tmp_path, 10, seed=4)
    assert not set(keys) & {int(key) for micros in others for micro in micros for key in micro.targets.keys}


def test_masks_without_an_id_have_keys_of_their_own(tmp_path: Path) -> None:
    members = []
    for image_id in (100, 101):
        document = tiny.document(image_id, masks=4)
        for mask in document["annotations"]:
            del mask["id"]
        members += tiny.pair_members(image_id, text=tiny.encode(document))
    tiny.ingest_tar(tiny.write_tar(tmp_path / "sa_000001.tar", members), tmp_path / "root")
    (micro,) = steps_of(tmp_path / "root", tmp_path, 1, global_batch=2)[0]
    assert micro.batch.mask_ids.tolist() == [-1] * 8
    assert len(micro.targets.keys.unique()) == 8


def test_a_mask_without_a_pixel_does_not_count(root: Path, tmp_path: Path) -> None:
    micros = [micro for micros in steps_of(root, tmp_path, 5, masks=100) for micro in micros]
    filled = torch.cat([micro.targets.masks.flatten(1).any(dim=1) for micro in micros])
    assert torch.equal(torch.cat([micro.targets.weights for micro in micros]), filled.float())
    assert not bool(filled.all())


def test_masks_with_too_few_pixels_at_the_target_size_are_not_trained_on(root: Path, tmp_path: Path) -> None:
    micros = [micro for micros in steps_of(root, tmp_path, 5, masks=100, min_pixels=6) for micro in micros]
    pixels = torch.cat([micro.targets.masks.flatten(1).sum(dim=1, dtype=torch.int64) for micro in micros])
    assert int(pixels.min()) >= 6
    assert len(pixels) > 20
    feed = feed_of(root, tmp_path, order="sequential", masks=100, min_pixels=6)
    kept = [batch.dense.flatten(1).sum(dim=1) for batch in feed]
    feed.close()
    assert int(torch.cat(kept).min()) < 6


def test_a_feed_goes_on_behind_the_last_whole_step(root: Path, tmp_path: Path) -> None:
    feed = feed_of(root, tmp_path, micro_batch=2)
    first, second = (list(map(prepared, feed.step())) for _ in range(2))
    state = feed.state_dict()
    next(feed.step())  # micro-batches of a step that a crash interrupts
    assert feed.state_dict()["position"] == state["position"]
    feed.load_state_dict({**state, "position": 5})
    assert masks_of(list(map(prepared, feed.step()))) == masks_of(second) != masks_of(first)
    feed.close()


def test_a_sequential_feed_has_every_image_once_and_ends(root: Path, tmp_path: Path) -> None:
    seen = []
    for rank in range(3):
        feed = feed_of(root, tmp_path, rank, 3, order="sequential", micro_batch=1, global_batch=4)
        for micro in map(prepared, feed):
            counted = set(micro.targets.image[micro.targets.weights > 0].tolist())
            seen += [int(micro.batch.ids[image]) for image in counted]
        feed.close()
    assert sorted(seen) == sorted(set(seen))
    assert set(seen) <= set(range(FIRST_ID, FIRST_ID + 23))
    assert len(seen) > 20


def test_runs_of_the_training_order_do_not_shorten_a_sequential_feed(root: Path, tmp_path: Path) -> None:
    feed = feed_of(root, tmp_path, order="sequential", block_size=8, global_batch=4, micro_batch=4)
    assert sum(len(batch.ids) for batch in feed) == 24  # 23 images, the last one twice
    feed.close()


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=8),
    st.sampled_from([1, 64, 256, 1024]),
)
def test_framed_sizes_are_those_of_the_grid(sizes: list[tuple[int, int]], image_size: int) -> None:
    found = framed_sizes(torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2), image_size)
    assert found.tolist() == [list(framed_size(*size, image_size)) for size in sizes]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_sums_of_losses_over_micro_batches_are_those_of_the_whole(
    root: Path, tmp_path: Path, micro_batch: int
) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, drop_path=0.5
    )
    interactive = Interactive(Sam(config), Recipe(clicks=1, unprompted=0))
    totals = []
    for size in (5, micro_batch):
        micros = steps_of(root, tmp_path, 1, micro_batch=size)[0]
        parts = [interactive(micro.images, micro.targets, micro.image_keys) for micro in micros]
        names = [name for name in parts[0] if name != "of_images"]
        totals.append({name: sum(float(part[name].detach()) for part in parts) for name in names})
        of_images = torch.cat([part["of_images"] for part in parts]).sum(dim=0)
        for name, value in zip(("loss", "iou_last", "count"), of_images.tolist(), strict=True):
            assert value == pytest.approx(totals[-1][name], rel=1e-5)
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"global_batch": 2}, "--data.global-batch 2: has 2 samples for 3 ranks"),
        ({"block_size": 4}, "--data.global-batch 5 must be a multiple of --data.block-size 4"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(
    root: Path, tmp_path: Path, data: dict[str, int], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        feed_of(root, tmp_path, 0, 3, **data)


def test_decoding_on_a_gpu_needs_a_gpu_and_a_library(root: Path, tmp_path: Path) -> None:
    assert feed_of(root, tmp_path, decode="cpu").loader.stream.options.decoder == "cpu"
    with pytest.raises(UsageError, match=r"--data.decode 'gpu': decodes into memory of a GPU, not of cpu"):
        feed_of(root, tmp_path, decode="gpu")
    missing = with_flags(ValueError("decode='gpu': needs torchcodec: or pass decode='cpu'"))
    assert str(missing) == "--data.decode 'gpu': needs torchcodec: or pass --data.decode 'cpu'"
