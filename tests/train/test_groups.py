"""Each step of the optimizer, computed from the checkpoints around it by the documented rules.

AdamW's step follows from its moments: lr and weight decay of a parameter are seen in the weights of two
checkpoints in a row, in every mode and after a resume. Rules: `docs/training.md`, `sa1b train --help`.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sa1b
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from tests.train.command import lines, start, tensors
from tests.train.inside import SAM, make_root, train

STEPS, DEPTH = 4, 2
MODEL = ModelConfig(
    image_size=64, width=32, depth=DEPTH, heads=2, global_blocks=(1,), window=2, channels=32, pixel_features=8
)
FROZEN = ("prompt_encoder", "image_encoder.blocks.0")
MODES = [("none", 1), ("ddp", 2), ("fsdp", 2)]


@dataclass(frozen=True)
class Rules:
    """Settings of the optimizer."""

    lr: float = 0.01
    layer_decay: float = 0.5
    weight_decay: float = 0.5
    beta1: float = 0.8
    beta2: float = 0.9
    epsilon: float = 1e-4
    grad_clip: float = 0.25
    ema: float = 0.2  # step 2 has 2/11

    def flags(self) -> list[str]:
        named = {name.replace("_", "-"): value for name, value in vars(self).items()}
        return [word for name, value in named.items() for word in (f"--optim.{name}", str(value))]

    def rate(self, step: int) -> float:
        """Of the last layer in a step, from 1: two steps of warm-up, then a tenth after step 3."""
        return self.lr * {1: 0.5, 4: 0.1}.get(step, 1.0)

    def scale(self, name: str) -> float:
        layer = DEPTH + 1
        if name.startswith(("image_encoder.patch_embed.", "image_encoder.pos_embed")):
            layer = 0
        elif name.startswith("image_encoder.blocks."):
            layer = 1 + int(name.split(".")[2])
        return self.layer_decay ** (DEPTH + 1 - layer)

    def decay(self, name: str, weight: Tensor) -> float:
        none = weight.ndim == 1 or name.rpartition(".")[2] in ("bias", "pos_embed", "rel_pos_h", "rel_pos_w")
        return 0.0 if none else self.weight_decay


RULES = Rules()
SCHEDULE = (
    *("--optim.batch-scaling", "none", "--optim.schedule", "step", "--optim.milestones", "3"),
    *("--optim.min-lr-ratio", "0"),
    *("--optim.steps", str(STEPS), "--optim.warmup", "2", "--checkpoint.every", "1"),
    *("--checkpoint.keep-last", "9", "--model.drop-path", "0.3", "--data.global-batch", "2"),
    *("--data.micro-batch", "1", "--optim.freeze", *FROZEN),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a dataset directory and initial weights, which have no zeros for weight decay to leave alone."""
    made = tmp_path_factory.mktemp("groups")
    make_root(made)
    torch.manual_seed(0)
    weights = {name: value + 0.05 * torch.rand_like(value) for name, value in Sam(MODEL).state_dict().items()}
    write_weights(made / "initial.safetensors", weights)
    return made


def trained(folder: Path, out: Path, mode: str, ranks: int, *flags: str) -> Path:
    words = (*RULES.flags(), *SCHEDULE, "--init", str(folder / "initial.safetensors"), *flags)
    if mode == "none":
        train(*SAM, "--data.root", folder / "root", "--out", out, *words)
    else:
        ended = start(folder / "root", out, *words, ranks=ranks, mode=mode)
        assert ended.codes == [0] * ranks, ended.outputs
    return out


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[[str, int], Path]:
    """The folder of an uninterrupted run."""

    def run(mode: str, ranks: int) -> Path:
        out = folder / mode
        return out if out.exists() else trained(folder, out, mode, ranks)

    return run


def begun(whole: Path, out: Path, step: int = 2) -> Path:
    """A copy of a run whose newest checkpoint is that of a step."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return out


@cache
def state(out: Path, folder: Path, step: int) -> dict[str, Tensor]:
    """Weights and optimizer after a step; after step 0 the initial weights alone."""
    if step:
        return tensors(out / "checkpoints" / f"step-{step:08}")
    weights = sa1b.load_model(folder / "initial.safetensors").state_dict()
    return {f"model.{name}": value for name, value in weights.items()}


def check_step(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    step: int,
    rules: Rules,
    norm: float,
    parameters: set[str],
) -> None:
    """AdamW's step number `step`, from 1, of all parameters that are not frozen; `norm` as in metrics.jsonl."""
    moved = {name for name in parameters if f"optimizer.{name}.exp_avg" in after}
    assert moved == {name for name in parameters if not name.startswith(tuple(f"{part}." for part in FROZEN))}
    rate, squares = rules.rate(step), 0.0
    for name in sorted(parameters):
        weight, result = before[f"model.{name}"].double(), after[f"model.{name}"].double()
        if name not in moved:
            assert torch.equal(weight, result), name
            assert not [key for key in after if key.startswith(f"optimizer.{name}.")], name
            continue
        own = f"optimizer.{name}."
        mean, square = (after[f"{own}{key}"].double() for key in ("exp_avg", "exp_avg_sq"))
        mean0, square0 = (
            before.get(f"{own}{key}", torch.zeros(())).double() for key in ("exp_avg", "exp_avg_sq")
        )
        assert float(after[f"{own}step"]) == step
        gradient = (mean - rules.beta1 * mean0) / (1 - rules.beta1)
        squares += float((gradient**2).sum())
        expected = rules.beta2 * square0 + (1 - rules.beta2) * gradient**2
        torch.testing.assert_close(
            square, expected, rtol=1e-3, atol=1e-6 * float(square.max()) + 1e-30, msg=name
        )
        lr = rate * rules.scale(name)
        moment = mean / (1 - rules.beta1**step)
        root = (square / (1 - rules.beta2**step)).sqrt() + rules.epsilon
        wanted = weight * (1 - lr * rules.decay(name, weight)) - lr * moment / root
        torch.testing.assert_close(
            result, wanted, rtol=2e-7, atol=1e-5 * lr, msg=lambda text, name=name: f"{name}: {text}"
        )
        mean_of_weights, last = after.get(f"{own}ema"), before.get(f"{own}ema")
        assert (mean_of_weights is None) == (rules.ema == 0), name
        if mean_of_weights is not None:
            decay = min(rules.ema, step / (9 + step))
            wanted = result if last is None else decay * last.double() + (1 - decay) * result
            torch.testing.assert_close(mean_of_weights.double(), wanted, rtol=1e-6, atol=1e-7, msg=name)
    assert math.sqrt(squares) == pytest.approx(min(norm, rules.grad_clip), rel=1e-3)


def check(out: Path, folder: Path, steps: range, rules: Rules) -> None:
    parameters = {name for name, _ in sa1b.load_model(folder / "initial.safetensors").named_parameters()}
    of_step = {line["step"]: line for line in lines(out) if "loss" in line}
    for step in steps:
        line = of_step[step]
        assert line["lr"] == pytest.approx(rules.rate(step), rel=1e-12)
        check_step(
            state(out, folder, step - 1), state(out, folder, step), step, rules, line["grad_norm"], parameters
        )


@pytest.mark.parametrize(("mode", "ranks"), MODES)
def test_each_parameter_has_the_rate_and_the_decay_of_its_layer_and_kind(
    mode: str, ranks: int, folder: Path, whole: Callable[[str, int], Path]
) -> None:
    out = whole(mode, ranks)
    check(out, folder, range(1, STEPS + 1), RULES)
    norms = [line["grad_norm"] for line in lines(out) if "loss" in line]
    assert max(norms) > RULES.grad_clip  # it is clipped


@pytest.mark.parametrize(("mode", "ranks"), MODES)
def test_a_run_that_resumes_ends_with_the_bits_of_one_that_did_not(
    mode: str, ranks: int, folder: Path, whole: Callable[[str, int], Path], tmp_path: Path
) -> None:
    out = trained(folder, begun(whole(mode, ranks), tmp_path / "run"), mode, ranks)
    for step in (3, 4):
        one, other = (state(run, folder, step) for run in (whole(mode, ranks), out))
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("mode", "ranks"), MODES[1:])
def test_the_groups_are_the_same_where_a_run_goes_on_in_another_mode(
    mode: str, ranks: int, folder: Path, whole: Callable[[str, int], Path], tmp_path: Path
) -> None:
    out = trained(folder, begun(whole("none", 1), tmp_path / "run"), mode, ranks)
    check(out, folder, range(3, STEPS + 1), RULES)


def test_settings_that_change_on_resume_hold_from_the_next_step_on(
    folder: Path, whole: Callable[[str, int], Path], tmp_path: Path
) -> None:
    rules = replace(
        RULES, layer_decay=0.9, weight_decay=0.1, beta1=0.5, beta2=0.7, lr=0.02, ema=0.12, grad_clip=9
    )
    out = trained(folder, begun(whole("none", 1), tmp_path / "run"), "none", 1, *rules.flags())
    check(out, folder, range(3, STEPS + 1), rules)


def test_a_mean_that_starts_on_resume_is_that_of_the_weights_from_then_on(
    folder: Path, tmp_path: Path
) -> None:
    without, out = replace(RULES, ema=0.0), tmp_path / "run"
    trained(folder, out, "none", 1, *without.flags())
    check(out, folder, range(1, 3), without)
    for path in sorted((out / "checkpoints").iterdir())[2:]:
        shutil.rmtree(path)
    trained(folder, out, "none", 1)
    check(out, folder, range(3, STEPS + 1), RULES)


COSINE = "--optim.schedule", "cosine", "--optim.min-lr-ratio", "0.25", "--optim.warmup", "2"
RSQRT = "--optim.schedule", "rsqrt", "--optim.timescale", "3", "--optim.warmup", "1", "--optim.cooldown", "2"


@pytest.mark.parametrize(
    ("flags", "scaling", "factors"),
    [
        (
            ("--optim.schedule", "step", "--optim.milestones", "3", "5", "--optim.warmup", "2"),
            "linear",
            [0.5, 1, 1, 0.1, 0.1, 0.01, 0.01],
        ),
        (COSINE, "sqrt", [0.5, 1, *(0.25 + 0.75 * (1 + math.cos(math.pi * k / 5)) / 2 for k in range(5))]),
        (
            RSQRT,  # the rate of each step is that after the steps before it, and it is 0 after the last one
            "none",
            [1, *(min((7 - k) / 2, 1) / math.sqrt(1 + (k - 1) / 3) for k in range(1, 7))],
        ),
        (("--optim.schedule", "step", "--optim.warmup", "0", "--optim.milestones", "90"), "linear", [1] * 7),
    ],
    ids=["step", "cosine", "rsqrt", "constant"],
)
def test_the_rate_of_each_step_follows_the_schedule_and_the_batch(
    flags: tuple[str, ...], scaling: str, factors: list[float], folder: Path, tmp_path: Path
) -> None:
    small = (
        "--data.masks",
        1,
        "--recipe.clicks",
        0,
        "--optim.freeze",
        "image_encoder",
        "--optim.steps",
        7,
        "--optim.min-lr-ratio",
        0,
    )
    rate = ("--optim.lr", 1e-3, "--optim.reference-batch", 8, "--optim.batch-scaling", scaling)
    out = tmp_path / "run"
    train(*SAM, "--data.root", folder / "root", "--out", out, *small, *rate, "--checkpoint.every", 9, *flags)
    peak = 1e-3 * {"linear": 2 / 8, "sqrt": math.sqrt(2 / 8), "none": 1}[scaling]
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in found if "loss" in line]
    assert rates == pytest.approx([peak * factor for factor in factors], rel=1e-9)
