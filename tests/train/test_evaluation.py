"""The mean IoU that the command reports: the same at any world size, alone and while training."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.command import REPOSITORY, STEPS, lines, make_root, start, train_to_end


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the views "train" and "held-out", which share no image."""
    root = make_root(tmp_path_factory.mktemp("parted"))
    for split in ("train", "held-out"):
        tool = [sys.executable, "tools/view.py", str(root), "--held-out", "40%", "--split", split]
        subprocess.run([*tool, "--name", split], cwd=REPOSITORY, check=True, capture_output=True)
    return root


EVALUATED = ("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.masks", "3")


@pytest.fixture(scope="module")
def trained(parted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    return train_to_end(parted, out, *EVALUATED, "--evaluation.every", "3", ranks=2, mode="ddp")


def scores_of(root: Path, run: Path, *flags: str, ranks: int = 1, mode: str = "none") -> dict[str, float]:
    ended = start(root, run, *EVALUATED, "--evaluate-only", "--json", *flags, ranks=ranks, mode=mode)
    assert ended.codes == [0] * ranks, ended.outputs
    assert ended.outputs[1:] == [""] * (ranks - 1)
    found: dict[str, float] = json.loads(ended.outputs[0])
    return found


def test_a_run_is_evaluated_every_so_many_steps_and_at_its_end(trained: Path) -> None:
    found = [line for line in lines(trained) if "evaluation" in line]
    assert [line["step"] for line in found if line["step"]] == [3, STEPS]
    assert found[-1]["evaluation"]["masks"] > 0


@pytest.mark.parametrize(
    ("mode", "ranks", "micro_batch"),
    [("none", 1, "2"), ("none", 1, "5"), ("ddp", 3, "1"), ("fsdp", 2, "2")],
)
def test_alone_at_any_world_size_it_is_the_figure_of_the_training_run_to_the_last_digit(
    parted: Path, trained: Path, mode: str, ranks: int, micro_batch: str
) -> None:
    during = [line["evaluation"] for line in lines(trained) if "evaluation" in line][-1]
    alone = scores_of(parted, trained, "--data.micro-batch", micro_batch, ranks=ranks, mode=mode)
    assert alone == during


def test_it_says_the_figure_for_people_too(parted: Path, trained: Path) -> None:
    ended = start(parted, trained, *EVALUATED, "--evaluate-only")
    during = [line["evaluation"] for line in lines(trained) if "evaluation" in line][-1]
    assert f"mIoU {during['miou_1_click']:.3f} (1 click)" in ended.outputs[0]
    assert f"on {during['masks']} masks" in ended.outputs[0]


def test_views_that_share_images_are_refused(parted: Path, tmp_path: Path) -> None:
    flags = ("--evaluation.view", "held-out", "--evaluation.every", "3")
    ended = start(parted, tmp_path / "run", *flags)
    assert ended.codes == [2]
    assert "error: --evaluation.view held-out shares " in ended.outputs[0]
    assert "images with what is trained on" in ended.outputs[0]


def test_evaluating_changes_nothing_in_the_training(parted: Path, trained: Path, tmp_path: Path) -> None:
    plain = train_to_end(parted, tmp_path / "run", *EVALUATED, ranks=2, mode="ddp")
    losses = [[line["loss"] for line in lines(out) if "loss" in line] for out in (plain, trained)]
    assert losses[0] == losses[1]


def test_without_weights_there_is_nothing_to_evaluate(parted: Path, tmp_path: Path) -> None:
    ended = start(parted, tmp_path / "run", *EVALUATED, "--evaluate-only")
    assert ended.codes == [1]
    assert "Traceback" not in ended.outputs[0]


def test_no_evaluation_is_noted_twice_when_a_run_begins_again(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "checkpoints")  # killed before the first one
    train_to_end(parted, out, *EVALUATED, "--evaluation.every", "3", ranks=2, mode="ddp")
    steps = [line["step"] for line in lines(out) if "evaluation" in line]
    assert steps == [line["step"] for line in lines(trained) if "evaluation" in line]
