"""`sa1b plan train`: what a training run takes on a cluster."""

import json
import re
from pathlib import Path

import pytest

from sa1b.engine import planner
from sa1b.engine.planner.fake_step import StepMemory
from sa1b.errors import UsageError
from sa1b.programs.plan import verb_plan_train as plan_train
from tests.cli.verb import runner
from tests.train.command import FLAGS, make_root

plan = runner("plan")
MEMORY = StepMemory(
    parameters=10**9, gradients=10**9, optimizer=2 * 10**9, batches=10**9, communication=0, activations=10**10
)
CLUSTER = ("--gpu", "H100", "--gpus", "2")


@pytest.fixture
def of_15_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes 15 GB, without measuring it."""
    monkeypatch.setattr(planner, "measure", lambda config, world_size: MEMORY)


def test_a_run_on_a_dataset_is_planned_as_json(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    done = plan(
        "train", *CLUSTER, "--price", "3", "--json", "--data.root", root, "--out", tmp_path / "run", *FLAGS,
        "--parallel.mode", "ddp",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["data"]["images"] == 23
    assert found["memory_bytes"]["activations"] > 0
    parameters = found["parameters"]
    assert found["memory_bytes"]["optimizer"] == pytest.approx(8 * parameters, rel=0.02)
    assert found["checkpoint_bytes"] == pytest.approx(12 * parameters, rel=0.001)
    assert found["fits"]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("of_15_gb")
def test_without_a_root_all_of_sa1b_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--preset", "vit_b", "--parallel.mode", "ddp", "--parallel.precision", "bf16")
    assert plan_train.main(arguments=flags, gpu="A100", nodes=2, price=1.5) == 0
    shown = capsys.readouterr().out
    assert "2 nodes x 8 A100 = 16 ranks" in shown
    assert "11,185,362 images of all of SA-1B, because there is no --data.root" in shown
    assert "128 images = 16 ranks x 1 micro-batch of up to 8" in shown
    assert "180,000 steps = 2.1 epochs of 87,386 steps" in shown
    assert "limited by: GPU compute (decoding" in shown
    assert "17.75 GB of 80.00 GB: fits" in shown
    assert " dollars" in shown
    assert "--mfu             0.2 of the peak is reached" in shown


@pytest.mark.usefixtures("of_15_gb")
def test_a_short_run_costs_seconds_and_parts_of_a_dollar(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--preset", "tiny", "--optim.steps", "30")
    assert plan_train.main(arguments=small, gpu="H100", gpus=1, price=2.0) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^time .* an epoch, [1-9]\d\d\.\d ms the run$", shown, re.MULTILINE)
    assert re.search(r"^cost +0\.0+[1-9]\d* GPU hours, 0\.0+[1-9]\d* dollars$", shown, re.MULTILINE)
    assert re.search(r"^ +0\.\d+ TFLOP for ", shown, re.MULTILINE)


@pytest.mark.usefixtures("of_15_gb")
def test_a_step_that_does_not_fit_prints_the_flags_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_train.main(arguments=("--parallel.mode", "ddp"), gpu="A10", gpu_memory=10.0) == 1
    shown = capsys.readouterr().out
    assert "17.75 GB of 10.00 GB: does not fit" in shown
    assert (
        "no micro-batch fits with these settings\n              "
        "pass --model.checkpoint-blocks all, --parallel.mode fsdp, --parallel.precision bf16, or use a larger"
        in shown
    )


@pytest.mark.usefixtures("of_15_gb")
def test_other_gpus_are_described_by_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_train.main(tflops=100.0, gpu_memory=32.0, gpus=1) == 0
    shown = capsys.readouterr().out
    assert "1 node x 1 other = 1 rank" in shown
    assert "100 TFLOP/s is the peak of a GPU" in shown


@pytest.mark.parametrize(
    ("arguments", "cluster", "complaint"),
    [
        ((), {}, "--gpu: missing; pass the type of GPU, such as H100, or --tflops and --gpu-memory"),
        ((), {"tflops": 100.0}, "--gpu: missing"),
        ((), {"gpu": "H10"}, "--gpu H10: unknown; did you mean 'H100'"),
        (
            ("--parallel.mode", "none"),
            {"gpu": "H100"},
            "--parallel.mode none: is for one process, this run has 8",
        ),
        (
            ("--parallel.mode", "ddp"),
            {"gpu": "H100", "nodes": 100},
            "--data.global-batch 128: has 128 samples for 800 ranks",
        ),
        (("--data.view", "train"), {"gpu": "H100"}, "--data.view: needs the dataset directory of the view"),
        (("--data.mask", "3"), {"gpu": "H100"}, "--data.mask: no such flag; did you mean --data.masks"),
        (("--data.root", "/nosuch"), {"gpu": "H100", "gpus": 1}, "/nosuch"),
    ],
)
@pytest.mark.usefixtures("of_15_gb")
def test_bad_input_is_refused(
    arguments: tuple[str, ...],
    cluster: dict[str, str | float],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "has 8" in complaint or "samples" in complaint:
        monkeypatch.undo()  # the measurement refuses the ranks, before it begins
    with pytest.raises(UsageError) as error:
        plan_train.main(arguments=arguments, **cluster)  # type: ignore[arg-type]
    assert complaint in str(error.value)


def test_a_failure_is_a_document_too(tmp_path: Path) -> None:
    done = plan("train", "--json", "--nodes", "2")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"].startswith("--gpu: missing")


def test_a_folder_named_train_is_planned_as_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "train" in plan("./train").stderr
    shown = plan("train", "--help").stdout
    assert "--network-gbit" in shown
    assert "sa1b plan ./train" in shown
