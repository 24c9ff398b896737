"""Records of a run: figures of all ranks, valid lines, no step twice."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from sa1b.engine.settings import EvaluationConfig, ParallelConfig
from sa1b.engine.watch.control import Control, StepFigures
from sa1b.engine.watch.metrics import BestScore, LoggingConfig, Metrics, about, figures_of, score_line
from sa1b.engine.watch.watchdog import Phases
from sa1b.errors import UsageError
from sa1b.shards.manifest import versions
from sa1b.version import code_digest
from tests.engine.stream_root import place_of

FIGURES = {"loss": 0.5, "iou_last": 0.1, "images_per_s": 3.0, "data_wait": 0.2}
RANKS = {"data_wait": 0.0, "peak_memory": 5e9}
HOW = {"protocol": "sam", "clicks": "centres", "masks_per_image": None}


def test_the_clock_of_a_step_stops_when_its_figures_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    phases = Phases()
    phases.begin(4)

    def spend(part: str, amount: float) -> None:
        phases.enter(part)
        now[0] += amount
        phases.enter("other")

    spend("data", 1.0)
    spend("compute", 2.0)
    now[0] += 0.25
    spend("sync", 0.5)
    totals = {"loss": torch.tensor(8.0), "iou_last": torch.tensor(1.0), "count": torch.tensor(4.0)}
    figures = Control(place_of()).exchange(
        totals, torch.tensor(2.5), 9, {**RANKS, "data_wait": phases.seconds["data"]}
    )
    spend("update", 0.25)
    spend("checkpoint", 4.0)
    found = figures_of(figures, phases, 0.1, 1.0)
    parts = ("data", "compute", "sync", "update", "checkpoint", "other")
    assert [found[f"seconds_{name}"] for name in parts] == [1.0, 2.0, 0.5, 0.25, 4.0, 0.25]
    assert found["seconds"] == 8.0
    assert (found["images_per_s"], found["masks_per_s"]) == (9 / 8, 4 / 8)
    assert (found["mfu"], found["data_wait"]) == (1 / 8, 1 / 8)
    assert (found["loss"], found["iou_last"], found["grad_norm"], found["lr"]) == (2.0, 0.25, 2.5, 0.1)
    assert "mfu" not in figures_of(figures, phases, 0.1, None)


def test_figures_of_ranks_name_the_one_with_the_largest_peak() -> None:
    ranks = {
        "data_wait": [0.0, 0.0, 0.0],
        "peak_memory": [1e9, 4e9, 1e9],
        "gpu_utilisation": [0.5, math.nan, 1.0],
        "gpu_power_w": [math.nan] * 3,
    }
    phases = Phases()
    figures = StepFigures({"loss": 1.0}, 1.0, 1, 1.0, 0.0, ranks)
    found = figures_of(figures, phases, 0.1, None)
    names = ("peak_memory_gb", "peak_memory_gb_min", "peak_memory_gb_mean", "peak_memory_rank")
    assert [found[name] for name in names] == [4, 1, 2, 1]
    sampled = {name: value for name, value in found.items() if name.startswith("gpu_")}
    assert sampled == {"gpu_utilisation_min": 0.5, "gpu_utilisation_mean": 0.75, "gpu_utilisation_max": 1.0}


def written(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_written(run: Path) -> list[object]:
    return [line["step"] for line in written(run) if "run" not in line]


def metrics_of(run: Path, done: int = 0, *, last: dict[str, object] | None = None, **config: Any) -> Metrics:
    place = place_of()
    settings = {"tensorboard": False, **config}
    shown = {"IoU": "iou_last"}
    given: dict[str, Any] = {"about": {}, "last": last, "shown": shown}
    return Metrics(LoggingConfig(**settings), run, place, Control(place), done, 9, **given)


def write(run: Path, done: int, until: int, **config: object) -> None:
    metrics = metrics_of(run, done, tensorboard=False, **config)
    for step in range(done + 1, until + 1):
        metrics.step(step, {**FIGURES, "loss": float(step)})
    metrics.close()


def test_no_step_is_there_twice_after_a_kill_that_cut_a_line(tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    write(tmp_path, 3, 7)
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_without_a_checkpoint_begins_its_file_anew(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path)
    metrics.evaluation(0, {"masks": 0}, 1.0, {})
    metrics.close()
    write(tmp_path, 0, 2)
    assert steps_written(tmp_path) == [1, 2]


def test_lines_are_json_where_figures_are_not_finite(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path)
    metrics.step(1, {**FIGURES, "loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[1]
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert json.loads(line)["grad_norm"] is None


def test_every_start_of_a_run_writes_what_its_figures_depend_on(tmp_path: Path) -> None:
    place = place_of()
    described = about(place, ParallelConfig(mode="ddp", precision="bf16"), code_digest())
    for done in (0, 2):
        metrics = Metrics(
            LoggingConfig(tensorboard=False), tmp_path, place, Control(place), done, 9, about=described
        )
        for step in range(done + 1, done + 4):
            metrics.step(step, FIGURES)
        metrics.close()
    found = written(tmp_path)
    assert [line.get("step") for line in found] == [None, 1, 2, None, 3, 4, 5]
    assert found[0]["run"] == {
        "step": 0, "world_size": 1, "mode": "ddp", "precision": "bf16", "device": "cpu",
        "torch": torch.__version__, "sa1b": sa1b.__version__, "code": code_digest(), "libraries": versions(),
    }  # fmt: skip
    assert found[3]["run"] == {**found[0]["run"], "step": 2}


def test_the_line_of_a_step_whose_process_was_killed_after_its_checkpoint_comes_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, 3)
    last = {"step": 4, "loss": 9.0}
    metrics_of(tmp_path, 4, last=last).close()
    metrics_of(tmp_path, 4, last=last).close()
    assert steps_written(tmp_path) == [1, 2, 3, 4]
    assert [line for line in written(tmp_path) if line.get("step") == 4] == [last]


def test_evaluations_in_the_file_are_known_at_the_next_start(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path)
    metrics.step(1, FIGURES)
    metrics.evaluation(1, {"masks": 0}, 1.0, {})
    metrics.close()
    again = metrics_of(tmp_path, 1)
    assert again.evaluations == {1: {"masks": 0}}
    again.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    place = place_of(1, 2)
    metrics = Metrics(LoggingConfig(), tmp_path, place, Control(place), 0, 9, about={})
    metrics.step(1, FIGURES)
    metrics.evaluation(1, {"masks": 0}, 1.0, {})
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_is_a_line_of_its_own_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {f"miou_{name}": 0.5 for name in ("1_click", "3_clicks", "5_clicks", "box")} | {"masks": 1234}
    metrics, whole = metrics_of(tmp_path), {**scores, **HOW, "damaged": 2, "empty": 3}
    metrics.evaluation(4, scores, 2.5, HOW)
    metrics.close()
    assert written(tmp_path)[1:] == [{"step": 4, "evaluation": {**scores, **HOW}, "seconds": 2.5}]
    assert "step 4: mIoU 0.500 (1 click), 0.500 (3 clicks), 0.500 (5 clicks), 0.500 (box) on 1,234 masks" in (
        capsys.readouterr().out
    )
    left_out = "left out: masks without a pixel 3, damaged images 2 (see damaged.jsonl)"
    assert score_line(whole).endswith(f"; {left_out}; protocol sam, clicks at centres, all masks of an image")
    assert score_line({"masks": 0}) == "mIoU: there is no mask to evaluate on"


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"every": 0}, "--logging.every")],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LoggingConfig(**settings)


def test_the_best_score_and_the_evaluations_since() -> None:
    best = BestScore(EvaluationConfig(view="held", every=1, best="mean", patience=2), {})
    found = []
    scores: list[Any] = [0.5, 0.25, 0.75, None, 0.75, 0.1]
    for step, score in enumerate(scores):
        best.add(step, {"mean": score})
        found.append((best.step, best.exhausted))
    assert found == [(0, False), (0, False), (2, False), (2, False), (2, True), (2, True)]
    assert best.why.startswith("3 evaluations without")
    with pytest.raises(UsageError, match="--evaluation.best mean: not a score; choose from boxes, miou"):
        best.add(6, {"boxes": 3, "miou": 0.5})
    without = BestScore(EvaluationConfig(), {0: {"mean": 1.0}})
    assert (without.step, without.exhausted) == (None, False)


def test_patience_needs_a_score_and_a_view() -> None:
    with pytest.raises(UsageError, match="--evaluation.best mean: needs --evaluation.view"):
        EvaluationConfig(best="mean")
    givens: list[dict[str, Any]] = [{"view": "held", "every": 2}, {"view": "held", "best": "mean"}]
    for given in givens:
        with pytest.raises(UsageError, match=r"--evaluation.patience 3: needs --evaluation.(best|every)"):
            EvaluationConfig(patience=3, **given)
