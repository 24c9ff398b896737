"""`sa1b.Loader`: reads a stream with threads of one process and prefetches batches to the device.

    loader = sa1b.Loader(stream, threads=8, device="cuda", dense=256)
    for epoch in range(3):
        for batch in loader:
            ...
            save({"stream": loader.state_dict()})

There are three stages. Each stage works on later batches than the stage after it:

    pick        waits for the bytes of a sample, which are read in the background, and chooses its masks
    decode      decodes the JPEG into the batch's memory, which is pinned if the device is a GPU, or
                decodes and resizes all images of the batch on the GPU (`decode="gpu"`)
    to device   collates; on a GPU also packs and copies, on a separate CUDA stream; rasterises the masks

One pool of threads runs all stages, the oldest batch first. Reading, decoding JPEG and zstandard, and
processing runs release the GIL, so threads can share one copy of the sample table. The caller only waits
until a batch is complete and makes its own CUDA stream wait for it. The sequence is exactly that of
`sa1b.Stream`.

Measured on a CPU with 3 threads: the caller computes for 0.4 s on each batch of 8 images of 1500 pixels with
32 masks at 256, and waits 1.3 ms for a batch (median). If collating and rasterising start only when the
caller asks for the batch, it waits 16 ms.
"""

import contextlib
import logging
from collections.abc import Generator
from functools import cache
from typing import Any, Literal

import torch

from sa1b.arguments import BadValue, check_arguments, number, whole_number
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.decoders import decoder_for
from sa1b.stream.iterations import closed_at_exit
from sa1b.stream.pipeline import BatchPipeline, PipelineSettings
from sa1b.stream.ragged import BufferPool, MaskBufferPool, SideStream
from sa1b.stream.stats import Snapshot
from sa1b.workers import available_cpus


class Loader:
    """Iterates over the batches of a stream, on `device`.

    Args:
        stream: the stream or mixture to read, from its current position.
        threads: threads that read and decode; by default one for each CPU that this rank may use, see
            sa1b.workers.available_cpus, and at most 8: 16 cores read 604 images/s with 8, 554 with 16.
        prefetch: batches that are in flight or complete while the caller uses another one, at least 1.
        device: device of the batches; "cuda" copies from pinned memory on a separate CUDA stream.
        dense: also rasterise the masks on the device at this size, in pixels: `batch.dense`, see `Batch`.
        decode: "cpu", or "gpu": JPEG files are decoded and resized on `device`, with the first library of
            sa1b.stream.jpeg_libraries that is installed (`pip install 'sa1b[gpu]'`). The stream takes the
            decoder over, and its state records it, because pixels differ between decoders. "auto": the
            decoder of the stream, by default that of the CPU.
        read_only: promise that the caller never writes into `batch.dense`. On a CPU only the parts with masks
            are then cleared before the memory is reused, which takes a fifth of the time at 1024 pixels. If
            the caller writes into it anyway, the values appear in later batches.
        stall_seconds: seconds after which a sample that is not loaded is logged as a warning, with its shard.
        quiet: do not log threads and memory, which the logger "sa1b" has once, at level INFO.

    Raises:
        ValueError: an argument is invalid, or the device is not available; the message names it.
    """

    @check_arguments
    def __init__(
        self,
        stream: BatchStream,
        *,
        threads: int | None = None,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        dense: int | None = None,
        decode: Literal["auto", "cpu", "gpu"] = "auto",
        read_only: bool = False,
        stall_seconds: float = 60.0,
        quiet: bool = False,
    ) -> None:
        self.stream = stream
        if not isinstance(stream, BatchStream):
            raise BadValue(
                f"stream={stream!r} must be a sa1b.Stream or sa1b.Mix: Loader(Stream(root, global_batch=256))"
            )
        self.threads = min(8, available_cpus()) if threads is None else whole_number("threads", threads, 1)
        self.prefetch = prefetch = whole_number("prefetch", prefetch, 1)
        self.device = _device(device)
        self.dense = dense = None if dense is None else whole_number("dense", dense, 1)
        stall_seconds = number("stall_seconds", stall_seconds, above=0)
        self._cuda = self.device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise BadValue("device='cuda': torch finds no GPU; pass device='cpu'")
        if decode == "gpu" and not self._cuda:
            raise BadValue(
                f"decode='gpu': decodes into memory of a GPU, not of {self.device}; pass device='cuda'"
            )
        stream.use_decoder(decoder_for(decode, stream.decoder, stream.options.decoder))
        if stream.decoder.device.type not in ("cpu", self.device.type):
            raise BadValue(
                f"decoder={stream.options.decoder!r}: writes images on {stream.decoder.device}, "
                f"not on {self.device}; pass device={stream.decoder.device.type!r}"
            )
        self._pipeline: BatchPipeline | None = None  # of the current iteration
        # One for all iterations: memory that torch has allocated for a stream is reused by that stream only.
        self._side: SideStream | None = None
        size = stream.options.image_size
        images = stream.plan.micro_batch
        # Memory for the batches in flight, the caller's batch, and its previous batch if it is still
        # referenced.
        self._settings = PipelineSettings(
            stream=stream,
            threads=self.threads,
            device=self.device,
            dense=dense,
            read_only=read_only,
            stall_seconds=stall_seconds,
            images=BufferPool(images * size * size * 3, prefetch + 3),
            masks=MaskBufferPool(images * stream.options.masks, dense or 0, prefetch + 3),
        )
        if not quiet:
            used = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
            _note(f"sa1b.Loader: {used}, {self._memory()}")

    def __repr__(self) -> str:
        dense = "" if self.dense is None else f", masks at {self.dense} pixels"
        settings = f"threads {self.threads}, prefetch {self.prefetch}, {self.device}{dense}"
        return f"Loader({self.stream!r}: {settings})"

    def __iter__(self) -> Generator[Batch, None, None]:
        """Iterate over one epoch, the next one in each iteration; see `Stream` for epochs=None."""
        return closed_at_exit(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        begun = self.stream.begin()
        pieces = self.stream.plan.micro_batches(begun)
        if self._cuda and self._side is None:
            self._side = SideStream(self.device)
        self._pipeline = pipeline = BatchPipeline(self._settings, self._side)
        with contextlib.ExitStack() as ending:
            ending.enter_context(self.stream.used())
            ending.callback(self._end, pipeline)
            while True:
                while len(pipeline.pending) < self.prefetch + 1 and (piece := next(pieces, None)) is not None:
                    pipeline.submit(piece)
                if not pipeline.pending:
                    return
                pipeline.look()
                batch = self.stream.taken(pipeline.take())
                yield batch
                del batch  # its memory may be used for the next one

    def _end(self, pipeline: BatchPipeline) -> None:
        self._pipeline = None
        pipeline.close()

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch. Raises TypeError for an endless stream (epochs=None)."""
        return len(self.stream)

    @property
    def steps_per_epoch(self) -> int:
        """See `Stream.steps_per_epoch`."""
        return self.stream.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of an epoch; see `Stream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that the caller took; prefetched batches do not count."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; see `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)

    def stats(self) -> Snapshot:
        """Statistics of each stage since the stream was created: a dict that prints as a table.

        See `sa1b.stream.stats.PipelineStats.snapshot` for its keys and units.
        """
        return self.stream.stats.snapshot()

    def reading(self) -> str | None:
        """The sample that the next incomplete batch waits for, with shard and offset; None if none.

        Any thread may call this while another one iterates.
        """
        pipeline = self._pipeline
        return None if pipeline is None else pipeline.reading()

    def _memory(self) -> str:
        """The memory that batches take."""
        size, images = self.stream.options.image_size, self.stream.plan.micro_batch
        image_bytes = images * size * size * 3
        mask_bytes = images * self.stream.options.masks * (self.dense or 0) ** 2
        # While the caller asks for the next batch, it holds one, and prefetch + 1 are in flight. On a CPU,
        # only the next one of these has dense masks.
        whole = self.prefetch + 2
        on_cpu = self.device.type == "cpu"
        place = "of memory" if on_cpu else "on the device"
        of_images = f"{whole * image_bytes / 1e6:,.0f} MB {place} for images"
        text = f"{whole} batches of up to {images} images, {of_images}"
        if self.dense:
            text += f" and {(2 if on_cpu else whole) * mask_bytes / 1e6:,.0f} MB for masks"
        if on_cpu:
            return text
        if self.stream.decoder.device.type != "cpu":
            return f"{text}, decoded there by {self.stream.options.decoder}"
        return f"{text}, {(self.prefetch + 1) * image_bytes / 1e6:,.0f} MB of pinned memory"


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise BadValue(f"device={device!r} must be a device of torch, such as 'cuda' or 'cpu'") from None


@cache
def _note(text: str) -> None:
    """Log a line, visible by default: on stderr where the program has not set up logging."""
    log = logging.getLogger("sa1b")
    if log.hasHandlers() or log.level or logging.lastResort is None:
        log.info(text)
    else:
        logging.lastResort.handle(
            log.makeRecord(log.name, logging.INFO, __file__, 0, text, args=(), exc_info=None)
        )
