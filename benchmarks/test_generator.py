"""Time of `sa1b.generate_masks` for an image of 2250 x 1500: `pytest benchmarks/test_generator.py -s`.

The weights are random, which takes the same time in encoder and decoder. Masks of random weights do not have
the sizes of objects, so that discs around the points replace the decoder's masks before they are enlarged:
40 % of the candidates are above the threshold of the predicted IoU. With a GPU, the model is on it.
"""

import time

import numpy as np
import pytest
import torch

import sa1b
from sa1b.programs.synthetic.source_tars import scene
from sa1b.sam import mask_generator
from sa1b.sam.model import PRESETS, Sam
from sa1b.shards.jpeg import decode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("preset", ["tiny", "vit_b"])
def test_time_of_an_image(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = Sam(PRESETS[preset]).eval().to(DEVICE), decode(scene(5)[0])
    side, per_pixel = 4 * model.config.side, 4 * model.config.side / model.config.image_size
    y, x = torch.meshgrid(*[torch.arange(side, device=DEVICE)] * 2, indexing="ij")
    radii = torch.tensor([side / 64, side / 25, side / 9], device=DEVICE)
    seconds = {"decoder": 0.0, "encoder": 0.0}
    real_decode, real_embed = mask_generator._decode, model.embed

    def timed(part, function, *arguments, **named):
        began = time.perf_counter()
        result = function(*arguments, **named)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds[part] += time.perf_counter() - began
        return result

    def discs(own, embedding, points):
        timed("decoder", real_decode, own, embedding, points)
        at = torch.from_numpy(points * per_pixel).to(DEVICE, torch.float32)
        distance = torch.hypot(x - at[:, 0, None, None], y - at[:, 1, None, None])
        quality = np.random.default_rng(0).uniform(0.7, 1.0, (len(points), 3)).astype(np.float32)
        return 8 * (radii[:, None, None] - distance[:, None]) * per_pixel, torch.from_numpy(quality).to(
            DEVICE
        )

    monkeypatch.setattr(mask_generator, "_decode", discs)
    monkeypatch.setattr(model, "embed", lambda *a, **n: timed("encoder", real_embed, *a, **n))
    sa1b.generate_masks(model, pixels, points_per_side=2)  # compiles the kernels
    seconds.update(decoder=0.0, encoder=0.0)
    began = time.perf_counter()
    found = sa1b.generate_masks(model, pixels, min_stability=0.5)
    total = time.perf_counter() - began
    print(
        f"{preset} on {DEVICE}: {total:.1f} s, encoder {seconds['encoder']:.1f} s, decoder "
        f"{seconds['decoder']:.1f} s for 1,024 points; {len(found)} masks"
    )
    assert len(found) > 100
