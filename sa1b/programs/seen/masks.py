"""The masks that a run has used, chosen again from the stored masks of each sample."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from sa1b.programs.seen.history import Span
from sa1b.programs.seen.samples import Samples
from sa1b.stream.pending import PendingBatch
from sa1b.stream.plan import MicroBatch

_TOGETHER = 64  # samples that are read at a time
_KEYS = ["source", "image_id", "mask_id", "mask_index"]


def seen_masks(pieces: Sequence[tuple[Span, Sequence[int]]]) -> pa.Table:
    """How often each mask was chosen at these positions of a run's order: the columns image_id, mask_id,
    mask_index, times and source. No image is decoded. A sample whose masks are damaged has a substitute, as
    in the run.
    """
    types = dict.fromkeys((*_KEYS[1:], "times"), pa.int64())
    total = pa.schema({"source": pa.string(), **types}).empty_table()
    for span, positions in pieces:
        stream, names = Samples(span), list(span.receipt["sources"])
        for start in range(0, len(positions), _TOGETHER):
            some = positions[start : start + _TOGETHER]
            pending = [stream.submit(MicroBatch(position, position + 1, position + 1)) for position in some]
            parts = pa.concat_tables([total, *(_picked(one, names) for one in pending)])
            summed = parts.group_by(_KEYS, use_threads=False).aggregate([("times", "sum")])
            total = summed.rename_columns([*_KEYS, "times"])
        stream.close()
    ordered = total.sort_by([(name, "ascending") for name in _KEYS])
    return ordered.select(["image_id", "mask_id", "mask_index", "times", "source"])


def _picked(pending: PendingBatch, names: Sequence[str]) -> pa.Table:
    """The chosen masks of a pending batch of one sample."""
    pending.pick(0)
    sample = pending.picked[0]
    assert sample is not None
    masks, count = sample.masks, len(sample.masks.mask_ids)
    numbers = np.full(count, masks.image_id), masks.mask_ids, masks.mask_index, np.ones(count, np.int64)
    columns = dict(zip((*_KEYS[1:], "times"), (one.astype(np.int64) for one in numbers), strict=True))
    return pa.table({"source": pa.repeat(names[pending.which[0]], count), **columns})
