"""CPU time of an interactive training step at the sizes of vit_b: the mask decoder, without the encoder.

`pytest benchmarks/test_decoder.py -s` prints the CPU seconds of all threads for each number of masks: one
image, the 11 iterations of the published recipe, forward and backward in float32, with an encoder of one
small block.

Two threads of a busy machine, 16 masks: 42 s. The published order of products with checkpointed iterations,
interleaved in the same process: 123 s.
"""

import time
from dataclasses import replace

import pytest
import torch

from sa1b.sam.clicks import random_words
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets


@pytest.mark.parametrize("masks", [1, 4, 16])
def test_an_interactive_step(masks: int) -> None:
    torch.manual_seed(0)
    config = replace(PRESETS["vit_b"], width=64, depth=1, heads=1, global_blocks=())
    interactive = Interactive(Sam(config), Recipe())
    centres, radii = torch.rand(masks, 2) * 200 + 28, torch.rand(masks, 1) * 60 + 5
    pixels = torch.stack(torch.meshgrid(torch.arange(256), torch.arange(256), indexing="xy"), dim=-1)
    discs = (pixels - centres[:, None, None]).square().sum(-1) < radii.square()[:, :, None]
    targets = Targets(
        masks=discs.to(torch.uint8),
        boxes=4 * torch.cat([centres - radii, centres + radii], dim=1).clamp(0, 255),
        points=4 * centres,
        image=torch.zeros(masks, dtype=torch.int64),
        weights=torch.ones(masks),
        keys=random_words(torch.tensor(7), torch.arange(masks)),
        sizes=torch.full((1, 2), 1024),
        counts=(masks,),
    )
    images = torch.randint(0, 256, (1, 3, 1024, 1024), dtype=torch.uint8)
    seconds = []
    for _ in range(2):  # the first one also allocates
        interactive.zero_grad()
        began = time.process_time()
        interactive(images, targets, torch.zeros(1, dtype=torch.int64))["loss"].backward()
        seconds.append(time.process_time() - began)
    print(f"\n{masks} masks: {seconds[-1]:.1f} CPU seconds, {torch.get_num_threads()} threads")
