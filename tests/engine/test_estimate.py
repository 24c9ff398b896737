"""The operations of a step computed from sizes, compared with torch's counter."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sa1b.engine.config import parse
from sa1b.engine.planner import estimate
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch import hardware
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import decoder_flops, encoder_flops, step_flops
from sa1b.train import main
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of
from tests.train.command import FLAGS, make_root

SMALL = ModelConfig(image_size=128, width=64, depth=3, heads=2, global_blocks=(1,), window=3, channels=64)


def counted(work: Callable[[], object]) -> int:
    # torch's counter does not support the fused attention of CPUs.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [SMALL, MODELS["tiny"]], ids=["small", "tiny"])
def test_operations_of_the_encoder_are_what_torch_counts_but_for_relative_positions(
    config: ModelConfig,
) -> None:
    model = Sam(config).eval()
    images = torch.zeros(1, 3, config.image_size, config.image_size, dtype=torch.uint8)
    found = counted(lambda: model.embed(images))
    # torch also counts the relative positions, which are folded into queries and keys.
    assert 0.8 * found < encoder_flops(config) <= found


@pytest.mark.parametrize("features", [0, 24])
@pytest.mark.parametrize("candidates", [SINGLE, AMBIGUOUS], ids=["single", "ambiguous"])
def test_operations_of_the_decoder_are_what_torch_counts_but_for_those_of_tokens_alone(
    candidates: slice, features: int
) -> None:
    config = dataclasses.replace(SMALL, image_size=1024, pixel_features=features)
    model = Sam(config).eval()
    embeddings = torch.zeros(1, config.channels + 16 * features, config.side, config.side)
    points, labels = torch.zeros(4, 7, 2), torch.ones(4, 7, dtype=torch.int64)
    before = torch.zeros(4, 1, 256, 256) if candidates == SINGLE else None
    image = torch.zeros(4, dtype=torch.int64)
    found = counted(
        lambda: model.decode(embeddings, image, points, labels, before, counts=(4,), candidates=candidates)
    )
    expected = decoder_flops(config, 12, len(range(4)[candidates]))
    assert expected == pytest.approx(found / 4, rel=0.05)


def test_a_step_is_three_forwards_of_images_and_of_iterations_of_masks() -> None:
    recipe = PRESETS["vit_h"].recipe
    model = MODELS["vit_b"]
    single = sum(decoder_flops(model, tokens, 1) for tokens in (*range(8, 17), 16))
    expected = 3 * (2 * encoder_flops(model) + 5 * (decoder_flops(model, 7, 3) + single))
    assert step_flops(model, recipe, 2, 5) == pytest.approx(expected)


def test_the_published_vit_h_has_the_published_order_of_operations() -> None:
    # Published figures for the ViT-H encoder of Segment Anything are about 2.7 T multiply-adds.
    assert encoder_flops(MODELS["vit_h"]) / 2 == pytest.approx(2.7e12, rel=0.15)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100 80GB PCIe", "bf16", 312e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_devices_name(
    device: str, precision: Any, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert hardware.peak_flops(torch.device("cuda"), precision) == peak


def test_frozen_parts_are_counted_without_their_backward_pass() -> None:
    module = PRESETS["tiny"].build()
    encoder, whole = encoder_flops(module.model.config), module.flops(2, 5)
    decoder = whole - 3 * 2 * encoder
    module.model.image_encoder.requires_grad_(False)
    assert module.flops(2, 5) == pytest.approx(2 * encoder + decoder)
    module.model.image_encoder.requires_grad_(True)
    module.model.mask_decoder.requires_grad_(False)
    assert module.flops(2, 5) == pytest.approx(3 * 2 * encoder + decoder * 2 / 3)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_plan_says_ranks_batch_run_memory_and_step(tmp_path: Path) -> None:
    preset = PRESETS["tiny"]
    data = dataclasses.replace(preset.data, global_batch=8, micro_batch=2)
    optim = dataclasses.replace(preset.optim, steps=200)
    config = dataclasses.replace(preset, data=data, optim=optim, out=tmp_path)
    module = config.build()
    module.unused = torch.nn.Parameter(torch.empty(250_000_000 - count(module), device="meta"))
    shown = estimate.describe(config, place_of(0, 2), module, 2, 800)
    assert "2 x cpu, mode none, precision fp32" in shown
    assert "8 images = 2 ranks x 2 micro-batches of up to 2" in shown
    assert "200 steps = 2.0 epochs of 800 images" in shown
    assert " = 1,600 epochs of 1 image" in estimate.describe(config, place_of(0, 2), module, 2, 1)
    parallel = dataclasses.replace(config.parallel, mode="pipeline")
    staged = estimate.describe(
        dataclasses.replace(config, parallel=parallel), place_of(0, 1), config.build(), 4, 8
    )
    assert "8 images = 4 micro-batches through 1 stage, each of 2\n" in staged
    assert "memory" not in shown  # it is measured, see `print_memory`
    assert "the peak of this device is not known" in shown


MEASURED = estimate.StepMemory(10, 20, 30, 128, 0, 128 * 9)
CUDA = torch.device("cuda", 0)


def have(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """A step of 1,340 bytes, and so many free bytes on the CPU and on the GPU."""
    monkeypatch.setattr(estimate, "measure", lambda *_: MEASURED)
    monkeypatch.setattr(estimate, "available_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80e9))


def test_a_step_beyond_the_memory_of_a_cpu_is_refused_with_the_micro_batch_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for free, way in ((1340, None), (105, "--data.micro-batch 4"), (65, "a smaller model")):
        have(monkeypatch, free)
        estimate.print_memory(PRESETS["vit_b"], place_of())
        why = f"a micro-batch of 128 images needs 1,340 bytes, and {free} are available; pass {way}, or train"
        assert (f"refused       --data.global-batch 128: {why} on a GPU" in capsys.readouterr().out) == bool(
            way
        )
    monkeypatch.setattr(estimate, "measure", None)  # a small step is not measured
    estimate.check_memory(PRESETS["tiny"], PRESETS["tiny"].build(), place_of())


@pytest.mark.parametrize(
    ("free", "complaint"),
    [
        (955, "--data.global-batch 128: a micro-batch of 128 images needs 956 bytes, and 955 are free on cuda:0; "
         "pass --data.micro-batch 64, or --parallel.mode fsdp"),
        (956, ""),
    ],
)  # fmt: skip
def test_a_step_beyond_the_free_memory_of_a_gpu_is_refused(
    free: int, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, free)  # 956: with two thirds of the activations
    rank, config = RankInfo(0, 1, 0, CUDA), PRESETS["vit_b"]
    with torch.device("meta"):
        module = config.build()
    if complaint:
        with pytest.raises(UsageError, match=complaint):
            estimate.check_memory(config, module, rank)
        return
    estimate.check_memory(config, module, rank)
    assert (
        "warning: --data.global-batch 128: a micro-batch of 128 images needs 1,340" in capsys.readouterr().err
    )
    have(monkeypatch, 1340)
    estimate.check_memory(config, module, rank)
    assert capsys.readouterr().err == ""


def test_a_run_that_resumes_on_a_gpu_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    have(monkeypatch, 1)
    monkeypatch.setattr(estimate, "_MEASURED", 0)
    config = dataclasses.replace(PRESETS["tiny"], out=str(tmp_path))
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    estimate.check_memory(config, PRESETS["tiny"].build(), RankInfo(0, 1, 0, CUDA))


def refusal(free: float) -> str:
    """Why this rank is refused, on a machine with so many free bytes that rank 0 alone measures."""
    config = dataclasses.replace(PRESETS["vit_b"], parallel=ParallelConfig(mode="ddp", device="cpu"))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, micro_batch=2))
    measured = lambda alone, ranks: MEASURED if alone.data.global_batch == 4 and ranks == 1 else None  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, group(config.parallel) as rank_info:
        have(patch, free)
        patch.setattr(estimate, "measure", measured if rank_info.rank == 0 else None)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        with torch.device("meta"):
            module = config.build()
        try:
            estimate.check_memory(config, module, rank_info)
        except UsageError as error:
            return str(error)
    return ""


def test_ranks_on_a_cpu_that_do_not_fit_together_are_refused_together() -> None:
    assert launch(refusal, 2, 2680.0) == ["", ""]
    of_first, of_second = launch(refusal, 2, 2678.0)
    assert of_first == of_second
    assert of_first.startswith(
        "--data.micro-batch 2: a micro-batch of 2 images needs 1,340 bytes, and 1,339 are"
    )
    assert "available for each of 2 ranks; pass --data.micro-batch 1, or train on a GPU" in of_first


@pytest.mark.slow
def test_a_step_of_ddp_is_measured_alone() -> None:
    # In a process that is in a group, the ranks of `measure` cannot exist.
    config = dataclasses.replace(PRESETS["vit_b"], parallel=ParallelConfig(mode="ddp", precision="bf16"))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, micro_batch=1, masks=2))
    assert estimate._share(config, RankInfo(0, 8, 0, CUDA)) == estimate.measure(config, 8)


@pytest.mark.slow
def test_the_command_of_the_readme_for_eight_gpus_fits_gpus_of_80_gb(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (flags,) = re.findall(r"`torchrun --nproc_per_node=8 -m sa1b.train ([^`]+)`", text)
    config = parse([*flags.split(), "--data.root", str(tmp_path)], None, PRESETS, world_size=8)
    assert config.parallel.mode == "ddp"
    needed = estimate.measure(config, 8).peak
    assert 10e9 < needed * 1.05 + 2e9 < 80e9  # with the reserve of `sa1b plan train`


def test_a_run_is_refused_before_its_first_step_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "_MEASURED", 0)
    monkeypatch.setattr(estimate, "measure", lambda *_: estimate.StepMemory(10, 20, 30, 128, 0, 1 << 60))
    out = tmp_path / "run"
    arguments = [
        *FLAGS,
        "--parallel.device",
        "cpu",
        "--data.root",
        str(make_root(tmp_path)),
        "--out",
        str(out),
    ]
    assert main(arguments=arguments) == 2
    assert "error: --data.micro-batch 2: a micro-batch of 2 images needs 1," in capsys.readouterr().err
    assert not out.exists()
