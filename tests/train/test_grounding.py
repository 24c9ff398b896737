"""The grounding preset in the training command: several ranks, resuming, evaluation, refused settings."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sa1b
from sa1b.engine.config import parse
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.errors import Sa1bError, UsageError
from sa1b.recipes.conversion import convert
from sa1b.recipes.presets import PRESETS, GroundingConfig
from sa1b.shards.predictions import read_predictions
from tests.train.command import (
    FIRST_ID,
    GROUNDING_FLAGS,
    STEPS,
    assert_same_state,
    lines,
    losses,
    start,
    train_to_end,
)

SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in (("ddp", 2), ("fsdp", 2))]
Run = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def root(parted: Path) -> Path:
    return parted


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of an uninterrupted run."""
    made: dict[tuple[str, int], Path] = {}

    def of(mode: str, ranks: int) -> Path:
        if (mode, ranks) not in made:
            out = tmp_path_factory.mktemp("grounding") / "run"
            made[mode, ranks] = train_to_end(root, out, ranks=ranks, mode=mode, model="grounding")
        return made[mode, ranks]

    return of


def evaluation(root: Path, weights: Path, out: Path, **more: Any) -> dict[str, Any]:
    flags = ["--evaluate-only", "--json", "--init", str(weights), "--evaluation.view", "held-out"]
    ended = start(root, out, *flags, model="grounding", **more)
    assert ended.codes == [0] * len(ended.codes), "\n".join(ended.outputs)
    return dict(json.loads(next(line for line in ended.outputs[0].splitlines() if line.startswith("{"))))


def test_the_only_region_of_an_image_is_the_first_one_for_its_phrase(root: Path, tmp_path: Path) -> None:
    flags = (
        "--optim.steps",
        "3",
        "--data.view",
        "train",
        "--evaluation.view",
        "held-out",
        "--evaluation.masks",
        "1",
    )
    ended = start(root, tmp_path / "run", *flags, model="grounding")
    assert ended.codes == [0], ended.outputs
    (scores,) = [line for line in lines(tmp_path / "run") if "evaluation" in line]
    assert scores["evaluation"]["phrases"] > 3
    assert {name: scores["evaluation"][name] for name in ("recall_at_1", "chance_at_1", "miou_region")} == {
        "recall_at_1": 1.0,
        "chance_at_1": 1.0,
        "miou_region": 1.0,
    }


@pytest.mark.parametrize(("mode", "ranks"), [("fsdp", 2), pytest.param("ddp", 3, marks=pytest.mark.slow)])
def test_losses_are_those_of_a_single_process(run: Run, mode: str, ranks: int) -> None:
    found = losses(run(mode, ranks))
    assert len(found) == STEPS
    assert found == pytest.approx(losses(run("none", 1)), rel=1e-5, abs=0)


@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), *SLOW])
def test_a_stopped_run_goes_on_bit_for_bit(
    root: Path, run: Run, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {"ranks": ranks, "mode": mode, "model": "grounding"}
    train_to_end(root, out, mishap={"what": "stop", "rank": ranks - 1, "step": 2}, **given)
    assert len(losses(out)) == 3
    train_to_end(root, out, **given)
    assert losses(out) == losses(run(mode, ranks))
    assert_same_state(out, run(mode, ranks))


def test_scores_are_the_same_on_two_ranks_and_say_which_region_was_found(
    root: Path, run: Run, tmp_path: Path
) -> None:
    weights = run("none", 1)
    alone = evaluation(root, weights, tmp_path / "alone", ranks=1)
    assert evaluation(root, weights, tmp_path / "two", ranks=2, mode="ddp") == alone
    assert alone["phrases"] > 20
    assert 0 < alone["chance_at_1"] < alone["recall_at_5"] < 1
    assert alone["recall_at_1"] <= alone["miou_region"] < 1
    files = [(tmp_path / name / "predictions.jsonl").read_text() for name in ("alone", "two")]
    assert files[0] == files[1]
    hits = 0
    for image_id, found in read_predictions(tmp_path / "alone" / "predictions.jsonl").items():
        true = sa1b.open(root).by_id(image_id).annotations
        assert len(found.phrases) == len(found.mask_id)
        rows = [true.mask_id.tolist().index(mask_id) for mask_id in found.mask_id]
        own = true.runs(np.array(rows))
        for number, iou in enumerate(found.iou.tolist()):
            same = own.select([number]).runs.tolist() == found.runs.select([number]).runs.tolist()
            assert iou == 1 or not same
            hits += iou == 1
    assert hits == round(alone["recall_at_1"] * alone["phrases"])


def test_the_model_of_a_run_grounds_phrases(root: Path, run: Run, tmp_path: Path) -> None:
    model = sa1b.load_grounding(run("none", 1))
    sample = sa1b.open(root).by_id(FIRST_ID + 3)
    regions = sample.annotations.runs()
    found = sa1b.ground(model, sample.image, ["small red disc", "large blue box"], regions=regions)
    assert found.masks.shape == (2, sample.annotations.height, sample.annotations.width)
    assert found.similarity.shape == (2, len(regions))
    newest = max((run("none", 1) / "checkpoints").iterdir())
    again = sa1b.load_grounding(newest)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    for call, message in (
        (
            lambda: sa1b.load_model(run("none", 1)),
            "a grounding model, not a SAM; pass its run to sa1b.load_g",
        ),
        (lambda: convert(newest, tmp_path / "w.pth"), "a grounding model, not a SAM; pass its run"),
        (lambda: sa1b.load_grounding(tmp_path), "not the run of a grounding model .FileNotFoundError"),
    ):
        with pytest.raises(Sa1bError, match=message):
            call()


def test_what_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    def config_of(*flags: str) -> GroundingConfig:
        paths = ["--data.root", str(root), "--data.text", str(root.parent / "phrases.parquet")]
        found = parse([*GROUNDING_FLAGS, *paths, *flags], None, PRESETS)
        assert isinstance(found, GroundingConfig)
        return found

    with pytest.raises(UsageError, match="--data.micro-batch 2: the 3 micro-batches of a step would each"):
        config_of("--data.micro-batch", "2")
    other = config_of("--data.micro-batch", "2", "--recipe.negatives", "micro-batch")
    assert other.micro_batches(1) == (2, 3)
    assert other.build().capacity == 2 * 4
    assert config_of("--data.micro-batch", "5").micro_batches(2) == (3, 1)

    def read(config: GroundingConfig) -> None:
        feed = Feed(config.data, config.image_size, RankInfo(0, 1, 0, torch.device("cpu")), tmp_path, 0)
        with contextlib.closing(feed):
            config.build().inputs(next(feed.step()), 0)

    for flags, message in (
        (["--data.text-width", "7"], "--data.text-width 7: the column of texts has strings; pass"),
        (["--data.text", "no.parquet"], "^--data.text: /.*/no.parquet does not exist; give the path of a"),
        (["--data.text-column", "caption"], "no column 'caption'; choose from image_id, mask_id, text"),
        (["--data.tokenizer", "no.json"], "tokenizer 'no.json': cannot be opened .No such file"),
    ):
        with pytest.raises(UsageError, match=message):
            read(config_of(*flags))
    read(config_of())
