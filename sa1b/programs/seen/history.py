"""The images that a run has used, from the starts in its metrics.jsonl.

Each start records the step and position from which it goes on, and the state of its stream. The order is a
formula of that state, so that the images of every step follow; nothing is logged for each image.
"""

import json
import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.stream.dataset import Stream
from sa1b.stream.mix import Mix
from sa1b.stream.mixture import Mixture, Phase
from sa1b.stream.order import Order
from sa1b.stream.plan import ResumeError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Steps [first, stop) of one start of a run, its positions from `position` on, and its receipt."""

    first: int
    stop: int
    position: int
    receipt: dict[str, Any]

    @property
    def end(self) -> int:
        """The position after the last step."""
        return self.position + (self.stop - self.first) * int(self.receipt["global_batch"])


@dataclass(frozen=True, slots=True, eq=False)
class SeenImages:
    """The images of one dataset of a run: their ids, and how often each was used, int64 [N]."""

    source: str
    root: str
    ids: Int64
    times: Int64


def read_metrics(run: str) -> str:
    """The metrics.jsonl of the run in a folder or at a URL. UsageError: there is none."""
    try:
        return open_store(run).read("metrics.jsonl").decode()
    except (MissingError, FileNotFoundError):
        raise UsageError(f"{run}: has no metrics.jsonl; pass --out of `sa1b train`") from None


def spans(run: str, text: str, before: int | None) -> list[Span]:
    """The starts of a run from its metrics.jsonl, up to step `before`. UsageError: they have no record of
    their data, or there is no such step.
    """
    # Only the starts are parsed: a long run has many steps.
    starts = [json.loads(line)["run"] for line in re.findall(r'^{"run": .*}$', text, re.MULTILINE)]
    done = max(map(int, re.findall(r'^{"step": (\d+).*}$', text, re.MULTILINE)), default=0)
    if not starts or any("data" not in start for start in starts):
        raise UsageError(
            f"{run}/metrics.jsonl: has no record of its data, as runs of earlier versions; start such a run "
            "again to record that of its later steps"
        )
    if before is not None and not 0 <= before <= done:
        raise UsageError(f"--before-step {before}: the run has {done} steps; pass a number up to {done}")
    last, found = done if before is None else before, []
    for start, following in zip(starts, [*starts[1:], {"step": last}], strict=True):
        stop = min(following["step"], last)
        if start["step"] < stop:
            found.append(Span(start["step"], stop, start["data"]["stream"]["position"], start["data"]))
    return found


def streams_of(span: Span) -> tuple[dict[str, Stream], Mixture | None]:
    """The streams of a start of a run, for their images and order alone, and the order of a mixture.
    UsageError: a dataset directory or view is no longer that of the run.
    """
    state, sources = span.receipt["stream"], span.receipt["sources"]
    states = state.get("sources", dict.fromkeys(sources, state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other options and stored bytes do not change the images
        streams = {name: _opened(name, one, states[name]) for name, one in sources.items()}
    if "phases" not in state:
        return streams, None
    phases = tuple(Phase(start, tuple(weights.values())) for start, weights in state["phases"])
    return streams, Mixture(tuple(len(stream.view) for stream in streams.values()), phases)


def seen_images(found: list[Span]) -> list[SeenImages]:
    """The images of each dataset. UsageError: a dataset directory or view is no longer that of the run."""
    images: dict[str, SeenImages] = {}
    for span in found:
        streams, mixture = streams_of(span)
        ranges = [(span.position, span.end)]
        if mixture is not None:
            ranges = list(zip(mixture.seen(span.position), mixture.seen(span.end), strict=True))
        for (name, stream), (start, stop) in zip(streams.items(), ranges, strict=True):
            order = stream.plan.order
            assert isinstance(order, Order)
            times = _times(order, start, stop)
            if name in images:
                times = times + images[name].times
            ids = stream.view.image_ids(stream.dataset.table).astype(np.int64)
            images[name] = SeenImages(name, str(stream.root), ids, times)
    return list(images.values())


def _times(order: Order, start: int, stop: int) -> Int64:
    """How often each row is at the positions [start, stop)."""
    count = order.count
    times, first = np.zeros(count, np.int64), -(-start // count) * count
    whole = max(stop // count - first // count, 0)
    for begin, end in ((start, min(first, stop)), (max(first + whole * count, start), stop)):
        if begin < end:
            times += np.bincount(order.rows(np.arange(begin, end)), minlength=count)
    return times + whole


def _opened(name: str, source: dict[str, Any], state: dict[str, Any], **options: Any) -> Stream:
    """The stream of a source of a run. Warnings say what else has changed."""
    try:
        stream = Stream(
            source["root"],
            view=source["view"],
            global_batch=int(state["block_size"]),
            seed=state["seed"],
            block_size=state["block_size"],
            epochs=None,
            rank=0,
            world_size=1,
            layers=[layer for layer, _ in state.get("layers", [])],
            damage_log=os.devnull,  # that of the run is complete
            **options,
        )
        stream.check_state(state)
    except ResumeError as error:
        raise UsageError(f"{source['root']}: {error}") from None
    return stream


def stream_of(span: Span) -> Stream | Mix:
    """The stream of a start of a run, with its samples. Warnings say what has changed since, such as the
    stored bytes. UsageError: the images are not those of the run, or a transform of its own code is missing.
    """
    state, sources = span.receipt["stream"], span.receipt["sources"]
    states = state.get("sources", dict.fromkeys(sources, state))
    streams = {}
    for name, source in sources.items():
        options = dict(states[name]["options"])
        decoder = str(options.pop("decoder")).rpartition("-")[0]
        if options.pop("transform") is not None:
            raise UsageError(
                f"{source['root']}: the run had a transform of its own code; replay it from Python, with "
                "Stream(transform=...) and load_state_dict"
            )
        options.pop("text", None)
        streams[name] = _opened(name, source, states[name], decoder=decoder, **options)
    if "phases" not in state:
        return next(iter(streams.values()))
    (_, first), *later = state["phases"]
    return Mix({name: (stream, first[name]) for name, stream in streams.items()}, schedule=dict(later))
