"""`sa1b.Stream`: the training stream as a torch dataset, for any DataLoader.

    stream = sa1b.Stream("shards", global_batch=256, micro_batch=16)
    loader = DataLoader(stream, batch_size=None, num_workers=8, pin_memory=True)
    for epoch in range(3):
        for batch in loader:
            ...
            save({"stream": stream.state_dict(batch)})

One iteration is one epoch, and the next iteration is the next epoch, for a DataLoader, a `sa1b.Loader` and
the stream itself. `Stream(epochs=None)` gives an endless iteration instead.

The sequence is a formula of (view, seed, position), see sa1b.stream.order. Rank and world size only select
the part of each step that this process reads. The number of workers only selects the process that decodes it:
batch i of a rank comes from worker i mod n, the order in which a DataLoader collects batches.
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sa1b.arguments import BadValue, check_arguments, number, whole_number
from sa1b.hashing import random_words
from sa1b.shards.dataset import Dataset, check_cache, check_images
from sa1b.shards.layer import check_layers
from sa1b.stream.batch_stream import BatchStream, Iterations
from sa1b.stream.damage_log import DAMAGE_LOG, DamageLog
from sa1b.stream.decoders import decoder
from sa1b.stream.order import Order, Sequential, whole_share
from sa1b.stream.pending import SampleSource
from sa1b.stream.plan import Plan, ResumeError, check_state, checked_position, process_rank
from sa1b.stream.sample import SampleOptions
from sa1b.stream.stats import PipelineStats
from sa1b.stream.text import ColumnError
from sa1b.views.view import view_of

if TYPE_CHECKING:
    from sa1b.stream.columns import Column


class Stream(BatchStream, SampleSource):
    """Micro-batches of one rank, in the order of the formula.

    Args:
        root: dataset directory that `sa1b reshard` made, or its URL (s3://..., any file system of fsspec),
            or an open dataset.
        global_batch: samples of a step over all ranks, G.
        micro_batch: samples that a rank takes at a time; by default its complete share of a step.
        view: view that `sa1b view` made: its name or digest (also its first 6 or more characters) in
            ROOT/views, or the path of its .json file or folder; by default all images. When sources are added
            to the directory, the order of a view stays the same and that of all images changes.
        order: "shuffle" shuffles every epoch differently. "sequential" is for evaluation: each iteration has
            every sample once over all ranks, in the same order, and padding marked valid=False at the end.
        epochs: 1: each iteration is one epoch. Its last step has fewer samples, and micro-batches of some
            ranks may be empty, so that all ranks have the same number. None: one endless iteration. All its
            steps have `global_batch` samples, and a step may span the border of two epochs.
        seed: seed of the order and of every random value.
        block_size: neighbouring samples that are kept and read together, see sa1b.stream.order.Order.
        damage_log: file for damaged samples; all ranks use the same file. Lines that are in the file when the
            stream is made come from other runs and do not count for the limit.
        rank: rank of this process; by default from torch.distributed, else from torchrun's variables, else 0.
        world_size: processes that share the steps; by default from the same source as `rank`, else 1.
        deadline: seconds that one read may take over all its attempts. After that the stream stops and
            reports the URL and the error. Samples are never substituted for unavailable data.
        storage_options: for fsspec's file system, if root is a URL, such as {"endpoint_url": ...}.
        cache: folder on a local disk that caches the data read from the URL; later epochs read it from there,
            with the same samples. See sa1b.storage.range_cache.
        cache_bytes: limit of the cache for this dataset directory, in bytes; required with `cache`.
        layers: names of layers (`sa1b layer add`): masks are chosen from those of the shards with the changes
            of these layers, in this order; by default those that the view was made with; see docs/layers.md.
        join: columns of other tables by image or mask id, such as {"caption": "captions.parquet"}; the values
            are in `batch.extra["caption"]`; see sa1b.stream.columns.
        text: a table of texts, `sa1b.Text(...)` or its path, for `batch.texts`; see sa1b.stream.text.
        options: fields of sa1b.stream.sample.SampleOptions: image_size, masks, strategy, flip, resize,
            transform, min_pixels, min_pixels_size, decoder.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is unknown.
        sa1b.shards.ManifestError: root contains no dataset, or a layer is missing, damaged or of other masks.
        sa1b.storage.errors.StorageError: the URL cannot be read.
        ColumnError: a table cannot be joined.
    """

    @partial(check_arguments, options=SampleOptions)
    def __init__(
        self,
        root: str | Path | Dataset,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        view: str | Path | None = None,
        order: Literal["shuffle", "sequential"] = "shuffle",
        epochs: Literal[1] | None = 1,
        seed: int = 0,
        block_size: int = 1,
        damage_log: str | Path = DAMAGE_LOG,
        rank: int | None = None,
        world_size: int | None = None,
        deadline: float = 300.0,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        layers: Sequence[str] = (),
        join: Mapping[str, Any] | None = None,
        text: Any = None,
        **options: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "options")}
        if order not in ("shuffle", "sequential"):
            raise BadValue(f"order={order!r} must be 'shuffle' or 'sequential'")
        if epochs not in (1, None):
            raise BadValue(f"epochs={epochs!r} must be 1, iterate again for more, or None for an endless one")
        if epochs is None and order == "sequential":
            raise BadValue("epochs=None: a sequential iteration ends; pass order='shuffle'")
        global_batch = whole_number("global_batch", global_batch, 1)
        micro_batch = None if micro_batch is None else whole_number("micro_batch", micro_batch, 1)
        block_size = whole_number("block_size", block_size, 1)
        seed = whole_number("seed", seed, 0, (1 << 63) - 1)
        deadline = number("deadline", deadline, above=0)
        check_cache(cache, cache_bytes, is_open=isinstance(root, Dataset))
        layers = check_layers(layers, is_open=isinstance(root, Dataset))
        found_rank, found_size = process_rank()
        rank = found_rank if rank is None else whole_number("rank", rank)
        world_size = found_size if world_size is None else whole_number("world_size", world_size, 1)
        self._arguments = {**arguments, **options, "rank": rank, "world_size": world_size}
        self.epochs, self.seed, self.options = epochs, seed, SampleOptions(**options)
        self.view_name = None if view is None else str(view)
        self.decoder = decoder(self.options.decoder)
        if isinstance(root, Dataset):
            self.dataset = root
        else:
            self.dataset = Dataset(root, deadline=deadline, storage_options=storage_options, cache=cache,
                                   cache_bytes=cache_bytes, layers=layers)  # fmt: skip
            if self.dataset.lacks():
                warnings.warn(f"{self.dataset.root} is {self.dataset.lacks()}", stacklevel=2)
        check_images(self.dataset, "a stream")
        self.root = self.dataset.root
        self.view, self.dataset = view_of(self.dataset, view)
        if block_size > 1:
            self.dataset.check_table()  # with blocks, the order depends on locations, not on a digest alone
            self.view = self.view.by_location(self.dataset.table)
        self.columns, self.text = {}, None
        if join or text is not None:
            from sa1b.stream import columns

            self.columns = columns.open_columns(join or {}, storage_options, dataset=self.dataset)
            self.text = columns.open_text(text, self.dataset, storage_options)
            for name, source in (join or {}).items():
                if not isinstance(source, columns.Column):  # workers get open columns
                    self._warn_of_missing(f"join[{name!r}]", self.columns[name])
            if self.text is not None and not isinstance(text, columns.TextColumn):
                self._warn_of_missing("text", self.text.column)
        formula: Order | Sequential = Sequential(len(self.view))
        if order == "shuffle":
            formula = Order(len(self.view), self.view.ids_digest, seed, block_size, endless=epochs is None)
        micro_batch = micro_batch or whole_share(global_batch, world_size, formula.block_size)
        self.plan = Plan(formula, global_batch, micro_batch, rank=rank, world_size=world_size)
        self.damage_log = DamageLog(Path(damage_log), rank, start=None)
        self.stats = PipelineStats(cache=self.dataset.reader.cache)
        self.iterations = Iterations()

    def _warn_of_missing(self, argument: str, column: "Column") -> None:
        """Warn of images without a row in a column by image id; ColumnError if it has none of the images."""
        if column.key != "image_id":
            return
        ids = self.view.image_ids(self.dataset.table).astype(np.int64)
        missing = len(ids) - column.count(ids)
        if missing == len(ids):
            raise ColumnError(
                f"{argument}: {column.source} has none of the {missing:,} images of the stream; are its "
                f"image_ids those of SA-1B, such as {ids[0]}?"
            )
        if missing:
            has_no = f"{column.source} has no {column.name} for {missing:,} of {len(ids):,} images"
            warnings.warn(f"{has_no}; their value is None", stacklevel=3)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps table and view of the same version of the dataset that was opened here.
        opened = {"root": self.dataset, "join": self.columns, "text": self.text}
        opened |= {"decoder": self.options.decoder, "cache": None, "cache_bytes": None, "layers": ()}
        state = {"iterations": self.iterations, "damage_log": self.damage_log}
        return _reopen, ({**self._arguments, **opened},), state  # a copy has its own arguments

    def __repr__(self) -> str:
        return (
            f"Stream({str(self.root)!r}, {self.view!r}: {self.steps_per_epoch:,} steps an epoch of "
            f"{self.plan.global_batch:,} images, rank {self.rank} of {self.world_size}, "
            f"position {self.position:,})"
        )

    def sources(self) -> dict[Any, SampleSource]:
        return {None: self}

    def identity(self) -> dict[str, Any]:
        condition = self.view.masks_where
        layers = [[layer.info.name, layer.info.digest] for layer in self.dataset.layers]
        return ({"layers": layers} if layers else {}) | {
            "seed": self.seed,
            "ids_sha256": self.view.ids_digest,
            "masks_where": None if condition is None else condition.text,
            "order": "sequential" if isinstance(self.plan.order, Sequential) else "shuffle",
            "block_size": self.plan.order.block_size,
            "epochs": self.epochs,
            "bytes_sha256": self.view.bytes_digest,
            "options": self.options.record() | ({} if self.text is None else {"text": self.text.record()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, at any world size, micro-batch size or number of workers.

        The next iteration finishes the epoch of the position. At the border of two epochs it is the second
        one. A difference that changes samples but not their sequence causes a warning: another sample table
        (other shards, another stored image size, more sources) or other options.

        Raises:
            ResumeError: the state has another sequence: the images, the condition on masks, the seed, the
                order or the block size differ; or it has other layers.
        """
        self.check_state(state)
        try:
            position = checked_position(state.get("position"))
            if isinstance(self.plan.order, Order):
                self.plan.order.check_step(position)
        except ValueError as error:
            raise ResumeError(f"state {state!r}: {error}; pass what state_dict() returned") from None
        self.position = position

    def check_state(self, state: object) -> None:
        """Check that a state, of which the position is ignored, has this stream's sequence: ResumeError."""
        name = "all images of the directory" if self.view_name is None else f"the view {self.view_name!r}"
        check_state(self.identity(), state, name, self.root)


@cache  # every later fork, of any library, only looks this up
def load_compiled_code() -> None:
    """Load numba and a compiled loop before this process forks: its workers share this memory, 70 MB each."""
    with contextlib.suppress(Exception):  # which would be printed in any fork; a worker reports its own
        random_words(0, np.zeros(1, np.int64))


os.register_at_fork(before=load_compiled_code)


def _reopen(arguments: dict[str, Any]) -> Stream:
    return Stream(**arguments)
