"""Checkpoints of several ranks can be read bit for bit by any number of ranks in any mode."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sa1b.engine.settings import ParallelConfig
from tests.engine import checkpoint_ranks
from tests.engine.checkpoint_ranks import equal
from tests.engine.launch import launch

NONE = ParallelConfig(device="cpu")
DDP = ParallelConfig(mode="ddp", device="cpu")
FSDP = ParallelConfig(mode="fsdp", device="cpu")
WRITERS = {
    1: {"none": NONE},
    2: {"ddp on 2": DDP, "fsdp on 2": FSDP},
    3: {"ddp on 3": DDP, "fsdp on 3": FSDP},
    4: {"hybrid on 4": ParallelConfig(mode="fsdp", replicas=2, device="cpu")},
}
NAMES = [name for configs in WRITERS.values() for name in configs]
READERS = {
    1: {"none": NONE, "fsdp": FSDP},
    2: {"ddp": DDP, "fsdp": FSDP},
    3: {"ddp": DDP, "fsdp": FSDP},
}

Saved = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Saved:
    """Saved values by name of the run, from rank 0; they are equal on every rank."""
    found: Saved = {}
    for world_size, configs in WRITERS.items():
        ranks = launch(checkpoint_ranks.save, world_size, folder, configs)
        for rank in ranks:
            assert all(equal(rank[name], ranks[0][name]) for name in configs)
        found |= ranks[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", READERS)
def test_weights_and_optimizer_come_back_bit_for_bit_in_any_mode_on_any_number_of_ranks(
    world_size: int, folder: Path, saved: Saved
) -> None:
    for rank in launch(checkpoint_ranks.load, world_size, folder, NAMES, READERS[world_size]):
        assert len(rank) == len(NAMES) * len(READERS[world_size])
        for (name, mode), (state, tensors) in rank.items():
            assert state == {"position": 10, "rate": 0.1}
            assert equal(tensors, saved[name]), f"{name} into {mode} on {world_size}"


@pytest.mark.parametrize("config", [DDP, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(
    config: ParallelConfig, tmp_path: Path
) -> None:
    for raised in launch(checkpoint_ranks.fail_on_the_last_rank, 2, tmp_path, config):
        first, second, third, last = raised
        assert (first, second) == (
            "",
            "",
        )  # the failure at step 2 is detected at the save of step 3, and tolerated
        for message in (third, last):
            assert "step-00000003: File too large" in message
            assert "(rank 1)" in message
            assert "2 failed in a row" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.slow
def test_ranks_agree_on_the_older_checkpoint_when_the_newest_is_damaged(tmp_path: Path) -> None:
    older: Any = launch(checkpoint_ranks.save_twice, 2, tmp_path, FSDP)[0][0]
    weights = {name.removeprefix("model.") for name in older if name.startswith("model.")}
    assert "image_encoder.blocks.0.attn.qkv.weight" in weights  # published names
    assert "optimizer.image_encoder.blocks.0.attn.qkv.weight.exp_avg_sq" in older
    path = tmp_path / "checkpoints" / "step-00000002" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for state, tensors in launch(checkpoint_ranks.resume, 2, tmp_path, DDP):
        assert state == {"step": 1}
        assert equal(tensors, older)
