"""Operators and bytes of an iteration of interactive training, and processor time of the forms of AdamW.

`pytest benchmarks/test_train_step.py -s` prints them. The iteration is a later one, forward and backward, at
the sizes of ViT-B: 16 masks, 12 tokens, bfloat16. Operators that only change the view of a tensor do not
count. The bytes are those of all inputs and outputs of the others, which a step without compilation moves.

816 operators, 323 MB for each mask, of which 128 MB are matrix products. One thread of a busy Xeon at 2.3
GHz: AdamW over 14 million parameters takes 17 to 20 ms in its fused form, 76 to 80 ms with lists of tensors,
and 56 to 59 ms with a loop.
"""

import time
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sa1b.sam.iteration import Iteration, Scene
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe

MASKS, PROMPTS = 16, 7
PRODUCTS = ("bmm", "mm", "addmm", "convolution", "convolution_backward")
VIEWS = {
    *("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select"),
    *(
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "split",
        "split_with_sizes",
        "unbind",
        "as_strided",
        "unfold",
    ),
    *("empty", "empty_like", "empty_strided", "lift_fresh"),
}


class Bytes(TorchDispatchMode):
    """Counts operators and the bytes of their inputs and outputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
            self.operators[name] += 1
            self.bytes[name] += sum(_stored(one) for one in tensors)
        return out


def _stored(tensor: Tensor) -> int:
    """Bytes of a tensor; those that an expanded tensor repeats count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def test_an_iteration() -> None:
    model = Sam(replace(PRESETS["vit_b"], width=64, depth=1, heads=1, global_blocks=()))
    size = 256
    masks = torch.zeros(MASKS, size, size, dtype=torch.bool)
    embeddings = torch.randn(1, 256, 64, 64).requires_grad_()
    scene = Scene(embeddings, torch.zeros(MASKS, dtype=torch.int64), (MASKS,), masks, masks)
    points, labels = torch.rand(MASKS, PROMPTS, 2), torch.ones(MASKS, PROMPTS, dtype=torch.int64)
    feedback = torch.randn(MASKS, 1, size, size).bfloat16()
    with Bytes() as counted:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outcome = Iteration(model, Recipe())(
                scene, points, labels, feedback, compiled=False, recompute=False
            )
        sources = [embeddings, *model.parameters()]
        torch.autograd.grad(outcome.losses.sum(), sources, allow_unused=True)
    products = sum(counted.bytes[name] for name in PRODUCTS) / MASKS / 1e6
    print(f"\n{counted.operators.total()} operators, {counted.bytes.total() / MASKS / 1e6:.0f} MB for a mask")
    print(f"{products:.0f} MB in products")
    for name, number in counted.bytes.most_common(12):
        print(f"  {name:28} {counted.operators[name]:4} {number / MASKS / 1e6:6.1f} MB")


@pytest.mark.parametrize("form", ["fused", "foreach", "loop"])
def test_adamw(form: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(768, 768)) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=form == "fused", foreach=form == "foreach")
    seconds = []
    for _ in range(8):  # the first one also allocates
        began = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - began)
    torch.set_num_threads(threads)
    print(f"\n{form}: {1e3 * median(seconds[1:]):.0f} ms of processor time")
