"""`sa1b.Loader`: the stream's own sequence by threads; nothing lost, nothing left behind."""

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import read_tasks
from sa1b.stream.dataset import PendingBatch, PickedSample, ResumeError
from sa1b.stream.sample import SampleMasks
from sa1b.synthetic import source_tars as synthetic
from tests.shards import tiny
from tests.stream.test_stream import SMALL, assert_equal, take


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    synthetic.write_tar(folder / "sa_000001.tar", images=17, first_id=100, long_side=160)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
    write_dataset(folder / "root", read_tasks(folder / "root"))
    return folder / "root"


def stream(root: Path, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(root, **{"global_batch": 6, "micro_batch": 3, **SMALL, **options})


def first(loader: sa1b.Loader, count: int) -> list[sa1b.Batch]:
    found = []
    for batch in loader:
        found.append(batch)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_the_sequence_is_the_streams(root: Path, threads: int, prefetch: int) -> None:
    loader = sa1b.Loader(stream(root), threads=threads, prefetch=prefetch, quiet=True)
    for one, other in zip(take(stream(root), 12), first(loader, 12), strict=True):
        assert_equal(one, other)


def test_masks_come_as_pixels_if_asked_for(root: Path) -> None:
    (batch,) = first(sa1b.Loader(stream(root), dense=32, quiet=True), 1)
    assert torch.equal(batch.dense, batch.masks.dense(32))
    (plain,) = first(sa1b.Loader(stream(root), quiet=True), 1)
    assert plain.dense is None


@pytest.mark.parametrize("hold", [0, 5])
def test_pixels_of_a_reader_are_those_of_anybody(root: Path, hold: int) -> None:
    loader = sa1b.Loader(stream(root, flip=0.5), dense=32, read_only=True, threads=2, quiet=True)
    held: deque[sa1b.Batch] = deque()
    for number, batch in enumerate(loader):
        held.append(batch)
        for one in held:
            assert torch.equal(one.dense, one.masks.dense(32))
        if len(held) > hold:
            held.popleft()
        del batch, one
        if number == 12:
            break


def test_a_state_of_something_else_is_refused(root: Path) -> None:
    with pytest.raises(ResumeError, match="no state of a stream: bytes_sha256, ids_sha"):
        sa1b.Loader(stream(root), quiet=True).load_state_dict({"position": 3})


def test_prefetched_batches_do_not_count_in_the_state(root: Path) -> None:
    loader = sa1b.Loader(stream(root), prefetch=5, quiet=True)
    batches = first(loader, 4)
    assert loader.state_dict()["position"] == batches[-1].position == 12
    again = sa1b.Loader(stream(root), quiet=True)
    again.load_state_dict(loader.state_dict())
    for one, other in zip(take(stream(root), 8)[4:], first(again, 4), strict=True):
        assert_equal(one, other)
    # The same loader goes on behind the last batch taken, too.
    assert_equal(first(loader, 1)[0], take(stream(root), 5)[4])


def test_evaluation_ends_by_itself(root: Path) -> None:
    batches = list(sa1b.Loader(stream(root, order="sequential"), quiet=True))
    ids = torch.cat([batch.ids[batch.valid] for batch in batches])
    assert ids.tolist() == list(range(100, 117))


def test_closing_early_leaves_no_thread(root: Path) -> None:
    before = threading.active_count()
    batches = iter(sa1b.Loader(stream(root), threads=8, prefetch=8, quiet=True))
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_an_error_in_a_thread_reaches_the_caller_with_its_sample(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(annotations: Any, *arguments: Any, **more: Any) -> SampleMasks:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("sa1b.stream.dataset.pick_masks", broken)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no such luck") as error:
        first(sa1b.Loader(stream(root), quiet=True), 1)
    (note,) = error.value.__notes__
    assert "at position 0: image 1" in note
    assert "sa1b-000001-" in note
    assert threading.active_count() == before


def test_a_stalled_sample_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = PendingBatch.pick

    def slow(self: PendingBatch, i: int) -> PickedSample:
        time.sleep(0.5 if self.piece.start + i == 1 else 0)
        return whole(self, i)

    monkeypatch.setattr(PendingBatch, "pick", slow)
    streamed = stream(root)
    first(sa1b.Loader(streamed, stall_seconds=0.1, quiet=True), 1)
    rows, _ = streamed.rows(next(streamed.plan.micro_batches(0)))
    assert f"waiting for {streamed.where(rows[1])} for over 0.1 s" in capsys.readouterr().err


def test_stages_are_counted_and_the_limiting_one_is_named(root: Path) -> None:
    loader = sa1b.Loader(stream(root), prefetch=1, quiet=True)
    first(loader, 4)
    stats = loader.stats()
    assert stats["read"]["items"] >= 12
    assert stats["pick"]["items"] >= stats["decode"]["items"] >= 12
    assert stats["read"]["bytes"] > 0
    assert stats["limiting"] in ("read", "pick", "decode")
    assert 1 / 3 <= stats["limiting_share"] <= 1
    assert 0 <= stats["collate"]["depth"] <= 1  # batches that were ready when one was asked for
    assert 0 <= stats["read"]["depth"] <= 6  # samples that waited for a thread
    assert stats["waited_seconds"] > 0


def test_memory_is_said_at_the_start(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sa1b.Loader(stream(root), threads=3, prefetch=2)
    assert "3 threads, 3 batches of up to 3 images" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(root: Path) -> None:
    with pytest.raises(ValueError, match="torch sees no GPU"):
        sa1b.Loader(stream(root), device="cuda")
