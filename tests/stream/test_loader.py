"""`sa1b.Loader`: the sequence of the stream, read by threads, without losses or leftovers."""

import contextlib
import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sa1b
from sa1b.errors import UsageError
from sa1b.masks import raster
from sa1b.shards.sample import PendingRead
from sa1b.storage.errors import UnavailableError
from sa1b.stream import decode, pending
from sa1b.stream.loader import _note
from sa1b.stream.maker import StalledError
from sa1b.stream.plan import ResumeError
from sa1b.stream.sample import SampleMasks
from sa1b.stream.stats import STAGES
from sa1b.stream.transform import Frame, TransformError, Visit
from tests.shards import tiny
from tests.storage.service import Service
from tests.stream.test_processes import Fails
from tests.stream.test_stream import SMALL, assert_equal, take


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    tiny.synthesize(folder / "sa_000001.tar", images=17, first_id=100, long_side=160)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
    return folder / "root"


def stream(root: Path, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(root, **{"global_batch": 6, "micro_batch": 3, "epochs": None, **SMALL, **options})


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


@pytest.mark.parametrize("hold", [0, 1, 5])
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
    with pytest.raises(ResumeError, match="has no block_size, bytes_sha256, epochs, ids_sha"):
        sa1b.Loader(stream(root), quiet=True).load_state_dict({"position": 3})


def test_prefetched_batches_do_not_count_in_the_state(root: Path) -> None:
    loader = sa1b.Loader(stream(root), prefetch=5, quiet=True)
    batches = first(loader, 4)
    assert loader.state_dict()["position"] == batches[-1].position == 12
    again = sa1b.Loader(stream(root), quiet=True)
    again.load_state_dict(loader.state_dict())
    for one, other in zip(take(stream(root), 8)[4:], first(again, 4), strict=True):
        assert_equal(one, other)
    # The same loader resumes after the last batch taken, too.
    assert_equal(first(loader, 1)[0], take(stream(root), 5)[4])


def test_evaluation_ends_by_itself(root: Path) -> None:
    batches = list(sa1b.Loader(stream(root, order="sequential", epochs=1), quiet=True))
    ids = torch.cat([batch.ids[batch.valid] for batch in batches])
    assert ids.tolist() == list(range(100, 117))


def test_closing_early_leaves_no_thread(root: Path) -> None:
    before = set(threading.enumerate())
    batches = iter(sa1b.Loader(stream(root), threads=8, prefetch=8, quiet=True))
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before


def test_an_error_in_a_thread_reaches_the_caller_with_its_sample(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(annotations: Any, *arguments: Any, **more: Any) -> SampleMasks:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("sa1b.stream.pending.pick_masks", broken)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no such luck") as error:
        first(sa1b.Loader(stream(root), processes=1, quiet=True), 1)
    (note,) = error.value.__notes__
    assert "at position 0: image 1" in note
    assert "sa1b-000001-" in note
    assert not set(threading.enumerate()) - before


class Waits:
    """A transform that waits at one image until an event."""

    def __init__(self, image_id: int) -> None:
        self.image_id, self.began, self.goes_on = image_id, threading.Event(), threading.Event()

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        if visit.image_id == self.image_id:
            self.began.set()
            assert self.goes_on.wait(600)
        return frame


def test_a_stalled_sample_is_named(root: Path, said: pytest.LogCaptureFixture) -> None:
    (expected,) = take(stream(root), 1)
    waits = Waits(int(expected.ids[1]))
    loader = sa1b.Loader(stream(root, transform=waits), processes=1, stall_seconds=0.1, quiet=True)
    observer = threading.Thread(target=lambda: (until(lambda: said.messages), waits.goes_on.set()))
    observer.start()
    assert torch.equal(first(loader, 1)[0].ids, expected.ids)
    observer.join()
    (line,) = set(said.messages)
    assert line.startswith(f"sa1b.Loader: waiting for image {waits.image_id} in {root}/sa1b-000001-")
    assert line.endswith(" for over 0.1 s")


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stage", ["read", "decode"])
def test_a_thread_that_hangs_ends_the_iteration_after_the_deadline(
    root: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    streamed, hangs, ends = stream(root, deadline=0.1), threading.Event(), threading.Event()

    def hanging(*_: object) -> None:
        hangs.set()
        ends.wait()

    monkeypatch.setattr("sa1b.stream.loader._LATE", 0.1)
    monkeypatch.setattr("sa1b.stream.maker._CLOSING", 0.1)
    loader = sa1b.Loader(streamed, threads=1, processes=1, quiet=True)
    if stage == "read":
        monkeypatch.setattr("sa1b.storage.local.OpenFile.read", hanging)
        expected: type[Exception] = UnavailableError
    else:
        monkeypatch.setattr(streamed.decoder, "decode", hanging)
        expected = StalledError
    readings: list[str | None] = []
    observer = threading.Thread(target=lambda: (hangs.wait(), readings.append(loader.reading())))
    observer.start()
    where = streamed.where(0)
    with pytest.raises(expected, match=rf"{where}: is not {stage}d? after \d+ s, and the deadline is 0.1 s:"):
        next(iter(loader))
    observer.join()
    assert readings == [where if stage == "read" else f"{where} to be decoded"]
    ends.set()
    monkeypatch.undo()
    assert len(first(loader, 3)) == 3  # the memory that the thread may still write into is not used again


def test_stages_are_counted_and_the_limiting_one_is_named(root: Path) -> None:
    loader = sa1b.Loader(stream(root), prefetch=1, quiet=True)
    first(loader, 4)
    stats = loader.stats()
    assert stats["read"]["items"] >= 12
    assert stats["pick"]["items"] >= stats["decode"]["items"] >= 12
    assert stats["read"]["bytes"] > 0
    assert stats["collate"]["items"] >= stats["device"]["items"] >= 4
    assert stats["limiting"] in STAGES
    assert stats[stats["limiting"]]["seconds"] == max(stats[name]["seconds"] for name in STAGES)
    assert 1 / len(STAGES) <= stats["limiting_share"] <= 1
    assert 0 <= stats["ready_batches"] <= 2
    assert stats["waited_seconds"] > 0


def test_memory_is_said_at_the_start(root: Path, said: pytest.LogCaptureFixture) -> None:
    sa1b.Loader(stream(root, image_size=64, masks=4), threads=3, processes=1, prefetch=2, dense=512)
    line = said.messages[-1]
    images = 4 * 3 * 64 * 64 * 3 / 1e6
    assert f"3 threads, 4 batches of up to 3 images, {images:,.0f} MB of memory for images" in line
    assert f"and {2 * 3 * 4 * 512 * 512 / 1e6:,.0f} MB for masks" in line


def test_dense_masks_of_held_batches_take_more_memory_and_stay(root: Path) -> None:
    loader = sa1b.Loader(stream(root), dense=32, read_only=True, threads=2, quiet=True)
    held = first(loader, 7)
    assert len({batch.dense.data_ptr() for batch in held}) == 7
    for batch in held:
        assert torch.equal(batch.dense, batch.masks.dense(32))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_work_in_flight_is_bounded_by_prefetch(root: Path, prefetch: int) -> None:
    begun: set[int] = set()

    def noted(frame: Frame, visit: Visit) -> Frame:
        begun.add(visit.image_id)
        return frame

    whole = take(stream(root), 10)
    loader = sa1b.Loader(stream(root, transform=noted), threads=4, processes=1, prefetch=prefetch, quiet=True)
    batches = iter(loader)
    assert not begun
    for taken in range(1, 4):
        next(batches)
        ahead = {one for batch in whole[: taken + prefetch] for one in batch.ids.tolist()}
        until(lambda: begun == ahead)  # noqa: B023
        time.sleep(0.05)
        assert begun == ahead
    batches.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_raised_at_the_batch_that_it_belongs_to(root: Path, processes: int) -> None:
    expected = take(stream(root), 2)
    third = take(stream(root), 3)[2]
    fails = Fails(int(third.ids[0]))
    loader = sa1b.Loader(stream(root, transform=fails), processes=processes, prefetch=4, quiet=True)
    batches = iter(loader)
    for one in expected:
        assert_equal(next(batches), one)
    with pytest.raises(TransformError, match="no such luck") as error:
        next(batches)
    assert any(note.startswith("at position 6: image ") for note in error.value.__notes__)
    assert loader.state_dict()["position"] == expected[-1].position == 6
    with pytest.raises(StopIteration):
        next(batches)


def test_an_iterator_that_is_dropped_ends_its_threads(root: Path) -> None:
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    batches = iter(sa1b.Loader(stream(root), threads=4, prefetch=4, dense=16, quiet=True))
    next(batches)
    assert set(threading.enumerate()) - before
    del batches
    gc.collect()
    assert set(threading.enumerate()) - before == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(root: Path) -> None:
    with pytest.raises(ValueError, match="torch finds no GPU"):
        sa1b.Loader(stream(root), device="cuda")


def test_two_users_of_one_dataset_at_a_url_do_not_end_each_others_reads(root: Path) -> None:
    """The end of the validation leaves the reads of the training alone."""
    with Service("range_server", root.parent) as server:
        dataset = sa1b.open(f"{server.url}/root")
        training = sa1b.Loader(stream(dataset, epochs=1), prefetch=3, quiet=True)
        validation = sa1b.Loader(stream(dataset, epochs=1), quiet=True)
        ids = []
        for batch in training:
            ids += batch.ids[batch.valid].tolist()
            for _ in validation:
                break
        assert sorted(ids) == dataset.table.image_id.tolist()


class OwnError(BaseException):
    """An error that `except Exception` does not catch."""


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt, StopIteration, OwnError])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("stage", "at"),
    [
        *((stage, at) for stage in ("read", "pick") for at in (0, 2)),
        ("decode", 0),
        ("collate", 0),
        ("raster", 0),
    ],
)
def test_an_error_of_any_stage_is_delivered_with_its_sample(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    at: int,
    error: type[BaseException],
    batched: bool,
) -> None:
    """Also with a batched decoder, which waits for all samples of a batch."""
    own = stream(root, epochs=1)
    piece = next(own.plan.micro_batches(0))
    rows = own.rows(np.arange(piece.start, piece.stop))
    sample = own.dataset[rows[at]]

    def raised(*_: object) -> None:
        raise error("this one")

    def fail(module: Any, name: str, is_it: Callable[..., object]) -> None:
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **more: (is_it(*a) and raised()) or whole(*a, **more))

    fail(
        *{
            "read": (PendingRead, "result", lambda read: read.location.image_id == sample.image_id),
            "pick": (
                pending,
                "pick_masks",
                lambda found, *_: found.to_json() == sample.annotations.to_json(),
            ),
            "decode": (decode, "decode", lambda jpeg, *_: jpeg == sample.jpeg),
            "collate": (pending, "collate", lambda *_: True),
            "raster": (raster, "rasterize_frame", lambda runs, *_: next(calls) == at),
        }[stage]
    )
    monkeypatch.setattr(type(own.decoder), "batched", batched, raising=False)
    calls = itertools.count()
    threads = 1 if stage == "raster" else 2
    loader = sa1b.Loader(own, threads=threads, processes=1, dense=16, quiet=True)
    with pytest.raises((error, RuntimeError)) as caught:
        list(loader)
    found = caught.value.__cause__ or caught.value  # a generator turns StopIteration into a RuntimeError
    assert (type(found), str(found)) == (error, "this one")
    if isinstance(found, Exception):
        (note,) = found.__notes__
        before = f"at position {at}: " if stage in ("read", "pick") else "in the batch of positions 0 to 2: "
        assert note.startswith(f"{before}image {sample.image_id} in ")


def test_a_stream_of_a_relative_path_survives_a_change_of_the_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    own = stream(Path("root"), epochs=1)
    monkeypatch.chdir(tmp_path)
    assert len(take(own, 99)) == 6


def test_iterators_that_are_globals_of_a_script_end_silently(root: Path) -> None:
    with Service("range_server", root.parent) as server:
        program = (
            f"import sa1b; stream = sa1b.Stream({server.url + '/root'!r}, global_batch=2, image_size=32, "
            "masks=1, epochs=None); batches = iter(sa1b.Loader(stream, threads=2, quiet=True)); own = iter(stream); "
            "print(next(batches).positions.tolist(), next(own).positions.tolist())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[0, 1] [2, 3]\n", "")


def test_threads_may_ask_for_state_and_text_while_others_iterate(root: Path) -> None:
    """A monitor of the user asks at any time, also while worker processes begin iterations."""
    own = stream(root, epochs=1)
    loader = sa1b.Loader(own, threads=2, quiet=True)
    errors: list[BaseException] = []
    ended = threading.Event()

    def ask() -> None:
        try:
            while not ended.is_set():
                with contextlib.suppress(UsageError):  # workers read
                    assert own.state_dict().keys() == loader.state_dict().keys()
                assert own.position % 17 == 0
                assert "position" in repr(own) + repr(loader)
                loader.stats(), loader.reading()
        except BaseException as error:
            errors.append(error)

    monitors = [threading.Thread(target=ask) for _ in range(3)]
    for monitor in monitors:
        monitor.start()
    try:
        for _ in range(4):
            assert sum(len(batch) for batch in loader) == 17
        workers = torch.utils.data.DataLoader(own, batch_size=None, num_workers=2)
        assert sum(len(batch) for batch in workers) == 17
    finally:
        ended.set()
        for monitor in monitors:
            monitor.join()
    assert errors == []
    assert own.position == 5 * 17


def test_a_worker_that_is_forked_while_a_thread_holds_locks_finds_them_free(root: Path) -> None:
    own = stream(root, epochs=1)
    with own.stats._lock, own.damage_log._lock, own.dataset.reader._lock:  # as other threads, for a moment
        loader = torch.utils.data.DataLoader(
            own, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=120
        )
        workers = iter(loader)
    assert sum(len(batch) for batch in workers) == 17


def test_the_line_of_a_loader_is_logged_once_and_visible_where_logging_is_not_set_up(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("sa1b")
    monkeypatch.setattr(log, "propagate", False)  # to the handlers of pytest
    _note.cache_clear()
    for _ in range(2):
        sa1b.Loader(stream(root), threads=2)
        sa1b.Loader(stream(root), threads=1, quiet=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sa1b.Loader: 2 threads, ")

    _note.cache_clear()
    log.addHandler(caplog.handler)
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()
    try:
        sa1b.Loader(stream(root), threads=2)
    finally:
        log.removeHandler(caplog.handler)
        log.manager._clear_cache()
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [("sa1b", "INFO", line)]
    assert capsys.readouterr().err == ""

    _note.cache_clear()
    monkeypatch.setattr(log, "level", logging.ERROR)
    sa1b.Loader(stream(root), threads=2)
    assert capsys.readouterr().err == ""
