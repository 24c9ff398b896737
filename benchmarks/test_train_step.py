"""Operators and bytes of an iteration of interactive training.

`pytest benchmarks/test_train_step.py -s` prints them. The iteration is a later one, forward and backward, at
the sizes of ViT-B: 16 masks, 12 tokens, bfloat16. Operators that only change the view of a tensor do not
count. The bytes are those of all inputs and outputs of the others, which a step without compilation moves.

816 operators, 323 MB for each mask, of which 128 MB are matrix products.
"""

from dataclasses import replace

import torch

from benchmarks.account import PRODUCTS, Account
from sa1b.sam.iteration import Scene, iterate
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe

MASKS, PROMPTS = 16, 7


def test_an_iteration() -> None:
    model = Sam(replace(PRESETS["vit_b"], width=64, depth=1, heads=1, global_blocks=()))
    size = 256
    masks = torch.zeros(MASKS, size, size, dtype=torch.bool)
    embeddings = torch.randn(1, 256, 64, 64).requires_grad_()
    scene = Scene(embeddings, torch.zeros(MASKS, dtype=torch.int64), (MASKS,), masks, masks)
    points, labels = torch.rand(MASKS, PROMPTS, 2), torch.ones(MASKS, PROMPTS, dtype=torch.int64)
    feedback = torch.randn(MASKS, 1, size, size).bfloat16()
    with Account() as account:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses, *_ = iterate(model, Recipe(), scene, points, labels, feedback)
        sources = [embeddings, *model.parameters()]
        torch.autograd.grad(losses.sum(), sources, allow_unused=True)
    every, products = account.total(), account.total(lambda _, name: name in PRODUCTS)
    print(f"\n{every.launches} operators, {every.bytes / MASKS / 1e6:.0f} MB for a mask")
    print(f"{products.bytes / MASKS / 1e6:.0f} MB in products")
    for (_, name), one in sorted(account.sums.items(), key=lambda row: -row[1].bytes)[:12]:
        print(f"  {name:28} {one.launches:4} {one.bytes / MASKS / 1e6:6.1f} MB")
