"""Shards for SamModel of transformers: the arguments that its processor makes of exported files; a training."""

import importlib
import io
import json
import sys
import time
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
from sa1b.views.selection import Selection, select
from tests.shards.tiny_source import ROOTS, make_root, two_sources

package: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
SMALL = ModelConfig(image_size=64, width=16, depth=1, heads=2, global_blocks=(0,), window=2, channels=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    made = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    select(made, Selection(images_where="masks >= 1"), name="masks", quiet=True)
    return str(made)


@pytest.fixture(scope="module")
def processor() -> Any:
    images = importlib.import_module("transformers.models.sam.image_processing_pil_sam").SamImageProcessorPil(
        size={"longest_edge": 64},
        pad_size={"height": 64, "width": 64},
        mask_size={"longest_edge": 16},
        mask_pad_size={"height": 16, "width": 16},
    )
    return package.SamProcessor(images)


@pytest.mark.parametrize("prompt", ["box", "point"])
def test_the_arguments_are_those_of_the_processor_for_the_stored_file_and_decoded_masks(
    root: str, processor: Any, prompt: str
) -> None:
    dataset = SamShards(root, processor, view="masks", prompt=prompt, masks=3)
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
            theirs = processor.image_processor(file, segmentation_maps=mask)["labels"][0]
            assert np.array_equal(label.numpy(), np.asarray(theirs))


def test_samples_differ_by_torchs_generator_and_are_reproducible(root: str, processor: Any) -> None:
    dataset, found = SamShards(root, processor, view="masks", prompt="point", masks=4), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(dataset[0]["input_points"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_image_without_masks_is_refused_with_the_view_to_make(root: str, processor: Any) -> None:
    dataset = SamShards(root, processor)
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


@pytest.mark.slow  # Trainer imports for seconds
def test_the_trainer_learns_from_shards(root: str, processor: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    document = settings(SMALL)
    parts = {name: document[name] for name in document if name.endswith("_config")}
    model = package.SamModel(package.SamConfig(**parts))
    arguments = package.TrainingArguments(
        str(tmp_path), remove_unused_columns=False, max_steps=30, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True, save_steps=15,
    )  # fmt: skip
    dataset = SamShards(root, processor, view="masks", masks=4)
    trainer = package.Trainer(model, arguments, train_dataset=dataset, compute_loss_func=mask_loss)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def main(root: str, exported: str, masks: int = 8) -> None:
    """Print images/s of shards and of the processor on files of `sa1b export --to sam2`, two passes."""
    images = importlib.import_module(
        "transformers.models.sam.image_processing_pil_sam"
    ).SamImageProcessorPil()
    processor = package.SamProcessor(images)
    dataset = SamShards(root, processor, masks=masks)
    low = importlib.import_module("transformers.image_utils").SizeDict(longest_edge=256)

    def of_files(position: int) -> None:
        name = f"sa_{dataset.samples.dataset.table.image_id[position]}"
        image = Image.open(f"{exported}/img_folder/{name}.jpg").convert("RGB")
        document = json.loads(Path(exported, "gt_folder", f"{name}.json").read_bytes())["annotations"]
        for one in document[:masks]:
            x, y, width, height = one["bbox"]
            segmentation = coco.decode(one["segmentation"])
            images.resize(segmentation[None], size=low, resample=0)
        processor(image, input_boxes=[[[x, y, x + width, y + height]] * masks], return_tensors="pt")

    for _ in range(2):
        for kind, read in (("files", of_files), ("shards", dataset.__getitem__)):
            began = time.process_time()
            for position in range(len(dataset)):
                read(position)
            print(f"{kind}: {len(dataset) / (time.process_time() - began):.2f} images per CPU second")


if __name__ == "__main__":
    main(*sys.argv[1:3])
