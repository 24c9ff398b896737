"""Which stage of a loader limits the run."""

from types import SimpleNamespace
from typing import Any

from sa1b.engine.watch.metrics import Window
from sa1b.stream.stats import BUSY, STAGES, LoaderSettings

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
