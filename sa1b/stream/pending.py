"""A micro-batch on its way from storage to tensors, and where its samples come from.

pending = PendingBatch(sources, order, piece)   the reads of all samples are in flight
pending.pick(start, stop, busy)                 waits for the bytes of samples and chooses their masks
pending.decode(start, stop, busy)               decodes them, or substitutes of damaged ones, into `images`
pending.collate()                               the batch

Threads may each call `pick` and `decode` for a share of the samples.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sa1b.errors import BadSample, ShardError
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import PendingRead
from sa1b.storage.errors import MissingError
from sa1b.stream.batch import Batch, collate
from sa1b.stream.decode import EncodedImage
from sa1b.stream.decoders import Decoder
from sa1b.stream.order import Mixture, Order, Sequential
from sa1b.stream.plan import MicroBatch, Plan
from sa1b.stream.sample import SampleOptions, no_masks, pick_masks
from sa1b.stream.stats import Busy
from sa1b.stream.text import Row, joined
from sa1b.stream.transform import Frame
from sa1b.stream.worker_memory import image_memory
from sa1b.views.predicate import ORIGIN_FIELDS
from sa1b.views.view import View

if TYPE_CHECKING:  # pyarrow takes 0.1 s and 40 MB
    from sa1b.stream.columns import Column, TextColumn

MAX_SUBSTITUTES = 100
READ, DECODED = 1, 2  # the progress of a sample; 0 before
_REPLACED = "the source may have been replaced or dropped since the dataset was opened; open it again"


class SampleSource:
    """A `Stream` as the place where samples come from; see there."""

    dataset: Dataset
    view: View
    plan: Plan
    seed: int
    options: SampleOptions
    decoder: Decoder
    columns: "dict[str, Column]"
    text: "TextColumn | None"

    def rows(self, positions: npt.NDArray[np.int64]) -> list[int]:
        assert not isinstance(self.plan.order, Mixture)
        rows: list[int] = self.view.table_rows(self.plan.order.rows(positions)).tolist()
        return rows

    def reads(self, rows: list[int]) -> list[PendingRead]:
        """Start reading samples. Texts of layers are joined only if the condition on masks reads them."""
        condition = self.view.masks_where
        reads_text = condition is not None and not condition.fields.isdisjoint(ORIGIN_FIELDS)
        return self.dataset.submit(rows, text=reads_text)

    def damage(self, row: int, position: int, error: Exception, name: str | None) -> dict[str, Any]:
        """The arguments of `DamageLog.damaged` for a damaged sample."""
        table = self.dataset.table
        shard = self.dataset.shards[int(table.shard[row])]
        self.dataset.check_table()  # if the table is damaged, every sample seems damaged
        self.dataset.check_shard(shard)  # likewise if the shard was replaced
        return {
            "shard": shard,
            "offset": int(table.offset[row]),
            "image_id": int(table.image_id[row]),
            "position": position,
            "read": position // self.plan.world_size,
            "reason": str(error)[:1000],
            # An evaluation reads the same image each time.
            "once": isinstance(self.plan.order, Sequential),
        } | ({} if name is None else {"source": name})

    def place(self, row: int, name: str | None) -> str:
        """Source, image, shard and offset of a row of the sample table, for messages."""
        table, source = self.dataset.table, "" if name is None else f"source {name}: "
        shard = self.dataset.reader.url(self.dataset.shards[int(table.shard[row])])
        return f"{source}image {table.image_id[row]} in {shard} at offset {table.offset[row]:,}"


Sources = Mapping[Any, SampleSource]  # by name in a mixture, else by None


@contextmanager
def named(piece: MicroBatch, where: Callable[[int], str]) -> Iterator[None]:
    """Add the samples of a micro-batch to errors that may concern all of them."""
    try:
        yield
    except Exception as error:
        error.add_note(piece.span(where))
        raise


class PendingBatch:
    """A micro-batch whose samples are being read, decoded and collated.

    A shuffled stream takes a substitute for a damaged sample. A sequential stream returns a black image
    without masks and sets its `valid` to False: with a substitute, the evaluation would not be comparable.
    """

    def __init__(self, sources: Sources, order: Order | Sequential | Mixture, piece: MicroBatch) -> None:
        which, local, valid = order.locate(np.arange(piece.start, piece.stop))
        count = len(which)
        # Of each sample, the number of its source, its position in the order of this source, and whether it
        # is no padding. All sources have the decoder and the image size of the first one.
        self.names, self.sources = list(sources), list(sources.values())
        self.source, self.piece = self.sources[0], piece
        self.which: list[int] = which.tolist()
        self.local, self.valid = local.tolist(), valid.tolist()
        self.rows = [0] * count  # of the sample table; of a damaged sample, that of its substitute
        self.reads = list[Any]([None] * count)
        self.substitutes = [0] * count  # numbers of those that were tried
        self.encoded = list[EncodedImage | None]([None] * count)  # by `pick`, until decoded; None: black
        self.samples = list[Any]([None] * count)  # SampleMasks, by `pick`
        self.progress = np.zeros(count, np.uint8)  # READ or DECODED; other processes may see it
        self.images = torch.empty(0)  # uint8 [B, S, S, 3], on the decoder's device, by whoever decodes
        self.damage = list[dict[str, Any]]()  # for whoever delivers the batch to log
        self.busy = Busy()  # likewise
        self.left = 0  # shares that threads have not made
        self.errors = dict[int, BaseException]()  # by the first sample of the share
        for number, source in enumerate(self.sources):
            here = np.flatnonzero(which == number)
            chosen = source.rows(local[here])
            _put(self.rows, chosen, here)
            _put(self.reads, source.reads(chosen), here)

    def __len__(self) -> int:
        return len(self.rows)

    def finish(self) -> Batch:
        """The batch, read and decoded by this thread; the errors are those of `pick` and `decode`."""
        size, count = self.source.options.image_size, len(self)
        self.images = image_memory((count, size, size, 3), self.source.decoder.device)
        # All choices first: between two decodings, their code and data would leave the processor's caches.
        self.pick(0, count, self.busy)
        self.decode(0, count, self.busy)
        return self.collate()

    def pick(self, start: int, stop: int, busy: Busy) -> None:
        """Wait for the bytes of samples and choose their masks; StorageError: the storage is unavailable."""
        for i in range(start, stop):
            self._pick(i, busy)
            self.progress[i] = READ

    def decode(self, start: int, stop: int, busy: Busy) -> None:
        """Decode the images of picked samples or of their substitutes. Raises the errors of `pick`."""
        step = stop - start if all(self.encoded[start:stop]) else 1
        for first in range(start, stop, step or 1):
            for i, failed in enumerate(self._decode(first, first + step, busy), first):
                error = failed
                while error is not None:
                    if self._substitute(i, error):
                        self._pick(i, busy)
                    (error,) = self._decode(i, i + 1, busy)
        self.encoded[start:stop] = [None] * (stop - start)  # frees the JPEG's bytes
        self.progress[start:stop] = DECODED

    def _decode(self, start: int, stop: int, busy: Busy) -> list[BadSample | None]:
        images = [image for image in self.encoded[start:stop] if image is not None]
        if not images:
            self.images[start:stop].zero_()
            return [None] * (stop - start)
        began = time.perf_counter()
        with named(self.piece, self._where):
            errors = self.source.decoder.decode(images, self.images[start:stop])
        size = sum(len(image.jpeg) for image in images)
        busy.add("decode", size, time.perf_counter() - began, items=len(images))
        return errors

    def _pick(self, i: int, busy: Busy) -> None:
        source = self.sources[self.which[i]]
        epoch, condition = self.local[i] // source.plan.order.count, source.view.masks_where
        while True:
            began = time.perf_counter()
            try:
                jpeg, annotations = self.reads[i].result()
                there = time.perf_counter()
                busy.add("read", int(source.dataset.table.jpg_bytes[self.rows[i]]), there - began)
                usable = None if condition is None else condition.masks(annotations)
                masks = pick_masks(annotations, source.options, source.seed, epoch, usable=usable)
                busy.add("pick", 0, time.perf_counter() - there)
                self.samples[i], self.encoded[i] = masks, EncodedImage(jpeg, masks.frame)
                return
            except ShardError as error:
                damage = error
            except Exception as error:
                position = self.piece.start + i
                error.add_note(f"at position {position}: {self._where(position)}")
                if isinstance(error, MissingError):
                    error.add_note(_REPLACED)
                raise
            if not self._substitute(i, damage):
                return

    def _substitute(self, i: int, damage: ShardError | BadSample) -> bool:
        """Note a damaged sample and begin to read its substitute; False: it is black and needs no reading."""
        source, position, row = self.sources[self.which[i]], self.piece.start + i, self.rows[i]
        order, tried = source.plan.order, self.substitutes[i]
        self.damage.append(source.damage(row, position, damage, self.names[self.which[i]]))
        if isinstance(order, Sequential):
            size, image_id = source.options.image_size, int(source.dataset.table.image_id[row])
            self.samples[i] = no_masks(image_id, Frame.whole_image(size, size, size))
            self.valid[i], self.encoded[i] = False, None
            return False
        if tried + 1 == MAX_SUBSTITUTES:
            raise AssertionError(f"{MAX_SUBSTITUTES} substitutes of position {position} are damaged")
        assert isinstance(order, Order)
        index = order.substitute(self.local[i], tried)
        self.rows[i] = int(source.view.table_rows(np.array([index]))[0])
        self.reads[i : i + 1] = source.reads([self.rows[i]])
        self.substitutes[i] += 1
        return True

    def _where(self, position: int) -> str:
        i = position - self.piece.start
        return self.sources[self.which[i]].place(self.rows[i], self.names[self.which[i]])

    def collate(self) -> Batch:
        began = time.perf_counter()
        with named(self.piece, self._where):
            batch = self._collated()
        self.busy.add("collate", 0, time.perf_counter() - began)
        return batch

    def _collated(self) -> Batch:
        piece = self.piece
        batch = collate(self.images, self.samples, range(piece.start, piece.stop), self.valid, piece.position)
        which = np.array(self.which, np.int64)
        if self.names[0] is not None:
            names = tuple(self.names[source] for source in self.which)
            batch = replace(batch, source=names, source_index=torch.from_numpy(which))
        ids, local, image = batch.ids.numpy(), np.array(self.local, np.int64), batch.masks.image.numpy()
        extra: dict[str, list[Any]] = {}
        texts, text = list[Row | None](), None
        for number, source in enumerate(self.sources):
            of_masks = np.flatnonzero(which[image] == number), batch.mask_ids.numpy()
            by_key = {"image_id": (np.flatnonzero(which == number), ids), "mask_id": of_masks}
            for name, column in source.columns.items():
                rows, values = by_key[column.key]
                _put(extra.setdefault(name, [None] * len(values)), column.lookup(values[rows]), rows)
            if source.text is None:
                continue
            text = source.text
            rows, values = by_key[text.column.key]
            images, indices = rows, np.zeros(len(rows), np.int64)
            if text.column.key == "mask_id":
                images, indices = image[rows], batch.mask_index.numpy()[rows]
            epochs = local[images] // source.plan.order.count
            strings, read = text.read(source.seed, values[rows], ids[images], epochs, indices)
            _put(extra.setdefault(text.column.name, [None] * len(values)), strings, rows)
            texts = texts or [None] * len(values)
            _put(texts, read, rows)
        if text is None:
            return replace(batch, extra=extra)
        longest = max(source.text.options.length for source in self.sources if source.text is not None)
        return replace(batch, extra=extra, texts=joined(texts, text.column.key, longest, text.width))

    def cancel(self) -> None:
        for read in self.reads:
            read.cancel()


def _put(column: list[Any], values: list[Any], rows: npt.NDArray[np.int64]) -> None:
    for row, value in zip(rows.tolist(), values, strict=True):
        column[row] = value
