"""Each iteration is the next epoch, for every way to read and interrupt a stream."""

import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import UsageError
from sa1b.stream.order import Order, Sequential
from sa1b.stream.plan import MicroBatch, Plan
from tests.stream.recorded import RECIPE, batch_of, digest, make_root

IMAGES = 23
STEP = {"global_batch": 6, "micro_batch": 2}
PIECES = 3  # micro-batches of a step
PER_EPOCH = 12  # micro-batches: the last step has 5 samples

WAYS: dict[str, dict[str, Any] | None] = {
    "loader": None,
    "no workers": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "persistent, fork": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "persistent, spawn": {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
}

examples = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("epochs"), IMAGES)


def stream_of(root: Path, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(root, **{**STEP, "damage_log": root.parent / "damage_log", **RECIPE, **options})


def loader_of(way: str, stream: sa1b.Stream) -> Any:
    arguments = WAYS[way]
    if arguments is None:
        return sa1b.Loader(stream, threads=2, quiet=True)
    return DataLoader(stream, batch_size=None, **arguments)


def expected(root: Path, start: int, stop: int | None = None) -> Iterator[str]:
    """Digests of one process's batches from a position to the end of its epoch, by the formula."""
    dataset = sa1b.open(root)
    end = stop or (start // IMAGES + 1) * IMAGES
    for first in range(start, end, STEP["global_batch"]):
        after = min(first + STEP["global_batch"], end)
        for i in range(PIECES):
            cut = range(first, after)[i * STEP["micro_batch"] : (i + 1) * STEP["micro_batch"]]
            yield digest(batch_of(dataset, cut, after if i == PIECES - 1 else first))


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if "spawn" in way else way for way in WAYS]
)
def test_every_iteration_is_the_next_epoch_and_a_state_is_resumed_within_one(root: Path, way: str) -> None:
    stream = stream_of(root)
    loader = loader_of(way, stream)
    for epoch in range(2):
        batches = list(loader)
        assert [digest(batch) for batch in batches] == list(expected(root, epoch * IMAGES))
    assert len(batches) == len(loader) == PER_EPOCH

    # An iteration that the caller leaves is followed by the next epoch.
    found = []
    for batch in loader:
        found.append(digest(batch))
        if len(found) == 5:
            break
    assert found == list(islice(expected(root, 2 * IMAGES), 5))
    after = digest(next(iter(loader)))
    assert after == next(expected(root, 3 * IMAGES))

    # A state within an epoch finishes it, and the next iteration is the one after.
    target = loader if way == "loader" else stream
    target.load_state_dict(stream.state_dict(batches[7]))
    assert [digest(batch) for batch in loader] == list(expected(root, IMAGES + 12))
    assert digest(next(iter(loader))) == next(expected(root, 2 * IMAGES))

    # A state at the border of two epochs is the start of the second one.
    target.load_state_dict(stream.state_dict(batches[-1]))
    assert [digest(batch) for batch in loader] == list(expected(root, 2 * IMAGES))

    target.set_epoch(1)
    assert [digest(batch) for batch in loader] == list(expected(root, IMAGES))
    assert digest(next(iter(loader))) == next(expected(root, 2 * IMAGES))


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if "spawn" in way else way for way in WAYS]
)
def test_a_sequential_stream_begins_again_in_every_iteration(root: Path, way: str) -> None:
    """Lightning's loop: a few batches as a check, then validation after every epoch."""
    stream = stream_of(root, order="sequential")
    loader = loader_of(way, stream)
    check = [digest(batch) for batch in islice(loader, 2)]
    for _ in range(2):
        batches = list(loader)
        ids = torch.cat([batch.ids[batch.valid] for batch in batches])
        assert ids.tolist() == sa1b.open(root).table.image_id.tolist()
        assert [digest(batch) for batch in batches[:2]] == check
        assert len(batches) == len(loader) == PER_EPOCH
    again = stream_of(root, order="sequential")
    again.load_state_dict(stream.state_dict(batches[5]))
    assert [digest(batch) for batch in again] == [digest(batch) for batch in batches[6:]]
    again.load_state_dict(stream.state_dict(batches[-1]))
    assert [digest(batch) for batch in again] == [digest(batch) for batch in batches]


@pytest.mark.parametrize("way", ["loader", "no workers", "persistent, fork"])
def test_training_and_validation_in_turns_as_a_trainer_does(root: Path, way: str) -> None:
    training, validation = stream_of(root), stream_of(root, order="sequential")
    train, validate = loader_of(way, training), loader_of(way, validation)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        for _ in range(3):
            assert len(train) == len(validate) == PER_EPOCH
            seen.append([i for batch in train for i in batch.ids.tolist()])
            assert sum(int(batch.valid.sum()) for batch in validate) == IMAGES
    assert all(sorted(epoch) == sorted(seen[0]) for epoch in seen)
    assert len(set(map(tuple, seen))) == 3
    assert all(len(set(epoch)) == IMAGES for epoch in seen)


@pytest.mark.parametrize("way", ["no workers", "persistent, fork"])
def test_ranks_and_their_number_may_change_within_an_epoch_and_at_its_border(root: Path, way: str) -> None:
    rows = sa1b.open(root).table.image_id
    position, seen = 0, list[int]()
    # World size, global batch, micro-batch, steps; None: to the end of the epoch.
    for world_size, batch, micro, steps in (
        (3, 6, 1, 2),
        (2, 5, 2, None),
        (4, 9, 1, 1),
        (1, 4, 4, 2),
        (3, 5, 1, None),
        (2, 40, 3, None),
    ):
        ranks = []
        for rank in range(world_size):
            stream = stream_of(root, global_batch=batch, micro_batch=micro, rank=rank, world_size=world_size)
            stream.load_state_dict({**stream.state_dict(), "position": position})
            pieces = None if steps is None else steps * stream.plan.count
            ranks.append(list(islice(loader_of(way, stream), pieces)))
        assert len({tuple(b.position for b in rank) for rank in ranks}) == 1
        seen += [p for rank in ranks for b in rank for p in b.positions.tolist()]
        assert sorted(seen) == list(range(ranks[0][-1].position))
        batches = list(chain(*ranks))
        ids = dict(
            zip(
                torch.cat([b.positions for b in batches]).tolist(),
                torch.cat([b.ids for b in batches]).tolist(),
                strict=True,
            )
        )
        order = Order(IMAGES, sa1b.open(root).table.ids_digest, 0)
        assert ids == {p: int(rows[order.rows(np.array([p]))[0]]) for p in ids}
        position = ranks[0][-1].position
    assert position == 3 * IMAGES


def test_an_epoch_of_fewer_samples_than_ranks_gives_some_an_empty_batch(root: Path) -> None:
    found = []
    for rank in range(4):
        stream = stream_of(root, global_batch=21, micro_batch=6, rank=rank, world_size=4)
        (batch,) = list(stream)[1:]  # micro-batches of 2 samples
        found.append(len(batch))
        assert batch.images.shape == (len(batch), 3, RECIPE["image_size"], RECIPE["image_size"])
        assert len(batch.masks.dense(16)) == len(batch.boxes)
    assert found == [0, 1, 0, 1]


# The endless form


@pytest.mark.parametrize("way", ["loader", "no workers"])
def test_an_endless_stream_spans_epochs_and_goes_on_after_the_last_batch(root: Path, way: str) -> None:
    stream = stream_of(root, epochs=None)
    loader = loader_of(way, stream)
    whole = list(expected(root, 0, stop=60))
    # The last of these batches belong to the second epoch.
    assert [digest(batch) for batch in islice(loader, 12)] == whole[:12]
    assert [digest(batch) for batch in islice(loader, 7)] == whole[12:19]
    assert [digest(batch) for batch in islice(loader, 5)] == whole[18:23]  # the step again as a whole
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    assert stream.steps_per_epoch == 4


@pytest.mark.parametrize("persistent", [False, True])
def test_an_endless_stream_of_workers_is_not_read_twice_unnoticed(root: Path, persistent: bool) -> None:
    stream = stream_of(root, epochs=None)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=persistent)
    whole = list(expected(root, 0, stop=60))
    batches = list(islice(loader, 13))
    assert [digest(batch) for batch in batches] == whole[:13]
    with pytest.raises(UsageError, match="cannot be iterated again.*load_state_dict.*or leave epochs at 1"):
        next(iter(loader))
    stream.load_state_dict(stream.state_dict(batches[-1]))
    assert [digest(batch) for batch in islice(loader, 6)] == whole[12:18]


def test_what_epochs_cannot_be_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="epochs=3 must be 1.*iterate again for more"):
        stream_of(root, epochs=3)
    with pytest.raises(ValueError, match="epochs=None: .* pass order='shuffle'"):
        stream_of(root, epochs=None, order="sequential")
    with pytest.raises(ValueError, match="epoch=-1 must be at least 0"):
        stream_of(root).set_epoch(-1)


# The plan


def taken(plans: list[Plan], position: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank to the end of the epoch."""
    return [list(plan.micro_batches(position)) for plan in plans]


@examples
@given(st.integers(1, 300), st.sampled_from([1, 2, 3, 8]), st.integers(0, 5), st.data())
def test_every_epoch_is_covered_once_with_equally_many_micro_batches(
    count: int, block: int, epoch: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, 6))
    batch = block * data.draw(st.integers(world_size, 40))
    micro = data.draw(st.integers(1, 20))
    start = block * data.draw(st.integers(0, (count - 1) // block))
    order = Order(count, "d", 0, block, endless=False)
    plans = [Plan(order, batch, micro, rank, world_size) for rank in range(world_size)]
    position, end = epoch * count + start, (epoch + 1) * count
    ranks = taken(plans, position)

    positions = [p for rank in ranks for piece in rank for p in range(piece.start, piece.stop)]
    assert sorted(positions) == list(range(position, end))
    rows = order.rows(np.arange(epoch * count, end))
    assert sorted(rows.tolist()) == list(range(count))
    assert len({tuple(piece.position for piece in rank) for rank in ranks}) == 1
    assert ranks[0][-1].position == end
    assert all(piece.stop - piece.start <= micro for piece in chain(*ranks))
    # No block of an epoch is divided among ranks.
    owners: dict[int, set[int]] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            for p in range(piece.start, piece.stop):
                owners.setdefault((p - epoch * count) // block, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in owners.values())
    # A micro-batch is empty on every rank only if none is needed.
    longest = [max(rank[i].stop - rank[i].start for rank in ranks) for i in range(len(ranks[0]))]
    assert block > 1 or min(longest) > 0
    if start == 0:
        assert {len(plan) for plan in plans} == {len(ranks[0])}
        assert plans[0].steps_per_epoch == -(-count // batch)
    assert len(ranks[0]) <= len(plans[0])


@settings(max_examples=25)
@given(st.integers(20, 200), st.sampled_from([1, 2, 8]), st.data())
def test_sizes_may_change_at_any_step_of_three_epochs(count: int, block: int, data: st.DataObject) -> None:
    order = Order(count, "d", 2, block, endless=False)
    position, rows = 0, list[int]()
    while position < 3 * count:
        world_size = data.draw(st.integers(1, 4))
        batch = block * data.draw(st.integers(world_size, 30))
        micro = data.draw(st.integers(1, 9))
        plans = [Plan(order, batch, micro, rank, world_size) for rank in range(world_size)]
        ranks = taken(plans, position)
        steps = data.draw(st.integers(1, 3))
        ends = sorted({piece.position for piece in ranks[0]} - {position})[:steps]
        for rank in ranks:
            done = next(i for i, piece in enumerate(rank) if piece.position == ends[-1]) + 1
            for piece in rank[:done]:
                rows += order.rows(np.arange(piece.start, piece.stop)).tolist()
        position = ends[-1]
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


@examples
@given(st.integers(1, 100), st.integers(1, 40), st.integers(0, 400), st.data())
def test_the_length_of_an_evaluation_is_that_of_its_filled_steps(
    count: int, batch: int, position: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, batch))
    plan = Plan(Sequential(count), batch, data.draw(st.integers(1, batch)), 0, world_size)
    assert len(plan) == len(list(plan.micro_batches(position // count * count)))


# The iteration that a worker process joins


def test_two_iterators_at_a_time_read_two_epochs(root: Path) -> None:
    stream = stream_of(root)
    options: Any = {"batch_size": None, "num_workers": 3, "persistent_workers": True}
    loaders = [DataLoader(stream, **options) for _ in range(2)]
    for turn in range(2):
        found: list[list[str]] = [[], []]
        for batches in zip(*loaders, strict=True):
            for digests, batch in zip(found, batches, strict=True):
                digests.append(digest(batch))
        epochs = [list(expected(root, (2 * turn + i) * IMAGES)) for i in range(2)]
        assert sorted(found) == sorted(epochs)  # whose workers begin first is open
    assert [digest(batch) for batch in stream] == list(expected(root, 4 * IMAGES))
    assert stream.position == 5 * IMAGES


def test_a_generator_that_is_reset_before_each_iteration_repeats_no_epoch(root: Path) -> None:
    loader = DataLoader(stream_of(root), batch_size=None, num_workers=2)
    for epoch in range(3):
        torch.manual_seed(0)
        assert [digest(batch) for batch in loader] == list(expected(root, epoch * IMAGES))


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_the_position_and_copies_do_not(root: Path, method: str) -> None:
    stream = stream_of(root)
    stream.set_epoch(1)
    copy = pickle.loads(pickle.dumps(stream))
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert digest(next(iter(loader))) == next(expected(root, IMAGES))
    assert stream.position == 2 * IMAGES
    assert copy.position == IMAGES


def test_threads_may_ask_for_the_state_at_any_time(root: Path) -> None:
    """The lock of a file does not exclude the threads of one process."""
    stream = stream_of(root)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(200):
                assert stream.state_dict()["position"] >= 0
                assert stream.begin() < stream.position
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stream.position == 6 * 200 * IMAGES  # no thread overwrote the position of another
    pid = os.fork()
    if not pid:  # a lock that another thread held at the fork does not block the child
        os._exit(0 if stream.position >= 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
