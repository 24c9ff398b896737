"""The positions that a rank reads in each step, as micro-batches, and the states from which it resumes."""

import os
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sa1b.arguments import BadType, BadValue, whole_number
from sa1b.console import command
from sa1b.errors import Sa1bError
from sa1b.stream.order import Mixture, Order, Sequential, check_global_batch, micro_batch_count, rank_slice

MAX_POSITION = 1 << 62  # samples over all epochs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Positions [start, stop) that one rank reads together, and the position to resume at after them."""

    start: int
    stop: int
    position: int

    def span(self, where: Callable[[int], str]) -> str:
        """The samples, for messages; `where` describes that of a position."""
        if self.start == self.stop:
            return "in an empty batch"
        first, last = self.start, self.stop - 1
        return f"in the batch of positions {first} to {last}: {where(first)}, to {where(last)}"


@dataclass(slots=True)
class Plan:
    """The micro-batches of a rank, step by step; ValueError if the sizes do not fit together."""

    order: Order | Sequential | Mixture
    global_batch: int  # samples of a step over all ranks
    micro_batch: int  # largest number of samples that a rank reads at a time
    rank: int
    world_size: int
    count: int = field(init=False)  # micro-batches of a full step, the same number on every rank

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch, self.world_size, self.order.block_size)
        self._slice(0, self.global_batch)
        self.count = self._count(self.global_batch)

    def __len__(self) -> int:
        """Micro-batches in an epoch, the same number on every rank; TypeError if the order is endless."""
        if self.endless:
            raise BadType("len(stream): an endless stream (epochs=None) has no length; use steps_per_epoch")
        full = self.steps_per_epoch - 1
        return full * self.count + self._count(self._step_size(full * self.global_batch))

    @property
    def steps_per_epoch(self) -> int:
        """Global batches that cover an epoch. An endless order may begin and end an epoch within a step."""
        return -(-self.order.count // self.global_batch)

    def epoch_end(self, position: int) -> int:
        """End of the epoch of a position. The border of two epochs belongs to the second epoch."""
        return (position // self.order.count + 1) * self.order.count

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from the start of a step to the end of the epoch, if there is an end.
        ValueError if the position cuts a block.
        """
        if isinstance(self.order, Sequential):
            position %= self.order.count  # every epoch repeats the first one
        elif isinstance(self.order, Order):
            self.order.check_step(position)
        end = self.epoch_end(position)
        while self.endless or position < end:
            size = self._step_size(position)
            count = self.count if size == self.global_batch else self._count(size)
            after = position + size if self.endless else min(position + size, end)
            first, stop = self._slice(position, size)
            for left in reversed(range(count)):  # the last ones may be short or empty
                last = min(first + self.micro_batch, stop)
                yield MicroBatch(first, last, position if left else after)
                first = last
            position = after

    @property
    def endless(self) -> bool:
        return self.order.endless

    def _step_size(self, position: int) -> int:
        """Samples of the step that begins at a position: fewer at the end of an epoch of training."""
        if self.endless or isinstance(self.order, Sequential):
            return self.global_batch
        return min(self.global_batch, self.epoch_end(position) - position)

    def _count(self, samples: int) -> int:
        block_size = self.order.block_size
        return micro_batch_count(samples, self.world_size, self.micro_batch, block_size=block_size)

    def _slice(self, position: int, samples: int) -> tuple[int, int]:
        block_size = self.order.block_size
        return rank_slice(position, samples, self.rank, self.world_size, block_size=block_size)


def checked_position(position: object) -> int:
    """A position from 0 to MAX_POSITION, which leaves room for an epoch in 63 bits; ValueError for others."""
    return whole_number("position", position, most=MAX_POSITION)


def process_rank() -> tuple[int, int]:
    """Rank and world size: those of torch.distributed, else of torchrun's variables, else 0 of 1."""
    # If torch.distributed was never imported, it is not initialised.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | os.environ
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not numbers[name].removeprefix("-").isdecimal():
            raise BadValue(f"{name}={numbers[name]}: must be a whole number; torchrun sets it")
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if not 0 <= rank < world_size:
        raise BadValue(f"RANK={rank}: must be from 0 to below WORLD_SIZE={world_size}; torchrun sets both")
    return rank, world_size


_SEQUENCE = ("layers", "order", "block_size", "ids_sha256", "masks_where", "seed")


class ResumeError(Sa1bError):
    """A saved state that is not of this stream, whose `argument` differs, such as "seed"; None: no state."""

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


def check_state(current: Mapping[str, Any], state: object, view: str, root: str) -> None:
    """Raise ResumeError for a state of another sequence than `current`, and warn about other differences."""
    current = {"layers": [], **current}
    saved = {"layers": [], **state} if isinstance(state, Mapping) else {}
    missing = {*current} - {*saved}
    if not isinstance(saved.get("options"), Mapping):
        missing.add("options")
    if missing:
        lacks = ", ".join(sorted(missing))
        raise ResumeError(f"state {reprlib.repr(state)}: has no {lacks}; pass what state_dict() returned")
    if str(decoder := saved["options"].get("decoder")).startswith("nvimgcodec"):
        raise ResumeError(
            f"saved state with the decoder {decoder}, which this version does not have: the pixels differ; "
            "begin again from its weights with decode='gpu', which is torchcodec, or set the state's "
            "options['decoder'] to 'torchcodec-2' to go on with the same images and other pixels",
            "decoder",
        )
    # With blocks, an endless order cuts the blocks of later epochs at other rows.
    for name in (*_SEQUENCE, "epochs") if current["block_size"] != 1 else _SEQUENCE:
        if saved[name] != current[name]:
            raise _other_sequence(name, saved[name], current[name], view, root)
    now, options = current["options"], {**current["options"], **saved["options"]}
    changed = [f"{name} {old}, now {now.get(name)}" for name, old in options.items() if now.get(name) != old]
    if changed:
        text = f"the state was saved by a stream with other options: {', '.join(changed)}"
        warnings.warn(f"{text}. The sequence of images is the same, but the samples differ", stacklevel=3)
    if (old := saved["bytes_sha256"]) != (new := current["bytes_sha256"]):
        text = f"{root} has changed since the state was saved (sample table {_short(old)}, now {_short(new)})"
        warnings.warn(f"{text}: the images are the same, but their stored bytes may differ", stacklevel=3)


def _other_sequence(name: str, saved: Any, current: Any, view: str, root: str) -> ResumeError:
    argument, differs, remedy = name, f"{name} {saved}, this stream {current}", f"pass {name}={saved!r}"
    effect = "its sequence differs, so samples would be repeated and left out"
    if name == "layers":
        differs, effect = f"{_layers(saved)}, this stream has {_layers(current)}", "the masks differ"
        remedy = "pass the layers that the state was saved with, or begin again from its weights"
    elif name == "masks_where":
        argument, remedy = "view", "pass the view that the state was saved with"
        before, now = ("none" if text is None else repr(text) for text in (saved, current))
        differs = f"condition on masks {before}, {view} {now}"
    elif name == "ids_sha256":
        argument, differs = "view", f"other images ({_short(saved)}) than {view} ({_short(current)})"
        remedy = (
            f"pass the view that the state was saved with, or, if sources were added to {root} since, make a "
            f"view of the images that it was trained on: `{command('view', root)} --ids FILE --name NAME`"
        )
    return ResumeError(f"saved state with {differs}: {effect}; {remedy}", argument)


def _layers(layers: Any) -> str:
    return ", ".join(f"the layer {name} ({_short(digest)})" for name, digest in layers) or "no layer"


def _short(digest: Any) -> str:
    return str(digest)[:12]
