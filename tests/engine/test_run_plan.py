"""What a run takes on a cluster: the arithmetic, with memory that is given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sa1b.engine import planner
from sa1b.engine.planner import ALL_OF_SA1B, NO_ROOT, RunPlan, plan
from sa1b.engine.planner.fake_step import StepMemory
from sa1b.engine.watch.hardware import GPUS, Cluster, gpu_named
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS, SamConfig
from tests.train.command import make_root

H100 = Cluster(
    gpu="H100", nodes=2, gpus=8, flops=1e15, gpu_memory=80e9, link=400e9, network=50e9, mfu=0.5, exposed=0.25,
    cpus=96, decode_rate=100.0, storage=None, reserved=2e9, fragmentation=0.1, price=2.0,
)  # fmt: skip
MEMORY = StepMemory(
    parameters=10**9, gradients=10**9, optimizer=2 * 10**9, batches=10**9, communication=0, activations=10**10
)


def config(**parallel: Any) -> SamConfig:
    vit_b = PRESETS["vit_b"]
    return replace(
        vit_b,
        data=replace(vit_b.data, root=NO_ROOT, global_batch=160, micro_batch=5),
        optim=replace(vit_b.optim, steps=180_000),
        parallel=replace(vit_b.parallel, **{"mode": "ddp", "precision": "bf16", **parallel}),
    )


def planned(
    cluster: Cluster = H100, *, parameters: int = 100_000_000, flops: float = 8e15, **parallel: Any
) -> RunPlan:
    return RunPlan(
        config(**parallel), cluster, ALL_OF_SA1B, parameters, parameters, 12 * parameters, flops, MEMORY
    )


def test_a_step_takes_its_operations_at_a_fraction_of_the_peak() -> None:
    assert planned().compute == pytest.approx(8e15 / (16 * 0.5e15))  # 1 s


def test_gradients_of_ddp_pass_the_network_of_a_node_twice_but_for_a_rank_of_sixteen() -> None:
    assert planned().communication == pytest.approx(2 * 15 / 16 * 400e6 / 50e9)
    one_node = planned(replace(H100, nodes=1))
    assert one_node.communication == pytest.approx(2 * 7 / 8 * 400e6 / 400e9)
    halved = planned(compress="bf16")
    assert halved.communication == pytest.approx(planned().communication / 2)


def test_fsdp_gathers_the_parameters_twice_in_each_micro_batch() -> None:
    part = 15 / 16 / 50e9
    # Two micro-batches; 2 bytes of a gathered parameter, 4 bytes of a gradient.
    assert planned(mode="fsdp").communication == pytest.approx((2 * 2 * 200e6 + 400e6) * part)
    assert planned(mode="fsdp", shard="grad_op").communication == pytest.approx((2 * 200e6 + 400e6) * part)
    assert planned(mode="fsdp", precision="fp32").communication == pytest.approx((4 * 400e6 + 400e6) * part)


def test_replicas_of_one_node_each_gather_by_its_links() -> None:
    gathers = 7 / 8 * (2 * 2 * 200e6 + 400e6) / 400e9
    between = 2 * 1 / 2 * 400e6 / 8 / (50e9 / 8)
    assert planned(mode="fsdp", replicas=2).communication == pytest.approx(gathers + between)


def test_a_single_gpu_does_not_communicate() -> None:
    assert planned(replace(H100, nodes=1, gpus=1)).communication == 0


def test_communication_that_computation_cannot_hide_is_exposed() -> None:
    hidden = planned()
    assert hidden.exposed == pytest.approx(0.25 * hidden.communication)
    slow = planned(replace(H100, network=1e9))  # 0.75 s, and the last backward pass takes a third of a second
    assert slow.exposed == pytest.approx(0.75 - 1 / 3)
    assert slow.seconds == pytest.approx(1 + 0.75 - 1 / 3)
    assert slow.limit == "GPU compute"
    assert planned(replace(H100, network=0.1e9)).limit == "network"


def test_the_slowest_part_limits_a_step() -> None:
    assert planned().limit == "GPU compute"
    decoding = planned(replace(H100, cpus=1, decode_rate=10.0))
    assert (decoding.limit, decoding.seconds) == ("decoding", pytest.approx(160 / 10 / 2))
    reading = planned(replace(H100, storage=10e6))
    assert reading.limit == "storage"
    assert reading.seconds == pytest.approx(160 * 11.3e12 / 11_185_362 / 10e6)


def test_hours_reads_and_dollars_follow_from_the_step() -> None:
    found = planned()
    assert found.seconds == pytest.approx(1 + found.exposed)
    assert found.epochs == pytest.approx(180_000 * 160 / 11_185_362)
    assert found.hours == pytest.approx(180_000 * found.seconds / 3600)
    assert found.read_rate == pytest.approx(160 * 1.0102e6 / found.seconds, rel=1e-3)
    assert found.cores == pytest.approx(160 / found.seconds / 100 / 2)
    document = found.document()
    assert document["dollars"] == pytest.approx(found.hours * 16 * 2)
    assert document["images_per_rank"] == pytest.approx(11_185_362 / 16)
    assert (document["micro_batch"], document["micro_batches"]) == (5, 2)
    assert planned(replace(H100, price=None)).document()["dollars"] is None


def test_checkpoints_that_are_kept_forever_count() -> None:
    found = planned()
    assert found.checkpoints == (180, 2)
    schedule = replace(found.config.checkpoint, keep_every=30_000)
    more = replace(found, config=replace(found.config, checkpoint=schedule))
    assert more.checkpoints == (180, 2 + 6)
    assert more.document()["checkpoint_bytes_written"] == 180 * 12 * 100_000_000


def test_tensors_allocator_and_reserve_must_fit_the_gpu() -> None:
    found = planned()
    assert found.needed == pytest.approx(1.1 * 15e9 + 2e9)
    assert found.fits
    assert found.exit_code() == 0
    small = planned(replace(H100, gpu_memory=18e9))
    assert not small.fits
    assert small.exit_code() == 1


def test_the_largest_micro_batch_that_fits_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measure(config: SamConfig, world_size: int) -> StepMemory:
        size, count = config.micro_batches(world_size)
        sizes.append(size)
        return replace(MEMORY, activations=3 * size * 10**9, gradients=(1 if count == 1 else 4) * 10**9)

    monkeypatch.setattr(planner, "measure", measure)
    whole = replace(config(), data=replace(config().data, micro_batch=None))  # ten images
    cluster = replace(H100, fragmentation=0.0, reserved=0.0)
    # 5 GB and 3 GB for each image; 3 GB more with several micro-batches.
    assert plan(whole, replace(cluster, gpu_memory=35e9)).fitting is None
    sizes.clear()
    assert plan(whole, replace(cluster, gpu_memory=30e9)).fitting == 7
    assert sizes == [10, 1, 8, 7]
    assert plan(whole, replace(cluster, gpu_memory=10e9)).fitting == 0


def test_a_dataset_directory_has_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(tmp_path)
    monkeypatch.setattr(planner, "measure", lambda config, world_size: MEMORY)
    own = replace(config(), out=str(tmp_path / "run"))
    found = plan(replace(own, data=replace(own.data, root=str(root))), H100).data
    assert (found.images, found.files, found.kind) == (23, 4, "shard")
    members = (root / "sa1b-000001-0000.tar").stat().st_size
    assert 23 / 7 * members * 0.5 < found.bytes < sum(one.stat().st_size for one in root.glob("*.tar"))
    assert not (tmp_path / "run").exists()


def test_re_encoded_images_are_decoded_faster() -> None:
    assert replace(ALL_OF_SA1B, resized=1024).decode_rate > ALL_OF_SA1B.decode_rate


@pytest.mark.parametrize("name", ["h100", "NVIDIA H100", "H100"])
def test_gpus_are_found_by_their_names(name: str) -> None:
    assert gpu_named(name).memory == 80e9


def test_a_pipeline_has_no_plan() -> None:
    with pytest.raises(UsageError, match="--parallel.mode pipeline: has no plan.*pass --parallel.mode ddp"):
        plan(config(mode="pipeline"), H100)


def test_an_unknown_gpu_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UsageError, match="--gpu H10: unknown; did you mean 'H100'\\? known are H100 PCIe"):
        gpu_named("H10")
    with pytest.raises(UsageError, match="--gpu TPU: unknown; known are .*for others pass --tflops"):
        gpu_named("TPU")


def test_peaks_fall_with_the_precision() -> None:
    for gpu in GPUS:
        assert gpu.peak("bf16") == gpu.peak("fp16") > gpu.peak("tf32") > gpu.peak("fp32")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nodes": 0}, "--nodes 0: must be at least 1"),
        ({"price": -2.0}, "--price -2: must be at least 0"),
        ({"price": float("nan")}, "--price nan: must be at least 0"),
        ({"mfu": 0.0}, "--mfu 0: must be more than 0 and at most 1"),
        ({"mfu": 1.5}, "--mfu 1.5: must be more than 0"),
        ({"flops": 0.0}, "--tflops 0: must be more than 0"),
        ({"gpu_memory": -1e9}, "--gpu-memory -1: must be more than 0"),
        ({"network": float("inf")}, "--network-gbit inf: must be more than 0 and finite"),
        ({"link": 0.0}, "--link-rate 0: must be more than 0"),
        ({"exposed": 1.1}, "--exposed 1.1: must be from 0 to 1"),
        ({"fragmentation": -0.1}, "--fragmentation -0.1: must be from 0 to 1"),
        ({"reserved": 81e9}, "--reserved 81: must be from 0 to 80.0, the --gpu-memory"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replace(H100, **changes)
