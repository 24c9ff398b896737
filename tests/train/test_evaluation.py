"""The mean IoU that the command reports: the same at any world size, alone and while training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import sa1b
from sa1b.views.view import open_view
from tests.train.command import (
    STEPS,
    checkpoint_steps,
    in_turn,
    lines,
    losses,
    output_of,
    start,
    torchrun,
    train_to_end,
)
from tests.train.mishap import Mishap

EVALUATED = ("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.masks", "3")


@pytest.fixture(scope="module")
def trained(parted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    return train_to_end(parted, out, *EVALUATED, "--evaluation.every", "3", ranks=2, mode="ddp")


def scores_of(root: Path, run: Path, *flags: str, ranks: int = 1, mode: str = "none") -> dict[str, float]:
    ended = start(root, run, *EVALUATED, "--evaluate-only", "--json", *flags, ranks=ranks, mode=mode)
    assert ended.codes == [0] * ranks, ended.outputs
    assert ended.outputs[1:] == [""] * (ranks - 1)
    # stderr, which says what was loaded, is in the same file.
    found: dict[str, float] = json.loads(ended.outputs[0].splitlines()[-1])
    return found


def test_a_run_is_evaluated_every_so_many_steps_and_at_its_end(trained: Path) -> None:
    found = [line for line in lines(trained) if "evaluation" in line]
    assert [line["step"] for line in found if line["step"]] == [3, STEPS]
    assert found[-1]["evaluation"]["masks"] > 0


@pytest.mark.parametrize(
    ("mode", "ranks", "micro_batch"),
    [
        ("none", 1, "5"),
        ("ddp", 3, "1"),
        pytest.param("fsdp", 2, "2", marks=pytest.mark.slow),
        pytest.param("none", 1, "2", marks=pytest.mark.slow),
    ],
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


def test_evaluating_changes_nothing_in_the_training(parted: Path, trained: Path, tmp_path: Path) -> None:
    plain = train_to_end(parted, tmp_path / "run", *EVALUATED, ranks=2, mode="ddp")
    losses = [[line["loss"] for line in lines(out) if "loss" in line] for out in (plain, trained)]
    assert losses[0] == losses[1]


def test_scores_are_printed_where_the_predicted_masks_cannot_be_written(parted: Path, trained: Path) -> None:
    flags = ("--init", str(trained), *EVALUATED, "--evaluate-only", "--json", "--parallel.mode", "none")
    ended = start(parted, "/proc/nosuch", *flags)
    assert ended.codes == [1]
    *_, scores, said = ended.outputs[0].splitlines()
    assert json.loads(scores) == [line["evaluation"] for line in lines(trained) if "evaluation" in line][-1]
    assert said.startswith(
        "error: /proc/nosuch: cannot be written (No such file or directory); the scores are complete"
    )
    assert "resumes" not in ended.outputs[0]


def test_shared_images_predictions_of_others_and_missing_weights_are_refused(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "predictions.jsonl").write_text("mine")
    new, alone = tmp_path / "run", (*EVALUATED, "--evaluate-only")
    runs = [
        ("--evaluation.view", "held-out", "--evaluation.every", "3"),
        ("--out", str(tmp_path), "--init", str(trained), *alone),
        alone,
    ]
    shared, others, missing = in_turn(parted, new, runs)
    assert shared.codes == others.codes == missing.codes == [2]
    assert "error: --evaluation.view held-out: shares " in shared.outputs[0]
    assert "images with the training data" in shared.outputs[0]
    refused = f"error: --out {tmp_path}: predictions.jsonl in it is not of a run of this program"
    assert refused in others.outputs[0]
    assert (tmp_path / "predictions.jsonl").read_text() == "mine"
    without = f"--out {new} has no checkpoint; pass --init WEIGHTS, or the --out of a run"
    assert missing.outputs == [f"error: --evaluate-only: {without}\n"]


def test_no_evaluation_is_noted_twice_when_a_run_begins_again(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "checkpoints")  # killed before the first one
    train_to_end(parted, out, *EVALUATED, "--evaluation.every", "3")
    steps = [line["step"] for line in lines(out) if "evaluation" in line]
    assert steps == [line["step"] for line in lines(trained) if "evaluation" in line]


def test_a_run_killed_while_it_saves_after_an_evaluation_has_each_evaluation_once(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = (*EVALUATED, "--evaluation.every", "3", "--checkpoint.every", "1")
    mishap = {"what": "kill", "step": 1, "once": str(tmp_path / "killed")}
    mishap["file"] = str(out / "checkpoints" / "*3.partial*" / "*")
    ended = start(parted, out, *flags, "--checkpoint.no-asynchronous", ranks=2, mode="ddp", mishap=mishap)
    assert ended.codes[0] == -9
    assert checkpoint_steps(out) == [1, 2]
    train_to_end(parted, out, *flags, ranks=2, mode="ddp")
    assert losses(out) == losses(trained)
    found = [[line for line in lines(run) if "evaluation" in line] for run in (out, trained)]
    assert [[line["step"], line["evaluation"]] for line in found[0]] == [
        [line["step"], line["evaluation"]] for line in found[1]
    ]


def test_a_run_that_is_asked_to_stop_while_it_evaluates_ends_there_with_a_checkpoint_and_exit_code_0(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    out, scored = tmp_path / "run", tmp_path / "scored"
    mishap = Mishap(
        {"what": "stop", "moment": "evaluating", "rank": 1, "step": 3, "batch": 1, "scored": str(scored)}
    )
    flags = (*EVALUATED, "--evaluation.every", "3")
    ended = start(parted, out, *flags, ranks=2, mode="ddp", mishap=mishap)
    assert ended.codes == [0, 0], ended.outputs
    assert "stopped after step 3 and saved a checkpoint; run the same command to resume" in ended.outputs[0]
    assert scored.read_text() == "1"  # no micro-batch was scored after the signal
    assert [line["step"] for line in lines(out) if "evaluation" in line] == [0]
    assert len(losses(out)) == 3
    assert checkpoint_steps(out)[-1] == 3
    # The same command makes up for the evaluation, then goes on.
    train_to_end(parted, out, *EVALUATED, "--evaluation.every", "3", ranks=2, mode="ddp")
    assert losses(out) == losses(trained)
    found = [[line for line in lines(run) if "evaluation" in line] for run in (out, trained)]
    assert [[line["step"], line["evaluation"]] for line in found[0]] == [
        [line["step"], line["evaluation"]] for line in found[1]
    ]


@pytest.mark.slow  # quick ones: the stop above, without torchrun, and test_stop.py, with it
@pytest.mark.parametrize("step", [0, STEPS])
def test_torchrun_that_is_told_to_end_during_the_first_or_last_evaluation_leaves_a_checkpoint(
    parted: Path, trained: Path, tmp_path: Path, step: int
) -> None:
    out, scored = tmp_path / "run", tmp_path / "scored"
    mishap = Mishap(
        {"what": "stop", "moment": "evaluating", "rank": 0, "step": step, "batch": 1, "agent": True}
    )
    flags = (*EVALUATED, "--evaluation.every", "3")
    mishap["scored"] = str(scored)
    process = torchrun(parted, out, *flags, ranks=2, mode="ddp", mishap=mishap)
    output = output_of(process, out)
    stopped = f"after step {step} and saved a checkpoint" if step else "before the first step"
    assert f"stopped {stopped}" in output
    assert scored.read_text() == "1"
    assert checkpoint_steps(out)[-1:] == ([step] if step else [])
    assert step not in [line["step"] for line in lines(out) if "evaluation" in line]
    train_to_end(parted, out, *flags, ranks=2, mode="ddp")
    assert losses(out) == losses(trained)
    assert [line["step"] for line in lines(out) if "evaluation" in line] == [0, 3, STEPS]


def test_a_damaged_held_out_image_is_left_out_and_counted_and_training_goes_on(
    parted: Path, trained: Path, tmp_path: Path
) -> None:
    root, out = tmp_path / "root", tmp_path / "run"
    shutil.copytree(parted, root)
    dataset = sa1b.open(root)
    row = int(open_view(dataset.reader, dataset.table, "held-out").table_rows(np.array([1]))[0])
    shard = root / dataset.shards[int(dataset.table.shard[row])]
    with shard.open("r+b") as file:
        file.seek(int(dataset.table.offset[row]) + 200)
        file.write(bytes(50))
    flags = (*EVALUATED, "--optim.steps", "2", "--optim.warmup", "1")
    ended = start(root, out, *flags)
    assert ended.codes == [0], ended.outputs
    found = [line["evaluation"] for line in lines(out) if "evaluation" in line]
    assert [scores["damaged"] for scores in found] == [1]
    whole = next(line["evaluation"] for line in lines(trained) if "evaluation" in line)
    assert 0 < found[0]["masks"] < whole["masks"]
    assert whole["damaged"] == 0
    assert "damaged images 1 (see damaged.jsonl)" in ended.outputs[0]
    (line,) = [json.loads(text) for text in (out / "damaged.jsonl").read_text().splitlines()]
    assert line["image_id"] == int(dataset.table.image_id[row])
    alone = scores_of(root, out)
    assert alone == found[-1]
