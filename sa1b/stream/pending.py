"""A micro-batch on its way from storage to tensors, and where its samples come from.

pending = submit(sources, order, piece)     the reads of all samples are in flight
pending.pick(start, stop)                   waits for the bytes of samples and chooses their masks
pending.decode(start, stop)                 decodes them, or substitutes of damaged ones, into `images`
pending.collate()                           the batch

Threads may each call `pick` and `decode` for a share of the samples.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import BadSample, ShardError
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import PendingRead
from sa1b.storage.errors import MissingError
from sa1b.stream.batch import Batch, collate
from sa1b.stream.columns import Column
from sa1b.stream.damage_log import Damage, DamageLog
from sa1b.stream.decode import Decoder, EncodedImage
from sa1b.stream.mixture import Mixture
from sa1b.stream.order import Order, Sequential
from sa1b.stream.plan import MicroBatch, Plan
from sa1b.stream.sample import SampleMasks, SampleOptions, no_masks, pick_masks
from sa1b.stream.stats import Busy, PipelineStats
from sa1b.stream.text import TextColumn, Texts, merged
from sa1b.stream.transform import Frame
from sa1b.stream.worker_memory import image_memory
from sa1b.views.predicate import ORIGIN_FIELDS
from sa1b.views.view import View

MAX_SUBSTITUTES = 100
READ, DECODED = 1, 2  # the progress of a sample; 0 before
_REPLACED = "the source may have been replaced or dropped since the dataset was opened; open it again"


@dataclass(frozen=True, slots=True, eq=False)
class SampleSource:
    """Where the samples of a stream come from, and how each is made; the fields are those of `Stream`."""

    dataset: Dataset
    view: View
    plan: Plan
    seed: int
    options: SampleOptions
    decoder: Decoder
    columns: dict[str, Column]
    text: TextColumn | None
    damage_log: DamageLog | Damage
    stats: PipelineStats
    name: str | None = None  # in a mixture

    def rows(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """The rows of the sample table at positions of this source's order."""
        order = self.plan.order
        assert not isinstance(order, Mixture)
        indices = order.rows(positions)[0] if isinstance(order, Sequential) else order.rows(positions)
        rows: list[int] = self.view.table_rows(indices).tolist()
        return rows

    def read(self, rows: list[int]) -> list[PendingRead]:
        """Start reading samples. Texts of layers are joined only if the condition on masks reads them."""
        condition = self.view.masks_where
        reads_text = condition is not None and not condition.fields.isdisjoint(ORIGIN_FIELDS)
        return self.dataset.submit(rows, text=reads_text)

    def record_damage(self, row: int, position: int, error: Exception) -> None:
        table = self.dataset.table
        shard = self.dataset.shards[int(table.shard[row])]
        self.dataset.check_table()  # if the table is damaged, every sample seems damaged
        self.dataset.check_shard(shard)  # likewise if the shard was replaced
        self.damage_log.damaged(
            shard=shard,
            offset=int(table.offset[row]),
            image_id=int(table.image_id[row]),
            position=position,
            read=position // self.plan.world_size,
            reason=str(error),
            # An evaluation reads the same image each time.
            once=isinstance(self.plan.order, Sequential),
            source=self.name,
        )

    def where(self, row: int) -> str:
        """Image, shard and offset of a row of the sample table, for messages."""
        table = self.dataset.table
        shard = self.dataset.reader.url(self.dataset.shards[int(table.shard[row])])
        source = "" if self.name is None else f"source {self.name}: "
        return f"{source}image {table.image_id[row]} in {shard} at offset {table.offset[row]:,}"


@dataclass(frozen=True, slots=True, eq=False)
class PickedSample:
    """A sample of a pending batch that is read, with its chosen masks; its image is still a JPEG."""

    index: int  # in the micro-batch
    attempt: int  # number of substitutes that were tried before it
    row: int  # of the sample table
    image: EncodedImage | None  # None: the black image that replaces a damaged sample of a sequential stream
    masks: SampleMasks


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A micro-batch whose samples are being read, decoded and collated.

    A damaged sample is recorded in the damage log. A shuffled stream then takes a substitute. A sequential
    stream returns a black image without masks and sets its `valid` to False: with a substitute, the
    evaluation would not be comparable.
    """

    sources: list[SampleSource]  # one, or those of a mixture, which have the same decoder and image size
    piece: MicroBatch
    which: list[int]  # for each sample, the number of its source
    local: list[int]  # and its position in the order of this source
    rows: list[int]  # of the sample table; of a damaged sample, that of its substitute
    valid: list[bool]  # False for padding and, once decoded, for a damaged sample of a sequential stream
    reads: list[PendingRead]
    # uint8 [B, S, S, 3], on the decoder's device; whoever decodes allocates it
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    picked: list[PickedSample | None] = field(init=False)  # results of pick, None if not done
    samples: list[SampleMasks | None] = field(init=False)  # results of decode
    progress: npt.NDArray[np.uint8] = field(init=False)  # [B], READ or DECODED; other processes may see it

    def __post_init__(self) -> None:
        self.picked, self.samples = [None] * len(self), [None] * len(self)
        self.progress = np.zeros(len(self), np.uint8)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def source(self) -> SampleSource:
        """The first source, for what all have in common: decoder, image size, statistics."""
        return self.sources[0]

    def of(self, i: int) -> SampleSource:
        """The source of sample i."""
        return self.sources[self.which[i]]

    def finish(self) -> Batch:
        """The batch, read and decoded by this thread; the errors are those of `pick` and `decode`."""
        size, count, decoder = self.source.options.image_size, len(self), self.source.decoder
        self.images = image_memory((count, size, size, 3), decoder.device)
        # All choices first: between two decodings, their code and data would leave the processor's caches.
        busy = self.pick(0, count)
        busy.merge(self.decode(0, count))
        began = time.perf_counter()
        batch = self.collate()
        busy.add("collate", 0, time.perf_counter() - began)
        self.source.stats.count(busy)
        return batch

    def pick(self, start: int, stop: int) -> Busy:
        """Wait for the bytes of samples and choose their masks. Raises DamageLimitError, or a StorageError if
        the storage is not available.
        """
        busy = Busy()
        for i in range(start, stop):
            self.picked[i] = self._pick(i, 0, self.rows[i], self.reads[i], busy)
            self.progress[i] = READ
        return busy

    def decode(self, start: int, stop: int) -> Busy:
        """Decode the images of picked samples or of their substitutes. Raises the errors of `pick`."""
        busy = Busy()
        samples = [sample for sample in self.picked[start:stop] if sample is not None]
        self.picked[start:stop] = [None] * (stop - start)  # frees the JPEG's bytes
        out = self.images[start:stop]
        if all(sample.image is not None for sample in samples):
            errors = self._decode(samples, out, busy)
        else:
            errors = [self._decode([sample], out[n, None], busy)[0] for n, sample in enumerate(samples)]
        for n in range(len(samples)):
            while (error := errors[n]) is not None:
                samples[n] = self._substitute(
                    samples[n].index, samples[n].attempt, samples[n].row, error, busy
                )
                (errors[n],) = self._decode([samples[n]], out[n, None], busy)
        self.samples[start:stop] = [sample.masks for sample in samples]
        self.progress[start:stop] = DECODED
        return busy

    def _decode(self, samples: list[PickedSample], out: torch.Tensor, busy: Busy) -> list[BadSample | None]:
        images = [sample.image for sample in samples if sample.image is not None]
        if not images:
            out.zero_()
            return [None] * len(samples)
        began = time.perf_counter()
        with self._named():
            errors = self.source.decoder.decode(images, out)
        size = sum(len(image.jpeg) for image in images)
        busy.add("decode", size, time.perf_counter() - began, items=len(images))
        return errors

    def _pick(self, i: int, attempt: int, row: int, read: PendingRead, busy: Busy) -> PickedSample:
        source, began = self.of(i), time.perf_counter()
        options, seed, epoch = source.options, source.seed, self.local[i] // source.plan.order.count
        try:
            jpeg, annotations = read.result()
            there = time.perf_counter()
            busy.add("read", int(source.dataset.table.jpg_bytes[row]), there - began)
            condition = source.view.masks_where
            usable = None if condition is None else condition.masks(annotations)
            masks = pick_masks(annotations, options, seed, epoch, usable=usable)
            busy.add("pick", 0, time.perf_counter() - there)
            return PickedSample(i, attempt, row, EncodedImage(jpeg, masks.frame), masks)
        except ShardError as error:
            damage = error
        except Exception as error:
            self.note(error, i)
            raise
        return self._substitute(i, attempt, row, damage, busy)

    def _substitute(
        self, i: int, attempt: int, row: int, damage: ShardError | BadSample, busy: Busy
    ) -> PickedSample:
        """Log a damaged sample and pick its replacement."""
        source, position = self.of(i), self.piece.start + i
        order = source.plan.order
        source.record_damage(row, position, damage)
        if isinstance(order, Sequential):
            self.valid[i] = False
            size = source.options.image_size
            masks = no_masks(int(source.dataset.table.image_id[row]), Frame.whole_image(size, size, size))
            return PickedSample(i, attempt, row, None, masks)
        if attempt + 1 == MAX_SUBSTITUTES:
            raise AssertionError(f"{MAX_SUBSTITUTES} substitutes of position {position} are damaged")
        assert isinstance(order, Order)
        index = order.substitute(self.local[i], attempt)
        self.rows[i] = row = int(source.view.table_rows(np.array([index]))[0])
        (read,) = source.read([row])
        return self._pick(i, attempt + 1, row, read, busy)

    def note(self, error: Exception, i: int) -> None:
        """Add position, image and shard of sample i to an error."""
        error.add_note(f"at position {self.piece.start + i}: {self.where(i)}")
        if isinstance(error, MissingError):
            error.add_note(_REPLACED)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the samples of the batch to errors that may concern all of them."""
        try:
            yield
        except Exception as error:
            error.add_note(self.piece.span(lambda position: self.where(position - self.piece.start)))
            raise

    def where(self, i: int) -> str:
        """Image, shard and offset of sample i, for messages."""
        return self.of(i).where(self.rows[i])

    def collate(self) -> Batch:
        """The batch of all samples, once they are decoded."""
        with self._named():
            return self._collate()

    def _collate(self) -> Batch:
        piece = self.piece
        samples = [sample for sample in self.samples if sample is not None]
        batch = collate(self.images, samples, range(piece.start, piece.stop), self.valid, piece.position)
        which = np.array(self.which, np.int64)
        if self.source.name is not None:
            names = tuple(self.sources[source].name or "" for source in self.which)
            batch = replace(batch, source=names, source_index=torch.from_numpy(which))
        ids, local, image = batch.ids.numpy(), np.array(self.local, np.int64), batch.masks.image.numpy()
        extra: dict[str, list[Any]] = {}
        texts: list[tuple[npt.NDArray[np.int64], Texts]] = []
        for number, source in enumerate(self.sources):
            of_masks = np.flatnonzero(which[image] == number), batch.mask_ids.numpy()
            by_key = {"image_id": (np.flatnonzero(which == number), ids), "mask_id": of_masks}
            for name, column in source.columns.items():
                rows, values = by_key[column.key]
                _put(extra, name, column.lookup(values[rows]), rows, len(values))
            if (text := source.text) is None:
                continue
            rows, values = by_key[text.column.key]
            images, indices = rows, np.zeros(len(rows), np.int64)
            if text.column.key == "mask_id":
                images, indices = image[rows], batch.mask_index.numpy()[rows]
            epochs = local[images] // source.plan.order.count
            read, strings = text.read(source.seed, values[rows], ids[images], epochs, indices)
            _put(extra, text.column.name, strings, rows, len(values))
            texts.append((rows, read))
        if not texts:
            return replace(batch, extra=extra)
        count = len(ids) if texts[0][1].key == "image_id" else len(image)
        return replace(batch, extra=extra, texts=merged(texts, count))

    def cancel(self) -> None:
        """Cancel all pending reads."""
        for read in self.reads:
            read.cancel()


def submit(
    sources: list[SampleSource], order: Order | Sequential | Mixture, piece: MicroBatch
) -> PendingBatch:
    """Start reading all samples of a micro-batch concurrently."""
    which, local, valid = order.locate(np.arange(piece.start, piece.stop))
    rows, reads = [0] * len(which), dict[int, PendingRead]()
    for number, source in enumerate(sources):
        here = np.flatnonzero(which == number)
        chosen = source.rows(local[here])
        for i, row, read in zip(here.tolist(), chosen, source.read(chosen), strict=True):
            rows[i], reads[i] = row, read
    in_order = [reads[i] for i in range(len(rows))]
    return PendingBatch(
        sources,
        piece,
        which=which.tolist(),
        local=local.tolist(),
        rows=rows,
        valid=valid.tolist(),
        reads=in_order,
    )


def _put(
    extra: dict[str, list[Any]], name: str, values: list[Any], rows: npt.NDArray[np.int64], count: int
) -> None:
    column = extra.setdefault(name, [None] * count)
    for row, value in zip(rows.tolist(), values, strict=True):
        column[row] = value
