"""`sa1b.Loader`: the stream read by threads of one process, batches ready on the device ahead of time.

    loader = sa1b.Loader(stream, threads=8, device="cuda", dense=256)
    for batch in loader:
        ...
        save({"stream": loader.state_dict()})

Reading, decoding JPEG and zstandard and walking runs release the GIL, so threads share one copy of the
sample table and write images straight into the batch's memory: pinned slots on their way to a GPU, guarded by
events. Copies and rasters run on a stream of their own. The sequence is that of `sa1b.Stream` exactly.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sa1b.stream.batch import Batch
from sa1b.stream.dataset import Begun, Stream
from sa1b.stream.memory import Canvas, Memory
from sa1b.stream.plan import MicroBatch
from sa1b.stream.pool import Pool
from sa1b.stream.sample import SampleMasks

_CUDA: Any = torch.cuda  # parts of it have no types


@dataclass(slots=True)
class _Slot:
    """Memory for the images of one batch; on its way to a GPU until `copied` has happened."""

    images: Tensor
    copied: Any = None  # torch.cuda.Event


@dataclass(slots=True)
class _Pending:
    """A batch that threads are working on."""

    begun: Begun
    slot: _Slot
    samples: list[Future[SampleMasks]]


class Loader:
    """Iterates over the batches of a stream, on `device`.

    Args:
        stream: what to read, and from which position on.
        threads: that read and decode; by default one per core.
        ahead: batches worked on before they are asked for, at least 1.
        device: where batches go; "cuda" copies from pinned memory on a stream of its own.
        dense: also rasterise the masks on the device at this size: `batch.dense`, see `Batch`.
        read_only: you never write into `batch.dense`. On a CPU its memory is then cleared only where the
            masks before were, in a fifth of the time at 1024 pixels; what you write shows in later batches.
        stall_seconds: a sample that takes longer is named on stderr, with its shard.
        quiet: do not print the memory it takes.

    Raises:
        ValueError: threads or ahead below 1, or a device that is not there.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        threads: int | None = None,
        ahead: int = 2,
        device: torch.device | str = "cpu",
        dense: int | None = None,
        read_only: bool = False,
        stall_seconds: float = 60.0,
        quiet: bool = False,
    ) -> None:
        self.stream = stream
        self.threads = threads if threads is not None else os.cpu_count() or 1
        self.ahead = ahead
        self.device = torch.device(device)
        self.dense = dense
        self.read_only = read_only
        self.stall_seconds = stall_seconds
        if self.threads < 1 or ahead < 1:
            raise ValueError(f"threads={self.threads} and ahead={ahead} must be at least 1")
        self._cuda = self.device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise ValueError("device='cuda', but torch sees no GPU here; device='cpu' works everywhere")
        self._state = stream.state_dict()
        size = stream.recipe.image_size
        images = stream.plan.micro_batch
        # Those that are worked on, the caller's, and the one that it still holds while it asks for the next.
        self._images = Memory(images * size * size * 3, ahead + 3)
        self._canvas = Canvas(images * stream.recipe.masks, dense or 0, 2)
        if not quiet:
            # On the way to a GPU one batch more is still being copied.
            kind, slots = ("pinned", ahead + 2) if self._cuda else ("ordinary", ahead + 1)
            print(
                f"sa1b.Loader: {self.threads} threads, {slots} batches of up to {images} images, "
                f"{slots * images * size * size * 3 / 1e6:,.0f} MB of {kind} memory for images"
                + (f", {self._canvas.capacity / 1e6:,.0f} MB a batch for masks" if dense else "")
            )

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from where the loader stands; iterating again goes on behind the last one taken."""
        self.stream.position = self._state["position"]
        pieces = self.stream.plan.micro_batches(self.stream.position)
        free: deque[_Slot] = deque()
        pending: deque[_Pending] = deque()
        side = _CUDA.Stream(self.device) if self._cuda else None
        pool = Pool(self.threads)
        try:
            while True:
                while len(pending) < self.ahead + 1 and (piece := next(pieces, None)) is not None:
                    pending.append(self._submit(pool, piece, self._take_slot(free)))
                if not pending:
                    return
                self._look(pending)
                one = pending.popleft()
                batch = self._finish(one, side, pool)
                if self._cuda:
                    free.append(one.slot)
                self._state = self.stream.state_dict(batch)
                yield batch
        finally:
            for one in pending:
                one.begun.cancel()
            pool.shutdown()
            self.stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Where to go on behind the last batch that was taken; prefetched ones do not count."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; see `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._state = self.stream.state_dict()

    def stats(self) -> dict[str, Any]:
        """What each stage did since the stream was made, and which one limits; see sa1b.stream.stages."""
        return self.stream.stages.snapshot()

    def _take_slot(self, free: deque[_Slot]) -> _Slot:
        # The oldest slot's copy ended long ago, or ends first.
        if len(free) > 1:
            slot = free.popleft()
            slot.copied.synchronize()
            return slot
        size = self.stream.recipe.image_size
        shape = (self.stream.plan.micro_batch, size, size, 3)
        # In ordinary memory the batch itself is the slot, and the caller's for as long as it is held.
        return _Slot(
            torch.empty(shape, dtype=torch.uint8, pin_memory=True) if self._cuda else self._images.take(shape)
        )

    def _submit(self, pool: Pool, piece: MicroBatch, slot: _Slot) -> _Pending:
        begun = self.stream.begin(piece)
        arrays = slot.images.numpy()
        draw = self.stream.draw
        samples = [pool.submit(partial(draw, begun, i, arrays[i])) for i in range(len(begun.rows))]
        return _Pending(begun, slot, samples)

    def _finish(self, one: _Pending, side: Any, pool: Pool) -> Batch:
        began = time.perf_counter()
        self._watch(one)
        self.stream.stages.waited(time.perf_counter() - began)
        samples = [future.result() for future in one.samples]
        images = one.slot.images[: len(samples)]
        with self.stream.stages.busy("collate"):
            batch = one.begun.collate(images, samples)
        if side is None:
            with self.stream.stages.busy("device"):
                return self._dense(batch, pool) if self.device.type == "cpu" else self._on_device(batch)
        with self.stream.stages.busy("device", images.numel()), torch.cuda.stream(side):
            # The images lie in pinned memory already; the ragged rest is small.
            batch = self._on_device(batch.pinned_but_images())
            one.slot.copied = _CUDA.Event()
            one.slot.copied.record(side)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(side)
        batch.record_stream(current)
        return batch

    def _dense(self, batch: Batch, pool: Pool) -> Batch:
        """With the masks as pixels, drawn by the loader's threads."""
        if self.dense is None:
            return batch
        out, boxes = self._canvas.take_drawn(len(batch.masks))
        drawings = batch.masks.drawings(self.dense, out, boxes if self.read_only else None)
        for drawing in [pool.submit(draw, first=True) for draw in drawings]:
            drawing.result()
        return replace(batch, dense=out)

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        return batch if self.dense is None else replace(batch, dense=batch.masks.dense(self.dense))

    def _look(self, pending: deque[_Pending]) -> None:
        """Count what waits where."""
        futures = [future for one in pending for future in one.samples]
        waiting = sum(not future.running() and not future.done() for future in futures)
        ready = sum(all(future.done() for future in one.samples) for one in pending)
        self.stream.stages.queued("read", waiting)
        self.stream.stages.queued("collate", min(ready, self.ahead))

    def _watch(self, one: _Pending) -> None:
        """Wait for the samples of a batch; name those that take suspiciously long."""
        left = set(one.samples)
        while left:
            done, left = wait(left, timeout=self.stall_seconds, return_when="FIRST_EXCEPTION")
            if any(future.exception() for future in done):
                return
            if not done:
                stalled = next(i for i, future in enumerate(one.samples) if future in left)
                where = self.stream.where(one.begun.rows[stalled])
                print(f"sa1b.Loader: waiting for {where} for over {self.stall_seconds:g} s", file=sys.stderr)
