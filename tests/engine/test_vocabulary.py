"""Flags of other training programs are answered with ours."""

import dataclasses
import re
from typing import Any

import pytest

from sa1b.engine import config as settings
from sa1b.engine import vocabulary
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS, SamConfig
from tests.engine.reconstruction import ReconstructionConfig

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


@dataclasses.dataclass(frozen=True, slots=True)
class OwnConfig(ReconstructionConfig):
    """A model whose settings have names of other programs' flags.

    Attributes:
        arch: Name.
        lr: Number.
        weights: File.
    """

    arch: str = "plain"
    lr: float = 0.1
    weights: str = ""


def test_settings_of_a_model_may_have_names_of_other_programs_flags() -> None:
    words = ["--data.root", "shards", "--lr", "0.5", "--arch=wide", "--weights", "file"]
    found = settings.parse(words, None, {"small": OwnConfig()})
    assert isinstance(found, OwnConfig)
    assert (found.lr, found.arch, found.weights) == (0.5, "wide", "file")
    with pytest.raises(UsageError, match="--epochs: no such flag"):
        settings.parse([*words, "--epochs", "3"], None, {"small": OwnConfig()})


@pytest.mark.parametrize(
    ("words", "expected", "note"),
    [
        ("--preset tiny --optim.steps 3", (3, 0, 0), "--optim.warmup 0: the preset's 20 of 200 steps"),
        ("--preset tiny --optim.steps=20", (20, 2, 0), "--optim.warmup 2: the preset's 20 of 200 steps"),
        ("--preset tiny --optim.steps 21", (21, 20, 0), ""),
        ("--preset tiny --optim.steps 3 --optim.warmup 1", (3, 1, 0), ""),
        (
            "--preset sam2 --optim.steps 900",
            (900, 10, 50),
            "--optim.cooldown 50: the preset's 5000 of 90,000",
        ),
    ],
)
def test_a_warm_up_that_is_not_passed_is_shortened_with_the_steps(
    words: str, expected: tuple[int, int, int], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = settings.parse(["--data.root", "shards", *words.split()], None, PRESETS).optim
    assert (optim.steps, optim.warmup, optim.cooldown) == expected
    printed = capsys.readouterr().err
    assert note in printed
    assert bool(note) == bool(printed)


def test_a_warm_up_that_is_passed_and_does_not_fit_is_refused() -> None:
    words = ["--data.root", "shards", "--preset", "tiny", "--optim.steps", "3", "--optim.warmup", "9"]
    with pytest.raises(UsageError, match=r"--optim.warmup 9: must be less than --optim.steps 3"):
        settings.parse(words, None, PRESETS)


@pytest.mark.parametrize(
    ("words", "world_size", "mode"),
    [
        ("", 2, "ddp"),
        ("", 1, "none"),
        ("--parallel.mode none", 2, "none"),
        ("--parallel.mode=fsdp", 2, "fsdp"),
    ],
)
def test_several_ranks_have_the_mode_ddp_if_none_is_passed(
    words: str, world_size: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert settings.parse(["--data.root", "x", *words.split()], None, PRESETS).parallel.mode == mode
    monkeypatch.delenv("WORLD_SIZE")
    found = settings.parse(["--data.root", "x", *words.split()], None, PRESETS, world_size=world_size)
    assert found.parallel.mode == mode


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ("", "tiny"),
        ("--preset vit_b", "vit_b"),
        ("--init sam_vit_b.pth", "vit_b"),
        ("--evaluate-only", "vit_b"),
    ],
)
def test_without_a_gpu_a_new_run_has_the_preset_tiny(words: str, preset: str) -> None:
    images = ("--evaluation.view", "some") if "--evaluate-only" in words else ()
    arguments = ["--data.root", "shards", *words.split(), *images]
    assert settings.parse(arguments, None, PRESETS, on_cpu="tiny").preset == preset


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
        (["--strategy", "FULL_SHARD"], "pass --parallel.mode none, ddp or fsdp"),
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


def test_epochs_shorten_a_warm_up_that_is_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data.root", "r", "--preset", "tiny", "--optim.epochs", "1"]
    optim = settings.with_steps(settings.parse(given, None, PRESETS), 22).optim
    assert (optim.steps, optim.warmup, optim.fitting) == (3, 0, ())
    assert capsys.readouterr().err == (
        "--optim.warmup 0: the preset's 20 of 200 steps, in proportion to --optim.steps 3\n"
    )
    config = settings.parse([*given, "--optim.warmup", "20"], None, PRESETS)
    with pytest.raises(UsageError, match=r"^--optim.epochs 1: is 3 steps; --optim.warmup 20: must be less"):
        settings.with_steps(config, 22)


def test_a_message_about_a_size_of_the_model_begins_with_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--model.checkpoint-blocks some: must be none, all or every:2"):
        settings.parse(["--data.root", "r", "--model.checkpoint-blocks", "some"], None, PRESETS)


@pytest.mark.parametrize(
    ("ranks", "answer"),
    [("8", "with 8 ranks, N is 2 or 4"), ("2", "with 2 ranks, none fits: N and the ranks of a copy are at")],
)
def test_hybrid_sharding_is_answered_with_the_numbers_that_fit(
    ranks: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    message = (
        f"--parallel.shard hybrid: pass --parallel.replicas N, the number of copies of the model; {answer}"
    )
    for words in (["--parallel.shard", "hybrid"], ["--parallel.shard=hybrid"]):
        with pytest.raises(UsageError, match=re.escape(message)):
            settings.parse(["--data.root", "x", "--out", "y", *words], None, PRESETS)
