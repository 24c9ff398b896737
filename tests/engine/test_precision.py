"""Number formats of all operations, and overflows of fp16, which all ranks skip together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sa1b.engine.precision import autocast, grad_scaler
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import finish, loss_divisor, seed_generators, warm_up
from tests.engine import checks
from tests.engine.launch import launch
from tests.engine.stream_root import place_of

MODES = ["ddp", "fsdp"]


def configured(mode: Any, precision: Any, **options: Any) -> ParallelConfig:
    return ParallelConfig(mode=mode, precision=precision, **options)


def two_ranks() -> dict[str, Any]:
    bf16 = {mode: configured(mode, "bf16") for mode in MODES}
    fp16 = {mode: configured(mode, "fp16") for mode in MODES}
    return {
        "gradient": {mode: checks.encoder_gradient(config) for mode, config in bf16.items()},
        "float32": checks.encoder_gradient(configured("ddp", "fp32")),
        "reduced": checks.encoder_gradient(configured("fsdp", "fp32", reduce="bf16")),
        "seen": {mode: checks.seen_in_forward(config) for mode, config in bf16.items()},
        "overflow": {mode: checks.overflow(config) for mode, config in fp16.items()},
        "frozen": {mode: checks.frozen(configured(mode, "fp32")) for mode in MODES},
    }


def four_ranks() -> dict[str, Any]:
    hybrid = configured("fsdp", "fp16", replicas=2)
    return {
        "overflow": checks.overflow(hybrid),
        "gradient": checks.encoder_gradient(configured("fsdp", "bf16", replicas=2)),
        "float32": checks.encoder_gradient(configured("ddp", "fp32")),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(two_ranks, 2)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", MODES)
def test_blocks_compute_in_bf16_and_norms_and_prompts_in_float32(
    ranks: list[dict[str, Any]], mode: str
) -> None:
    low = torch.bfloat16 if mode == "fsdp" else torch.float32  # autocast casts tensors that FSDP has not cast
    for rank in ranks:
        seen = rank["seen"][mode]
        assert (seen["attention"], seen["mlp"]) == (low, low)
        assert {seen[name] for name in ("norm", "neck", "decoder")} == {torch.float32}
        assert seen["product"] == torch.bfloat16
        assert seen["gradients"] == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_clicks_are_not_rounded(ranks: list[dict[str, Any]], mode: str) -> None:
    for rank in ranks:
        points, alone = rank["seen"][mode]["points"], rank["seen"][mode]["points alone"]
        assert points.dtype == torch.float32
        assert torch.equal(points, alone)
        assert not torch.equal(points, points.bfloat16().float())


def test_bf16_gradients_are_those_of_float32_within_its_precision_and_alike_in_both_modes(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        ddp, fsdp = (rank["gradient"][mode] for mode in MODES)
        assert 1e-4 < distance(ddp, rank["float32"]) < 0.02
        assert 1e-4 < distance(fsdp, rank["float32"]) < 0.02
        assert distance(fsdp, ddp) < 1e-4


def test_gradients_that_are_summed_in_bf16_are_rounded_to_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert 1e-4 < distance(rank["reduced"], rank["float32"]) < 0.01


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: list[dict[str, Any]], mode: str) -> None:
    for rank in ranks:
        found = rank["overflow"][mode]
        assert all(torch.equal(tensor, found["after"][key]) for key, tensor in found["before"].items())
        assert found["scales"] == [128.0, 64.0, 64.0]
        assert not all(torch.equal(tensor, found["end"][key]) for key, tensor in found["after"].items())
        assert torch.tensor(found["norms"]).isfinite().tolist() == [True, False, True]
    one, other = (rank["overflow"][mode] for rank in ranks)
    assert all(torch.equal(tensor, other["end"][key]) for key, tensor in one["end"].items())


def test_the_state_of_the_scaler_is_numbers_and_goes_on_in_another_one() -> None:
    cpu = torch.device("cpu")
    scaler = grad_scaler("fp16", cpu)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0})
    assert {type(value) for value in scaler.state_dict().values()} == {float, int}
    assert float(scaler.scale(torch.ones(()))) == 32.0
    assert grad_scaler("bf16", cpu).state_dict() == {}
    assert float(grad_scaler("bf16", cpu).scale(torch.ones(()))) == 1.0


def test_sums_over_thousands_of_masks_do_not_overflow_float16_at_the_first_scale() -> None:
    cpu, masks = torch.device("cpu"), 4096
    norms = {}
    for divisor in (1.0, loss_divisor(masks)):
        layer = torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.ones_(layer.weight)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), grad_scaler("fp16", cpu)
        with autocast("fp16", cpu):
            loss = layer(torch.full((masks, 8), 0.5)).float().sum()
        scaler.scale(loss / divisor).backward()
        count = torch.tensor(masks / divisor)
        norms[divisor] = float(finish(layer, optimizer, scaler, count, place_of(), grad_clip=0))
    assert norms[1.0] == torch.inf
    assert norms[4096.0] == pytest.approx(2**0.5, rel=1e-3)


@pytest.mark.parametrize(("expected", "divisor"), [(1, 1), (20, 16), (25, 32), (8192, 8192), (16384, 16384)])
def test_losses_are_divided_by_a_power_of_two_near_the_expected_count(expected: int, divisor: int) -> None:
    assert loss_divisor(expected) == divisor


def test_the_warm_up_leaves_gradients_and_running_statistics_as_they_were() -> None:
    norm = torch.nn.BatchNorm1d(3)
    warm_up(norm, lambda: norm(torch.arange(6.0).view(2, 3)).sum().backward())
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.num_batches_tracked == 0
    assert norm.weight.grad is None


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_have_the_format_that_was_asked_for(precision: Any, dtype: torch.dtype) -> None:
    ones = torch.ones(2, 2)
    with autocast(precision, torch.device("cpu")):
        assert (ones @ ones).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_encoder_stays_and_the_rest_learns(ranks: list[dict[str, Any]], mode: str) -> None:
    for rank in ranks:
        found = rank["frozen"][mode]
        moved = {
            key for key, tensor in found["before"].items() if not torch.equal(tensor, found["after"][key])
        }
        assert "model.mask_decoder.mask_tokens.weight" in moved
        assert not any("image_encoder" in key for key in moved)
        assert found["norms"] == pytest.approx(ranks[0]["frozen"]["ddp"]["norms"], rel=1e-4)


@pytest.mark.slow
def test_hybrid_shards_in_half_precision_agree_on_overflows_and_gradients() -> None:
    for rank in launch(four_ranks, 4):
        found = rank["overflow"]
        assert all(torch.equal(tensor, found["after"][key]) for key, tensor in found["before"].items())
        assert found["scales"] == [128.0, 64.0, 64.0]
        assert distance(rank["gradient"], rank["float32"]) < 0.02


def test_random_numbers_depend_on_seed_step_rank_and_micro_batch() -> None:
    keys = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 2)]
    found = []
    for key in keys * 2:
        seed_generators(*key)
        found.append(tuple(torch.rand(3).tolist()))
    assert found[: len(keys)] == found[len(keys) :]
    assert len(set(found)) == len(keys)
