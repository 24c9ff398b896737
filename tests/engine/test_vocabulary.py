"""Flags of other training programs are answered with ours."""

import dataclasses
import re
from typing import Any

import pytest

from sa1b.engine import config as settings
from sa1b.engine import vocabulary
from sa1b.engine.presets import PRESETS, SamConfig
from sa1b.errors import UsageError

NAMES = [name for names in vocabulary._ANSWERS for name in names.split("|")]


def flags(kind: Any = SamConfig, prefix: str = "") -> set[str]:
    """All flags of the command."""
    found = set()
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name.replace('_', '-')}"
        part = field.default_factory
        if dataclasses.is_dataclass(part):
            found |= flags(part, f"{name}.")
        else:
            found.add(f"--{name}")
    return found


def test_every_answer_names_flags_that_exist_and_no_flag_is_refused() -> None:
    own = flags()
    for answer in vocabulary._ANSWERS.values():
        named = re.findall(r"--[a-z][\w.-]*[a-z]", answer)
        assert set(named) <= own | {"--nproc_per_node"}, answer
        assert named or answer.startswith("drop it"), answer
    assert not own & {f"--{name}" for name in NAMES}
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--epochs", "3"], "--epochs: no such flag; pass --optim.epochs"),
        (["--batch-size=8"], "--batch-size: no such flag; pass --data.global-batch, the images of a step"),
        (["--batch_size", "8"], "--batch_size: no such flag; pass --data.global-batch"),
        (["-lr", "1e-3"], "-lr: no such flag; pass --optim.lr"),
        (["--lr", "1e-3"], "--lr: no such flag; pass --optim.lr"),
        (["--accumulation-steps", "4"], "pass --data.micro-batch"),
        (["--save-interval", "10"], "pass --checkpoint.every"),
        (["--strategy", "FULL_SHARD"], "pass --parallel.mode none, ddp, zero1, fsdp or pipeline"),
        (["--checkpoint-dir", "run"], "pass --out"),
        (["--backend", "nccl"], "drop it: NCCL connects GPUs"),
        (["--local-rank=0"], "start the ranks with torchrun"),
    ],
)
def test_a_flag_of_another_program_is_answered(words: list[str], answer: str) -> None:
    with pytest.raises(UsageError, match=re.escape(answer)):
        settings.parse(["--data.root", "shards", *words], None, PRESETS)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2.0, 9), (0.5, 3), (0.01, 1)])
def test_epochs_are_rounded_up_to_complete_steps(epochs: float, steps: int) -> None:
    given = ["--data.root", "shards", "--preset", "tiny", "--data.global-batch", "5", "--optim.warmup", "0"]
    config = settings.parse([*given, "--optim.epochs", str(epochs)], None, PRESETS)
    assert settings.with_steps(config, 22).optim.steps == steps
    assert settings.with_steps(settings.parse(given, None, PRESETS), 22).optim.steps == 200


def test_epochs_that_do_not_fit_the_schedule_are_named() -> None:
    config = settings.parse(["--data.root", "r", "--preset", "tiny", "--optim.epochs", "1"], None, PRESETS)
    with pytest.raises(UsageError, match=r"^--optim.epochs 1: is 3 steps; --optim.warmup 20: must be less"):
        settings.with_steps(config, 22)


def test_a_message_about_a_size_of_the_model_begins_with_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--model.checkpoint-blocks some: must be none, all or every:2"):
        settings.parse(["--data.root", "r", "--model.checkpoint-blocks", "some"], None, PRESETS)


def test_epochs_must_be_positive() -> None:
    with pytest.raises(UsageError, match=r"--optim.epochs 0.0: must be more than 0"):
        settings.parse(["--data.root", "shards", "--optim.epochs", "0"], None, PRESETS)
