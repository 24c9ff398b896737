"""`sa1b.Mix`: several datasets by weight, with one position as the only state.

    mix = sa1b.Mix({"sa1b": (sa1b.Stream("shards", global_batch=256), 3),
                    "mine": (sa1b.Stream("mine", global_batch=256), 1)})
    for batch in sa1b.Loader(mix, device="cuda"):
        batch.source                                # ("sa1b", "sa1b", "mine", "sa1b", ...)
        save({"stream": mix.state_dict(batch)})

The source of a position is a formula of the weights, see sa1b.stream.order. The n-th sample of a source is
that of its own stream at position n: its view, seed, epochs, masks, strategy and transforms are its own.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sa1b.arguments import BadValue, check_arguments, whole_number
from sa1b.stream.batch_stream import BatchStream, Iterations
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.order import Mixture, Phase, Sequential, whole_weights
from sa1b.stream.plan import MAX_POSITION, ResumeError, checked_position
from sa1b.stream.stats import PipelineStats

Weights = Mapping[str, Any]


class Mix(BatchStream):
    """Micro-batches of one rank from several streams, by weight.

    Args:
        sources: name -> (stream, weight). The streams have the same global and micro-batch, ranks,
            image size, decoder and order; the rest is their own. A weight is a whole number, a float, which
            is read as it is printed, or text such as "1/3"; only the ratios matter. With streams of
            order="sequential" every source is read once, one after the other; weights, schedule and until
            have no effect.
        schedule: position -> name -> weight: other weights from a position on, in samples of the mixture
            (a step of the training has `global_batch` of them). A weight of 0 leaves a source out.
        until: the end of an iteration. None: one endless iteration, in which every source begins its next
            epoch when it has ended. "first": the first source has been used once. "all": all sources have.
            The iteration after it continues the formula.
        damage_log: file for damaged samples of all sources; None: that of the first stream. All samples
            count for its limit.

    Raises:
        ValueError: an argument is invalid, or the streams do not fit together; the message names it.
    """

    @check_arguments
    def __init__(
        self,
        sources: Mapping[str, tuple[Stream, Any]],
        *,
        schedule: Mapping[int, Weights] | None = None,
        until: Literal["first", "all"] | None = None,
        damage_log: str | Path | None = None,
    ) -> None:
        self.streams = _checked_streams(sources)
        if until not in (None, "first", "all"):
            raise BadValue(f"until={until!r} must be None, 'first' or 'all'")
        self._arguments: dict[str, Any] = {"sources": dict(sources), "schedule": schedule, "until": until}
        streams = list(self.streams.values())
        first, counts = streams[0], tuple(stream.plan.order.count for stream in streams)
        order: Mixture | Sequential = Sequential(sum(counts), counts)
        if not isinstance(first.plan.order, Sequential):
            phases = self._phases([weight for _, weight in sources.values()], schedule or {})
            order = Mixture(counts, phases, until)
        self.plan, self.decoder = replace(first.plan, order=order), first.decoder
        self.options = replace(first.options, masks=max(stream.options.masks for stream in streams))
        self.damage_log, self.iterations = first.damage_log, Iterations()
        if damage_log is not None:
            self.damage_log = DamageLog(Path(damage_log), self.plan.rank, start=None)
        self.stats = PipelineStats(cache=first.stats.cache)

    def _phases(self, weights: list[Any], schedule: Mapping[int, Weights]) -> tuple[Phase, ...]:
        phases = [Phase(0, whole_weights(weights))]
        for start in sorted(whole_number("schedule", position, 1, MAX_POSITION) for position in schedule):
            if schedule[start].keys() != self.streams.keys():
                raise BadValue(f"schedule[{start}] must have a weight for each of {', '.join(self.streams)}")
            later = whole_weights([schedule[start][name] for name in self.streams])
            if later != phases[-1].weights:
                phases.append(Phase(start, later))
        return tuple(phases)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"iterations": self.iterations, "damage_log": self.damage_log}
        return partial(Mix, **self._arguments), (), state

    def __repr__(self) -> str:
        shares = f", weights {self.weights_at(self.position)}" if isinstance(self.plan.order, Mixture) else ""
        return (
            f"Mix({', '.join(self.streams)}{shares}: global batch {self.plan.global_batch:,}, rank "
            f"{self.rank} of {self.world_size}, position {self.position:,})"
        )

    def weights_at(self, position: int) -> dict[str, int]:
        """The weights at a position of the mixture, as whole numbers without a common divisor."""
        assert isinstance(self.plan.order, Mixture)
        return dict(zip(self.streams, self.plan.order.phase_at(position)[0].weights, strict=True))

    def seen(self, position: int) -> dict[str, int]:
        """Samples of each source before a position of the mixture. Divided by the samples of the source,
        `len(stream.view)`, it is the number of its epochs.
        """
        assert isinstance(self.plan.order, Mixture | Sequential)
        return dict(zip(self.streams, self.plan.order.seen(whole_number("position", position)), strict=True))

    def use_decoder(self, name: str) -> None:
        for stream in self.streams.values():
            stream.use_decoder(name)
        super().use_decoder(name)

    def sources(self) -> dict[str, Stream]:
        return self.streams

    def identity(self) -> dict[str, Any]:
        phases = self.plan.order.phases if isinstance(self.plan.order, Mixture) else ()
        return {
            "phases": [[start, dict(zip(self.streams, weights, strict=True))] for start, weights in phases],
            "sources": {name: stream.identity() for name, stream in self.streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, at any world size, micro-batch size or number of workers.

        The weights up to the position must be those of the state. Weights after it may differ: that is how
        they are changed, `schedule={position: weights}`.

        Raises:
            ResumeError: the state has other sources, or other weights before its position, or the sequence
                of a source differs; see `Stream.load_state_dict`.
        """
        try:
            saved, position = dict(state["sources"]), checked_position(state["position"])
            before, now = (
                [(start, weights) for start, weights in phases if start < max(position, 1)]
                for phases in (state["phases"], self.identity()["phases"])
            )
        except (KeyError, TypeError, ValueError):
            raise ResumeError(
                f"state {reprlib.repr(state)}: not the state of a mixture; pass what state_dict() returned"
            ) from None
        if list(saved) != list(self.streams):
            raise ResumeError(
                f"saved state with the sources {', '.join(saved)}, this mixture has "
                f"{', '.join(self.streams)}: the sequence differs; pass the sources of the state, in this "
                "order, with weight 0 from a position on for those that are no longer wanted",
                "sources",
            )
        if before != now:
            raise ResumeError(
                f"saved state with the weights {_text(before)}, this mixture has {_text(now)}: samples would "
                f"be repeated and left out; pass the weights of the state, and change them with "
                f"schedule={{{position}: ...}}, from_position: {position} in a file of --data.mix",
                "weights",
            )
        for name, stream in self.streams.items():
            try:
                stream.check_state(saved[name])
            except ResumeError as error:
                raise ResumeError(f"source {name}: {error}", error.argument) from None
        self.position = position


def _checked_streams(sources: Mapping[str, tuple[Stream, Any]]) -> dict[str, Stream]:
    """The streams by name; ValueError if they do not fit together."""
    pairs = list(sources.values()) if isinstance(sources, Mapping) else []
    if not pairs or not all(isinstance(x, tuple | list) and isinstance(x[0], Stream) for x in pairs):
        raise BadValue('sources must be pairs of stream and weight: Mix({"a": (stream, 3), "b": (other, 1)})')
    streams = {name: stream for name, (stream, _) in sources.items()}
    first: dict[str, tuple[str, Any]] = {}  # what is in common -> the first source that has it, its value
    for name, stream in streams.items():
        for what, value in _shared(stream).items():
            other, of_other = first.setdefault(what, (name, value))
            if value != of_other:
                raise BadValue(
                    f"{what}: the sources {other} and {name} have {of_other!r} and {value!r}; pass the same "
                    "to all streams of a mixture"
                )
    return streams


def _shared(stream: Stream) -> dict[str, Any]:
    """What is the same for all streams of a mixture: arguments, and the form of joined columns and texts."""
    of_plan = ("global_batch", "micro_batch", "rank", "world_size")
    shared: dict[str, Any] = {name: getattr(stream.plan, name) for name in of_plan}
    shared |= {name: getattr(stream.options, name) for name in ("image_size", "decoder")}
    shared["order"] = stream.identity()["order"]
    shared |= {f"join[{name!r}]": column.key for name, column in stream.columns.items()}
    if (text := stream.text) is not None:
        tokenizer = None if text.tokenizer is None else text.tokenizer.name
        shared["text"] = (text.column.key, text.width, tokenizer)
    return shared


def _text(phases: list[tuple[int, Mapping[str, int]]]) -> str:
    return ", ".join(f"{':'.join(map(str, parts.values()))} from position {start}" for start, parts in phases)
