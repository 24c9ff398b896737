"""The distill preset in the training command: several ranks, resuming, evaluation, refused settings."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from sa1b.engine.config import parse
from sa1b.engine.planner import measure
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS, DistillConfig
from sa1b.sam.embedding_cache import open_cache
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from tests.train.command import (
    BATCH,
    DISTILL_FLAGS,
    IMAGES,
    STEPS,
    assert_same_state,
    losses,
    start,
    train_to_end,
)

TEACHER = ModelConfig(
    image_size=64, width=32, depth=3, heads=2, global_blocks=(1,), window=2, channels=32, pixel_features=8
)
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in (("ddp", 2), ("fsdp", 2))]
Train = Callable[..., Path]


def write_teacher(path: Path, seed: int, config: ModelConfig = TEACHER) -> Path:
    torch.manual_seed(seed)
    write_weights(path, Sam(config).state_dict())
    return path


@pytest.fixture(scope="session")
def root(parted: Path) -> Path:
    return parted


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors", 1)


@pytest.fixture(scope="module")
def run(root: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The folder of an uninterrupted run."""
    made: dict[tuple[str, int], Path] = {}

    def of(mode: str, ranks: int) -> Path:
        if (mode, ranks) not in made:
            out = tmp_path_factory.mktemp("distillation") / "run"
            given: dict[str, Any] = {"ranks": ranks, "mode": mode, "model": "distill"}
            made[mode, ranks] = train_to_end(root, out, "--distill.teacher", str(teacher), **given)
        return made[mode, ranks]

    return of


@pytest.mark.parametrize(("mode", "ranks"), [("fsdp", 2), pytest.param("ddp", 3, marks=pytest.mark.slow)])
def test_losses_are_those_of_a_single_process(run: Train, mode: str, ranks: int) -> None:
    found = losses(run(mode, ranks))
    assert len(found) == STEPS
    assert found == pytest.approx(losses(run("none", 1)), rel=1e-5, abs=0)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), *SLOW])
def test_a_stopped_run_goes_on_bit_for_bit(
    root: Path, run: Train, teacher: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {"ranks": ranks, "mode": mode, "model": "distill"}
    flags = ("--distill.teacher", str(teacher))
    train_to_end(root, out, *flags, mishap={"what": "stop", "rank": ranks - 1, "step": 2}, **given)
    assert len(losses(out)) == 3
    train_to_end(root, out, *flags, **given)
    assert losses(out) == losses(run(mode, ranks))
    assert_same_state(out, run(mode, ranks))


def test_a_student_with_a_model_of_timm_learns_and_goes_on_bit_for_bit(
    root: Path, teacher: Path, tmp_path: Path
) -> None:
    flags = ("--distill.teacher", str(teacher))
    whole = train_to_end(root, tmp_path / "whole", *flags, model="backbone")
    found = losses(whole)
    assert found[-1] < found[0]
    out = tmp_path / "run"
    train_to_end(root, out, *flags, mishap={"what": "stop", "rank": 0, "step": 2}, model="backbone")
    assert len(losses(out)) == 3
    train_to_end(root, out, *flags, model="backbone")
    assert losses(out) == found
    assert_same_state(out, whole)
    equal = ("--data.global-batch", "4", "--data.micro-batch", "1")
    ended = start(root, tmp_path / "ddp", *flags, *equal, ranks=2, mode="ddp", model="backbone")
    assert 2 in ended.codes
    message = "BatchNorm would normalise .* pass --parallel.sync-batchnorm on GPUs"
    assert re.search(message, ended.outputs[0] + ended.outputs[1]), ended.outputs


def test_a_resumed_run_says_that_the_teacher_differs(
    root: Path, run: Train, teacher: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(run("none", 1), tmp_path / "run")
    digest = json.loads((out / "config.json").read_text())["distill"]["digest"]
    assert len(digest) == 16
    other = write_teacher(tmp_path / "teacher.safetensors", 2)
    flags = ("--distill.teacher", str(other), "--optim.steps", str(STEPS + 1))
    ended = start(root, out, *flags, model="distill")
    assert ended.codes == [0], ended.outputs
    assert f"--distill.digest {digest} -> " in ended.outputs[0]


def test_the_student_is_a_sam_with_the_decoder_of_its_teacher(
    root: Path, run: Train, teacher: Path, tmp_path: Path
) -> None:
    student, whole = sa1b.load_model(run("none", 1)), sa1b.load_model(teacher)
    own, theirs = student.state_dict(), whole.state_dict()
    for name in own:
        if not name.startswith("image_encoder."):
            assert torch.equal(own[name], theirs[name]), name
    assert student.config.width == 16
    weights = ("--init", str(run("none", 1)), "--evaluation.view", "held-out")
    scored = start(
        root, tmp_path / "scores", *weights, "--distill.teacher", str(teacher), "--evaluate-only", "--json",
        model="distill",
    )  # fmt: skip
    assert scored.codes == [0], scored.outputs
    scores = json.loads(next(line for line in scored.outputs[0].splitlines() if line.startswith("{")))
    assert scores["masks"] > 20
    # Interactive training goes on from the student, with all of its parts.
    sizes = ("--model.width", "16", "--model.heads", "1", "--data.view", "train")
    short = ("--optim.steps", "1", "--optim.warmup", "0", "--evaluation.every", "1")
    second = train_to_end(root, tmp_path / "second", *sizes, *short, *weights)
    begun = json.loads((second / "metrics.jsonl").read_text().splitlines()[1])
    assert begun["evaluation"]["miou_5_clicks"] == scores["miou_5_clicks"]


@pytest.mark.slow  # quick: sam/test_embedding_cache.py, and the resumed run above
@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), *SLOW])
def test_a_run_has_the_same_bits_with_any_files_of_a_cache(
    root: Path, teacher: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    """The steps are an epoch and a few images more, some of them flipped otherwise."""

    cached = ("--distill.cache", str(tmp_path / "cache"), "--distill.cache-bytes", "1000000")

    def train(out: str, *flags: str, **given: Any) -> Path:
        flags += ("--distill.teacher", str(teacher), "--optim.steps", "6")
        given |= {"ranks": ranks, "mode": mode, "model": "distill"}
        return train_to_end(root, tmp_path / out, *flags, **given)

    whole = train("whole", *cached)
    assert losses(whole) == pytest.approx(losses(train("plain")), rel=1e-3, abs=0)  # float16
    digest = json.loads((whole / "config.json").read_text())["distill"]["digest"]
    files = sorted((tmp_path / "cache" / digest / "float32").glob("*/*.safetensors"))
    assert IMAGES < len(files) < 6 * BATCH
    for path in files[::2]:
        path.unlink()
    train("stopped", *cached, mishap={"what": "stop", "rank": ranks - 1, "step": 2})
    files[1].unlink()
    stopped = train("stopped", *cached)
    assert losses(stopped) == losses(whole)
    assert_same_state(stopped, whole)


def test_the_limit_of_a_cache_counts_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    other = tmp_path / "of another teacher" / "00.safetensors"
    other.parent.mkdir()
    other.write_bytes(bytes(600))
    assert open_cache("--distill.cache", str(tmp_path), 1000, "1f2e").limit == 100
    assert f"--distill.cache {tmp_path}/1f2e: 0 embeddings; up to 400 more bytes" in capfd.readouterr().err
    with pytest.raises(UsageError, match="00.safetensors/1f2e cannot be created or read .Not a directory"):
        open_cache("--distill.cache", str(other), 1000, "1f2e")


def test_memory_is_measured_without_weights(root: Path) -> None:
    flags = (*DISTILL_FLAGS, "--data.root", str(root), "--parallel.mode", "ddp", "--distill.teacher")
    sizes = ("--model.channels", "256", "--model.pixel-features", "0")
    found, sizes_of_weights = [], []
    for name in ("vit_b", "vit_l"):
        found.append(measure(parse([*flags, name, *sizes], None, PRESETS), world_size=2))
        with torch.device("meta"):
            tensors = Sam(replace(MODELS[name], image_size=64)).state_dict().values()
        sizes_of_weights.append(sum(one.numel() * one.element_size() for one in tensors))
    small, large = found
    assert large.parameters - small.parameters == sizes_of_weights[1] - sizes_of_weights[0]
    assert large.peak - small.peak >= sizes_of_weights[1] - sizes_of_weights[0]
    assert large.activations < 0.1 * sizes_of_weights[1]


def test_what_does_not_fit_is_refused(root: Path, teacher: Path, tmp_path: Path) -> None:
    def config_of(*flags: str) -> DistillConfig:
        found = parse([*DISTILL_FLAGS, "--data.root", str(root), *flags], None, PRESETS)
        assert isinstance(found, DistillConfig)
        return found

    with pytest.raises(UsageError, match="--distill.teacher: missing; pass the weights of a SAM"):
        config_of()
    with pytest.raises(
        UsageError, match="--distill.teacher vit_h: is the name of a model; to train, pass the file"
    ):
        config_of("--distill.teacher", "vit_h").resolved()
    cached = ("--distill.teacher", "vit_h", "--distill.cache")
    with pytest.raises(UsageError, match="--distill.cache near: needs a limit; also pass --distill.cache-b"):
        config_of(*cached, "near")
    with pytest.raises(UsageError, match="--distill.cache s3://b/c: must be a folder on a local disk"):
        config_of(*cached, "s3://b/c", "--distill.cache-bytes", "9")
    with pytest.raises(UsageError, match="--distill.cache-bytes 0: must be at least 1"):
        config_of(*cached, "near", "--distill.cache-bytes", "0")
    with pytest.raises(UsageError, match="--distill.cache-bytes 9: .* also pass --distill.cache"):
        config_of(*cached[:2], "--distill.cache-bytes", "9")
    with pytest.raises(UsageError, match="--distill.teacher: .*nothing: no such file or folder"):
        config_of("--distill.teacher", str(tmp_path / "nothing")).resolved()
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(teacher.read_bytes()[:-9])
    with pytest.raises(UsageError, match="--distill.teacher: .*damaged.safetensors"):
        config_of("--distill.teacher", str(damaged)).resolved()
    for flag, value, other in (
        ("--model.channels", "64", 32),
        ("--model.pixel-features", "0", 8),
        ("--model.patch-size", "8", 16),
    ):
        config = config_of("--distill.teacher", str(teacher), flag, value)
        with pytest.raises(UsageError, match=f"{flag} {value}: the teacher has {other}.*pass {flag} {other}"):
            config.build()
    # A teacher of another image size is resized.
    large = write_teacher(tmp_path / "large.safetensors", 1, replace(TEACHER, image_size=128))
    assert config_of("--distill.teacher", str(large)).build().teacher.config.image_size == 64
