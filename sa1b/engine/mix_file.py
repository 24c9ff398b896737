"""The file of `--data.mix`: datasets, their weights and settings, and changes of the weights.

    sources:
      sa1b: {root: shards, weight: 3, view: train, evaluation_view: held-out}
      mine: {root: mine, weight: 1, masks: 16, seed: 1}
    schedule:
      - {from_step: 10000, weights: {sa1b: 1, mine: 1}}

A source has the settings of `--data.` that differ from the flags, and the fields of `_Source`. Paths are
relative to the current folder, as in flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from sa1b.engine.settings import DataConfig
from sa1b.errors import UsageError
from sa1b.stream.mix import Mix
from sa1b.stream.mixture import fraction_of

# Settings of a step or a process, which all sources share.
_SHARED = ("mix", "global_batch", "micro_batch", "target_size", "threads", "prefetch", "decode", "text_width")


_FORM = "write sources: {NAME: {root: FOLDER, weight: 1}}, see the page Mixing datasets"


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a source that are no flag of `--data.`: weight, seed and view of evaluations."""

    weight: int | float | str
    seed: int | None = None  # None: that of the run
    evaluation_view: str | msgspec.UnsetType | None = msgspec.UNSET  # unset: --evaluation.view; null: none


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    weights: dict[str, int | float | str]
    from_step: int | None = None
    from_position: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sources: dict[str, dict[str, Any]]
    schedule: list[_Change] = []


@dataclass(frozen=True, slots=True)
class MixSource:
    """A source of a mixture; `data.view` and `data.layers` are those of the training."""

    name: str
    data: DataConfig
    weight: int | float | str
    seed: int | None
    evaluation_view: str | msgspec.UnsetType | None

    def view(self, evaluation: str | None) -> str | None:
        """The view of an evaluation by `--evaluation.view`; None: the source has no part in it."""
        return evaluation if self.evaluation_view is msgspec.UNSET else self.evaluation_view


def read_mix(
    config: DataConfig, history: Sequence[Sequence[int]] = ()
) -> tuple[list[MixSource], dict[int, Mapping[str, Any]]]:
    """The sources and the schedule, position -> weights, of the file. UsageError names file and source.
    `history`: step and position from which a run has each global
    batch, for `from_step`. Of two changes at one position, the later one in the file holds.
    """
    flag = f"--data.mix {config.mix}"
    try:
        text = Path(str(config.mix)).read_bytes()
        mixture = msgspec.yaml.decode(text, type=_File)
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}; pass a file of sources and weights") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{flag}: {' '.join(str(error).split())}; {_FORM}") from None
    if (key := _repeated_key(text)) is not None:
        raise UsageError(f"{flag}: has {key!r} twice in one place; give each another name")
    if not mixture.sources:
        raise UsageError(f"{flag}: has no sources; {_FORM}")
    if config.root or config.view or config.layers:
        name = "root" if config.root else "view" if config.view else "layers"
        raise UsageError(f"--data.{name}: belongs to each source of --data.mix; move it into {config.mix}")
    sources = [
        _source(f"{flag}: source {name}", name, source, config) for name, source in mixture.sources.items()
    ]
    schedule: dict[int, Mapping[str, Any]] = {}
    for change in mixture.schedule:
        if (change.from_step is None) == (change.from_position is None):
            raise UsageError(f"{flag}: schedule: a change must have either from_step or from_position")
        position, where = change.from_position, f"{flag}: schedule: from_position {change.from_position}"
        if change.from_step is not None:
            known = [one for one in history if one[0] <= change.from_step] or [(0, 0, config.global_batch)]
            position = known[-1][1] + (change.from_step - known[-1][0]) * known[-1][2]
            where = f"{flag}: schedule: from_step {change.from_step}"
        assert position is not None
        if position < 1:
            raise UsageError(f"{where}: must be above 0")
        if change.weights.keys() != mixture.sources.keys():
            raise UsageError(
                f"{where}: has weights of {', '.join(change.weights)}; write one for each of "
                f"{', '.join(mixture.sources)}, and 0 to leave a source out"
            )
        schedule[position] = change.weights
    return sources, schedule


def roots_of(config: DataConfig) -> list[str]:
    """The dataset directories of the settings: the root, or those of the sources of a mixture."""
    return [config.root] if config.mix is None else [source.data.root for source in read_mix(config)[0]]


def _repeated_key(text: bytes) -> str | None:
    """A key that a mapping of the file has twice: the parser keeps the last one only."""
    import yaml

    waiting, known = [yaml.compose(text, yaml.SafeLoader)], set()
    while waiting:
        node = waiting.pop()
        if id(node) in known:  # an alias
            continue
        known.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            if repeated := [key for key in keys if keys.count(key) > 1]:
                return str(repeated[0])
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return None


def _source(where: str, name: str, given: Mapping[str, Any], config: DataConfig) -> MixSource:
    defaults = asdict(replace(config, mix=None))
    source_fields = {key: value for key, value in given.items() if key in _Source.__struct_fields__}
    data = {key: value for key, value in given.items() if key not in source_fields}
    for key in data:
        if key not in defaults or key in _SHARED:
            why = "all sources share it, so it is a flag" if key in defaults else "no such setting"
            raise UsageError(f"{where}: {key}: {why}; a source has {', '.join(_settings(defaults))}")
    if not data.get("root"):
        raise UsageError(f"{where}: root: missing; the folder that `sa1b reshard` made, or its URL")
    try:
        extra = msgspec.convert(source_fields, _Source)
        fraction_of(extra.weight)
        settings = msgspec.convert({**defaults, **data}, DataConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from None
    return MixSource(name, settings, extra.weight, extra.seed, extra.evaluation_view)


def _settings(defaults: Mapping[str, Any]) -> list[str]:
    return [*_Source.__struct_fields__, *(name for name in defaults if name not in _SHARED)]


def reschedule(mix: Mix, config: DataConfig, state: Mapping[str, Any]) -> list[list[int]]:
    """Let the steps of the schedule be those of the run, whose batch may have changed before or now."""
    history: list[list[int]] = state["history"]
    size = config.global_batch
    step, position, batch = history[-1]
    if batch != size:
        history = [*history, [step + (state["position"] - position) // batch, state["position"], size]]
    if len(history) > 1:
        sources, schedule = read_mix(config, history=history)
        weighted = {source.name: (mix.streams[source.name], source.weight) for source in sources}
        mix.plan = Mix(weighted, schedule=schedule).plan
    return history
