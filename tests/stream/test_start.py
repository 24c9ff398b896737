"""The cost of a start and a resume: the same at every position, and independent of the dataset's size."""

import mmap
import os
import pickle
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b import hashing
from sa1b.kernel import kernel, plain
from sa1b.shards.manifest import table_name
from sa1b.storage.errors import MissingError
from sa1b.stream import dataset
from sa1b.stream.order import Order
from tests.stream.recorded import RECIPE, digest, make_root, sequence

IMAGES, BATCH = 20, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("start"), IMAGES)


def stream_of(root: Path, position: int = 0, **options: Any) -> sa1b.Stream:
    stream = sa1b.Stream(
        root,
        **{
            "global_batch": BATCH,
            "epochs": None,
            "damage_log": root.parent / "damage_log",
            **RECIPE,
            **options,
        },
    )
    stream.load_state_dict({**stream.state_dict(), "position": position})
    return stream


# Cost


class Work:
    """Positions whose rows were computed, and bytes and ranges that were read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.positions: list[int] = []
        self.ranges: list[int] = []
        rows, pread = Order.rows, os.pread

        def counted_rows(order: Order, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            self.positions += positions.tolist()
            return rows(order, positions)

        def counted_pread(descriptor: int, length: int, offset: int) -> bytes:
            self.ranges.append(length)
            return pread(descriptor, length, offset)

        patch.setattr(Order, "rows", counted_rows)
        patch.setattr(os, "pread", counted_pread)


NEAR = [0, IMAGES * 9 // 10 // BATCH * BATCH]
FAR = [IMAGES * 1000, IMAGES * 1000 + NEAR[1]]


@pytest.mark.parametrize("position", [*NEAR, *FAR])
def test_the_first_batch_costs_the_same_anywhere_in_the_order(
    root: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    stream = stream_of(root, position)
    work = Work(monkeypatch)
    next(iter(stream))
    # What is read ahead of the second batch counts too; nothing in front of the first is touched.
    assert sorted(work.positions) == list(range(position, position + len(work.positions)))
    assert BATCH <= len(work.positions) <= 2 * BATCH
    assert 1 <= len(work.ranges) <= len(work.positions)


@pytest.mark.parametrize("position", [*NEAR, *FAR])
def test_the_loader_reads_no_more_than_it_keeps_ahead(
    root: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    loader = sa1b.Loader(stream_of(root, position), threads=2, prefetch=2, quiet=True)
    work = Work(monkeypatch)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert sorted(work.positions) == list(range(position, position + len(work.positions)))
    assert BATCH <= len(work.positions) <= 4 * BATCH


def test_opening_looks_at_no_shard(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dataset.json", table_name(root)):
        (tmp_path / name).write_bytes((root / name).read_bytes())

    def listed(*arguments: Any) -> Any:
        raise AssertionError("a folder was listed")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, listed)
    stream = stream_of(tmp_path)
    assert len(stream.view) == IMAGES
    with pytest.raises(MissingError, match=r"sa1b-000001-\d+\.tar"):
        next(iter(stream))


def test_what_a_worker_gets_does_not_grow_with_the_dataset(root: Path, tmp_path: Path) -> None:
    """A worker maps the sample table itself: one copy for all processes of a machine, no Python objects."""
    small, large = stream_of(root), stream_of(make_root(tmp_path, 3 * IMAGES))
    sizes = [len(pickle.dumps(stream)) for stream in (small, large)]
    assert max(sizes) < 2000
    assert abs(sizes[0] - sizes[1]) < 100  # the root's path
    for column in (large.dataset.table.image_id, large.dataset.table.offset):
        assert not column.flags.owndata
        assert isinstance(column.base, mmap.mmap) or isinstance(column.base.obj, mmap.mmap)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A compiled loop of a stream that is not loaded yet."""
    loop: Any = kernel(plain(hashing._mix_one))
    monkeypatch.setattr(hashing, "_mix_one", loop)
    dataset.load_compiled_code.cache_clear()
    return loop


def test_compiled_code_is_loaded_before_worker_processes_are_forked(root: Path, loop: Any) -> None:
    """So that they share its memory and do not load it themselves."""
    stream = stream_of(root)
    assert not loop.signatures  # a process that never forks does not load it for workers
    next(iter(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")))
    assert loop.signatures


def test_a_fork_succeeds_where_compiled_code_cannot_be_loaded(
    root: Path, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, printed = [], []

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError("no space left on device")

    monkeypatch.setattr(hashing, "_mix_one", fails)
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    stream_of(root)
    for _ in range(2):
        if not (child := os.fork()):
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(calls) == 1  # later forks do not try again
    assert not printed


# Other bytes of the same images


def test_another_sharding_is_said_and_every_batch_stays_the_same(root: Path, tmp_path: Path) -> None:
    other = make_root(tmp_path, IMAGES, per_shard=8)
    assert len(sa1b.open(other).shards) != len(sa1b.open(root).shards)
    state = stream_of(root).state_dict(next(iter(stream_of(root))))
    stream = stream_of(other)
    with pytest.warns(UserWarning, match="has changed since the state was saved"):
        stream.load_state_dict(state)
    expected = [digest(b) for b in islice(sequence(root, 9, global_batch=BATCH, micro_batch=BATCH), 9)]
    assert [digest(batch) for batch in islice(stream, 8)] == expected[1:]


def test_another_image_size_is_said_and_ids_and_masks_stay_the_same(root: Path, tmp_path: Path) -> None:
    other = make_root(tmp_path, IMAGES, image_size=40, quality=80)
    state = stream_of(root).state_dict(next(iter(stream_of(root))))
    stream = stream_of(other)
    with pytest.warns(UserWarning, match="has changed since the state was saved"):
        stream.load_state_dict(state)
    before = list(islice(stream_of(root, BATCH), 8))
    for one, now in zip(before, islice(stream, 8), strict=True):
        for name in ("ids", "mask_ids", "boxes", "points", "areas", "source_sizes"):
            assert torch.equal(getattr(one, name), getattr(now, name)), name
        assert torch.equal(one.masks.runs, now.masks.runs)
        assert not torch.equal(one.images, now.images)


def test_the_same_bytes_are_resumed_without_a_word(root: Path) -> None:
    stream = stream_of(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.load_state_dict(stream.state_dict(next(iter(stream))))
