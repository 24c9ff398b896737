"""Parameter groups, learning rates and schedules."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sa1b.engine.settings import OptimConfig
from sa1b.engine.step.optim import (
    averaged,
    freeze,
    lr_at,
    lr_line,
    make_optimizer,
    peak_lr,
    set_lr,
    update_ema,
)
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from tests.engine.training import MODEL, build

PUBLISHED = OptimConfig()
COSINE = OptimConfig(schedule="cosine", lr=1e-3, warmup=10, steps=110, min_lr_ratio=0.1)
ENCODER = "image_encoder"


def test_the_groups_of_two_builds_are_the_same_and_in_the_order_of_layers() -> None:
    groups = [make_optimizer(build(seed), PUBLISHED, 256).param_groups for seed in (0, 1)]
    shapes = [[[tuple(tensor.shape) for tensor in group["params"]] for group in one] for one in groups]
    assert shapes[0] == shapes[1]
    scales = [group["lr_scale"] for group in groups[0]]
    assert scales == sorted(scales)


def test_a_frozen_encoder_is_in_no_group_and_its_forward_leaves_no_gradient() -> None:
    interactive = build()
    config = OptimConfig(freeze=("image_encoder",))
    freeze(interactive, config)
    trained = {id(parameter) for parameter in interactive.parameters() if parameter.requires_grad}
    groups = make_optimizer(interactive, config, 256).param_groups
    assert {id(parameter) for group in groups for parameter in group["params"]} == trained
    assert not any(parameter.requires_grad for parameter in interactive.model.image_encoder.parameters())
    images = torch.zeros(1, 3, MODEL.image_size, MODEL.image_size, dtype=torch.uint8)
    assert not interactive.model.embed(images).requires_grad


@pytest.mark.parametrize("part", ["image_encoder", "image_encoder.blocks.1"])
def test_a_frozen_part_has_no_drop_path(part: str) -> None:
    interactive = Interactive(Sam(replace(MODEL, drop_path=0.9)), Recipe())
    freeze(interactive, OptimConfig(freeze=(part,)))
    encoder = interactive.model.image_encoder
    images = torch.randint(0, 256, (4, 3, MODEL.image_size, MODEL.image_size), dtype=torch.uint8)
    pixels, kept = images.float() / 255, torch.ones(4, MODEL.depth, 2, dtype=torch.bool)
    frozen = range(MODEL.depth) if part == "image_encoder" else range(1, 2)
    dropped = kept.index_fill(1, torch.tensor(frozen), False)
    assert torch.equal(encoder(pixels, dropped), encoder(pixels, kept))
    if len(frozen) < MODEL.depth:
        assert not torch.equal(encoder(pixels, ~kept), encoder(pixels, kept))
    assert interactive.training
    assert not encoder.blocks[1].training


def test_a_part_that_the_model_does_not_have_cannot_be_frozen() -> None:
    with pytest.raises(UsageError, match=r"--optim.freeze encoder: .* image_encoder, prompt_encoder, mask_d"):
        freeze(build(), OptimConfig(freeze=("encoder",)))


def test_the_running_mean_of_weights_is_that_of_the_formula_and_starts_fast() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    config, expected = OptimConfig(ema=0.3), None
    for step in range(8):
        weight.grad = torch.ones(1)
        optimizer.step()
        update_ema(optimizer, config, step)
        decay = min(0.3, (1 + step) / (10 + step))
        now = float(weight.detach())
        expected = now if expected is None else decay * expected + (1 - decay) * now
        assert float(optimizer.state[weight]["ema"]) == pytest.approx(expected, rel=1e-6)
    assert abs(expected - now) > 0.01
    module = torch.nn.ParameterList([weight])
    before = weight.detach().clone()
    with averaged(module, optimizer):
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(weight.detach(), before)
    assert float(optimizer.state[weight]["ema"]) == pytest.approx(expected, rel=1e-6)


def test_without_freezing_every_parameter_is_trained() -> None:
    interactive = build()
    freeze(interactive, PUBLISHED)
    assert all(parameter.requires_grad for parameter in interactive.parameters())


def test_the_rates_of_the_groups_follow_the_step() -> None:
    optimizer = make_optimizer(build(), PUBLISHED, 256)
    assert optimizer.param_groups[-1]["lr"] == 8e-4
    set_lr(optimizer, 1e-5)
    assert [group["lr"] for group in optimizer.param_groups] == [
        1e-5 * group["lr_scale"] for group in optimizer.param_groups
    ]


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 8e-4 / 250),
        (124, 4e-4),
        (249, 8e-4),
        (59_999, 8e-4),
        (60_000, 8e-5),
        (86_665, 8e-5),
        (86_666, 8e-6),
        (89_999, 8e-6),
        (200_000, 8e-6),
    ],
)
def test_the_default_is_the_published_schedule(step: int, rate: float) -> None:
    assert lr_at(PUBLISHED, 256, step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1e-4), (9, 1e-3), (10, 1e-3), (60, 5.5e-4), (110, 1e-4), (9999, 1e-4)]
)
def test_the_cosine_falls_from_the_peak_to_its_floor(step: int, rate: float) -> None:
    assert lr_at(COSINE, 256, step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 4e-7),
        (999, 4e-4),
        (1000, 4e-4),
        (4000, 2e-4),
        (64_000, 5e-5),
        (85_000, 4e-4 / 85**0.5),
        (87_500, 4e-4 / 87.5**0.5 / 2),
        (90_000, 0),
        (99_999, 0),
    ],
)
def test_the_reciprocal_square_root_falls_by_its_timescale_and_cools_down(step: int, rate: float) -> None:
    assert lr_at(PRESETS["sam2"].optim, 256, step) == pytest.approx(rate)


def test_the_warm_up_ends_at_the_peak_exactly() -> None:
    assert all(
        lr_at(PUBLISHED, batch, PUBLISHED.warmup - 1) == peak_lr(PUBLISHED, batch) for batch in range(1, 99)
    )


@given(
    st.sampled_from([PUBLISHED, COSINE, OptimConfig(warmup=0), OptimConfig(schedule="rsqrt")]),
    st.integers(1, 10_000),
    st.lists(st.integers(0, 100_000), min_size=2, max_size=5),
)
def test_the_rate_is_positive_never_above_the_peak_and_falls_after_warm_up(
    config: OptimConfig, batch: int, steps: list[int]
) -> None:
    rates = [(step, lr_at(config, batch, step)) for step in sorted(steps)]
    assert all(0 < rate <= peak_lr(config, batch) for _, rate in rates)
    for (one, higher), (_, lower) in pairwise(rates):
        if one >= config.warmup:
            assert lower <= higher


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_the_rate_follows_the_batch(scaling: str, factor: float) -> None:
    config = OptimConfig(batch_scaling=scaling)
    assert peak_lr(config, 64) == pytest.approx(8e-4 * factor)
    assert lr_at(config, 64, 1000) == pytest.approx(8e-4 * factor)


def test_one_line_says_where_the_rate_comes_from() -> None:
    line = lr_line(OptimConfig(batch_scaling="sqrt"), 64)
    assert "\n" not in line
    assert all(part in line for part in ("0.0004", "0.0008", "256", "64", "sqrt", "250", "step"))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"lr": 0.0}, "--optim.lr"),
        ({"lr": math.nan}, "--optim.lr"),
        ({"reference_batch": 0}, "--optim.reference-batch"),
        ({"weight_decay": -0.1}, "--optim.weight-decay"),
        ({"grad_clip": -1.0}, "--optim.grad-clip"),
        ({"beta2": 1.0}, "--optim.beta2"),
        ({"layer_decay": 0.0}, "--optim.layer-decay"),
        ({"layer_decay": 1.1}, "--optim.layer-decay"),
        ({"min_lr_ratio": 0.1}, "--optim.schedule cosine"),
        ({"schedule": "cosine", "min_lr_ratio": 2.0}, "--optim.min-lr-ratio"),
        ({"schedule": "rsqrt", "min_lr_ratio": 0.1}, "--optim.schedule cosine"),
        ({"schedule": "rsqrt", "timescale": 0}, "--optim.timescale"),
        ({"schedule": "rsqrt", "cooldown": 89_751}, "--optim.cooldown 89751"),
        ({"cooldown": 10}, "--optim.schedule rsqrt"),
        ({"warmup": 90_000}, "--optim.warmup"),
        ({"milestones": (86_666, 60_000)}, "--optim.milestones"),
        ({"warmup": 70_000}, "--optim.milestones"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_flag_named(options: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        OptimConfig(**options)
