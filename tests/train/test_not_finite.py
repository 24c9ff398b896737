"""A loss that is not finite on one rank: a step that no rank takes, logged, and tolerated up to a limit."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.train.command import STEPS, figures, ids_of_steps, newest, start, tensors, train_to_end
from tests.train.mishap import Mishap


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_all_ranks_skip_the_step_and_the_images_of_that_rank_are_written_down(
    root: Path, whole: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    out = tmp_path / "run"
    mishap = Mishap({"what": "nan", "rank": 1, "step": 2, "times": 1})
    train_to_end(root, out, ranks=2, mode=mode, mishap=mishap, model="reconstruction")
    found = [loss for _, loss in figures(out, "loss")]
    assert len(found) == STEPS
    assert [loss is None for loss in found] == [step == 2 for step in range(STEPS)]
    assert found[:2] == [loss for _, loss in figures(whole(mode, 2, "reconstruction"), "loss")][:2]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(newest(out)).values())
    noted = [json.loads(line) for line in (out / "not-finite.jsonl").read_text().splitlines()]
    own = ids_of_steps(root, STEPS)[2][2:]  # of two ranks' slices of five images the second
    assert noted == [{"step": 3, "rank": 1, "loss": "nan", "image_ids": own}]


def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(root: Path, tmp_path: Path) -> None:
    flags = ("--optim.steps", "3", "--checkpoint.every", "1", "--checkpoint.keep-last", "3")
    out = train_to_end(
        root, tmp_path / "run", *flags, ranks=2, mode="ddp",
        mishap=Mishap({"what": "inf", "step": 1, "times": 1}), model="reconstruction",
    )  # fmt: skip
    states = [tensors(out / "checkpoints" / f"step-{step:08d}") for step in (1, 2, 3)]
    changed = [
        any(not torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(states)
    ]
    assert changed == [False, True]


def test_too_many_in_a_row_end_the_run_on_all_ranks_with_an_error_that_names_the_file(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    mishap = Mishap({"what": "nan", "rank": 1, "step": 1, "times": 100})
    flags = ("--health.patience", "2")
    ended = start(root, out, *flags, ranks=2, mode="ddp", mishap=mishap, model="reconstruction")
    assert ended.codes == [1, 1]
    for rank, output in enumerate(ended.outputs):
        assert f"error on rank {rank}: step 4: the last 3 steps had" in output
        assert str(out / "not-finite.jsonl") in output
        assert "Traceback" not in output
    assert [step for step, _ in figures(out, "loss")] == [1, 2, 3]


@pytest.mark.parametrize("patience", [pytest.param("1", marks=pytest.mark.slow), "20"])
def test_no_checkpoint_is_written_of_what_is_in_doubt_and_the_run_has_not_ended_well(
    root: Path, tmp_path: Path, patience: str
) -> None:
    out = tmp_path / "run"
    mishap = Mishap({"what": "nan", "step": 2, "times": 100})
    flags = ("--checkpoint.every", "1", "--health.patience", patience)
    ended = start(root, out, *flags, mishap=mishap, model="reconstruction")
    assert ended.codes == [1]
    assert "step 4: the last 2 steps had" in ended.outputs[0]
    assert "step 3 is skipped: loss nan" in ended.outputs[0]
    assert sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir()) == [
        "step-00000001",
        "step-00000002",
    ]
    train_to_end(root, out, *flags, model="reconstruction")


def test_patience_counts_steps_in_a_row(root: Path, tmp_path: Path) -> None:
    mishap = Mishap({"what": "nan", "step": 1, "times": 2})
    out = train_to_end(
        root, tmp_path / "run", "--health.patience", "2", mishap=mishap, model="reconstruction"
    )
    assert len(figures(out, "loss")) == STEPS
