"""A micro-batch that is being read: its samples are picked and decoded one by one, then collated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sa1b.errors import BadSample, ShardError
from sa1b.shards.sample import PendingRead
from sa1b.storage.errors import MissingError
from sa1b.stream.batch import Batch, collate
from sa1b.stream.buffers import fresh
from sa1b.stream.decode import EncodedImage
from sa1b.stream.order import Sequential
from sa1b.stream.plan import MicroBatch
from sa1b.stream.sample import SampleMasks, no_masks, pick_masks
from sa1b.stream.transform import Frame

if TYPE_CHECKING:
    from sa1b.stream.dataset import Stream

MAX_SUBSTITUTES = 100
_NAMED = 3  # samples that the error of a batched decoder names
_REPLACED = "the source may have been replaced or dropped since the dataset was opened; open it again"


@dataclass(frozen=True, slots=True, eq=False)
class PickedSample:
    """A sample of a pending batch that is read, with its chosen masks; its image is still a JPEG.

    Attributes:
        index: index in the micro-batch.
        attempt: number of substitutes that were tried before it.
        row: row of the sample table.
        image: the image to decode; None for the black image that replaces a damaged sample of a sequential
            stream.
        masks: the chosen masks.
    """

    index: int
    attempt: int
    row: int
    image: EncodedImage | None
    masks: SampleMasks


@dataclass(frozen=True, slots=True, eq=False)
class PendingBatch:
    """A micro-batch whose samples are being read: call `pick` and `decode` for each, then `collate`.

    A damaged sample is recorded in the damage log. A shuffled stream then takes a substitute. A sequential
    stream returns a black image without masks and sets its `valid` to False: with a substitute, the
    evaluation would not be comparable.

    Attributes:
        stream: the stream of the micro-batch.
        piece: positions of the micro-batch.
        rows: rows of the sample table; of a damaged sample, that of its substitute.
        valid: whether each sample is valid: False for padding and, once decoded, for a damaged sample of a
            sequential stream.
        reads: one pending read for each sample.
    """

    stream: "Stream"
    piece: MicroBatch
    rows: list[int]
    valid: list[bool]
    reads: list[PendingRead]

    def __len__(self) -> int:
        return len(self.rows)

    def finish(self) -> Batch:
        """The batch, read and decoded by this thread; the errors are those of `pick` and `decode`."""
        size, count = self.stream.options.image_size, len(self)
        images = fresh((count, size, size, 3), self.stream.decoder.device)
        # All picks first: between two decodings, their code and data would leave the processor's caches.
        picked = [self.pick(i) for i in range(count)]
        if self.stream.decoder.batched:
            samples = self.decode(picked, images) if count else []
        else:
            samples = [self.decode([one], images[i, None])[0] for i, one in enumerate(picked)]
        with self.named():
            return self.collate(images, samples)

    def pick(self, i: int) -> PickedSample:
        """Wait for sample i and choose its masks. Threads may call it concurrently, once for each sample.

        Raises:
            DamageLimitError: too many samples are damaged.
            sa1b.storage.errors.StorageError: the storage is not available.
        """
        return self._pick(i, 0, self.rows[i], self.reads[i])

    def decode(self, picked: Sequence[PickedSample], out: torch.Tensor) -> list[SampleMasks]:
        """Decode the images of picked samples or of their substitutes, and return the masks.

        Args:
            picked: one sample, or all samples if the decoder takes a micro-batch at a time.
            out: uint8 [n, S, S, 3] on the decoder's device.

        Raises:
            DamageLimitError, sa1b.storage.errors.StorageError: as in `pick`.
        """
        samples = list(picked)
        if all(sample.image is not None for sample in samples):
            errors = self._decode(samples, out)
        else:
            errors = [self._decode([sample], out[n, None])[0] for n, sample in enumerate(samples)]
        for n in range(len(samples)):
            while (error := errors[n]) is not None:
                samples[n] = self._substitute(samples[n].index, samples[n].attempt, samples[n].row, error)
                (errors[n],) = self._decode([samples[n]], out[n, None])
        return [sample.masks for sample in samples]

    def _decode(self, samples: list[PickedSample], out: torch.Tensor) -> list[BadSample | None]:
        images = [sample.image for sample in samples if sample.image is not None]
        if not images:
            out.zero_()
            return [None] * len(samples)
        stream = self.stream
        try:
            with stream.stats.busy("decode", sum(len(image.jpeg) for image in images), items=len(images)):
                return stream.decoder.decode(images, out)
        except Exception as error:
            together = len(samples) > 1
            failing = [one for n, one in enumerate(samples) if not together or self._fails(one, out[n, None])]
            for one in failing[:_NAMED]:
                self.note(error, one.index)
            if not failing:
                error.add_note(f"in {self._span()}, decoded together")
            raise

    def _fails(self, sample: PickedSample, out: torch.Tensor) -> bool:
        """Whether the decoder raises an error for this sample alone."""
        try:
            assert sample.image is not None
            self.stream.decoder.decode([sample.image], out)
        except Exception:
            return True
        return False

    def _pick(self, i: int, attempt: int, row: int, read: PendingRead) -> PickedSample:
        stream = self.stream
        options, seed, epoch = stream.options, stream.seed, (self.piece.start + i) // stream.plan.order.count
        try:
            with stream.stats.busy("read", int(stream.dataset.table.jpg_bytes[row])):
                jpeg, annotations = read.result()
            with stream.stats.busy("pick"):
                condition = stream.view.masks_where
                usable = None if condition is None else condition.masks(annotations)
                masks = pick_masks(annotations, options, seed, epoch, usable=usable)
            return PickedSample(i, attempt, row, EncodedImage(jpeg, masks.frame), masks)
        except ShardError as error:
            damage = error
        except Exception as error:
            self.note(error, i)
            raise
        return self._substitute(i, attempt, row, damage)

    def _substitute(self, i: int, attempt: int, row: int, damage: ShardError | BadSample) -> PickedSample:
        """Log a damaged sample and pick its replacement."""
        stream, position = self.stream, self.piece.start + i
        order = stream.plan.order
        stream.record_damage(row, position, damage)
        if isinstance(order, Sequential):
            self.valid[i] = False
            size = stream.options.image_size
            masks = no_masks(int(stream.dataset.table.image_id[row]), Frame.whole_image(size, size, size))
            return PickedSample(i, attempt, row, None, masks)
        if attempt + 1 == MAX_SUBSTITUTES:
            raise AssertionError(f"{MAX_SUBSTITUTES} substitutes of position {position} are damaged")
        self.rows[i] = row = int(stream.view.table_rows(np.array([order.substitute(position, attempt)]))[0])
        (read,) = stream.dataset.submit([row])
        return self._pick(i, attempt + 1, row, read)

    def note(self, error: Exception, i: int) -> None:
        """Add position, image and shard of sample i to an error."""
        error.add_note(f"at position {self.piece.start + i}: {self.stream.where(self.rows[i])}")
        if isinstance(error, MissingError):
            error.add_note(_REPLACED)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the samples of the batch to errors that concern all of them."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self._span()}")
            raise

    def _span(self) -> str:
        if not self.rows:
            return "an empty batch"
        first, last = (self.stream.where(self.rows[i]) for i in (0, -1))
        return f"the batch of positions {self.piece.start} to {self.piece.stop - 1}: {first}, to {last}"

    def collate(self, images: torch.Tensor, samples: list[SampleMasks]) -> Batch:
        """The batch of all samples, whose images are decoded into `images`, uint8 [B, S, S, 3]."""
        piece = self.piece
        batch = collate(images, samples, range(piece.start, piece.stop), self.valid, piece.position)
        by_key = {"image_id": batch.ids.numpy(), "mask_id": batch.mask_ids.numpy()}
        columns = self.stream.columns
        extra = {name: one.lookup(by_key[one.key]) for name, one in columns.items()}
        if self.stream.text is None:
            return replace(batch, extra=extra)
        text = self.stream.text
        epochs = batch.positions.numpy() // self.stream.plan.order.count
        of_images, indices = by_key["image_id"], np.zeros(len(batch), np.int64)
        if text.column.key == "mask_id":
            image = batch.masks.image.numpy()
            of_images, epochs, indices = of_images[image], epochs[image], batch.mask_index.numpy()
        ids = by_key[text.column.key]
        texts, values = text.read(self.stream.seed, ids, of_images, epochs, indices)
        return replace(batch, extra=extra | {text.column.name: values}, texts=texts)

    def cancel(self) -> None:
        """Cancel all pending reads."""
        for read in self.reads:
            read.cancel()
