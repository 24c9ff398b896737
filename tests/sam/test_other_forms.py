"""Weights in the forms of other programs: the same masks in transformers and in onnxruntime."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sa1b
from sa1b.sam.mask_decoder import SINGLE
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.other_forms import (
    DECODER,
    ENCODER,
    OPSET,
    Decoder,
    Encoder,
    largest_difference,
    write_onnx,
    write_transformers,
)
from tests.sam.random_weights import randomise

SMALL = ModelConfig(image_size=64, width=16, depth=2, heads=2, global_blocks=(1,), window=2, channels=32)
PIXELS = ModelConfig(
    image_size=64, width=16, depth=1, heads=2, global_blocks=(0,), window=2, channels=32, pixel_features=4
)


def random_model(config: ModelConfig) -> Sam:
    """A model whose masks are neither empty nor everything."""
    torch.manual_seed(3)
    model = Sam(config)
    randomise(model)
    return model.eval()


def test_transformers_opens_the_folder_and_has_the_same_masks(tmp_path: Path) -> None:
    package: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
    model = random_model(SMALL)
    write_transformers(tmp_path, model.state_dict(), SMALL)
    theirs, report = package.SamModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    processor: Any = importlib.import_module(
        "transformers.models.sam.image_processing_pil_sam"
    ).SamImageProcessorPil
    processor = processor.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    prepared = processor(image, return_tensors="pt")
    points = np.array([[[10.0, 20.0]], [[40.0, 30.0]], [[60.0, 5.0]]])
    with torch.no_grad():
        given = torch.from_numpy(points).float()[None]
        found = theirs(prepared["pixel_values"], given, torch.ones(1, 3, 1, dtype=torch.int64))
        sizes = prepared["original_sizes"], prepared["reshaped_input_sizes"]
        masks = processor.post_process_masks(found.pred_masks, *sizes)[0].numpy()
    expected = sa1b.predict(model, image, points=points, all_candidates=True)
    np.testing.assert_allclose(found.pred_masks[0].numpy(), expected.logits, atol=1e-4)
    assert np.array_equal(masks, expected.masks)
    assert 0.05 < masks.mean() < 0.95


@pytest.mark.parametrize("config", [SMALL, PIXELS])
def test_the_modules_of_the_two_files_have_the_masks_of_predict(config: ModelConfig) -> None:
    model, random = random_model(config), np.random.default_rng(1)
    for height, width in ((64, 40), (30, 64)):
        image = random.integers(0, 256, (height, width, 3), np.uint8)
        embeddings = Encoder(model)(torch.from_numpy(image).float())
        one = random.random((1, 1, 2)) * (width - 1, height - 1)
        box = np.array([[3.0, 4.0, width - 5.0, height - 6.0]])
        for given, points, labels in (
            ({"points": one}, [*one[0], [0, 0]], [1, -1]),
            ({"boxes": box}, box.reshape(2, 2), [2, 3]),
            ({"points": one, "boxes": box}, [*one[0], *box.reshape(2, 2)], [1, 2, 3]),
        ):
            expected = sa1b.predict(model, image, **given)
            masks, iou, low = decoded(model, embeddings, points, labels, (height, width))
            assert np.array_equal(masks[0] > 0, expected.masks)
            np.testing.assert_allclose(iou[0], expected.predicted_iou, atol=1e-5)
        _, _, again = decoded(model, embeddings, points, labels, (height, width), torch.from_numpy(low))
        prompt = torch.from_numpy(np.array(points, np.float32))[None], torch.tensor([labels])
        with torch.no_grad():
            logits, _ = model.decode(
                embeddings, torch.tensor([0]), *prompt, torch.from_numpy(low), candidates=SINGLE
            )
        torch.testing.assert_close(torch.from_numpy(again), logits)
        assert np.abs(again - low).max() > 1e-3


def decoded(
    model: Sam,
    embeddings: Tensor,
    points: Any,
    labels: list[int],
    size: tuple[int, int],
    earlier: Tensor | None = None,
) -> list[Any]:
    """Masks, predicted IoU and low-resolution logits as arrays."""
    side = 4 * model.config.side
    with torch.no_grad():
        found = Decoder(model)(
            embeddings,
            torch.from_numpy(np.array(points, np.float32))[None],
            torch.tensor(labels).float()[None],
            torch.zeros(1, 1, side, side) if earlier is None else earlier,
            torch.tensor([float(earlier is not None)]),
            torch.tensor(size).float(),
        )
    return [one.numpy() for one in found]


@pytest.mark.slow  # tracing takes half a minute
@pytest.mark.parametrize("config", [SMALL, PIXELS])
def test_onnxruntime_has_the_masks_of_torch(config: ModelConfig, tmp_path: Path) -> None:
    onnx: Any = pytest.importorskip("onnx", reason="the package onnx is not installed")
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"the package {name} is not installed")
    model = random_model(config)
    write_onnx(tmp_path, model)
    largest, differing = largest_difference(tmp_path, model)
    assert largest < 1e-4
    assert differing < 1e-4
    for name in (ENCODER, DECODER):
        document = onnx.load(tmp_path / name)
        onnx.checker.check_model(document)
        assert [one.version for one in document.opset_import if not one.domain] == [OPSET]
    with torch.no_grad():
        next(iter(model.mask_decoder.iou_prediction_head.parameters())).add_(1)
    assert largest_difference(tmp_path, model, 2)[0] > 0.01  # it can fail
