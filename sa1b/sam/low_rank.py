"""Low-rank adaptation: layers whose weight is frozen, plus a trained product of two small matrices.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. A layer of the attention computes
x (W + B A)' with the frozen weight W [out, in] and the trained matrices A [r, in] and B [out, r]. B is 0 at
the start, so that the model begins as the one that it adapts. The names of W and its bias do not change;
those of A and B are `lora_a` and `lora_b` beside them. `merged` adds the products to the weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_A, _B = "lora_a", "lora_b"


class LowRankLinear(nn.Module):
    """A linear layer with a frozen weight and a trained change; it keeps the tensors of the layer."""

    # Not the library `peft`: its layers add the change in `forward`. The mask decoder multiplies tokens by
    # the weights themselves (sa1b.sam.transformer), so 20 of its 56 matrices would have no effect and no
    # gradient. It also renames the weights, which would then not load from published files.

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.normal_(self.lora_a, std=layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a linear layer, [out, in], with its low-rank change if it has one."""
    weight = layer.get_parameter("weight")
    return weight + layer.lora_b @ layer.lora_a if isinstance(layer, LowRankLinear) else weight


def adapt(part: nn.Module, kinds: tuple[type[nn.Module], ...], rank: int) -> None:
    """Replace the linear layers in modules of these kinds by `LowRankLinear`."""
    for attention in [module for module in part.modules() if isinstance(module, kinds)]:
        for name, layer in list(attention.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(attention, name, LowRankLinear(layer, rank))


def is_low_rank(name: str) -> bool:
    """Whether a parameter of this name is a matrix of a low-rank change."""
    return name.rpartition(".")[2] in (_A, _B)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by their published names: each with its low-rank change, if there is one."""
    full_rank = {name: tensor for name, tensor in weights.items() if not is_low_rank(name)}
    for name in weights.keys() - full_rank.keys():
        layer, _, kind = name.rpartition(".")
        if kind == _B and f"{layer}.{_A}" in weights and f"{layer}.weight" in full_rank:
            change = torch.matmul(weights[name], weights[f"{layer}.{_A}"])
            full_rank[f"{layer}.weight"] = full_rank[f"{layer}.weight"] + change
    return full_rank
