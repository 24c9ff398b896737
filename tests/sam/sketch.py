"""A simple substitute for a model, and micro-batches for the tests of interactive training.

The substitute computes with single numbers, so that the results of a mask are the same bits in any batch. It
records every call.
"""

from dataclasses import fields
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from sa1b.sam.clicks import random_words
from sa1b.sam.interactive import Interactive
from sa1b.sam.mask_decoder import ALL
from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets

SIZE = 64
SMALL = ModelConfig(
    image_size=SIZE, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, drop_path=0.3
)
PLAIN = Recipe()


class Sketch(nn.Module):
    """Predicts a diamond around every prompt; bright pixels and the mask prompt increase the logits."""

    def __init__(self, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=SIZE, depth=3, drop_path=drop_path, cuda_graphs=False)
        self.gain = nn.Parameter(torch.tensor(3.0))
        self.mask_decoder = SimpleNamespace(mask_tokens=SimpleNamespace(weight=self.gain))
        self.radius = nn.Parameter(torch.tensor([9.0, 4.0, 8.0, 13.0]))
        self.embeds: list[SimpleNamespace] = []
        self.decodes: list[SimpleNamespace] = []

    def embed(self, images: Tensor, keep: Tensor | None = None, sizes: Tensor | None = None) -> Tensor:
        self.embeds.append(SimpleNamespace(images=images, keep=keep, sizes=sizes))
        embeddings = images[:, :1, ::16, ::16].float() / 255 * self.gain
        return embeddings if keep is None else embeddings * keep[:, 1, 0, None, None, None]

    def decode(self, embeddings, image, points, labels, low_res=None, *, counts=None, candidates=ALL):
        centres_of_pixels = torch.arange(SIZE // 4) * 4 + 1.5
        logits = embeddings[image].repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        for number in range(points.shape[1]):
            sign = (labels[:, number] > 0).float() - (labels[:, number] == 0).float()
            x, y = points[:, number, 0, None, None], points[:, number, 1, None, None]
            distance = (centres_of_pixels - x).abs() + (centres_of_pixels[:, None] - y).abs()
            near = self.radius[:, None, None] - distance[:, None]
            logits = logits + sign[:, None, None, None] * near.clamp(min=-6)
        if low_res is not None:
            logits = logits + 0.25 * low_res
        iou = 0.5 + 0.01 * logits[:, :, 3, 3] - 0.003 * logits[:, :, 5, 9]
        call = SimpleNamespace(
            points=points, labels=labels, low_res=low_res, counts=counts, candidates=candidates
        )
        if logits.requires_grad:
            logits.retain_grad()
            iou.retain_grad()
        call.logits, call.iou = logits, iou
        self.decodes.append(call)
        return logits[:, candidates], iou[:, candidates]


def case(masks: int = 12, images: int = 3, size: int = 16) -> tuple[Tensor, Targets, Tensor]:
    """Images, the targets of their masks (boxes of pixels), and the images' keys."""
    torch.manual_seed(0)
    sizes = torch.tensor([[64, 43], [48, 64], [64, 64]])[:images]
    image = torch.arange(masks) * images // max(masks, 1)
    low = 4 * torch.randint(0, 7, (masks, 2))
    boxes = torch.cat((low, low + 4 * torch.randint(1, 4, (masks, 2))), dim=1).float()
    centres = (torch.arange(size) + 0.5) * (SIZE / size)
    x0, y0, x1, y1 = boxes.T[..., None]
    columns, rows = (x0 < centres) & (centres < x1), (y0 < centres) & (centres < y1)
    targets = Targets(
        masks=(rows[:, :, None] & columns[:, None, :]).to(torch.uint8),
        boxes=boxes,
        points=(boxes[:, :2] + 1.5),
        image=image,
        weights=torch.ones(masks),
        keys=random_words(torch.tensor(7), torch.arange(masks)),
        sizes=sizes,
        counts=tuple(torch.bincount(image, minlength=images).tolist()),
    )
    pixels = torch.randint(0, 256, (images, 3, SIZE, SIZE), dtype=torch.uint8)
    return pixels, targets, random_words(torch.tensor(8), torch.arange(images))


def part(targets: Targets, masks: Tensor, **changed: Tensor) -> Targets:
    """Some of the masks, in any order of images, therefore without `counts`."""
    of_masks = [field.name for field in fields(targets) if field.name not in ("sizes", "counts")]
    chosen = {name: getattr(targets, name)[masks] for name in of_masks}
    return Targets(**chosen | {"sizes": targets.sizes} | changed)


def trained(recipe: Recipe, inputs=None, **options) -> tuple[Sketch, dict[str, Tensor]]:
    sketch = Sketch()
    return sketch, Interactive(sketch, recipe)(*(inputs or case()), **options)
