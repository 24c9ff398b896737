"""Random weights for models that are compared."""

import torch
from torch import nn


def randomise(model: nn.Module) -> None:
    """Give random values to positions, which begin as zero, and to biases and norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                parameter.normal_(std=0.5)
            elif parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
