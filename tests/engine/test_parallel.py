"""One process, DDP and FSDP train the same model; differing ranks and invalid settings are refused."""

import re
import socket
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sa1b.engine.model import unwrap
from sa1b.engine.ranks import process_group
from sa1b.engine.ranks.parallel import shared_statistics, wrap
from sa1b.engine.ranks.process_group import replicas_on, start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.errors import UsageError
from tests.engine import checks
from tests.engine.launch import group, launch
from tests.engine.training import OPTIM, begin, build

NONE = ParallelConfig()
DDP = ParallelConfig(mode="ddp")
FSDP = ParallelConfig(mode="fsdp")
HYBRID = ParallelConfig(mode="fsdp", replicas=2)
STATIC = ParallelConfig(mode="ddp", static_graph=True)

# Configuration and micro-batches per step, by number of ranks. Two or three ranks have unequal parts of five
# images; of three micro-batches some are empty.
Cases = dict[str, tuple[ParallelConfig, int]]
CASES: dict[int, Cases] = {
    2: {
        "ddp": (DDP, 1),
        "ddp, static graph, 3 micro-batches": (STATIC, 3),
        "fsdp, 3 micro-batches": (FSDP, 3),
        "fsdp, gradients and optimizer only": (ParallelConfig(mode="fsdp", shard="grad_op"), 1),
        "fsdp, offload": (ParallelConfig(mode="fsdp", offload="cpu"), 1),
    },
    4: {"hybrid, 3 micro-batches": (HYBRID, 3)},
}
SLOW: dict[int, Cases] = {
    2: {
        "fsdp, groups of a size": (ParallelConfig(mode="fsdp", wrap="size:5K"), 3),
        "fsdp, one group": (ParallelConfig(mode="fsdp", wrap="none"), 1),
    },
    3: {
        "fsdp": (FSDP, 1),
        "ddp, 3 micro-batches": (DDP, 3),
        "fsdp, gradients and optimizer only, 3 micro-batches": (
            ParallelConfig(mode="fsdp", shard="grad_op"),
            3,
        ),
    },
    4: {"hybrid": (HYBRID, 1)},
}
Work = tuple[int, bool]  # number of ranks, and whether its tests are slow
NAMES = [
    *(pytest.param((size, False), name) for size, cases in CASES.items() for name in cases),
    *(
        pytest.param((size, True), name, marks=pytest.mark.slow)
        for size, cases in SLOW.items()
        for name in cases
    ),
]


def two_ranks() -> dict[str, Any]:
    return {
        "traces": checks.traces(CASES[2]),
        "resumed": checks.straight_and_resumed(DDP),
        "resumed, fsdp": checks.straight_and_resumed(FSDP),
        "seed, ddp": checks.disagreement(DDP, "seed"),
        "seed, fsdp": checks.disagreement(FSDP, "seed"),
        "shape": checks.disagreement(DDP, "shape"),
        "weight": checks.disagreement(DDP, "model.mask_decoder.iou_token.weight"),
        "buffer": checks.disagreement(
            FSDP, "model.prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"
        ),
        "errors": checks.errors_of_a_wait_for_silent_ranks(DDP, 1.0),
        "evaluated, ddp": checks.evaluated_with_means(DDP),
        "evaluated, fsdp": checks.evaluated_with_means(FSDP),
    }


def two_ranks_slow() -> dict[str, Any]:
    config = ParallelConfig(mode="fsdp", shard="grad_op")
    return {
        "traces": checks.traces(SLOW[2]),
        "evaluated, fsdp, gradients and optimizer only": checks.evaluated_with_means(config),
    }


def three_ranks_slow() -> dict[str, Any]:
    return {
        "traces": checks.traces(SLOW[3]),
        "resumed": checks.straight_and_resumed(DDP),
        "resumed, fsdp": checks.straight_and_resumed(FSDP),
        "resumed, static graph": checks.straight_and_resumed(STATIC),
        "weight": checks.disagreement(DDP, "model.mask_decoder.iou_token.weight"),
    }


def four_ranks() -> dict[str, Any]:
    return {
        "traces": checks.traces(CASES[4]),
        "replica": checks.disagreement(HYBRID, "model.image_encoder.blocks.0.attn.qkv.weight"),
        "errors": checks.errors_of_a_wait_for_silent_ranks(HYBRID, 1.0),
    }


def four_ranks_slow() -> dict[str, Any]:
    return {"traces": checks.traces(SLOW[4]), "resumed": checks.straight_and_resumed(DDP)}


WORKS: dict[Work, Callable[[], dict[str, Any]]] = {
    (2, False): two_ranks,
    (2, True): two_ranks_slow,
    (3, True): three_ranks_slow,
    (4, False): four_ranks,
    (4, True): four_ranks_slow,
}
Ranks = Callable[[Work], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """The results of a function on each rank; each function runs once."""
    return cache(lambda work: launch(WORKS[work], work[0]))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same steps in one process, with one micro-batch per step."""
    torch.set_num_threads(1)
    return checks.trace(NONE, 1)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("work", "name"), NAMES)
def test_every_mode_takes_the_steps_of_one_process_with_an_evaluation_between_them(
    ranks: Ranks, alone: dict[str, Any], work: Work, name: str
) -> None:
    traces = [rank["traces"][name] for rank in ranks(work)]
    assert torch.tensor([trace["losses"] for trace in traces]).sum(dim=0).tolist() == pytest.approx(
        alone["losses"], rel=1e-5
    )
    for trace in traces:
        assert trace["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert_close(trace["gradients"], alone["gradients"], 1e-5)
        assert_close(trace["weights"], alone["weights"], 1e-5)


def test_the_steps_move_the_weights_and_the_norm_is_clipped(alone: dict[str, Any]) -> None:
    before = dict(build().named_parameters())
    moved = {name for name, tensor in alone["weights"].items() if not torch.equal(tensor, before[name])}
    ends = ("encoder.pos_embed", "blocks.1.mlp.lin2.weight", "not_a_point_embed.weight", "mask_tokens.weight")
    assert all(any(name.endswith(end) for name in moved) for end in ends)
    assert alone["gradients"].keys() == before.keys()
    assert min(alone["norms"]) > OPTIM.grad_clip
    squares = [float(gradient.square().sum()) for gradient in alone["gradients"].values()]
    assert sum(squares) ** 0.5 == pytest.approx(OPTIM.grad_clip, rel=1e-4)


@pytest.mark.parametrize("accumulation", [3, 5])
def test_micro_batches_of_one_process_add_up_to_one_large_batch(
    alone: dict[str, Any], accumulation: int
) -> None:
    trace = checks.trace(NONE, accumulation)
    assert trace["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert_close(trace["weights"], alone["weights"], 1e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp, 3 micro-batches"])
def test_ranks_hold_the_same_weights_bit_for_bit(ranks: Ranks, name: str) -> None:
    one, other = (rank["traces"][name] for rank in ranks((2, False)))
    assert all(torch.equal(tensor, other["weights"][key]) for key, tensor in one["weights"].items())
    assert one["norms"] == other["norms"]


@pytest.mark.parametrize(
    ("work", "name"),
    [
        ((2, False), "resumed"),
        ((2, False), "resumed, fsdp"),
        *(
            pytest.param((3, True), name, marks=pytest.mark.slow)
            for name in ("resumed", "resumed, fsdp", "resumed, static graph")
        ),
        pytest.param((4, True), "resumed", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one_bit_for_bit(
    ranks: Ranks, work: Work, name: str
) -> None:
    for rank in ranks(work):
        straight, resumed = rank[name]
        assert [key for key, tensor in straight.items() if not torch.equal(tensor, resumed[key])] == []


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_models_from_different_seeds_are_refused(ranks: Ranks, mode: str) -> None:
    for rank in ranks((2, False)):
        assert re.search(
            r"^\S+ is '\(.*, crc32 0x\w+' on rank 1 and '.*, crc32 0x\w+' on rank 0; build the model from the same seed",
            rank[f"seed, {mode}"],
        )


def test_models_of_different_shapes_are_refused(ranks: Ranks) -> None:
    for rank in ranks((2, False)):
        assert re.search(
            r"iou_token.weight is '\(2, 32\) .* on rank 1 and '\(1, 32\) .* on rank 0", rank["shape"]
        )


@pytest.mark.parametrize(
    ("work", "others"), [((2, False), [0]), pytest.param((3, True), [0, 1], marks=pytest.mark.slow)]
)
def test_a_weight_that_changed_on_one_rank_is_named(ranks: Ranks, work: Work, others: list[int]) -> None:
    for rank in ranks(work):
        assert rank["weight"].startswith("model.mask_decoder.iou_token.weight is ")
        assert f" on rank {work[0] - 1} and " in rank["weight"]
        assert f" on rank {others[0]}; build the model" in rank["weight"]


def test_a_buffer_that_changed_on_one_rank_is_named_under_fsdp(ranks: Ranks) -> None:
    for rank in ranks((2, False)):
        assert "positional_encoding_gaussian_matrix is " in rank["buffer"]


def test_a_shard_that_differs_from_its_replica_is_named(ranks: Ranks) -> None:
    for rank in ranks((4, False)):
        assert rank["replica"].startswith("model.image_encoder.blocks.0.attn.qkv.weight is ")
        assert " on rank 3 and " in rank["replica"]
        assert " on rank 1; build the model" in rank["replica"]


@pytest.mark.parametrize(("world_size", "groups"), [(2, 1), (4, 3)])
def test_a_silent_rank_is_noticed_after_the_short_timeout(ranks: Ranks, world_size: int, groups: int) -> None:
    errors = ranks((world_size, False))[0]["errors"]
    assert len(errors) == groups
    assert all("imed out waiting 1000ms" in error for error in errors)


@pytest.mark.parametrize("config", [DDP, FSDP])
def test_a_single_process_without_torchrun_is_a_group_of_one(
    config: ParallelConfig, alone: dict[str, Any]
) -> None:
    rank_info = start(config)
    try:
        assert (rank_info.rank, rank_info.world_size, rank_info.device) == (0, 1, torch.device("cpu"))
        run = begin(rank_info, config)
        run.step(0)
        assert_close(run.gradients, alone["gradients"], 1e-5)
    finally:
        stop()


@pytest.fixture(scope="module")
def evaluated_alone() -> dict[str, Any]:
    return checks.evaluated_with_means(NONE)


@pytest.mark.parametrize(
    ("work", "mode"),
    [
        ((2, False), "ddp"),
        ((2, False), "fsdp"),
        pytest.param((2, True), "fsdp, gradients and optimizer only", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_with_the_running_mean_of_weights_is_that_of_one_process(
    ranks: Ranks, evaluated_alone: dict[str, Any], work: Work, mode: str
) -> None:
    single = evaluated_alone
    assert float((single["found"] - single["own"]).abs().max()) > 1e-3
    for rank in (one[f"evaluated, {mode}"] for one in ranks(work)):
        for name in ("own", "found"):
            torch.testing.assert_close(rank[name], single[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(rank["again"], rank["own"])
        assert_close(rank["means"], single["means"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DDP, FSDP])
def test_runs_end_when_their_last_collective_has_just_ended(config: ParallelConfig) -> None:
    assert launch(checks.many_short_runs, 2, config) == [40, 40]


@pytest.mark.parametrize(
    ("demanded", "on"),
    [
        (1, {1: 1, 2: 1, 7: 1}),
        (2, {1: 1, 2: 1, 3: 1, 4: 2, 5: 1, 6: 2}),
        (4, {2: 1, 4: 2, 6: 3, 7: 1, 8: 4, 10: 2, 12: 4, 14: 2, 16: 4}),
        (8, {8: 4, 12: 6, 14: 7, 15: 5, 16: 8}),
    ],
)
def test_copies_of_the_model_fit_any_number_of_ranks_and_take_no_more_memory(
    demanded: int, on: dict[int, int]
) -> None:
    assert {world_size: replicas_on(world_size, demanded) for world_size in on} == on
    for world_size in range(1, 65):
        replicas = replicas_on(world_size, demanded)
        assert world_size % replicas == 0
        assert replicas <= demanded  # so a rank has at most demanded / world_size of the model
        assert replicas < world_size or world_size == 1


def copies(demanded: int) -> tuple[tuple[int, ...], int]:
    with group(ParallelConfig(mode="fsdp", replicas=demanded, device="cpu")) as rank_info:
        assert rank_info.mesh is not None
        return tuple(rank_info.mesh.mesh.shape), rank_info.mesh["shard"].size()


def test_replicas_that_do_not_fit_are_reduced_with_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    config = ParallelConfig(mode="fsdp", replicas=3, device="cpu")
    with group(config) as rank_info:
        assert rank_info.mesh is not None
        assert rank_info.mesh["shard"].size() == 1
    assert capfd.readouterr().err == (
        "--parallel.replicas 3: does not fit 1 rank, so it is 1, with 1 rank for each copy of the model\n"
    )
    assert launch(copies, 2, 2) == [((2,), 2)] * 2


def test_unwrap_gives_back_what_was_wrapped() -> None:
    interactive = build()
    rank_info = start(DDP)
    try:
        assert unwrap(wrap(interactive, DDP, rank_info)) is interactive
    finally:
        stop()


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (ParallelConfig(), 2, "--parallel.mode none: is for one process, this run has 2; pass ddp or fsdp"),
        (ParallelConfig(mode="ddp", shard="grad_op"), 2, "--parallel.shard: is for --parallel.mode fsdp"),
        (ParallelConfig(mode="ddp", replicas=2), 2, "--parallel.replicas: is for --parallel.mode fsdp"),
        (ParallelConfig(mode="ddp", offload="cpu"), 2, "--parallel.offload: is for --parallel.mode fsdp"),
        (
            ParallelConfig(mode="fsdp", static_graph=True),
            2,
            "--parallel.static-graph: is for --parallel.mode ddp",
        ),
        (ParallelConfig(mode="fsdp", replicas=0), 2, "--parallel.replicas 0: must be at least 1"),
        (ParallelConfig(mode="ddp", bucket=0), 2, "--parallel.bucket"),
        (ParallelConfig(mode="ddp", wrap="none"), 2, "--parallel.wrap: is for --parallel.mode fsdp, not ddp"),
        (
            ParallelConfig(mode="ddp", reduce="bf16"),
            2,
            "--parallel.reduce: is for --parallel.mode fsdp, not ddp",
        ),
        (ParallelConfig(mode="fsdp", wrap="blocks"), 2, "--parallel.wrap blocks: not a kind of group"),
        (
            ParallelConfig(mode="fsdp", compress="bf16"),
            2,
            "--parallel.compress: is for --parallel.mode ddp, not fsdp",
        ),
        (ParallelConfig(mode="fsdp", bucket=50), 2, "--parallel.bucket: is for --parallel.mode ddp"),
        (ParallelConfig(mode="ddp", timeout_first=0), 2, "--parallel.timeout-first"),
        (
            ParallelConfig(precision="tf32", device="cpu"),
            1,
            "--parallel.precision tf32: needs a GPU; pass fp32 or bf16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_flag_named(
    monkeypatch: pytest.MonkeyPatch, config: ParallelConfig, world_size: int, message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))

    def begin() -> None:
        config.check(world_size)
        start(config)

    with pytest.raises(UsageError, match=message):
        begin()


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)


def statistics(config: ParallelConfig, rank_info: RankInfo) -> torch.nn.Module:
    return shared_statistics(Normed(), config, rank_info)


SYNCHRONISED = ParallelConfig(mode="ddp", sync_batchnorm=True)


@pytest.mark.parametrize(
    ("config", "device", "message"),
    [
        (DDP, "cuda", "first: .*--parallel.sync-batchnorm on"),
        (FSDP, "cpu", "first: .*--parallel.sync-batchnorm on"),
    ],
)
def test_batch_norms_of_several_ranks_are_refused(config: ParallelConfig, device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        statistics(config, RankInfo(0, 2, 0, torch.device(device)))


def test_batch_norms_are_converted_on_gpus_and_left_alone_in_one_process() -> None:
    converted = statistics(SYNCHRONISED, RankInfo(0, 2, 0, torch.device("cuda")))
    assert {type(norm) for norm in converted.children()} == {torch.nn.SyncBatchNorm}
    assert converted.state_dict().keys() == Normed().state_dict().keys()
    alone = statistics(DDP, RankInfo(0, 1, 0, torch.device("cpu")))
    assert {type(norm) for norm in alone.children()} == {torch.nn.BatchNorm2d}


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 0, 0), (1, 5, 0), (8, 5, 5), (2, 1, 1)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert process_group._device(DDP, local_rank) == torch.device("cuda", index)
    assert taken == [index]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="local rank 2: no GPU is left for it, this process sees 2"):
        process_group._device(DDP, 2)


def test_ranks_that_see_the_same_gpu_as_their_only_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    store = torch.distributed.HashStore()
    store.set("gpu/0", "another host GPU-1")
    store.set("gpu/2", f"{socket.gethostname()} GPU-1")
    with pytest.raises(UsageError, match=r"ranks 1 and 2: have the same GPU \(\S+ GPU-1\)"):
        process_group._refuse_shared_gpus(store, 1, 3, torch.device("cuda", 0))
    store.set("gpu/2", f"{socket.gethostname()} GPU-2")
    process_group._refuse_shared_gpus(store, 1, 3, torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--parallel.device cpu"):
        start(ParallelConfig(device="cuda"))
