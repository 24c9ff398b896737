"""Windows of steps: their lines in metrics.jsonl and messages, once for each incident."""

import json
import math
from pathlib import Path

import pytest

from sa1b.console import command
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.metrics import LoggingConfig, Metrics
from sa1b.engine.watch.stragglers import Window
from sa1b.stream.bottleneck import BUSY, LoaderSettings
from tests.engine.stream_root import place_of

SETTINGS = LoaderSettings(
    threads=1, cpus=1, is_local=True, cached=False, stored=64, image_size=64, on_gpu=False
)


def numbers(step: int, *, slow: float = 0.5, data: float = 0.01) -> dict[str, list[float]]:
    """Of two ranks; `slow`: computation of rank 1. In each step the loaders decode for 2 s."""
    unknown = math.nan if step < 2 else 0.0
    return {
        "data": [0.01 + unknown, data],
        "compute": [0.5, slow],
        "sync": [slow - 0.5, 0.0],
        "update": [0.01, 0.01],
        **{name: [0.0, 2.0 * step if name == "busy_decode" else 0.1] for name in BUSY},
    }


def metrics_of(run: Path) -> Metrics:
    place = place_of()
    return Metrics(LoggingConfig(tensorboard=False), run, place, Control(place), 0, 99)


def written(run: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "run" not in line]


def test_a_window_has_two_lines_and_an_incident_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = metrics_of(tmp_path)
    window = Window(["a", "b"], 3, metrics, SETTINGS, run="run", separable=True)
    for step in range(11):
        window.add(step, numbers(step, slow=2.0, data=0.3), requested=False)
    metrics.close()
    found = written(tmp_path)
    assert [(line["step"], *line.keys() - {"step"}) for line in found] == [
        (step, kind) for step in (4, 7, 10) for kind in ("ranks", "loader")
    ]  # the first two steps are in no window
    assert found[1]["loader"] == {
        **{"rank": 1, "data_wait": round(0.3 / 2.31, 4), "limiting": "decode"},
        "busy": {"read": 0.0, "pick": 0.0, "decode": 1.0, "collate": 0.0, "device": 0.0},
    }
    messages = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert messages == [
        "data wait 13 % on rank 1: decode limits; give each rank more than 1 processor",
        "rank 1 on b is 4.44 times slower than the other ranks, which wait for it: compute takes 2.000 s a step, "
        f"0.500 s on the others; images of this step: {command('replay')} run --step 7",
    ]


def test_a_table_on_request_does_not_end_the_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = metrics_of(tmp_path)
    window = Window(["a", "b"], 3, metrics, SETTINGS, run="run", separable=True)
    for step in range(5):
        window.add(step, numbers(step), requested=step in (1, 3))
    metrics.close()
    assert [(line["step"], "ranks" in line) for line in written(tmp_path)] == [
        (3, True),
        (4, True),
        (4, False),
    ]
    text = capsys.readouterr().out
    assert "times of the ranks: no complete step yet" in text
    assert "times of the ranks in the last 2 steps" in text
    assert text.count("images of this step") == 1
    assert f"images of this step: {command('replay')} run --step 3" in text


def test_lines_of_windows_after_the_checkpoint_are_removed_on_resume(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path)
    metrics.step(1, {"loss": 1.0, "images_per_s": 1.0, "data_wait": 0.0})
    for step in (2, 3):
        metrics.window(step, "ranks", {})
    metrics.close()
    place = place_of()
    last = {"step": 2, "loss": 2.0}
    Metrics(LoggingConfig(tensorboard=False), tmp_path, place, Control(place), 2, 99, last=last).close()
    assert written(tmp_path)[1:] == [{"step": 2, "ranks": {}}, last]
