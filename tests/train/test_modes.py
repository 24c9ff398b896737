"""Runs with a sharded optimizer and with compressed gradients: stopped, killed, resumed in other modes."""

import json
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from sa1b.engine import config as settings
from sa1b.engine.planner import plan
from sa1b.engine.watch.hardware import Cluster
from tests.engine import reconstruction
from tests.stream.test_stream import damage
from tests.train.command import (
    FLAGS_OF_MODELS,
    STEPS,
    assert_same_state,
    checkpoint_steps,
    figures,
    in_turn,
    losses,
    newest,
    start,
    tensors,
    train_to_end,
)

CLUSTER = Cluster(
    gpu="H100", nodes=1, gpus=2, flops=1e15, gpu_memory=80e9, link=400e9, network=50e9, mfu=0.5, exposed=0.25,
    cpus=96, decode_rate=100.0, storage=None, reserved=2e9, fragmentation=0.1, price=2.0,
)  # fmt: skip
Whole = Callable[..., Path]
MODEL = "reconstruction"  # engine/test_parallel.py and test_compression.py have SAM
POWERSGD = ("--parallel.compress", "powersgd:2", "--parallel.compress-after", "2")


def test_zero1_has_the_losses_of_one_process(whole: Whole) -> None:
    assert losses(whole("zero1", 2, MODEL)) == pytest.approx(losses(whole("none", 1, MODEL)), rel=1e-5, abs=0)


def test_zero1_that_is_killed_resumes_bit_for_bit(root: Path, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {"ranks": 2, "mode": "zero1", "model": MODEL}
    mishap = {"what": "kill", "rank": 1, "step": 3, "once": str(tmp_path / "once")}
    ended = start(root, out, mishap=mishap, **given)
    assert ended.codes == [1, -9]
    train_to_end(root, out, **given)
    assert losses(out) == losses(whole("zero1", 2, MODEL))
    assert_same_state(out, whole("zero1", 2, MODEL))


@pytest.fixture(scope="module")
def compressed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with PowerSGD on two ranks."""
    out = tmp_path_factory.mktemp("compressed") / "run"
    return train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp", model=MODEL)


def test_powersgd_resumes_bit_for_bit_with_the_errors_of_each_rank(
    root: Path, compressed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "stop", "rank": 1, "step": 2}
    train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp", mishap=mishap, model=MODEL)
    assert checkpoint_steps(out)[-1] == 3
    saved = tensors(newest(out))
    name = "error.blocks.0.qkv.weight"
    assert {f"compression.{rank}.{name}" for rank in (0, 1)} < set(saved)
    assert not saved[f"compression.0.{name}"].equal(saved[f"compression.1.{name}"])
    train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp", model=MODEL)
    assert losses(out) == losses(compressed)
    assert_same_state(out, compressed)


def test_a_plan_counts_the_state_of_powersgd_that_a_checkpoint_has(root: Path, compressed: Path) -> None:
    words = ["--data.root", str(root), *FLAGS_OF_MODELS[MODEL], "--parallel.mode", "ddp"]
    presets = reconstruction.PRESETS
    before, after = (
        plan(settings.parse([*words, *flags], None, presets), CLUSTER) for flags in ((), POWERSGD)
    )
    saved = tensors(newest(compressed))
    kept = {
        kind: sum(one.nbytes for name, one in saved.items() if f".{kind}." in name) for kind in ("error", "q")
    }
    assert after.saved - before.saved == kept["error"] + kept["q"] > 0
    # On each rank the errors and factors of two steps, because the last one may be skipped, and first factors.
    assert after.memory.gradients - before.memory.gradients == (2 * kept["error"] + 3 * kept["q"]) // 2


@pytest.mark.parametrize(
    ("ranks", "flags", "reason"),
    [
        (3, POWERSGD, "it was saved by another number of ranks"),
        (2, ("--parallel.compress", "powersgd:1"), "powersgd:2"),
        pytest.param(1, ("--parallel.mode", "none"), None, marks=pytest.mark.slow),
    ],
)
def test_the_errors_are_dropped_with_a_message_where_they_do_not_fit(
    root: Path, compressed: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...], reason: str | None
) -> None:
    out = tmp_path / "run"
    shutil.copytree(compressed, out)
    flags += ("--optim.steps", str(STEPS + 1))
    mode = "none" if reason is None else "ddp"
    ended = start(root, out, *flags, ranks=ranks, mode=mode, model=MODEL)
    assert ended.codes == [0] * ranks, "\n".join(ended.outputs)
    assert ("error feedback of PowerSGD is dropped" in ended.outputs[0]) == (reason is not None)
    if reason is not None:
        assert reason in ended.outputs[0]
    assert losses(out)[:STEPS] == losses(compressed)


def test_unequal_shares_have_the_same_losses_and_resume_with_other_shares(
    root: Path, whole: Whole, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "stop", "rank": 1, "step": 2}
    train_to_end(root, out, "--parallel.shares", "3,1", ranks=2, mode="ddp", mishap=mishap, model=MODEL)
    train_to_end(root, out, "--parallel.shares", "1,2,1", ranks=3, mode="fsdp", model=MODEL)
    assert losses(out) == pytest.approx(losses(whole("none", 1, MODEL)), rel=1e-4, abs=0)


ONE_IMAGE = ("--data.micro-batch", "1")  # the micro-batches of a pipeline are equal


@pytest.fixture(scope="module")
def pipeline(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two stages."""
    out = tmp_path_factory.mktemp("pipeline") / "run"
    return train_to_end(root, out, *ONE_IMAGE, ranks=2, mode="pipeline")


def test_a_pipeline_has_the_losses_of_one_process_and_counts_each_image_once(
    pipeline: Path, whole: Whole
) -> None:
    assert losses(pipeline) == pytest.approx(losses(whole("none", 1)), rel=1e-4, abs=0)
    names = ("images", "masks", "grad_norm", "iou_last")
    for one, other in zip(figures(pipeline, *names), figures(whole("none", 1), *names), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_pipeline_that_is_killed_resumes_bit_for_bit(root: Path, pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    mishap = {"what": "kill", "rank": 0, "step": 3, "once": str(tmp_path / "once")}
    ended = start(root, out, *ONE_IMAGE, ranks=2, mode="pipeline", mishap=mishap)
    assert ended.codes == [-9, 1]
    train_to_end(root, out, *ONE_IMAGE, ranks=2, mode="pipeline")
    assert losses(out) == losses(pipeline)
    assert_same_state(out, pipeline)


def test_stages_that_read_other_images_stop_together(root: Path, tmp_path: Path) -> None:
    """A sample that is damaged in the copy of one machine only; that rank then reads a substitute."""
    for name in ("good", "bad"):
        shutil.copytree(root, tmp_path / name / "shards")
    damage(tmp_path / "bad" / "shards", range(8))
    out = tmp_path / "run"
    folders = [tmp_path / "good", tmp_path / "bad"]
    ended = start(Path("shards"), out, *ONE_IMAGE, ranks=2, mode="pipeline", folders=folders)
    assert ended.codes == [1, 1]
    for output in ended.outputs:
        assert "step 1: 1 stage of the pipeline (rank 1) read other images than rank 0" in output
    lines = [json.loads(line) for line in (out / "damaged.jsonl").read_text().splitlines()]
    assert {line["rank"] for line in lines} == {1}


NOT_IN_A_PIPELINE = [
    (("--data.micro-batch", "2"), "--data.micro-batch 2: does not divide --data.global-batch 5, and"),
    (("--data.micro-batch", "5"), "--data.micro-batch 5: 1 micro-batch of a step for 2 stages"),
    (("--evaluate-only", "--evaluation.view", "held-out"), "--evaluate-only: does not work with"),
    (("--evaluation.every", "2", "--evaluation.view", "held-out"), "--evaluation.view: does not work"),
    (("--parallel.precision", "fp16"), "pass --parallel.precision bf16"),
    (("--parallel.shares", "2,1"), "--parallel.shares: is for --parallel.mode none or ddp"),
    (("--parallel.bucket", "50"), "--parallel.bucket: is for --parallel.mode ddp or zero1"),
    (("--optim.freeze", "image_encoder"), "--optim.freeze: leaves nothing to train on stage 0"),
]  # the last one is refused by the stages


def test_settings_that_do_not_fit_a_pipeline_are_refused(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    runs = [flags for flags, _ in NOT_IN_A_PIPELINE]
    found = in_turn(root, out, runs, *ONE_IMAGE, ranks=2, mode="pipeline")
    for (flags, message), ended in zip(NOT_IN_A_PIPELINE, found, strict=True):
        assert ended.codes == [2, 2], (flags, ended.outputs)
        assert message in ended.outputs[0], flags
        assert ended.outputs[1] == "", flags
    assert not out.exists() or not list(out.iterdir())


def test_a_pipeline_is_estimated_before_it_is_started_and_chooses_micro_batches_that_fit(
    root: Path, tmp_path: Path
) -> None:
    runs = [
        (*ONE_IMAGE, "--dry-run"),
        ("--data.micro-batch", "None", "--data.global-batch", "6", "--dry-run"),
    ]
    own, chosen = in_turn(root, tmp_path / "run", runs, ranks=2, mode="pipeline")
    assert own.codes == chosen.codes == [0, 0], (own.outputs, chosen.outputs)
    assert "5 images = 5 micro-batches through 2 stages, each of 1\n" in own.outputs[0]
    assert "not measured: the stages of a pipeline need unequal memory" in own.outputs[0]
    assert "6 images = 2 micro-batches through 2 stages, each of 3\n" in chosen.outputs[0]


PRECISIONS = ("fp32", "bf16", "fp16")
CHANGES = [
    (one, other, ema) for one, other in permutations(PRECISIONS, 2) for ema in ((), ("--optim.ema", "0.5"))
]


@pytest.mark.parametrize(
    ("before", "after", "ema"),
    [pytest.param(*one, marks=() if one == ("fp32", "fp16", ()) else pytest.mark.slow) for one in CHANGES],
)
def test_a_run_resumes_with_another_precision(
    root: Path, whole: Whole, tmp_path: Path, before: str, after: str, ema: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    for precision, mishap in ((before, {"what": "stop", "rank": 0, "step": 2}), (after, None)):
        train_to_end(root, out, *ema, "--parallel.precision", precision, mishap=mishap, model=MODEL)
    assert losses(out)[:3] == pytest.approx(losses(whole("none", 1, MODEL))[:3], rel=0.05)
    assert len(losses(out)) == STEPS or "fp16" in (before, after)
