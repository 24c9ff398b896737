"""Hugging Face's implementation, `transformers.SamModel`, at any size, with our names of the weights.

An independent reference for tests, which are skipped if the package `transformers` is missing.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sa1b.sam.model import ModelConfig
from sa1b.sam.other_forms import settings, their_name


def build(config: ModelConfig, weights: dict[str, Tensor]) -> nn.Module:
    """Their model with our weights; skips the test if the package is missing."""
    package: Any = pytest.importorskip(
        "transformers", reason="the package transformers, a reference of this test, is not installed"
    )
    document = settings(config)
    whole = package.SamConfig(**{name: document[name] for name in document if name.endswith("_config")})
    modeling = importlib.import_module("transformers.models.sam.modeling_sam")
    model: nn.Module = modeling.SamModel(whole)
    theirs = {their_name(name): tensor for name, tensor in weights.items()}
    missing = model.load_state_dict(theirs, strict=False)
    # The frequencies of the image are the same tensor under a second name.
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"shared_image_embedding.positional_embedding"}
    shared = model.get_submodule("shared_image_embedding")
    shared.positional_embedding.data = theirs["prompt_encoder.shared_embedding.positional_embedding"].clone()
    return model.eval()


def gradients(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The gradients of their parameters, by our names; zeros for parameters without a gradient."""
    found = {}
    for name in names:
        parameter = model.get_parameter(their_name(name))
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found
