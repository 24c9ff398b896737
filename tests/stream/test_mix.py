"""`sa1b.Mix`: each sample is that of its own stream, for any ranks, workers and interruptions."""

import copy
import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import sa1b
from sa1b import Batch, Mix, Stream
from sa1b.storage.errors import UnavailableError
from sa1b.stream.plan import MicroBatch, ResumeError
from tests.shards import tiny
from tests.stream.test_stream import assert_equal

OWN: dict[str, dict[str, Any]] = {
    "sa1b": {"masks": 5, "flip": 0.5, "seed": 3},
    "mine": {"masks": 2, "strategy": "coverage", "min_pixels": 1, "block_size": 2},
}
WEIGHTS = {"sa1b": 3, "mine": 2}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, images, first in (("sa1b", 23, 100), ("mine", 9, 500)):
        folder = tmp_path_factory.mktemp(name)
        tiny.synthesize(folder / "sa_000001.tar", images=images, first_id=first, long_side=160)
        tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
        found[name] = folder / "root"
    return found


def streams(roots: dict[str, Path], **options: Any) -> dict[str, Stream]:
    shared = {"global_batch": 8, "image_size": 64, **options}
    return {name: Stream(root, **OWN[name], **shared) for name, root in roots.items()}


def mixed(roots: dict[str, Path], options: dict[str, Any] | None = None, **arguments: Any) -> Mix:
    made = streams(roots, **(options or {}))
    return Mix({name: (stream, WEIGHTS[name]) for name, stream in made.items()}, **arguments)


def take(batches: Any, count: int) -> list[Batch]:
    return list(itertools.islice(batches, count))


def ids(batches: list[Batch]) -> list[tuple[int, str, int]]:
    """Position, source and image of every sample."""
    return [
        one
        for batch in batches
        for one in zip(batch.positions.tolist(), batch.source, batch.ids.tolist(), strict=True)
    ]


def test_each_sample_is_that_of_its_own_stream(roots: dict[str, Path]) -> None:
    mix, seen = mixed(roots), {"sa1b": 0, "mine": 0}
    for batch in take(mix, 9):
        assert batch.source_index is not None
        assert [list(roots)[one] for one in batch.source_index.tolist()] == list(batch.source)
        for i, name in enumerate(batch.source):
            local = seen[name]
            seen[name] += 1
            alone = mix.streams[name].submit(MicroBatch(local, local + 1, 0)).finish()
            assert torch.equal(batch.images[i], alone.images[0])
            assert batch.ids[i] == alone.ids[0]
            masks = batch.masks.image == i
            assert torch.equal(batch.mask_ids[masks], alone.mask_ids)
            assert torch.equal(batch.points[masks], alone.points)
            assert torch.equal(batch.masks.dense(64)[masks], alone.masks.dense(64))
    assert mix.seen(72) == seen
    assert seen["mine"] > len(mix.streams["mine"].view)  # its second epoch has begun


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_resumes_at_any_rank_count_and_micro_batch(roots: dict[str, Path], ranks: int) -> None:
    whole = ids(take(mixed(roots), 6))
    state = mixed(roots).state_dict(take(mixed(roots), 2)[-1])
    found = []
    for rank in range(ranks):
        own = mixed(roots, {"rank": rank, "world_size": ranks, "micro_batch": 2})
        own.load_state_dict(json.loads(json.dumps(state)))
        found += ids(take(own, 4 * own.plan.count))
    assert sorted(found) == whole[16:48]


def assert_same(found: list[sa1b.Batch], expected: list[sa1b.Batch]) -> None:
    for got, batch in zip(found, expected, strict=True):
        assert_equal(got, batch)
        assert got.source == batch.source


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_give_the_same_batches(roots: dict[str, Path], method: str, workers: int) -> None:
    loader = DataLoader(mixed(roots), batch_size=None, num_workers=workers, multiprocessing_context=method)
    assert_same(take(loader, 5), take(mixed(roots), 5))


def test_a_loader_and_a_stateful_loader_give_the_same_batches(roots: dict[str, Path]) -> None:
    expected = take(mixed(roots), 5)
    assert_same(take(sa1b.Loader(mixed(roots), threads=2, quiet=True), 5), expected)
    loader = StatefulDataLoader(mixed(roots), batch_size=None, num_workers=2)
    take(loader, 2)
    resumed = StatefulDataLoader(mixed(roots), batch_size=None, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert ids(take(resumed, 3)) == ids(expected[2:])


def test_an_endless_mixture_continues_after_the_last_batch(roots: dict[str, Path]) -> None:
    mix, loader = mixed(roots), sa1b.Loader(mixed(roots), threads=2, quiet=True)
    expected = ids(take(mixed(roots), 4))
    assert ids(take(mix, 2)) + ids(take(mix, 2)) == expected
    assert ids(take(loader, 2)) + ids(take(loader, 2)) == expected


def test_until_ends_an_iteration_and_the_next_one_continues(roots: dict[str, Path]) -> None:
    mix = mixed(roots, until="first")  # after 9 of `mine`, which is 2 in 5
    endless = ids(take(mixed(roots), 9))
    first, second = ids(list(mix)), ids(list(mix))
    assert mix.plan.order.count == len(first) == len(second) == 22
    assert first + second == endless[:44]
    assert [name for _, name, _ in first].count("mine") == 9
    every = mixed(roots, until="all")
    assert {image for _, name, image in ids(list(every)) if name == "sa1b"} == set(range(100, 123))
    assert len(every) == every.steps_per_epoch == -(-every.plan.order.count // 8)


def test_a_schedule_changes_weights_and_resumes_exactly(roots: dict[str, Path]) -> None:
    schedule = {20: {"sa1b": 1, "mine": 1}}
    whole = take(mixed(roots, schedule=schedule), 6)
    assert ids(whole)[:20] == ids(take(mixed(roots), 3))[:20]
    assert [name for _, name, _ in ids(whole)[20:28]] == ["sa1b", "mine"] * 4
    before = mixed(roots).state_dict(take(mixed(roots), 2)[-1])  # at 16, before the change
    after = mixed(roots, schedule=schedule).state_dict(whole[3])
    for state, start in ((before, 16), (after, 32)):
        own = mixed(roots, schedule=schedule)
        own.load_state_dict(copy.deepcopy(state))
        assert ids(take(own, 2)) == ids(whole)[start : start + 16]
    assert after["phases"] == [[0, {"sa1b": 3, "mine": 2}], [20, {"sa1b": 1, "mine": 1}]]
    with pytest.raises(ResumeError, match=r"weights 3:2 from position 0, 1:1 from position 20, this mixture"):
        mixed(roots).load_state_dict(after)
    assert mixed(roots, schedule=schedule).weights_at(19) == WEIGHTS
    assert mixed(roots, schedule=schedule).weights_at(20) == {"sa1b": 1, "mine": 1}


def test_changed_weights_are_refused_and_the_advice_resumes(roots: dict[str, Path]) -> None:
    batches = take(mixed(roots), 2)
    state = mixed(roots).state_dict(batches[-1])
    made = streams(roots)
    with pytest.raises(ResumeError, match=r"schedule=\{16: \.\.\.\}") as refused:
        Mix({name: (stream, 1) for name, stream in made.items()}).load_state_dict(state)
    assert refused.value.argument == "weights"
    changed = mixed(roots, schedule={16: {"sa1b": 1, "mine": 1}})
    changed.load_state_dict(state)
    assert [name for _, name, _ in ids(take(changed, 1))] == ["sa1b", "mine"] * 4
    at_start = Mix({name: (stream, 1) for name, stream in streams(roots).items()})
    with pytest.raises(ResumeError, match="weights 3:2"):
        at_start.load_state_dict(mixed(roots).state_dict())


def test_other_sources_are_refused_by_name(roots: dict[str, Path], tmp_path: Path) -> None:
    state = mixed(roots).state_dict()
    for wrong in ({}, None, [], {"position": 0}, {**state, "position": -1}, {**state, "phases": [[0]]}):
        with pytest.raises(ResumeError, match="not the state of a mixture"):
            mixed(roots).load_state_dict(wrong)
    alone = streams(roots)["sa1b"]
    with pytest.raises(ResumeError, match="not the state of a mixture"):
        mixed(roots).load_state_dict(alone.state_dict())
    with pytest.raises(ResumeError, match="the sources sa1b, mine, this mixture has sa1b"):
        Mix({"sa1b": (alone, 1)}).load_state_dict(state)
    grown = tmp_path / "grown"
    shutil.copytree(roots["mine"], grown)
    tiny.synthesize(tmp_path / "sa_000002.tar", images=3, first_id=900, long_side=160)
    tiny.ingest_tar(tmp_path / "sa_000002.tar", grown, images_per_shard=7)
    with pytest.raises(ResumeError, match=r"source mine: saved state with other images .* make a view"):
        mixed({**roots, "mine": grown}).load_state_dict(state)
    other = {**OWN["mine"], "seed": 9}
    changed = streams(roots)
    changed["mine"] = Stream(roots["mine"], **other, global_batch=8, image_size=64)
    with pytest.raises(ResumeError, match="source mine: .*pass seed=0") as refused:
        Mix({name: (changed[name], WEIGHTS[name]) for name in changed}).load_state_dict(state)
    assert refused.value.argument == "seed"


def test_an_evaluation_reads_each_source_once(roots: dict[str, Path]) -> None:
    options = {"global_batch": 6, "image_size": 64, "order": "sequential", "masks": 3}
    found = []
    for rank in (0, 1):
        ranked = {**options, "rank": rank, "world_size": 2}
        made = {name: (Stream(root, **ranked), 1) for name, root in roots.items()}
        for batch in Mix(made):
            valid = batch.valid.tolist()
            found += [one for one, is_valid in zip(ids([batch]), valid, strict=True) if is_valid]
    expected = [("sa1b", 100 + i) for i in range(23)] + [("mine", 500 + i) for i in range(9)]
    assert [(name, image) for _, name, image in sorted(found)] == expected


def damaged(root: Path, folder: Path) -> Path:
    """A copy of a dataset directory whose first shard has a sample with a damaged record."""
    shutil.copytree(root, folder)
    dataset = sa1b.Dataset(folder)
    shard = folder / dataset.shards[0]
    data = bytearray(shard.read_bytes())
    at = int(dataset.table.offset[0]) + 600
    data[at] ^= 0xFF
    shard.write_bytes(data)
    return folder


def test_a_damaged_sample_is_replaced_from_its_own_source(roots: dict[str, Path], tmp_path: Path) -> None:
    copied = {**roots, "mine": damaged(roots["mine"], tmp_path / "mine")}
    log = tmp_path / "damage.jsonl"
    mix = mixed(copied, damage_log=log)
    batches, whole = take(mix, 4), ids(take(mixed(roots), 4))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["source"] for line in lines} == {"mine"}
    changed = [(was, now) for was, now in zip(whole, ids(batches), strict=True) if was != now]
    assert [now[0] for _, now in changed] == [line["position"] for line in lines]
    for was, now in changed:
        assert was[1] == now[1] == "mine"
        assert 500 <= now[2] < 509


def test_an_unavailable_store_is_named_with_its_source(
    roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = mixed(roots)

    def unavailable(*_: object) -> None:
        raise UnavailableError("no answer", last_error="timeout", counters={})

    read = mix.streams["mine"].submit(MicroBatch(0, 1, 0)).reads[0]
    monkeypatch.setattr(type(read), "result", unavailable)
    with pytest.raises(UnavailableError) as stopped:
        take(mix, 1)
    assert any("source sa1b: image" in note for note in stopped.value.__notes__)


@pytest.mark.filterwarnings("ignore:.* has no kind for 22 of 23 images")
def test_texts_and_columns_of_some_sources_are_in_the_batch(roots: dict[str, Path]) -> None:
    shared = {"global_batch": 8, "image_size": 64, "masks": 2}
    captions = pa.table({"image_id": list(range(500, 509)), "text": [f"image {i}" for i in range(9)]})
    of_masks = pa.table({"mask_id": [1], "kind": ["rare"]})
    mine = Stream(roots["mine"], text=captions, join={"kind": of_masks}, **shared)
    mix = Mix({"sa1b": (Stream(roots["sa1b"], **shared), 1), "mine": (mine, 1)})
    batch = take(mix, 1)[0]
    assert batch.texts is not None
    assert batch.texts.given.tolist() == [name == "mine" for name in batch.source]
    assert len(batch.texts) == 8
    tokens, belongs = batch.texts.padded()
    for i, name in enumerate(batch.source):
        text = bytes(tokens[i][belongs[i]].tolist()).decode()
        expected = f"image {int(batch.ids[i]) - 500}" if name == "mine" else ""
        assert text == expected
        assert batch.extra["text"][i] == (expected or None)
    assert len(batch.extra["kind"]) == len(batch.masks)
    of_images = pa.table({"image_id": [100], "kind": ["rare"]})
    other = Stream(roots["sa1b"], join={"kind": of_images}, **shared)
    with pytest.raises(ValueError, match=r"join\['kind'\]: the sources mine and sa1b"):
        Mix({"mine": (mine, 1), "sa1b": (other, 1)})


def test_streams_that_do_not_fit_together_are_refused(roots: dict[str, Path]) -> None:
    made = streams(roots)
    for wrong in ({"sa1b": made["sa1b"]}, {"sa1b": (roots["sa1b"], 1)}):
        with pytest.raises(ValueError, match="sources"):
            Mix(wrong)
    for argument, options in (
        ("global_batch", {"global_batch": 16, "micro_batch": 8}),
        ("micro_batch", {"micro_batch": 4}),
        ("image_size", {"image_size": 32}),
        ("order", {"order": "sequential"}),
        ("rank", {"rank": 1, "world_size": 2, "micro_batch": 8}),
    ):
        wrong_stream = Stream(roots["sa1b"], **{"global_batch": 8, "image_size": 64, **options})
        with pytest.raises(ValueError, match=f"^{argument}: the sources mine and sa1b have"):
            Mix({"mine": (made["mine"], 1), "sa1b": (wrong_stream, 1)})
    with pytest.raises(ValueError, match=r"schedule\[5\] must have a weight for each of sa1b, mine"):
        mixed(roots, schedule={5: {"sa1b": 1}})
    with pytest.raises(ValueError, match="position=-1 must be at least 0"):
        mixed(roots).seen(-1)
    with pytest.raises(ValueError, match="until='never' must be None, 'first' or 'all'"):
        mixed(roots, until="never")
    with pytest.raises(TypeError, match="weights"):
        mixed(roots, weights=3)


def test_it_prints_its_sources_and_pickles_with_its_position(roots: dict[str, Path]) -> None:
    mix = mixed(roots)
    mix.position = 16
    assert "Mix(sa1b, mine, weights {'sa1b': 3, 'mine': 2}: global batch 8, rank 0 of 1" in repr(mix)
    again = pickle.loads(pickle.dumps(mix))
    assert again.position == 16
    assert ids(take(again, 1)) == ids(take(mix, 1))
    mix.close()
