"""The file of `--data.mix`, see docs/mixing.md: datasets, their weights, settings and schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from sa1b.engine.settings import DataConfig
from sa1b.errors import UsageError
from sa1b.stream.mix import Mix

# Settings of a step or a process, which all sources share.
_SHARED = {
    *("mix", "global_batch", "micro_batch", "target_size", "text_width"),
    *("threads", "processes", "prefetch", "decode"),
}


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    weights: dict[str, int | float | str]
    from_step: int | None = None
    from_position: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sources: dict[str, dict[str, Any]]
    schedule: list[_Change] = []


class MixSource(msgspec.Struct):
    weight: int | float | str
    seed: int | None = None  # None: that of the run
    evaluation_view: str | msgspec.UnsetType | None = msgspec.UNSET  # unset: --evaluation.view; null: none
    name: str = ""
    data: DataConfig = msgspec.field(default_factory=DataConfig)

    def view(self, evaluation: str | None) -> str | None:
        """The view of an evaluation by `--evaluation.view`; None: the source has no part in it."""
        return evaluation if self.evaluation_view is msgspec.UNSET else self.evaluation_view


_OWN = ("weight", "seed", "evaluation_view")  # settings of a source that are no flag of `--data.`


def read_mix(
    config: DataConfig, history: Sequence[Sequence[int]] = ()
) -> tuple[list[MixSource], dict[int, Mapping[str, Any]]]:
    """The sources and the schedule, position -> weights. `history`: step, position and batch of changes."""
    flag = f"--data.mix {config.mix}"
    try:
        mixture = msgspec.yaml.decode(Path(str(config.mix)).read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        way = "write sources: {NAME: {root: FOLDER, weight: 1}}, see the page Mixing datasets"
        raise UsageError(f"{flag}: {' '.join(str(error).split())}; {way}") from None
    schedule: dict[int, Mapping[str, Any]] = {}
    for change in mixture.schedule:
        position = change.from_position
        if change.from_step is not None:
            known = [one for one in history if one[0] <= change.from_step] or [(0, 0, config.global_batch)]
            position = known[-1][1] + (change.from_step - known[-1][0]) * known[-1][2]
        if position is None:
            raise UsageError(f"{flag}: schedule: a change has no from_step and no from_position; write one")
        schedule[position] = change.weights
    return [_source(flag, name, given, config) for name, given in mixture.sources.items()], schedule


def roots_of(config: DataConfig) -> list[str]:
    """The dataset directories of the settings: the root, or those of the sources of a mixture."""
    return [config.root] if config.mix is None else [source.data.root for source in read_mix(config)[0]]


def _source(flag: str, name: str, given: Mapping[str, Any], config: DataConfig) -> MixSource:
    flags = asdict(replace(config, mix=None))
    allowed = [*_OWN, *(key for key in flags if key not in _SHARED)]
    if unknown := [key for key in given if key not in allowed]:
        names = ", ".join(allowed)
        raise UsageError(f"{flag}: source {name}: {unknown[0]}: no setting of a source; it has {names}")
    try:
        source = msgspec.convert({key: given[key] for key in _OWN if key in given}, MixSource)
        source.name, source.data = name, msgspec.convert({**flags, **given}, DataConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{flag}: source {name}: {error}; correct it") from None
    return source


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
