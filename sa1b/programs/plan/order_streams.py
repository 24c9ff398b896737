"""The streams whose order is simulated: one for each block size, and the mixture of a file."""

import os
from typing import Any

from sa1b.engine.data_config import DataConfig, with_flags
from sa1b.engine.mix_file import read_mix
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.dataset import Stream
from sa1b.stream.mix import Mix


def streams(
    root: str, view: str | None, blocks: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, BatchStream]:
    """A stream for each block size, by the name of its case. UsageError names the flag that is wrong."""
    return {f"blocks of {size}": _stream(root, view, size, settings) for size in blocks}


def mixture(file: str, settings: dict[str, Any]) -> BatchStream:
    """The mixture of a file of `--data.mix`. UsageError names file and source."""
    sources, schedule = read_mix(DataConfig(mix=file, global_batch=settings["global_batch"]), "--mix")
    found = {}
    for source in sources:
        data = source.data
        own = settings if source.seed is None else {**settings, "seed": source.seed}
        found[source.name] = _stream(data.root, data.view, data.block_size, own), source.weight
    try:
        return Mix(found, schedule=schedule)
    except ValueError as error:
        raise with_flags(error, "--") from None


def _stream(root: str, view: str | None, block_size: int, settings: dict[str, Any]) -> Stream:
    try:
        return Stream(
            root,
            view=view,
            block_size=block_size,
            epochs=None,
            rank=0,
            damage_log=os.devnull,
            **settings,
        )
    except ValueError as error:
        raise with_flags(error, "--") from None
