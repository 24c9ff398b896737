"""The micro-batches of a training step: batches of the stream on the device, with dense masks.

feed = Feed(config.data, config.image_size, rank_info, config.folder, config.seed)
for batch in feed.step():
    module(*model.inputs(batch, config.seed))
state = feed.state_dict()
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
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
from sa1b.stream.columns import ColumnError
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.loader import Loader
from sa1b.stream.mix import Mix


class Feed:
    """The micro-batches of one rank; `image_size` is that of the model, `run` its folder, for the damage log.

    `view` is read instead of `config.view`; "sequential" is the order of an evaluation. UsageError names the
    flag of settings that do not fit together.
    """

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

        def stream(data: DataConfig, own_seed: int, own_view: str | None) -> Stream:
            return _stream(
                data,
                view=own_view,
                evaluates=view is not None,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                order=order,
                epochs=None if order == "shuffle" else 1,  # a training run counts steps, not epochs
                seed=own_seed,
                block_size=data.block_size if order == "shuffle" else 1,
                damage_log=run / "damaged.jsonl",
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                image_size=image_size,
                flip=data.flip if order == "shuffle" else 0.0,
                min_pixels=data.min_pixels if order == "shuffle" else 0,
                min_pixels_size=target_size,
            )

        self.stream: Stream | Mix
        if config.mix is None:
            self.stream = stream(config, seed, view or config.view)
        else:
            self.stream = _mix(config, seed, view, order, stream)
        # The lines of earlier starts count, too.
        self.stream.damage_log = DamageLog(run / "damaged.jsonl", rank_info.rank)
        if config.decode == "gpu" and rank_info.device.type == "cpu":
            raise UsageError("--data.decode gpu: this run is on the CPU; drop the flag")
        try:
            self.loader = Loader(
                self.stream,
                threads=config.threads,
                processes=config.processes,
                prefetch=config.prefetch,
                device=rank_info.device,
                dense=target_size,
                decode=config.decode,
                quiet=True,
            )
        except ValueError as error:
            raise with_flags(error) from None
        self.micro_batches = self.stream.plan.count
        self._config, self._history = config, [[0, 0, config.global_batch]]
        self._batches: Generator[Batch, None, None] | None = None
        self._peeked: tuple[dict[str, Any], Batch] | None = None  # the state before this step

    @property
    def source_names(self) -> list[str]:
        """Of the sources of a mixture; else none."""
        return list(self.stream.streams) if isinstance(self.stream, Mix) else []

    @property
    def images(self) -> int:
        """Images of an epoch. An epoch of a mixture ends when each image of every source was used."""
        return self.stream.plan.order.count

    def receipt(self) -> dict[str, Any]:
        """What decides the images of all later steps: dataset directories and views, and the state."""
        mix = {"": self.stream} if isinstance(self.stream, Stream) else self.stream.streams
        sources = {
            name or str(stream.root): {
                "root": str(stream.root),
                "view": stream.view_name,
                "images": len(stream.view),
            }
            for name, stream in mix.items()
        }
        state = self.state_dict()
        return {"sources": sources, "global_batch": self.stream.plan.global_batch, "stream": state}

    def seen(self) -> dict[str, tuple[int, float]]:
        """Of each source of a mixture: its images up to this state, and the epochs that these are."""
        mix = self.stream
        if not isinstance(mix, Mix):
            return {}
        counts = mix.seen(self.state_dict()["position"])
        return {name: (count, count / len(mix.streams[name].view)) for name, count in counts.items()}

    def step(self) -> Iterator[Batch]:
        """The next step's `micro_batches` batches, as many on every rank, some empty; none after the end."""
        for _ in range(self.micro_batches):
            batch = self._next()
            if batch is None:
                return
            yield batch

    def peek(self) -> Batch:
        """The first batch of the next step, which `step` returns again; EOFError: the feed has ended."""
        if self._peeked is None:
            state, batch = self.loader.state_dict(), self._next()
            if batch is None:
                raise EOFError("there is no next step")
            self._peeked = (state, batch)
        return self._peeked[1]

    def _next(self) -> Batch | None:
        if self._peeked is not None:
            (_, batch), self._peeked = self._peeked, None
            return batch
        self._batches = self._batches or iter(self.loader)
        return next(self._batches, None)

    def reading(self) -> str | None:
        """The sample that the next incomplete batch waits for; see `sa1b.stream.loader.Loader.reading`."""
        return self.loader.reading()

    def steps(self) -> Iterator[list[Batch]]:
        """Steps until a sequential feed ends."""
        return iter(lambda: list(self.step()), [])

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step whose micro-batches were all taken."""
        state = self.loader.state_dict() if self._peeked is None else self._peeked[0]
        return {**state, "history": self._history} if isinstance(self.stream, Mix) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Raises sa1b.stream.plan.ResumeError."""
        self.close()
        if isinstance(self.stream, Mix):
            self._history = reschedule(self.stream, self._config, {"history": self._history, **state})
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop the loader's threads."""
        batches, self._batches, self._peeked = self._batches, None, None
        if batches is not None:
            batches.close()


def _stream(data: DataConfig, *, view: str | None, evaluates: bool, **arguments: Any) -> Stream:
    """The stream of a dataset; UsageError names the flag that is wrong."""
    try:
        stream = Stream(
            data.root,
            view=view,
            deadline=data.deadline,
            storage_options=endpoint_options(str(data.root), data.endpoint) or None,
            cache=data.cache,
            cache_bytes=data.cache_bytes,
            layers=data.layers,
            masks=data.masks,
            strategy=data.strategy,
            text=data.texts(),
            **arguments,
        )
    except ColumnError as error:
        raise UsageError(f"--data.text: {str(error).removeprefix('text: ')}") from None
    except ValueError as error:
        raise with_flags(error) from None
    except (ManifestError, MissingError) as error:
        part = "--evaluation" if evaluates else "--data"
        flag = f"{part}.view" if _opens(data, data.layers) else f"{part}.layers"
        raise UsageError(f"{flag if _opens(data) else '--data.root'}: {error}") from None
    if data.masks and not (stream.dataset.manifest["totals"]["masks"] or stream.dataset.layers):
        raise UsageError(
            f"--data.root {data.root}: has no masks, and this model learns masks; label images with "
            "`sa1b annotate`, or train a model that reads none: --preset distill, or one of your own"
        )
    return stream


def _mix(
    config: DataConfig,
    seed: int,
    view: str | None,
    order: str,
    make: Callable[[DataConfig, int, str | None], Stream],
) -> Mix:
    """The mixture of `--data.mix`; `view` is that of an evaluation. UsageError names file and source."""
    sources, schedule = read_mix(config)
    streams = {}
    for source in sources:
        own_view = source.data.view if view is None else source.view(view)
        if view is not None and own_view is None:
            continue  # the source has no part in the evaluation
        # The seed of an evaluation is constant, see `held_out_feed`.
        own_seed = seed if source.seed is None or view is not None else source.seed
        data = (
            source.data
            if view is None
            else replace(source.data, layers=config.layers, masks=config.masks, strategy=config.strategy)
        )
        try:
            streams[source.name] = make(data, own_seed, own_view), source.weight
        except UsageError as error:
            where = f"--data.mix {config.mix}: source {source.name}"
            raise UsageError(f"{where}: {error}") from None
    if not streams:
        raise UsageError(f"--data.mix {config.mix}: no source has an evaluation_view; give one a view")
    try:
        return Mix(streams, schedule=schedule if order == "shuffle" else None)
    except ValueError as error:
        raise UsageError(f"--data.mix {config.mix}: {error}") from None


def _opens(data: DataConfig, layers: tuple[str, ...] = ()) -> bool:
    """Whether the dataset opens without the view. If it does, an error was caused by the view."""
    options = endpoint_options(str(data.root), data.endpoint) or None
    try:
        Dataset(data.root, deadline=data.deadline, storage_options=options, layers=layers)
    except Sa1bError:
        return False
    return True
