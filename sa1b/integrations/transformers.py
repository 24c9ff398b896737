"""Shards for `SamModel` and `Sam2Model` of Hugging Face's transformers and its `Trainer`."""

import reprlib
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.arguments import BadType, BadValue, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, takes_view
from sa1b.masks import geometry
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample


class SamShards:
    """A `torch.utils.data.Dataset` of the images of a view, for `SamModel` or `Sam2Model`.

    Args:
        root: folder that `sa1b reshard` made, or its URL. Images must have a mask.
        processor: a `SamProcessor` or a `Sam2Processor`.
        masks: number of masks of a sample. They are chosen by torch's generator, with repetition if an image
            has fewer.
        prompt: the exact box of each mask, or a uniform random pixel of it as a point.
        options: `view`, the name of a view, and arguments of `sa1b.open`.
    """

    @takes_view
    def __init__(
        self,
        root: str,
        processor: Any,
        *,
        masks: int = 8,
        prompt: Literal["box", "point"] = "box",
        **options: Unpack[ViewOptions],
    ) -> None:
        self.samples = ViewSamples(root, **options)
        if prompt not in ("box", "point"):
            raise BadValue(f"prompt={prompt!r}: no such prompt; pass 'box' or 'point'")
        self.masks, self.prompt = whole_number("masks", masks, 1), prompt
        if not hasattr(processor, "image_processor"):
            raise BadType(
                f"processor={reprlib.repr(processor)}: no processor; pass a SamProcessor or a Sam2Processor"
            )
        self.processor = processor

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """The arguments of the model for one image, without the dimension of the batch, and "labels", int64
        [masks, M, M] of 0 and 1, where M is the side of the predicted masks. BadValue: it has no mask.
        """
        sample, kept = self.samples.with_masks(position)
        order = torch.randperm(len(kept)).numpy()
        chosen = kept[np.resize(order, self.masks)]
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (self.masks,)).numpy().view(np.uint64)
        return self.arguments(sample, chosen, words)

    def arguments(
        self, sample: Sample, chosen: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> dict[str, Tensor]:
        """The arguments for these masks of a sample; `words`: random, for the points of the masks."""
        runs, image = sample.annotations.runs(chosen), sample.image
        scale = np.array(image.shape[1::-1]) / (runs.width, runs.height)  # of a smaller stored image
        if self.prompt == "box":
            boxes = geometry.bbox(runs).astype(np.float64)
            boxes[:, 2:] += boxes[:, :2] - 1
            given: dict[str, Any] = {"input_boxes": [(boxes * np.tile(scale, 2)).tolist()]}
        else:
            points = geometry.uniform_point(runs, words) * scale
            given = {
                "input_points": [[[point] for point in points.tolist()]],
                "input_labels": [[[1]] * len(points)],
            }
        encoded = self.processor(images=image, **given, return_tensors="pt")
        arguments: dict[str, Tensor] = {name: value[0] for name, value in encoded.items()}
        settings = self.processor.image_processor
        padding = (0, 0, 0, 0)
        if low := settings.mask_size.get("longest_edge"):
            longer = max(image.shape[:2])
            rows, columns = (int(side * low / longer + 0.5) for side in image.shape[:2])  # as the processor
            padding = (0, low - columns, 0, low - rows)
        else:  # of SAM 2: the image is stretched
            rows, columns = (settings.mask_size[side] for side in ("height", "width"))
        masks = torch.from_numpy(rasterize(runs, rows, columns).astype(np.int64))
        return arguments | {"labels": F.pad(masks, padding)}


def mask_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss of SAM's paper for `Trainer(compute_loss_func=mask_loss)`: focal and dice loss of the best
    mask of each prompt, 20 to 1, and the squared error of its predicted IoU; a mean over masks.

    Args:
        outputs: of the model: pred_masks [B, masks, K, M, M] and iou_scores [B, masks, K].
        labels: [B, masks, M, M], see `SamShards`.
        num_items_in_batch: pixels of the labels of all accumulated batches, as `Trainer` counts them.
    """
    logits, target = outputs.pred_masks.float(), labels[:, :, None].float()
    probability = logits.sigmoid()
    right = probability * target + (1 - probability) * (1 - target)
    weight = 0.25 * target + 0.75 * (1 - target)
    entropy = F.binary_cross_entropy_with_logits(logits, target.expand_as(logits), reduction="none")
    focal = (weight * (1 - right) ** 2 * entropy).mean(dim=(-2, -1))
    both = (probability * target).sum(dim=(-2, -1))
    dice = 1 - (2 * both + 1) / (probability.sum(dim=(-2, -1)) + target.sum(dim=(-2, -1)) + 1)
    predicted = logits > 0
    hits = (predicted & (target > 0)).sum(dim=(-2, -1))
    iou = hits / (predicted | (target > 0)).sum(dim=(-2, -1)).clamp(min=1)
    of_masks, best = (20 * focal + dice).min(dim=-1)
    error = (outputs.iou_scores.float() - iou).square().gather(-1, best[..., None])[..., 0]
    count = of_masks.numel() if num_items_in_batch is None else num_items_in_batch / labels[0, 0].numel()
    loss: Tensor = (of_masks + error).sum() / count
    return loss
