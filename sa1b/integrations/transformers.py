"""Shards for `SamModel` and `Sam2Model` of Hugging Face's transformers and its `Trainer`."""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.integrations import ViewSamples
from sa1b.masks import geometry
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample


class SamShards:
    """The images of a view for `SamModel` or `Sam2Model`: see docs/training.md, "Other training loops"."""

    def __init__(
        self, root: str, processor: Any, *, masks: int = 8, prompt: Literal["box", "point"] = "box",
        **options: Any,
    ) -> None:  # fmt: skip
        self.samples, self.processor, self.masks = ViewSamples(root, **options), processor, masks
        self.is_box = {"box": True, "point": False}[prompt]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """The arguments of the model for one image, without the dimension of the batch, and "labels", int64
        [masks, M, M] of 0 and 1, where M is the side of the predicted masks. BadValue: it has no mask.
        """
        sample, kept = self.samples.with_masks(position)
        chosen = np.resize(kept[torch.randperm(len(kept)).numpy()], self.masks)
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (self.masks,)).numpy().view(np.uint64)
        return self.arguments(sample, chosen, words)

    def arguments(self, sample: Sample, chosen: Any, words: Any) -> dict[str, Tensor]:
        """The arguments for these masks of a sample; `words`, uint64, choose the points."""
        runs, image = sample.annotations.runs(chosen), sample.image
        scale = np.array(image.shape[1::-1]) / (runs.width, runs.height)  # of a smaller stored image
        boxes = geometry.bbox(runs).astype(np.float64)
        boxes[:, 2:] += boxes[:, :2] - 1
        given: dict[str, Any] = {"input_boxes": [(boxes * np.tile(scale, 2)).tolist()]}
        if not self.is_box:
            points = (geometry.uniform_point(runs, words) * scale)[None, :, None].tolist()
            given = {"input_points": points, "input_labels": [[[1]] * len(words)]}
        encoded = self.processor(images=image, **given, return_tensors="pt")
        low, padding = self.processor.image_processor.mask_size, (0, 0, 0, 0)
        if side := low.get("longest_edge"):  # of SAM; for SAM 2, the image is stretched
            rows, columns = (int(one * side / max(image.shape[:2]) + 0.5) for one in image.shape[:2])
            low, padding = {"height": rows, "width": columns}, (0, side - columns, 0, side - rows)
        labels = torch.from_numpy(rasterize(runs, low["height"], low["width"]).astype(np.int64))
        return {name: value[0] for name, value in encoded.items()} | {"labels": F.pad(labels, padding)}


def mask_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss of SAM's paper for `Trainer(compute_loss_func=mask_loss)`: focal and dice loss of the best
    mask of each prompt, 20 to 1, and the squared error of its predicted IoU; a mean over masks.
    """
    logits, target = outputs.pred_masks.float(), labels[:, :, None].float()  # [B, masks, K or 1, M, M]
    probability, predicted, pixels = logits.sigmoid(), logits > 0, (-2, -1)
    entropy = F.binary_cross_entropy_with_logits(logits, target.expand_as(logits), reduction="none")
    focal = ((0.75 - 0.5 * target) * (probability - target).square() * entropy).mean(pixels)
    dice = 1 - (2 * (probability * target).sum(pixels) + 1) / ((probability + target).sum(pixels) + 1)
    iou = (predicted & (target > 0)).sum(pixels) / (predicted | (target > 0)).sum(pixels).clamp(min=1)
    of_masks, best = (20 * focal + dice).min(dim=-1)
    error = (outputs.iou_scores.float() - iou).square().gather(-1, best[..., None])[..., 0]
    # Trainer counts the pixels of the labels of all accumulated batches.
    count = of_masks.numel() if num_items_in_batch is None else num_items_in_batch / labels[0, 0].numel()
    loss: Tensor = (of_masks + error).sum() / count
    return loss
