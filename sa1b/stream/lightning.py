"""`TrainingData`: a stream for Lightning that resumes after the last batch that was trained on.

    data = TrainingData(lambda: sa1b.Loader(sa1b.Stream("shards", global_batch=256), device="cuda"))
    trainer = lightning.Trainer(callbacks=[data], max_epochs=3)
    trainer.fit(model, data)                            # and ckpt_path="last.ckpt" to resume

Lightning fetches a batch before it trains on the one before it, and begins iterations that it does not read.
So the position is neither that of the last batch fetched nor that of the next iteration. It is recorded here
after each step of the optimizer, and every iteration begins at it. No image is left out or repeated, wherever
a checkpoint was saved and whatever Lightning takes for the end of an epoch.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning
from torch.utils.data import DataLoader

from sa1b.errors import UsageError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.loader import Loader


class TrainingData(lightning.Callback):
    """The training data of a `lightning.Trainer`, and the callback that records their position.

    Pass the same object to `Trainer(callbacks=[...])` and to `Trainer.fit(model, ...)`. Its state is part of
    each checkpoint. It can be resumed with another number of devices, `global_batch` and `micro_batch` at the
    end of an epoch; within an epoch, Lightning's own counters then end that epoch early or late.

    Args:
        make: returns a `sa1b.Loader`, or a `DataLoader` of a `sa1b.Stream` with `batch_size=None`. It is
            called once on each rank, when ranks and devices are known.

    Raises:
        UsageError: the object is not among the callbacks, or the optimizer steps within a step of the stream,
            because `Trainer(accumulate_grad_batches=)` is not a multiple of the micro-batches of a step.
        ResumeError: the checkpoint has the state of another sequence.
    """

    def __init__(self, make: Callable[[], "Loader | DataLoader[Batch]"]) -> None:
        self._make = make
        self._loader: Loader | DataLoader[Batch] | None = None
        self._state: dict[str, Any] | None = None  # after the last step of the optimizer
        self._steps = 0  # of the optimizer, at that time
        self._is_callback = self._is_partial = False

    @property
    def loader(self) -> "Loader | DataLoader[Batch]":
        """The loader that `make` returned."""
        if self._loader is None:
            self._loader = self._make()
            if self._state is not None:
                self._stream.load_state_dict(self._state)
            self._state = self._stream.state_dict()
        return self._loader

    @property
    def _stream(self) -> BatchStream:
        stream = getattr(self._loader, "stream", getattr(self._loader, "dataset", None))
        if not isinstance(stream, BatchStream):
            way = "make() must return a sa1b.Loader, or a DataLoader of a sa1b.Stream"
            raise UsageError(f"TrainingData(make): got {self._loader!r}; {way}")
        return stream

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch. Raises TypeError for an endless stream (epochs=None)."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate from the last batch that was trained on; the iteration begins when it is read."""
        if not self._is_callback:
            raise UsageError("TrainingData(make): is no callback; pass it to Trainer(callbacks=[...]) too")
        loader = self.loader
        assert self._state is not None
        self._stream.position = self._state["position"]
        yield from loader

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Record that the trainer has this callback."""
        self._is_callback = True

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count the optimizer's steps from those of the checkpoint on."""
        self._steps, self._is_partial = trainer.global_step, False

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the position after a step of the optimizer; batches of an unfinished step do not count."""
        self._is_partial = trainer.global_step == self._steps
        if self._is_partial:
            return
        assert self._state is not None
        if batch.position == self._state["position"]:
            count = self._stream.plan.count
            raise UsageError(
                f"the optimizer stepped within a step of the stream, which has {count} micro-batches: pass "
                f"Trainer(accumulate_grad_batches={count}) or a multiple of it; after a resume, take a "
                "checkpoint that was saved after a step of the optimizer, with the same batches"
            )
        self._state, self._steps = self._stream.state_dict(batch), trainer.global_step

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Warn of a checkpoint between two steps of the optimizer."""
        if self._is_partial:
            text = f"step {trainer.global_step}: a checkpoint has no accumulated gradients: the first step"
            way = "save with ModelCheckpoint(every_n_train_steps=...)"
            warnings.warn(f"{text} after a resume has fewer batches; {way}", stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream after the last step of the optimizer."""
        return {} if self._state is None else dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._state = dict(state_dict)
        if self._loader is not None:
            self._stream.load_state_dict(self._state)
