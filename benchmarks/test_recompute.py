"""Recomputed blocks, memory and time: `pytest benchmarks/test_recompute.py -s`, two minutes.

For each value of `--model.checkpoint-blocks`: processor time of the encoder of ViT-B, forward and backward,
for two images of 512 pixels on one thread, and memory of the tensors at the peak of a training step with
them (sa1b.engine.planner). Every round measures every value.
"""

import time
from dataclasses import replace
from statistics import median

import torch

from sa1b.engine.config import build
from sa1b.engine.planner import measure
from sa1b.engine.settings import ParallelConfig
from sa1b.recipes.presets import PRESETS

VALUES = ("none", "every:2", "all")
IMAGES, SIZE, MASKS, ROUNDS = 2, 512, 8, 7


def test_recompute(figures: dict[str, dict[str, object]]) -> None:
    torch.set_num_threads(1)
    vit_b = PRESETS["vit_b"]
    configs = {
        value: replace(
            vit_b,
            data=replace(vit_b.data, global_batch=IMAGES, micro_batch=IMAGES, masks=MASKS),
            model=replace(vit_b.model, image_size=SIZE, checkpoint_blocks=value),
            parallel=ParallelConfig(device="cpu", mode="none"),
        )
        for value in VALUES
    }
    images = torch.rand(IMAGES, 3, SIZE, SIZE)
    seconds: dict[str, list[float]] = {value: [] for value in VALUES}
    encoders = {value: build(config, None).model.image_encoder.train() for value, config in configs.items()}
    for _ in range(ROUNDS + 1):
        for value, encoder in encoders.items():
            start = time.process_time()
            encoder(images).square().mean().backward()
            seconds[value].append(time.process_time() - start)
            encoder.zero_grad()
    memory = {value: measure(config, 1) for value, config in configs.items()}
    found = {
        value: {
            "seconds": median(seconds[value][1:]),
            "activations": memory[value].activations,
            "peak": memory[value].peak,
        }
        for value in VALUES
    }
    for value, one in found.items():
        print(
            f"{value:<8} {one['seconds']:6.2f} s   {one['activations'] / 1e9:6.3f} GB of activations, "
            f"{one['peak'] / 1e9:.3f} GB in all"
        )
    figures["recompute"] = found
