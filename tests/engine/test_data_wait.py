"""Which stage of a loader limits the run, and the advice for each."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sa1b.engine.watch.metrics import Window
from sa1b.stream.stats import BUSY, STAGES, LoaderSettings, remedy
from tests.engine.stream_root import IMAGE_SIZE, feed_of, make_root

SETTINGS = LoaderSettings(
    threads=2, cpus=8, is_local=True, cached=False, stored=None, image_size=1024, on_gpu=False
)


def ranks(*busy: dict[str, float]) -> dict[str, list[float]]:
    """The numbers of ranks with these busy seconds so far; 1 s in the other stages."""
    return {name: [one.get(stage, 1.0) for one in busy] for stage, name in zip(STAGES, BUSY, strict=True)}


class Recorded:
    """Lines and messages of windows of one step of one second."""

    def __init__(self, *first: dict[str, float]) -> None:
        self.lines: dict[str, dict[str, Any]] = {}
        self.said: list[str] = []
        metrics: Any = SimpleNamespace(
            window=lambda step, kind, line: self.lines.update({kind: line}), say=self.said.append
        )
        self.window = Window(["a", "b"][: len(first)], 1, metrics, SETTINGS)
        self.step([0.0] * len(first), *first)

    def step(self, waits: list[float], *busy: dict[str, float]) -> tuple[dict[str, Any], str | None]:
        self.said.clear()
        self.window.add(1, ranks(*busy) | {"data_wait": waits, "forward": waits}, 1.0)
        return self.lines.get("loader", {}), next(iter(self.said), None)


def test_the_stage_is_that_of_the_rank_with_the_largest_wait_in_this_window() -> None:
    window = Recorded({"read": 900.0}, {"pick": 900.0})  # before the window
    line, message = window.step([0.01, 0.323], {"read": 990.0}, {"pick": 901.0, "decode": 4.0})
    busy = {"read": 0.0, "pick": 0.25, "decode": 0.75, "collate": 0.0, "device": 0.0}
    assert line == {"rank": 1, "data_wait": 0.323, "limiting": "decode", "busy": busy}
    assert message is not None
    assert message.startswith(
        "data wait 32 % on rank 1: decode limits; add processes or threads (--data.processes, --data.threads, "
        "now 1 x 2 for 8 processors) or reshard to 1024 px: "
    )


def test_a_limit_is_reported_when_it_begins_and_when_another_stage_limits() -> None:
    seconds = dict.fromkeys(STAGES, 0.0)
    window, said = Recorded(seconds), []
    for stage, wait in (
        *(("read", 0.2), ("read", 0.25), ("read", 0.3), ("decode", 0.25)),
        *(("decode", 0.01), ("decode", 0.21)),
    ):
        seconds[stage] += 1.0
        line, message = window.step([wait], seconds)
        assert line["limiting"] == stage
        said.append(message and message.partition(";")[0])
    assert said == [
        *(None, "data wait 25 %: read limits", None, "data wait 25 %: decode limits"),
        *(None, "data wait 21 %: decode limits"),
    ]


def test_a_window_in_which_nothing_was_loaded_names_no_stage() -> None:
    line, message = Recorded({}).step([0.9], {})
    assert (line["limiting"], message) == (None, None)


@pytest.mark.parametrize(
    ("stage", "changes", "text"),
    [
        ("read", {}, "raise --data.prefetch, or pass --data.block-size 16 to a new run"),
        ("read", {"is_local": False}, "cache the data on a local disk with --data.cache"),
        ("read", {"is_local": False, "cached": True}, "raise --data.cache-bytes if the cache does not hold"),
        ("pick", {"threads": 8}, "lower --data.masks"),
        ("decode", {"stored": 1500, "threads": 8}, "reshard to 1024 px: "),
        ("decode", {"stored": 1024, "threads": 8}, "give each rank more than 8 processors"),
        ("collate", {"threads": 8}, "lower --data.masks"),
        ("device", {"on_gpu": True}, "lower --data.target-size"),
    ],
)
def test_the_remedy_fits_the_stage_and_the_settings(
    stage: str, changes: dict[str, object], text: str
) -> None:
    assert remedy(stage, replace(SETTINGS, **changes)).startswith(text)


def test_settings_are_those_of_the_feed(tmp_path: Path) -> None:
    feed = feed_of(make_root(tmp_path), tmp_path / "run", threads=3)
    settings = LoaderSettings.of(feed.loader)
    assert (settings.threads, settings.is_local, settings.cached, settings.stored) == (3, True, False, None)
    assert (settings.image_size, settings.on_gpu) == (IMAGE_SIZE, False)
    assert settings.cpus >= 1
    assert list(feed.stream.stats.busy_seconds()) == list(STAGES)
    feed.close()
