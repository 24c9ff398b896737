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
from sa1b.engine.planner import measure
from sa1b.engine.watch import hardware
from sa1b.recipes.presets import PRESETS
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import decoder_flops, encoder_flops

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


def test_the_published_vit_h_has_the_published_order_of_operations() -> None:
    # Published figures for the ViT-H encoder of Segment Anything are about 2.7 T multiply-adds.
    assert encoder_flops(MODELS["vit_h"]) / 2 == pytest.approx(2.7e12, rel=0.15)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H200", "bf16", 989e12),
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


@pytest.mark.slow
def test_the_command_of_the_readme_for_eight_gpus_fits_gpus_of_80_gb(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (flags,) = re.findall(r"`torchrun --nproc_per_node=8 -m sa1b.train ([^`]+)`", text)
    config = parse([*flags.split(), "--data.root", str(tmp_path)], None, PRESETS, world_size=8)
    assert config.parallel.mode == "ddp"
    needed = measure(config, 8).peak
    assert 10e9 < needed * 1.05 + 2e9 < 80e9  # with the reserve of `sa1b plan train`
