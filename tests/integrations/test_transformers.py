"""Shards for SamModel of transformers: the arguments that its processor makes of exported files; a training."""

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

from sa1b.integrations.transformers import SamShards, mask_loss
from sa1b.sam.model import ModelConfig
from sa1b.sam.other_forms import settings

package: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
SMALL = ModelConfig(image_size=64, width=16, depth=1, heads=2, global_blocks=(0,), window=2, channels=32)


def processor_of(name: str) -> Any:
    """A small processor of SAM or SAM 2. That of SAM 2 needs torchvision; without it, its image processor is
    that of SAM with the sizes of SAM 2's, to which images are stretched.
    """
    module = importlib.import_module("transformers.models.sam.image_processing_pil_sam")
    square, low = {"height": 64, "width": 64}, {"height": 16, "width": 16}
    if name == "sam":
        sizes = {"size": {"longest_edge": 64}, "mask_size": {"longest_edge": 16}}
        images = module.SamImageProcessorPil(pad_size=square, mask_pad_size=low, **sizes)
        return package.SamProcessor(images)
    try:
        kind = importlib.import_module("transformers.models.sam2.image_processing_sam2").Sam2ImageProcessor
    except (ImportError, RuntimeError):
        pil = importlib.import_module("transformers.image_processing_backends").PilBackend
        body = {"resize": pil.resize, "do_pad": False, "size": square, "mask_size": low}
        kind = type("Sam2Images", (module.SamImageProcessorPil,), body)
    return package.Sam2Processor(kind(size=square, mask_size=low))


@pytest.fixture(scope="module", params=["sam", "sam2"])
def processor(request: pytest.FixtureRequest) -> Any:
    return processor_of(request.param)


@pytest.mark.parametrize("prompt", ["box", "point"])
def test_the_arguments_are_those_of_the_processor_for_the_stored_file_and_decoded_masks(
    root: Path, processor: Any, prompt: str
) -> None:
    dataset = SamShards(str(root), processor, view="masks", prompt=prompt, masks=3)
    for position in range(len(dataset)):
        sample = dataset.samples.sample(position)
        chosen = np.resize(dataset.samples.kept(sample), 3)
        words = np.array([0, 1 << 63, (1 << 64) - 1], np.uint64)
        found = dataset.arguments(sample, chosen, words)
        file = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
        document = sample.annotations.to_json()["annotations"]
        masks = [coco.decode(document[int(one)]["segmentation"]) for one in chosen]
        given: dict[str, Any] = {}
        if prompt == "box":
            corners = [
                np.argwhere(mask).min(0).tolist() + np.argwhere(mask).max(0).tolist() for mask in masks
            ]
            given["input_boxes"] = [
                [[float(x0), float(y0), float(x1), float(y1)] for y0, x0, y1, x1 in corners]
            ]
        else:
            columns = [np.argwhere(mask.T) for mask in masks]  # (x, y), down the columns
            places = (0, len(columns[1]) // 2, len(columns[2]) - 1)
            pairs = zip(columns, places, strict=True)
            given["input_points"] = [[[[float(v) for v in points[place]]] for points, place in pairs]]
            given["input_labels"] = [[[1]] * 3]
        expected = processor(images=file, **given, return_tensors="pt")
        assert found.keys() == {*expected.keys(), "labels"}
        for name, value in expected.items():
            assert torch.equal(found[name], value[0]), name
        for mask, label in zip(masks, found["labels"], strict=True):
            theirs = processor.image_processor(file, segmentation_maps=mask, return_tensors="pt")["labels"][0]
            assert np.array_equal(label.numpy(), np.asarray(theirs))


def test_samples_differ_by_torchs_generator_and_are_reproducible(root: Path, processor: Any) -> None:
    dataset, found = SamShards(str(root), processor, view="masks", prompt="point", masks=4), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(dataset[0]["input_points"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_image_without_masks_is_refused_with_the_view_to_make(root: Path, processor: Any) -> None:
    dataset = SamShards(str(root), processor)
    empty = next(i for i in range(len(dataset)) if not len(dataset.samples.sample(i).annotations))
    with pytest.raises(ValueError, match="has no mask; pass a view made with --images-where 'masks >= 1'"):
        dataset[empty]


def test_the_loss_is_the_mean_over_the_masks_of_all_accumulated_batches() -> None:
    torch.manual_seed(0)
    target = (torch.rand(2, 3, 8, 8) > 0.5).long()
    outputs = package.models.sam.modeling_sam.SamImageSegmentationOutput(
        iou_scores=torch.ones(2, 3, 3), pred_masks=torch.randn(2, 3, 3, 8, 8)
    )
    outputs.pred_masks[:, :, 1] = 20 * (target * 2.0 - 1)  # the second candidate is right
    assert mask_loss(outputs, target) < 1e-3
    outputs.pred_masks[:, :, 1] *= -1
    whole = mask_loss(outputs, target)
    assert whole > 0.3
    parts = [
        mask_loss(type(outputs)(iou_scores=outputs.iou_scores[i], pred_masks=outputs.pred_masks[i]), target[i],
                  torch.tensor(target.numel()))
        for i in (slice(0, 1), slice(1, 2))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)


def model_of(name: str) -> Any:
    if name == "sam":
        document = settings(SMALL)
        return package.SamModel(
            package.SamConfig(**{n: document[n] for n in document if n.endswith("_config")})
        )
    sizes = {"hidden_size": 16, "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [16, 32, 64, 128]}
    backbone = package.Sam2HieraDetConfig(
        image_size=[64, 64], num_attention_heads=1, num_attention_heads_per_stage=[1, 1, 2, 2],
        window_positional_embedding_background_size=[2, 2], global_attention_blocks=[3], **sizes,
    )  # fmt: skip
    vision = package.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )  # fmt: skip
    prompts = package.Sam2PromptEncoderConfig(hidden_size=32, image_size=64)
    decoder = package.Sam2MaskDecoderConfig(
        hidden_size=32, mlp_dim=64, num_attention_heads=2, iou_head_hidden_dim=32
    )
    config = package.Sam2Config(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder
    )
    return package.Sam2Model(config)


@pytest.mark.slow  # Trainer imports for seconds
@pytest.mark.parametrize("name", ["sam", "sam2"])
def test_the_trainer_learns_from_shards(root: Path, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = package.TrainingArguments(
        str(tmp_path), remove_unused_columns=False, max_steps=30, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True, save_steps=15,
    )  # fmt: skip
    dataset = SamShards(str(root), processor_of(name), view="masks", masks=4)
    trainer = package.Trainer(model_of(name), arguments, train_dataset=dataset, compute_loss_func=mask_loss)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
