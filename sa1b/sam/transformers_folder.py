"""A SAM in the form of Hugging Face's `transformers`: `SamModel.from_pretrained(folder)`.

The form is two JSON files and the weights under other names; `transformers` is not needed to write it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD
from sa1b.sam.mask_decoder import HEAD_LENGTH, HIDDEN_RATIO
from sa1b.sam.model import ModelConfig
from sa1b.sam.published import write_weights
from sa1b.storage.atomic import json_bytes

FREQUENCIES = "prompt_encoder.shared_embedding.positional_embedding"
_NAMES = (  # a pattern of the published names, and its replacement
    (r"^image_encoder\.blocks\.(\d+)\.norm(\d)", r"vision_encoder.layers.\1.layer_norm\2"),
    (r"^image_encoder\.blocks\.", "vision_encoder.layers."),
    (r"^image_encoder\.patch_embed\.proj\.", "vision_encoder.patch_embed.projection."),
    (r"^image_encoder\.neck\.0\.", "vision_encoder.neck.conv1."),
    (r"^image_encoder\.neck\.1\.", "vision_encoder.neck.layer_norm1."),
    (r"^image_encoder\.neck\.2\.", "vision_encoder.neck.conv2."),
    (r"^image_encoder\.neck\.3\.", "vision_encoder.neck.layer_norm2."),
    (r"^image_encoder\.", "vision_encoder."),
    (r"^prompt_encoder\.pe_layer\.positional_encoding_gaussian_matrix", FREQUENCIES),
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
    """The name of a weight in `transformers`, from its published one."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def settings(model: ModelConfig) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["SamModel"],
        "model_type": "sam",
        "vision_config": {
            "hidden_size": model.width,
            "output_channels": model.channels,
            "num_hidden_layers": model.depth,
            "num_attention_heads": model.heads,
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "window_size": model.window,
            "global_attn_indexes": list(model.global_blocks),
            "mlp_dim": 4 * model.width,
            "num_pos_feats": model.channels // 2,
        },
        "prompt_encoder_config": {
            "hidden_size": model.channels,
            "image_size": model.image_size,
            "patch_size": model.patch_size,
        },
        "mask_decoder_config": {
            "hidden_size": model.channels,
            "mlp_dim": HIDDEN_RATIO * model.channels,
            "num_attention_heads": model.channels // HEAD_LENGTH,
            "iou_head_hidden_dim": model.channels,
            "layer_norm_eps": 1e-5,  # of the published code; the default of `transformers` is 1e-6
        },
    }


def write_folder(folder: Path, weights: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Write config.json, preprocessor_config.json and model.safetensors; OSError: the path."""
    theirs = {their_name(name): tensor for name, tensor in weights.items()}
    theirs["shared_image_embedding.positional_embedding"] = theirs[FREQUENCIES]  # one tensor, two names
    write_weights(folder / "model.safetensors", theirs)
    size, low = model.image_size, model.image_size // 4
    images = {
        "image_processor_type": "SamImageProcessor",
        "processor_class": "SamProcessor",
        "size": {"longest_edge": size},
        "pad_size": {"height": size, "width": size},
        "mask_size": {"longest_edge": low},
        "mask_pad_size": {"height": low, "width": low},
        "rescale_factor": 1 / 255,
        "image_mean": [value / 255 for value in PIXEL_MEAN],
        "image_std": [value / 255 for value in PIXEL_STD],
    }
    for name, document in (("config.json", settings(model)), ("preprocessor_config.json", images)):
        (folder / name).write_bytes(json_bytes(document))
