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

package: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")


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


@pytest.mark.parametrize("name", ["sam", "sam2"])
@pytest.mark.parametrize("prompt", ["box", "point"])
def test_the_arguments_are_those_of_the_processor_for_the_stored_file_and_decoded_masks(
    root: Path, name: str, prompt: Any
) -> None:
    processor = processor_of(name)
    dataset = SamShards(str(root), processor, view="masks", prompt=prompt, masks=3)
    for position in range(len(dataset)):
        sample = dataset.samples.sample(position)
        chosen = np.resize(dataset.samples.kept(sample), 3)
        found = dataset.arguments(sample, chosen, np.array([0, 1 << 63, (1 << 64) - 1], np.uint64))
        file = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
        document = sample.annotations.to_json()["annotations"]
        masks = [coco.decode(document[int(one)]["segmentation"]) for one in chosen]
        pixels = [np.argwhere(mask.T).astype(float) for mask in masks]  # (x, y), down the columns
        given: dict[str, Any] = {"input_boxes": [[[*of.min(0), *of.max(0)] for of in pixels]]}
        if prompt == "point":
            places = (0, len(pixels[1]) // 2, len(pixels[2]) - 1)
            points = [[of[place].tolist()] for of, place in zip(pixels, places, strict=True)]
            given = {"input_points": [points], "input_labels": [[[1]] * 3]}
        expected = processor(images=file, **given, return_tensors="pt")
        assert found.keys() == {*expected.keys(), "labels"}
        for key, value in expected.items():
            assert torch.equal(found[key], value[0]), key
        for mask, label in zip(masks, found["labels"], strict=True):
            theirs = processor.image_processor(file, segmentation_maps=mask, return_tensors="pt")["labels"][0]
            assert np.array_equal(label.numpy(), np.asarray(theirs))


def test_samples_differ_by_torchs_generator_and_are_reproducible(root: Path) -> None:
    dataset, found = SamShards(str(root), processor_of("sam"), view="masks", prompt="point", masks=4), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(dataset[0]["input_points"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_image_without_masks_is_refused_with_the_view_to_make(root: Path) -> None:
    with pytest.raises(ValueError, match="has no mask; pass a view made with --images-where 'masks >= 1'"):
        list(map(SamShards(str(root), processor_of("sam")).__getitem__, range(19)))


def test_the_loss_is_the_mean_over_the_masks_of_all_accumulated_batches() -> None:
    torch.manual_seed(0)
    target = (torch.rand(2, 3, 8, 8) > 0.5).long()
    kind = package.models.sam.modeling_sam.SamImageSegmentationOutput
    masks, scores = torch.randn(2, 3, 3, 8, 8), torch.ones(2, 3, 3)
    masks[:, :, 1] = 20 * (target * 2.0 - 1)  # the second candidate is right
    assert mask_loss(kind(iou_scores=scores, pred_masks=masks), target) < 1e-3
    masks[:, :, 1] *= -1
    whole = mask_loss(kind(iou_scores=scores, pred_masks=masks), target)
    assert whole > 0.3
    parts = [
        mask_loss(kind(iou_scores=scores[i], pred_masks=masks[i]), target[i], torch.tensor(target.numel()))
        for i in (slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.slow  # Trainer imports for seconds
def test_the_trainer_learns_from_shards(root: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
    vision |= {
        "global_attn_indexes": [0],
        "window_size": 2,
        "output_channels": 32,
        "mlp_dim": 64,
        "num_pos_feats": 16,
    }
    prompts = {"hidden_size": 32, "image_size": 64, "image_embedding_size": 4, "mask_input_channels": 16}
    decoder = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
    model = package.SamModel(
        package.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    )
    arguments = package.TrainingArguments(
        str(tmp_path), remove_unused_columns=False, max_steps=30, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True, save_steps=15,
    )  # fmt: skip
    dataset = SamShards(str(root), processor_of("sam"), view="masks", masks=4)
    trainer = package.Trainer(model, arguments, train_dataset=dataset, compute_loss_func=mask_loss)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
