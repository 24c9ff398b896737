"""Hugging Face's implementation, `transformers.SamModel`, at any size, with our names of the weights.

An independent reference for tests, which are skipped if the package `transformers` is missing.
"""

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sa1b.sam.model import ModelConfig

NAMES = (  # a pattern of our names, and its replacement
    (r"^image_encoder\.blocks\.(\d+)\.norm(\d)", r"vision_encoder.layers.\1.layer_norm\2"),
    (r"^image_encoder\.blocks\.", "vision_encoder.layers."),
    (r"^image_encoder\.patch_embed\.proj\.", "vision_encoder.patch_embed.projection."),
    (r"^image_encoder\.neck\.0\.", "vision_encoder.neck.conv1."),
    (r"^image_encoder\.neck\.1\.", "vision_encoder.neck.layer_norm1."),
    (r"^image_encoder\.neck\.2\.", "vision_encoder.neck.conv2."),
    (r"^image_encoder\.neck\.3\.", "vision_encoder.neck.layer_norm2."),
    (r"^image_encoder\.", "vision_encoder."),
    (
        r"^prompt_encoder\.pe_layer\.positional_encoding_gaussian_matrix",
        "prompt_encoder.shared_embedding.positional_embedding",
    ),
    (r"\.point_embeddings\.", ".point_embed."),
    (r"\.mask_downscaling\.0\.", ".mask_embed.conv1."),
    (r"\.mask_downscaling\.1\.", ".mask_embed.layer_norm1."),
    (r"\.mask_downscaling\.3\.", ".mask_embed.conv2."),
    (r"\.mask_downscaling\.4\.", ".mask_embed.layer_norm2."),
    (r"\.mask_downscaling\.6\.", ".mask_embed.conv3."),
    (r"\.transformer\.layers\.(\d)\.norm(\d)", r".transformer.layers.\1.layer_norm\2"),
    (r"\.norm_final_attn\.", ".layer_norm_final_attn."),
    (r"\.output_upscaling\.0\.", ".upscale_conv1."),
    (r"\.output_upscaling\.1\.", ".upscale_layer_norm."),
    (r"\.output_upscaling\.3\.", ".upscale_conv2."),
    (r"(mlps\.\d|iou_prediction_head)\.layers\.0\.", r"\1.proj_in."),
    (r"(mlps\.\d|iou_prediction_head)\.layers\.1\.", r"\1.layers.0."),
    (r"(mlps\.\d|iou_prediction_head)\.layers\.2\.", r"\1.proj_out."),
)


def their_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def build(config: ModelConfig, weights: dict[str, Tensor]) -> nn.Module:
    """Their model with our weights; skips the test if the package is missing."""
    package: Any = pytest.importorskip(
        "transformers", reason="the package transformers, a reference of this test, is not installed"
    )
    vision = package.SamVisionConfig(
        hidden_size=config.width,
        output_channels=config.channels,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
        window_size=config.window,
        global_attn_indexes=list(config.global_blocks),
        mlp_dim=4 * config.width,
        num_pos_feats=config.channels // 2,
    )
    prompt = package.SamPromptEncoderConfig(
        hidden_size=config.channels, image_size=config.image_size, patch_size=config.patch_size
    )
    decoder = package.SamMaskDecoderConfig(
        hidden_size=config.channels,
        mlp_dim=8 * config.channels,
        num_attention_heads=config.channels // 32,
        iou_head_hidden_dim=config.channels,
        layer_norm_eps=1e-5,  # the epsilon of the published code; theirs is 1e-6
    )
    whole = package.SamConfig(
        vision_config=vision.to_dict(),
        prompt_encoder_config=prompt.to_dict(),
        mask_decoder_config=decoder.to_dict(),
    )
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
