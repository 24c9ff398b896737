"""A SAM in the forms of other programs: two ONNX files, and a folder of Hugging Face's `transformers`.

encoder.onnx and decoder.onnx, as runtimes and annotation tools read them:

    input_image       float32 [h, w, 3], RGB from 0 to 255, resized so that the longer side has S pixels
    image_embeddings  float32 [1, channels, S / patch, S / patch]

    image_embeddings  as above
    point_coords      float32 [1, P, 2], x and y in pixels of the resized image; P >= 1
    point_labels      float32 [1, P]: 1 foreground, 0 background, 2 and 3 the corners of a box, -1 empty: a
                      prompt without a box has one empty point, as in the published code
    mask_input        float32 [1, 1, S / 4, S / 4], low_res_masks of an earlier call
    has_mask_input    float32 [1]: 1 if mask_input counts
    orig_im_size      float32 [2], rows and columns of the source image
    masks             float32 [1, 1, rows, columns], logits: the mask is where they are above 0
    iou_predictions   float32 [1, 1]
    low_res_masks     float32 [1, 1, S / 4, S / 4]

Names, frames and choice of the mask are those of the published decoder (segment_anything.utils.onnx): one of
three masks for a single prompt, mask 0 for several. The published one has the size of the crop as a constant.

The folder for `SamModel.from_pretrained(folder)` is two JSON files and the weights under other names;
`transformers` is not needed to write it.
"""

import logging
import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD
from sa1b.sam.mask_decoder import HEAD_LENGTH, HIDDEN_RATIO, MASKS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from sa1b.storage.atomic import json_bytes

OPSET = 18
_check: Any = torch._check
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
_INPUTS = (
    "image_embeddings", "point_coords", "point_labels", "mask_input", "has_mask_input", "orig_im_size",
)  # fmt: skip
_OUTPUTS = ("masks", "iou_predictions", "low_res_masks")
_PROMPTS_OF_IMAGE = 25
_LARGEST = 1_900_000_000  # bytes of weights in one file: protocol buffers end at 2 GiB


class _Part(nn.Module):
    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model


class Encoder(_Part):
    """Resized pixels -> embeddings; see the module."""

    def forward(self, input_image: Tensor) -> Tensor:
        size = self.model.config.image_size
        height, width = input_image.shape[:2]
        pixels = (input_image.permute(2, 0, 1) - self.model.pixel_mean) / self.model.pixel_std
        pixels = F.pad(pixels, (0, size - width, 0, size - height))[None]
        return self.model.with_features(pixels, self.model.image_encoder(pixels))


class Decoder(_Part):
    """Embeddings and prompts of one mask -> logits; see the module."""

    def forward(
        self,
        image_embeddings: Tensor,
        point_coords: Tensor,
        point_labels: Tensor,
        mask_input: Tensor,
        has_mask_input: Tensor,
        orig_im_size: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, iou = self.model.decode(
            image_embeddings,
            torch.zeros(1, dtype=torch.int64),
            point_coords,
            point_labels.long(),
            low_res=mask_input,
            has_low_res=has_mask_input > 0,
            counts=[1],
        )
        several = 1000.0 * (point_coords.shape[1] - 2.5)
        best = (iou + several * F.pad(torch.ones(1, 1), (0, MASKS - 1))).argmax(dim=1)
        low, iou = logits.index_select(1, best), iou.index_select(1, best)
        size = self.model.config.image_size
        taken = (size / orig_im_size.max() * orig_im_size + 0.5).floor().long().clamp(min=1)
        (rows, columns), (height, width) = _sides(taken), _sides(orig_im_size.long())
        _check(rows <= size)
        _check(columns <= size)
        large = F.interpolate(low, (size, size), mode="bilinear", align_corners=False)
        cut = large[..., :rows, :columns]
        return F.interpolate(cut, (height, width), mode="bilinear", align_corners=False), iou, low


def _sides(size: Tensor) -> tuple[Any, Any]:
    rows, columns = size[0].item(), size[1].item()  # int() would make them constants
    _check(rows >= 1)
    _check(columns >= 1)
    return rows, columns


@torch.no_grad()
def write_onnx(folder: Path, model: Sam) -> None:
    """Write the two files; ModuleNotFoundError: onnx or onnxscript is missing."""
    size, dim = model.config.image_size, torch.export.Dim
    rows, columns = dim("rows", min=1, max=size), dim("columns", min=1, max=size)
    points = dim("num_points", min=1, max=4096)
    channels = model.config.channels + 16 * model.config.pixel_features
    image, embeddings = torch.zeros(size, size - 1, 3), torch.zeros(1, channels, *2 * (model.config.side,))
    prompt = (embeddings, *_prompt(model, torch.Generator(), 3), torch.tensor([size, size - 1.0]))
    shapes = (None, {1: points}, {1: points}, None, None, None)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # notes about torchvision
    for module, example, name, inputs, outputs, dynamic in (
        (Encoder(model), (image,), ENCODER, ["input_image"], ["image_embeddings"], ({0: rows, 1: columns},)),
        (Decoder(model), prompt, DECODER, [*_INPUTS], [*_OUTPUTS], shapes),
    ):
        with warnings.catch_warnings(action="ignore"):  # of the exporter's own deprecated calls
            torch.onnx.export(
                module.eval(),
                example,
                folder / name,
                input_names=inputs,
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                external_data=4 * sum(x.numel() for x in module.parameters()) > _LARGEST,
                dynamic_shapes=dynamic,
                verbose=False,
            )


@torch.no_grad()
def largest_difference(folder: Path, model: Sam, prompts: int = 100) -> tuple[float, float]:
    """The files in onnxruntime beside the model in torch, on random pixels and prompts.

    Returns the largest difference of a logit or predicted IoU, and the fraction of pixels whose masks differ.
    ModuleNotFoundError: onnxruntime is missing.
    """
    onnxruntime: Any = import_module("onnxruntime")
    encode, decode = (onnxruntime.InferenceSession(folder / name).run for name in (ENCODER, DECODER))
    random, size = torch.Generator().manual_seed(0), model.config.image_size
    differences, differing, pixels = [0.0], 0, 0
    for number in range(prompts):
        if number % _PROMPTS_OF_IMAGE == 0:
            source = torch.randint(max(size // 4, 1), size + 1, (2,), generator=random)
            taken = (2 * source * size + source.max()) // (2 * source.max())
            image = torch.randint(256, (*taken.tolist(), 3), generator=random).float()
            embedded = torch.from_numpy(encode(None, {"input_image": image.numpy()})[0])
            differences.append(float((embedded - Encoder(model)(image)).abs().max()))
        inputs = (embedded, *_prompt(model, random, 1 + number % 12), source.float())
        given = {name: x.numpy() for name, x in zip(_INPUTS, inputs, strict=True)}
        outputs, expected = [torch.from_numpy(x) for x in decode(None, given)], Decoder(model)(*inputs)
        differences += [float((x - y).abs().max()) for x, y in zip(outputs, expected, strict=True)]
        differing += int(((outputs[0] > 0) != (expected[0] > 0)).sum())
        pixels += outputs[0].numel()
    return max(differences), differing / max(pixels, 1)


def _prompt(model: Sam, random: torch.Generator, points: int) -> tuple[Tensor, ...]:
    """Random points of any label, with a random earlier mask or without one."""
    low = 4 * model.config.side
    return (
        torch.rand(1, points, 2, generator=random) * model.config.image_size,
        torch.randint(-1, 4, (1, points), generator=random).float(),
        torch.randn(1, 1, low, low, generator=random),
        torch.randint(0, 2, (1,), generator=random).float(),
    )


FREQUENCIES = "prompt_encoder.shared_embedding.positional_embedding"
_NAMES = (  # a pattern of the published names, and its replacement
    (r"\.norm(\d)\.", r".layer_norm\1."),
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


def write_transformers(folder: Path, weights: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Write config.json, preprocessor_config.json and model.safetensors."""
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
