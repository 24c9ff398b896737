"""Latency of image encoders on a CPU: one image of 1024 pixels, float32, in evaluation mode.

`OMP_NUM_THREADS=1 pytest benchmarks/test_image_encoders.py -s` prints for each model the median and the
smallest of five calls, which are interleaved: each round calls every model once. Models with
--model.backbone need `pip install 'sa1b[timm]'`. docs/models.md has the result.
"""

import statistics
import time

import torch

from sa1b.sam.model import PRESETS, Sam

ROUNDS = 5
NAMES = ("repvit", "tiny_vit", "vit_t", "vit_b")


@torch.no_grad()
def test_image_encoders() -> None:
    torch.manual_seed(0)
    encoders = {name: Sam(PRESETS[name]).eval().image_encoder for name in NAMES}
    pixels = torch.randn(1, 3, 1024, 1024)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(1 + ROUNDS):  # the first one also allocates
        for name, encoder in encoders.items():
            began = time.perf_counter()
            assert encoder(pixels).shape == (1, 256, 64, 64)
            if number:
                seconds[name].append(time.perf_counter() - began)
    print(f"\n{torch.get_num_threads()} threads")
    for name, measured in seconds.items():
        numbers = sum(one.numel() for one in encoders[name].parameters()) / 1e6
        print(f"{name}: {numbers:.1f} M, {statistics.median(measured):.2f} s, smallest {min(measured):.2f} s")
