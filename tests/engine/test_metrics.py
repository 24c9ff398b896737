"""What a run writes down: figures of all ranks, lines that each parse, no step twice."""

import json
import math
from pathlib import Path

import pytest
import torch

from sa1b.engine.metrics import LoggingConfig, Metrics, StepTime, figures_of, score_line, step_means
from sa1b.engine.parallel import ParallelConfig
from sa1b.errors import UsageError
from sa1b.sam.interactive import Interactive
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of

SUMS = Interactive.figures
PARTS = [  # of six parts of a step: the sums over their masks, the masks, the images
    ([2.0, 1.0, 0.5, 0.25, 3.0, 1.5], 4, 2),
    ([0.0] * 6, 0, 0),
    ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], 7, 3),
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1, 1),
    ([0.5, 0.0, 0.0, 0.0, 0.25, 0.25], 2, 1),
    ([4.0, 3.0, 2.0, 1.0, 0.5, 0.5], 6, 2),
]
FIGURES = {"loss": 0.5, "iou_last": 0.1, "images_per_s": 3.0, "data_wait": 0.2}


def means_of(rank: int, world_size: int, rank_info: object) -> dict[str, float]:
    mine = PARTS[rank * 6 // world_size : (rank + 1) * 6 // world_size]
    totals = {name: torch.tensor(sum(part[0][i] for part in mine)) for i, name in enumerate(SUMS)}
    totals["count"] = torch.tensor(float(sum(part[1] for part in mine)))
    seconds = StepTime(data=1.0 + rank, compute=2.0, update=0.5, total=4.0 + rank)
    images = sum(part[2] for part in mine)
    return step_means(totals, images, rank == world_size - 1 > 0, seconds, rank_info)


def rank_means(world_size: int) -> dict[str, float]:
    with group(ParallelConfig(mode="ddp")) as rank_info:
        return means_of(rank_info.rank, world_size, rank_info)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_means_over_ranks_are_those_of_a_single_process(world_size: int) -> None:
    single = means_of(0, 1, place_of())
    assert single["loss"] == sum(part[0][0] for part in PARTS) / 20
    assert (single["masks"], single["images"], single["stop"]) == (20, 9, 0)
    ranks = launch(rank_means, world_size, world_size)
    for means in ranks:
        assert {name: means[name] for name in (*SUMS, "masks", "images")} == pytest.approx(
            {name: single[name] for name in (*SUMS, "masks", "images")}
        )
        assert means["stop"] == 1
        assert means["data"] == 1.0 + (world_size - 1) / 2  # the mean over ranks
    assert all(means == ranks[0] for means in ranks)


def test_a_step_without_a_mask_has_means_of_zero() -> None:
    totals = {name: torch.zeros(()) for name in (*SUMS, "count")}
    means = step_means(totals, 1, False, StepTime(total=1.0), place_of())
    assert [means[name] for name in SUMS] == [0.0] * len(SUMS)


def test_parts_of_a_step_are_shares_of_its_time() -> None:
    means = means_of(0, 1, place_of())
    found = figures_of(means, 0.1, 2.0, place_of(), None)
    assert found["seconds"] == 4.0
    assert found["seconds_other"] == 0.5
    assert found["data_wait"] == 0.25
    assert found["images_per_s"] == 9 / 4
    assert "mfu" not in found
    assert figures_of(means, 0.1, 2.0, place_of(), 1.0)["mfu"] == 0.25


def written(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write(run: Path, done: int, until: int, **config: object) -> None:
    metrics = Metrics(LoggingConfig(tensorboard=False, **config), run, place_of(), done, 9)
    for step in range(done + 1, until + 1):
        metrics.step(step, {**FIGURES, "loss": float(step)})
    metrics.close()


def test_no_step_is_there_twice_after_a_kill_that_cut_a_line(tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    write(tmp_path, 3, 7)
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_without_a_checkpoint_begins_its_file_anew(tmp_path: Path) -> None:
    metrics = Metrics(LoggingConfig(tensorboard=False), tmp_path, place_of(), 0, 9)
    metrics.evaluation(0, {"masks": 0})
    metrics.close()
    write(tmp_path, 0, 2)
    assert [line["step"] for line in written(tmp_path)] == [1, 2]


def test_lines_are_json_where_figures_are_not_finite(tmp_path: Path) -> None:
    metrics = Metrics(LoggingConfig(tensorboard=False), tmp_path, place_of(), 0, 9)
    metrics.step(1, {**FIGURES, "loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert json.loads(line)["grad_norm"] is None


def test_one_line_in_so_many_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, 9, every=3)
    assert [line["step"] for line in written(tmp_path)] == [3, 6, 9]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(LoggingConfig(), tmp_path, place_of(1, 2), 0, 9)
    metrics.step(1, FIGURES)
    metrics.evaluation(1, {"masks": 0})
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_is_a_line_of_its_own_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {f"miou_{name}": 0.5 for name in ("1_click", "3_clicks", "5_clicks", "box")} | {"masks": 1234}
    metrics = Metrics(LoggingConfig(tensorboard=False), tmp_path, place_of(), 0, 9)
    metrics.evaluation(4, scores)
    metrics.close()
    assert written(tmp_path) == [{"step": 4, "evaluation": scores}]
    assert "step 4: mIoU 0.500 (1 click), 0.500 (3 clicks), 0.500 (5 clicks), 0.500 (box) on 1,234 masks" in (
        capsys.readouterr().out
    )
    assert score_line({"masks": 0}) == "mIoU: the held-out images have no mask"


def test_curves_have_the_figures_and_the_scores(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(LoggingConfig(), tmp_path, place_of(), 0, 9)
    metrics.step(1, FIGURES)
    metrics.evaluation(
        1, {"miou_box": 0.25, "miou_1_click": 0.5, "miou_3_clicks": 0, "miou_5_clicks": 0, "masks": 3}
    )
    metrics.close()
    curves = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert curves.Scalars("loss")[0].value == 0.5
    assert curves.Scalars("miou_box")[0].value == 0.25


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every": 0}, "--logging.every"),
        ({"profile": (2, 1)}, "--logging.profile"),
        ({"profile": (-1, 1)}, "--logging"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LoggingConfig(**settings)


def test_tensorboard_that_is_asked_for_and_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sa1b.engine.metrics.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--logging.tensorboard needs TensorBoard"):
        LoggingConfig(tensorboard=True)
    assert LoggingConfig().tensorboard is None
