"""`sa1b plan train`: what a training run takes on a cluster."""

from pathlib import Path
from typing import Any

import pytest

from sa1b.recipes.presets import PRESETS
from tests.kit import refused, run
from tests.train.command import FLAGS, make_root

QUICK = ("tiny", "distill_tiny", "grounding_tiny")
TINY = ("--preset", "tiny", "--model.image-size", 128, "--data.masks", 8)


def planned(*words: object, gpus: int = 8, code: int = 0) -> dict[str, Any]:
    found = run("plan", "train", "--gpu", "H100", "--gpus", gpus, *words, "--json", code=code).json
    assert found["exit_code"] == code
    return dict(found)


def test_a_run_on_a_dataset_is_planned_as_json(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    words = ("--price", 3, "--data.root", root, "--out", tmp_path / "run", *FLAGS, "--parallel.mode", "ddp")
    found = planned(*words, gpus=2)
    assert (found["ranks"], found["micro_batch"], found["micro_batches"]) == (2, 2, 2)
    data, parameters = found["data"], found["parameters"]
    assert (data["images"], data["files"], data["kind"]) == (23, 4, "shard")
    assert (found["images_per_rank"], found["files_per_rank"]) == (23 / 2, 4 / 2)
    shards = sum(one.stat().st_size for one in root.glob("*.tar"))
    assert 0.5 * shards < data["bytes"] < shards
    assert found["checkpoint_bytes"] == pytest.approx(12 * parameters, rel=0.001)
    assert (found["steps"], found["steps_per_epoch"], found["checkpoints_written"]) == (4, 5, 2)
    assert found["checkpoint_bytes_written"] == 2 * found["checkpoint_bytes"]
    assert found["hours"] == pytest.approx(found["steps"] * found["seconds_per_step"] / 3600)
    assert found["dollars"] == pytest.approx(3 * found["gpu_hours"]) == pytest.approx(6 * found["hours"])
    assert not (tmp_path / "run").exists()


def test_all_of_sa1b_is_assumed_and_every_assumption_is_printed() -> None:
    flags = ("--gpu", "A100", "--nodes", 2, "--price", 1.5, *TINY, "--data.global-batch", 128)
    shown = run("plan", "train", *flags).out
    assert "2 nodes x 8 A100 = 16 ranks" in shown
    assert "11,185,362 images of all of SA-1B, because there is no --data.root" in shown
    assert "128 images = 16 ranks x 1 micro-batch of up to 8" in shown
    assert " dollars" in shown
    for flag in ("--mfu", "--tflops", "--gpu-memory", "--network-gbit", "--decode-rate", "--reserved"):
        assert flag in shown
    assert (
        "1 node x 1 other = 1 rank"
        in run("plan", "train", "--tflops", 9, "--gpu-memory", 32, "--gpus", 1, *TINY).out
    )


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, config in PRESETS.items()
        if not config.model.backbone  # the others need timm
    ],
)
def test_every_preset_has_a_plan(preset: str) -> None:
    teacher = {"distill_tiny": "tiny"}.get(preset, "vit_h")
    words = ("--distill.teacher", teacher) if preset.startswith("distill") else ()
    found = planned("--preset", preset, "--data.global-batch", 8, "--parallel.precision", "bf16", *words)
    memory = found["memory_bytes"]
    assert memory["parameters"] >= 4 * found["parameters"]
    assert memory["activations"] > 0
    assert found["hours"] > 0


def test_states_are_those_of_the_mode_and_activations_those_of_the_micro_batch() -> None:
    batch = ("--data.global-batch", 32)
    ddp = planned(*TINY, *batch, "--parallel.mode", "ddp")
    parameters, memory = ddp["parameters"], ddp["memory_bytes"]
    assert memory["parameters"] == pytest.approx(4 * parameters, rel=0.001)  # and a few buffers
    assert memory["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    assert memory["optimizer"] == pytest.approx(8 * parameters, rel=0.001)
    assert memory["peak"] <= ddp["memory_bytes"]["needed"]
    sharded = planned(*TINY, *batch, "--parallel.mode", "fsdp")["memory_bytes"]
    assert sharded["optimizer"] == pytest.approx(parameters, rel=0.1)
    assert sharded["parameters"] < memory["parameters"] / 4
    assert sharded["communication"] > 0
    hosted = planned(*TINY, *batch, "--parallel.mode", "fsdp", "--parallel.offload", "cpu")["memory_bytes"]
    assert hosted["offloaded"] == sum(hosted[name] for name in ("parameters", "gradients", "optimizer"))
    assert hosted["peak"] == hosted["batches"] + hosted["communication"] + hosted["activations"]
    half = planned(*TINY, *batch, "--parallel.mode", "ddp", "--data.micro-batch", 2)["memory_bytes"]
    assert half["activations"] == pytest.approx(memory["activations"] / 2, rel=0.1)
    flags = (*TINY, *batch, "--parallel.mode", "ddp", "--model.checkpoint-blocks", "all")
    assert planned(*flags)["memory_bytes"]["activations"] < memory["activations"]


def test_hours_follow_from_a_measured_rate() -> None:
    one = ("--images-per-second", 9, "--data.global-batch", 64, *TINY)
    alone = planned(*one, gpus=1)
    assert alone["seconds_per_step"] == pytest.approx(64 / 9)
    assert alone["hours"] == pytest.approx(alone["steps"] * 64 / 9 / 3600)
    # On eight GPUs an eighth of it, and the communication that is not hidden.
    eight = planned(*one)
    assert eight["seconds"]["compute"] == pytest.approx(8 / 9)
    assert eight["seconds_per_step"] == pytest.approx(8 / 9 + eight["seconds"]["exposed_communication"])
    refused("plan", "train", "--gpu", "H100", "--images-per-second", 1e9, *TINY, names="--mfu")


def test_a_step_that_does_not_fit_prints_the_flags_to_change() -> None:
    words = (*TINY, "--data.global-batch", 64, "--parallel.mode", "ddp", "--reserved", 0)
    one = planned(*words, "--data.micro-batch", 2)["memory_bytes"]["needed"]
    small = ("--gpu-memory", one / 1e9 * 1.001)
    assert planned(*words, *small, code=1)["largest_micro_batch"] == 2
    done = run("plan", "train", "--gpu", "H100", *words, *small, code=1)
    assert "does not fit" in done.out
    assert "--data.micro-batch 2" in done.out
    assert "--model.checkpoint-blocks all" in done.out
    found = planned(*words, "--gpu-memory", 0.001, code=1)
    assert (found["fits"], found["largest_micro_batch"]) == (False, 0)


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = ("plan", "train", "--gpu", "H100")
    refused("plan", "train", names="--gpu")
    refused("plan", "train", "--tflops", 100, names="--gpu")
    refused("plan", "train", "--gpu", "H10", names="'H100'")
    refused(*h100, "--parallel.mode", "none", names="--parallel.mode none")
    refused(*h100, "--parallel.mode", "ddp", "--nodes", 100, names="--data.global-batch 128")
    refused(*h100, "--data.view", "train", names="--data.view")
    refused(*h100, "--data.mask", 3, names="--data.mask")
    refused(*h100, "--mfu", 1.5, names="--mfu")
    refused(*h100, "--data.root", tmp_path / "none", names=f"{tmp_path / 'none'}")
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    refused("plan", "./train", names="train")
