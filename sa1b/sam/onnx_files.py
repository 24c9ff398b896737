"""A SAM as two ONNX files, encoder.onnx and decoder.onnx, as runtimes and annotation tools read them.

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
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.sam.mask_decoder import MASKS
from sa1b.sam.model import Sam

OPSET = 18
_check: Any = torch._check
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
_INPUTS = (
    "image_embeddings", "point_coords", "point_labels", "mask_input", "has_mask_input", "orig_im_size",
)  # fmt: skip
_OUTPUTS = ("masks", "iou_predictions", "low_res_masks")
_PROMPTS_OF_IMAGE = 25
_LARGEST = 1_900_000_000  # bytes of weights in one file: protocol buffers end at 2 GiB


class Encoder(nn.Module):
    """Resized pixels -> embeddings; see the module."""

    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_image: Tensor) -> Tensor:
        size = self.model.config.image_size
        height, width = input_image.shape[:2]
        pixels = (input_image.permute(2, 0, 1) - self.model.pixel_mean) / self.model.pixel_std
        pixels = F.pad(pixels, (0, size - width, 0, size - height))[None]
        return self.model.with_features(pixels, self.model.image_encoder(pixels))


class Decoder(nn.Module):
    """Embeddings and prompts of one mask -> logits; see the module."""

    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model

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
            mask_input,
            has_mask_input > 0,
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
    random, channels = np.random.default_rng(0), model.config.channels + 16 * model.config.pixel_features
    rows, columns = dim("rows", min=1, max=size), dim("columns", min=1, max=size)
    points = dim("num_points", min=1, max=4096)
    image, embeddings = torch.zeros(size, size - 1, 3), torch.zeros(1, channels, *2 * (model.config.side,))
    prompt = (embeddings, *_prompt(model, random, 3).values(), torch.tensor([size, size - 1.0]))
    shapes = (None, {1: points}, {1: points}, None, None, None)
    for module, example, name, inputs, outputs, dynamic in (
        (Encoder(model), (image,), ENCODER, ["input_image"], ["image_embeddings"], ({0: rows, 1: columns},)),
        (Decoder(model), prompt, DECODER, [*_INPUTS], [*_OUTPUTS], shapes),
    ):
        external = 4 * sum(one.numel() for one in module.parameters()) > _LARGEST
        with _quiet():
            torch.onnx.export(
                module.eval(),
                example,
                folder / name,
                input_names=inputs,
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                external_data=external,
                dynamic_shapes=dynamic,
                verbose=False,
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes about torchvision and about its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def largest_difference(folder: Path, model: Sam, prompts: int = 100) -> tuple[float, float]:
    """The files in onnxruntime beside the model in torch, on random pixels and prompts.

    Returns the largest difference of a logit or predicted IoU, and the fraction of pixels whose masks differ.
    ModuleNotFoundError: onnxruntime is missing.
    """
    onnxruntime: Any = import_module("onnxruntime")
    encode, decode = (onnxruntime.InferenceSession(folder / name).run for name in (ENCODER, DECODER))
    random, differences, differing, pixels = np.random.default_rng(0), [0.0], 0, 0
    for number in range(prompts):
        if number % _PROMPTS_OF_IMAGE == 0:
            image, source = _image(model, random)
            embedded = torch.from_numpy(encode(None, {"input_image": image.numpy()})[0])
            differences.append(float((embedded - Encoder(model)(image)).abs().max()))
        inputs = {
            "image_embeddings": embedded,
            **_prompt(model, random, 1 + number % 12),
            "orig_im_size": source,
        }
        found = [torch.from_numpy(x) for x in decode(None, {k: x.numpy() for k, x in inputs.items()})]
        expected = Decoder(model)(*inputs.values())
        differences += [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
        differing += int(((found[0] > 0) != (expected[0] > 0)).sum())
        pixels += found[0].numel()
    return max(differences), differing / max(pixels, 1)


def _image(model: Sam, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Random pixels of a resized image, and the size of its source."""
    size = model.config.image_size
    source = random.integers(max(size // 4, 1), size + 1, 2)
    rows, columns = (2 * source * size + source.max()) // (2 * source.max())
    pixels = random.integers(0, 256, (rows, columns, 3))
    return _float(pixels), _float(source)


def _prompt(model: Sam, random: np.random.Generator, points: int) -> dict[str, Tensor]:
    """Random points of any label, with a random earlier mask or without one."""
    low = 4 * model.config.side
    return {
        "point_coords": _float(random.random((1, points, 2)) * model.config.image_size),
        "point_labels": _float(random.integers(-1, 4, (1, points))),
        "mask_input": _float(random.standard_normal((1, 1, low, low))),
        "has_mask_input": _float(random.integers(0, 2, 1)),
    }


def _float(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
