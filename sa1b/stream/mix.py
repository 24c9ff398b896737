"""`sa1b.Mix`: several datasets by weight, with one position as the only state.

    mix = sa1b.Mix({"sa1b": (sa1b.Stream("shards", global_batch=256), 3),
                    "mine": (sa1b.Stream("mine", global_batch=256), 1)})
    for batch in sa1b.Loader(mix, device="cuda"):
        batch.source                                # ("sa1b", "sa1b", "mine", "sa1b", ...)
        save({"stream": mix.state_dict(batch)})

The source of a position is a formula of the weights, see sa1b.stream.mixture. The n-th sample of a source is
that of its own stream at position n: its view, seed, epochs, masks, strategy and transforms are its own.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sa1b.arguments import BadValue, check_arguments, path, whole_number
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.iterations import Iterations
from sa1b.stream.mixture import Concatenated, Mixture, Phase, whole_weights
from sa1b.stream.order import Sequential
from sa1b.stream.pending import SampleSource
from sa1b.stream.plan import MAX_POSITION, ResumeError, checked_position
from sa1b.stream.stats import PipelineStats

Weights = Mapping[str, Any]


class Mix(BatchStream):
    """Micro-batches of one rank from several streams, by weight.

    Args:
        sources: name -> (stream, weight). The streams have the same global and micro-batch, ranks,
            image size, decoder and order; the rest is their own. A weight is a whole number, a float, which
            is read as it is printed, or text such as "1/3"; only the ratios matter. With streams of
            order="sequential" every source is read once, one after the other, and weights have no effect.
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
        first = next(iter(self.streams.values()))
        counts = tuple(stream.plan.order.count for stream in self.streams.values())
        order: Mixture | Concatenated
        if isinstance(first.plan.order, Sequential):
            if schedule or until:
                raise BadValue(
                    f"{'schedule' if schedule else 'until'}: the streams are sequential, and each is read "
                    "once; pass streams with order='shuffle'"
                )
            order = Concatenated(sum(counts), counts)
        else:
            phases = self._phases({name: weight for name, (_, weight) in sources.items()}, schedule or {})
            order = Mixture(counts, phases, until)
        self.plan = replace(first.plan, order=order)
        masks = max(stream.options.masks for stream in self.streams.values())
        self.options, self.decoder = replace(first.options, masks=masks), first.decoder
        self.damage_log = first.damage_log
        if damage_log is not None:
            self.damage_log = DamageLog(Path(path("damage_log", damage_log)), self.plan.rank, start=None)
        self.stats = PipelineStats(cache=first.stats.cache)
        self.iterations = Iterations()

    def _phases(self, weights: Weights, schedule: Mapping[Any, Weights]) -> tuple[Phase, ...]:
        if not isinstance(schedule, Mapping):
            raise BadValue(
                f"schedule={schedule!r} must be a mapping of positions to weights: "
                "{8: {'sa1b': 1, 'mine': 1}}"
            )
        phases = [Phase(0, whole_weights(list(weights.values())))]
        for start in sorted(whole_number("schedule", position, 1, MAX_POSITION) for position in schedule):
            if not isinstance(schedule[start], Mapping) or schedule[start].keys() != self.streams.keys():
                raise BadValue(
                    f"schedule[{start}] must have a weight for each of {', '.join(self.streams)}; 0 leaves a "
                    "source out"
                )
            later = whole_weights([schedule[start][name] for name in self.streams])
            if later != phases[-1].weights:
                phases.append(Phase(start, later))
        return tuple(phases)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"iterations": self.iterations, "damage_log": self.damage_log}
        return partial(Mix, **self._arguments), (), state

    def __repr__(self) -> str:
        order = self.plan.order
        shares = "" if isinstance(order, Concatenated) else f", weights {self.weights_at(self.position)}"
        return (
            f"Mix({', '.join(self.streams)}{shares}: global batch {self.plan.global_batch:,}, rank "
            f"{self.rank} of {self.world_size}, position {self.position:,})"
        )

    def weights_at(self, position: int) -> dict[str, int]:
        """The weights at a position of the mixture, as whole numbers without a common divisor."""
        order = self.plan.order
        assert isinstance(order, Mixture)
        weights = [phase.weights for phase in order.phases if phase.start <= position]
        return dict(zip(self.streams, weights[-1], strict=True))

    def seen(self, position: int) -> dict[str, int]:
        """Samples of each source before a position of the mixture. Divided by the samples of the source,
        `len(stream.view)`, it is the number of its epochs.
        """
        order = self.plan.order
        assert isinstance(order, Mixture | Concatenated)
        return dict(zip(self.streams, order.seen(whole_number("position", position)), strict=True))

    def use_decoder(self, name: str) -> None:
        for stream in self.streams.values():
            stream.use_decoder(name)
        self.options = replace(self.options, decoder=name)
        self.decoder = next(iter(self.streams.values())).decoder

    def sources(self) -> list[SampleSource]:
        decoder, log, stats = self.decoder, self.damage_log, self.stats
        return [
            replace(source, name=name, decoder=decoder, damage_log=log, stats=stats)
            for name, stream in self.streams.items()
            for source in stream.sources()
        ]

    def state_at(self, position: int) -> dict[str, Any]:
        sources = {name: stream.state_at(0) for name, stream in self.streams.items()}
        for state in sources.values():
            del state["position"]
        phases = self.plan.order.phases if isinstance(self.plan.order, Mixture) else ()
        return {
            "position": position,
            "phases": [[phase.start, dict(zip(sources, phase.weights, strict=True))] for phase in phases],
            "sources": sources,
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
            saved, position = state["sources"], checked_position(state["position"])
            phases = [(int(start), dict(weights)) for start, weights in state["phases"]]
            names = list(saved)
        except (KeyError, TypeError, ValueError):
            raise ResumeError(
                f"state {reprlib.repr(state)}: not the state of a mixture; pass what state_dict() returned"
            ) from None
        if names != list(self.streams):
            raise ResumeError(
                f"saved state with the sources {', '.join(names)}, this mixture has "
                f"{', '.join(self.streams)}: the sequence differs; pass the sources of the state, in this "
                "order, with weight 0 from a position on for those that are no longer wanted",
                "sources",
            )
        before = [phase for phase in phases if phase[0] < max(position, 1)]
        current = [tuple(phase) for phase in self.state_at(0)["phases"] if phase[0] < max(position, 1)]
        if before != current:
            raise ResumeError(
                f"saved state with {_text(before)}, this mixture has {_text(current)}: samples would be "
                f"repeated and left out; pass the weights of the state, and change them with "
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
    how = 'Mix({"sa1b": (stream, 3), "mine": (other, 1)})'
    if not isinstance(sources, Mapping) or not sources:
        raise BadValue(f"sources={sources!r} must be a mapping of names to pairs of stream and weight: {how}")
    streams: dict[str, Stream] = {}
    for name, pair in sources.items():
        if not isinstance(name, str) or not name:
            raise BadValue(f"sources: {name!r} must be a name: {how}")
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Stream):
            raise BadValue(f"sources[{name!r}]={pair!r} must be a sa1b.Stream and its weight: {how}")
        streams[name] = pair[0]
    (first_name, first), *others = streams.items()
    for name, stream in others:
        if sum(stream is other for other in streams.values()) > 1:
            raise BadValue(f"sources[{name!r}]: is the stream of another source; make one for each source")
        shared = _shared_arguments(stream)
        for argument, first_value in _shared_arguments(first).items():
            if (value := shared[argument]) != first_value:
                raise BadValue(
                    f"{argument}: the sources {first_name} and {name} have {first_value!r} and {value!r}; "
                    "pass the same to all streams of a mixture"
                )
    _check_columns(streams)
    return streams


def _check_columns(streams: Mapping[str, Stream]) -> None:
    """ValueError if joined columns or texts of different sources cannot be in one batch."""
    kinds: dict[str, tuple[str, Any]] = {}  # column, or "text" -> source and kind
    for source, stream in streams.items():
        columns: dict[str, Any] = {f"join[{name!r}]": (it.key,) for name, it in stream.columns.items()}
        if (text := stream.text) is not None:
            tokenizer = None if text.tokenizer is None else text.tokenizer.name
            columns["text"] = (text.column.key, text.width, tokenizer)
        for name, kind in columns.items():
            other, of_other = kinds.setdefault(name, (source, kind))
            if kind != of_other:
                raise BadValue(
                    f"{name}: the sources {other} and {source} have tables with {of_other} and {kind}; use "
                    "the same key, numbers of an embedding and tokenizer in all sources"
                )


def _shared_arguments(stream: Stream) -> dict[str, Any]:
    """The arguments that are the same for all streams of a mixture."""
    of_plan = ("global_batch", "micro_batch", "rank", "world_size")
    shared = {name: getattr(stream.plan, name) for name in of_plan}
    shared |= {name: getattr(stream.options, name) for name in ("image_size", "decoder")}
    return shared | {"order": "sequential" if isinstance(stream.plan.order, Sequential) else "shuffle"}


def _text(phases: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    parts = [f"{':'.join(map(str, weights.values()))} from position {start}" for start, weights in phases]
    return f"the weights {', '.join(parts)}"
