"""The scores of an evaluation of grounding, summed in integers: they do not depend on order or world size.

For each phrase, the regions of its image are ordered by similarity:

    recall_at_1, recall_at_5   part of the phrases whose region is the first, or among the first five
    chance_at_1                the same for a region chosen at random
    miou_region                mean IoU of the first region with that of the phrase; 1 for equal phrases
    miou_mask                  mean IoU of the mask that the model predicts for the phrase, without regions

Any region with the same phrase counts as a region of the phrase.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from sa1b.grounding.alignment import Phrased
from sa1b.masks.raster_torch import inside_image
from sa1b.masks.runs import Runs
from sa1b.sam.protocol import UNIT, Size, prediction_lines
from sa1b.sam.targets import overlaps
from sa1b.stream.batch import Batch

MEANS = ("recall_at_1", "recall_at_5", "chance_at_1", "miou_region", "miou_mask")
AT = (1, 5)


class GroundingScore:
    """Sums over the phrases of an evaluation."""

    def __init__(self, device: torch.device) -> None:
        # One for each of MEANS in units of 1 / UNIT, the phrases, and masks without a pixel, not scored.
        self.sums = torch.zeros(len(MEANS) + 2, dtype=torch.int64, device=device)
        self._found: dict[str, Tensor] = {}

    def add(self, module: nn.Module, inputs: tuple[Tensor, Phrased, Tensor], batch: Batch) -> None:
        """Evaluate the model on a micro-batch and add its phrases."""
        masks = inputs[1]
        outputs = module(*inputs, evaluate=True)
        present = batch.valid[masks.image] & masks.dense.flatten(1).any(dim=1).bool()
        same_image = masks.image[:, None] == masks.image[None]
        candidate = same_image & present[None]
        similarity = (outputs["texts"] @ outputs["regions"].T).masked_fill(~candidate, -torch.inf)
        described = candidate & (masks.keys[:, None] == masks.keys[None])
        rows = torch.nonzero(masks.counted).flatten()
        similarity, candidate, described = similarity[rows], candidate[rows], described[rows]
        phrases = (masks.keys >= 0) & batch.valid[masks.image]
        self.sums[-2] += len(rows)
        self.sums[-1] += (phrases & ~masks.counted).sum()
        if not len(rows):
            self._found = dict.fromkeys(("rows", "first", "iou", "chance"), rows)
            return
        best = similarity.masked_fill(~described, -torch.inf).amax(dim=1, keepdim=True)
        before = (similarity > best).sum(dim=1)
        first = similarity.argmax(dim=1)
        size, image_size = masks.dense.shape[-1], batch.images.shape[-1]
        inside = inside_image(masks.sizes, image_size, size)[masks.image]
        true = masks.dense.bool() & inside
        logits = outputs["logits"][rows]
        if size > logits.shape[-1]:
            logits = functional.interpolate(logits[:, None], (size, size), mode="bilinear")[:, 0]
        of_region = overlaps(true[first], true[rows])
        of_mask = overlaps((logits > 0) & inside[rows], true[rows])
        hits = [(before < at).long() * UNIT for at in AT]
        chance = described.sum(dim=1) * UNIT // candidate.sum(dim=1)
        ious = [both * UNIT // either.clamp(min=1) for both, either in (of_region, of_mask)]
        ious[0] = torch.where(before < 1, UNIT, ious[0])
        self.sums[:-2] += torch.stack([*hits, chance, *ious]).sum(dim=1)
        probability = (similarity * outputs["scale"]).softmax(dim=1).amax(dim=1)
        self._found = {"rows": rows, "first": first, "iou": ious[0] / UNIT, "chance": probability}

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        """Position and line of predictions.jsonl for each image of the micro-batch that was added last."""
        found = self._found
        texts = [*batch.extra.values()][-1]  # `Stream` adds the texts after the joined columns
        rows, first = found["rows"], found["first"].cpu().numpy()
        phrases = [x if isinstance(x := texts[row], str) else "(an embedding)" for row in rows.tolist()]
        offsets, counts = batch.masks.offsets.cpu().numpy(), batch.masks.runs.cpu().numpy().view(np.uint32)

        def runs_of(masks: npt.NDArray[np.int64], source: Size, _: Size) -> Runs:
            return Runs(counts, offsets, *source).select(first[masks])

        return prediction_lines(
            batch, rows, batch.points[rows], found["iou"], found["chance"], runs_of, phrases
        )

    def all_reduce(self) -> None:
        dist.all_reduce(self.sums)

    def result(self) -> dict[str, float]:
        """The means by name, from 0 to 1; "phrases", the number of phrases; and "empty"."""
        *sums, count, empty = self.sums.tolist()
        means: dict[str, float] = {"phrases": count}
        if count:
            means |= {name: total / (UNIT * count) for name, total in zip(MEANS, sums, strict=True)}
        return means | {"empty": empty}
