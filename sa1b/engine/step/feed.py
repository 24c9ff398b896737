"""The micro-batches of a training step: batches of the stream on the device, with dense masks."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sa1b.engine.mix_file import read_mix, reschedule
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import DataConfig, with_flags
from sa1b.errors import ManifestError, Sa1bError, UsageError
from sa1b.shards.dataset import Dataset
from sa1b.storage.errors import MissingError
from sa1b.storage.protocols import endpoint_options
from sa1b.stream.batch import Batch
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.loader import Loader
from sa1b.stream.mix import Mix
from sa1b.stream.text import ColumnError


class Feed:
    """The micro-batches of one rank; `view` is read instead of `config.view`; `run`: for the damage log."""

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        rank_info: RankInfo,
        run: Path,
        seed: int,
        *,
        view: str | None = None,
        order: Literal["shuffle", "sequential"] = "shuffle",
    ) -> None:
        target_size = config.target_size or image_size // 4
        shared: dict[str, Any] = {
            "order": order,
            "epochs": None if order == "shuffle" else 1,  # a training run counts steps, not epochs
            "damage_log": run / "damaged.jsonl",
            "rank": rank_info.rank,
            "world_size": rank_info.world_size,
            "image_size": image_size,
            "min_pixels_size": target_size,
        }
        if config.mix is None:
            self.stream: Stream | Mix = _stream(config, view or config.view, seed, **shared)
        else:
            self.stream = _mix(config, view, seed, **shared)
        self.sources = self.stream.streams if isinstance(self.stream, Mix) else {}  # of a mixture, by name
        self.stream.damage_log = DamageLog(run / "damaged.jsonl", rank_info.rank)
        try:
            same = {name: getattr(config, name) for name in ("threads", "processes", "prefetch", "decode")}
            self.loader = Loader(self.stream, device=rank_info.device, dense=target_size, quiet=True, **same)
        except ValueError as error:
            raise with_flags(error) from None
        self.micro_batches = self.stream.plan.count
        self._config, self._history = config, [[0, 0, config.global_batch]]
        self._batches: Generator[Batch, None, None] | None = None

    @property
    def images(self) -> int:
        """Images of an epoch; that of a mixture ends when each image of every source was used."""
        return self.stream.plan.order.count

    def receipt(self) -> dict[str, Any]:
        """What decides the images of all later steps: dataset directories and views, and the state."""
        streams = self.sources
        if isinstance(self.stream, Stream):
            streams = {str(self.stream.root): self.stream}
        sources = {
            name: {"root": str(stream.root), "view": stream.view_name, "images": len(stream.view)}
            for name, stream in streams.items()
        }
        state = self.state_dict()
        return {"sources": sources, "global_batch": self.stream.plan.global_batch, "stream": state}

    def seen(self) -> dict[str, tuple[int, float]]:
        """Of each source of a mixture: its images up to this state, and the epochs that these are."""
        if not isinstance(self.stream, Mix):
            return {}
        counts = self.stream.seen(self.state_dict()["position"])
        return {name: (count, count / len(self.sources[name].view)) for name, count in counts.items()}

    def __iter__(self) -> Iterator[Batch]:
        """The batches after the current state, until a sequential feed ends."""
        self._batches = self._batches or iter(self.loader)
        return self._batches

    def step(self) -> Iterator[Batch]:
        """The next step's `micro_batches` batches, as many on every rank, some empty; none after the end."""
        return islice(self, self.micro_batches)

    def state_dict(self) -> dict[str, Any]:
        state = self.loader.state_dict()
        return {**state, "history": self._history} if isinstance(self.stream, Mix) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        if isinstance(self.stream, Mix):
            self._history = reschedule(self.stream, self._config, {"history": self._history, **state})
        self.loader.load_state_dict(state)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


def _stream(data: DataConfig, view: str | None, seed: int, **shared: Any) -> Stream:
    trains = shared["order"] == "shuffle"
    same = ("global_batch", "micro_batch", "deadline", "cache", "cache_bytes", "layers", "masks", "strategy")
    try:
        stream = Stream(
            data.root,
            view=view,
            seed=seed,
            storage_options=endpoint_options(str(data.root), data.endpoint) or None,
            text=data.texts(),
            block_size=data.block_size if trains else 1,
            flip=data.flip if trains else 0.0,
            min_pixels=data.min_pixels if trains else 0,
            **{name: getattr(data, name) for name in same},
            **shared,
        )
    except ColumnError as error:
        raise UsageError(f"--data.text: {str(error).removeprefix('text: ')}") from None
    except ValueError as error:
        raise with_flags(error) from None
    except (ManifestError, MissingError) as error:
        part = "--data" if trains else "--evaluation"
        flag = f"{part}.view" if _opens(data, data.layers) else f"{part}.layers"
        raise UsageError(f"{flag if _opens(data) else '--data.root'}: {error}") from None
    if data.masks and not (stream.dataset.manifest["totals"]["masks"] or stream.dataset.layers):
        way = "label images with `sa1b annotate`, or train a model that reads none: --preset distill"
        raise UsageError(f"--data.root {data.root}: has no masks, and this model learns masks; {way}")
    return stream


def _mix(config: DataConfig, view: str | None, seed: int, **shared: Any) -> Mix:
    sources, schedule = read_mix(config)
    streams = {}
    for source in sources:
        data, own_view, own_seed = source.data, source.data.view, source.seed
        if view is not None:
            # The seed of an evaluation is constant, see `held_out_feed`.
            data = replace(data, layers=config.layers, masks=config.masks, strategy=config.strategy)
            own_view, own_seed = source.view(view), None
            if own_view is None:
                continue  # the source has no part in the evaluation
        try:
            own = _stream(data, own_view, seed if own_seed is None else own_seed, **shared)
        except UsageError as error:
            where = f"--data.mix {config.mix}: source {source.name}"
            raise UsageError(f"{where}: {error}") from None
        streams[source.name] = own, source.weight
    if not streams:
        raise UsageError(f"--data.mix {config.mix}: no source has an evaluation_view; give one a view")
    try:
        return Mix(streams, schedule=schedule if shared["order"] == "shuffle" else None)
    except ValueError as error:
        raise UsageError(f"--data.mix {config.mix}: {error}") from None


def _opens(data: DataConfig, layers: tuple[str, ...] = ()) -> bool:
    """Whether the dataset opens without the view, which then is at fault."""
    options = endpoint_options(str(data.root), data.endpoint) or None
    try:
        Dataset(data.root, deadline=data.deadline, storage_options=options, layers=layers)
    except Sa1bError:
        return False
    return True
