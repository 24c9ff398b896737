"""How good the model is: mean IoU after 1, 3 and 5 clicks and with a box, on images it never trains on."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.engine.control import Control
from sa1b.engine.feed import DataConfig, Feed
from sa1b.engine.gradients import autocast
from sa1b.engine.metrics import score_line
from sa1b.engine.model import declared
from sa1b.engine.parallel import ParallelConfig, wrap
from sa1b.engine.ranks import RankInfo
from sa1b.errors import UsageError
from sa1b.gallery.predictions import Predicted
from sa1b.masks import geometry
from sa1b.masks.dense import runs_of
from sa1b.masks.grid import framed, framed_size
from sa1b.sam.score import Score
from sa1b.storage.atomic import write_whole
from sa1b.stream.batch import Batch
from sa1b.stream.dataset import Stream

if TYPE_CHECKING:
    from sa1b.engine.config import Config


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """When and on what the model is evaluated.

    Attributes:
        view: View to evaluate on (tools/view.py --held-out ... --split held-out); it must share no image with
            the one trained on.
        every: Steps from one evaluation to the next, and one at the end; 0: never while training.
        masks: At most so many masks an image, the same ones every time.
        show: So many images, the first ones of the view, have the model's masks written to
            OUT/predictions.jsonl: tools/gallery.py --predictions draws them beside the true ones.
    """

    view: str | None = None
    every: int = 0
    masks: int = 16
    show: int = 24

    def __post_init__(self) -> None:
        if self.every < 0 or self.masks < 1 or self.show < 0:
            raise UsageError(
                "--evaluation.masks must be at least 1, --evaluation.every and --evaluation.show 0 or more"
            )


def held_out_feed(
    config: EvaluationConfig,
    data: DataConfig,
    image_size: int,
    rank_info: RankInfo,
    run: Path,
    training: Stream | None,
) -> Feed | None:
    """The feed of an evaluation: every image of the view once over all ranks; None without a view.

    Args:
        training: must share no image with the view; None: nothing is trained.

    Raises:
        UsageError: it does; the message says how many.
    """
    if config.view is None:
        return None
    batch = max(
        rank_info.world_size,
        min(data.global_batch, rank_info.world_size * (data.micro_batch or data.global_batch)),
    )
    settings = replace(data, masks=config.masks, strategy="uniform", global_batch=batch)
    # Another seed would score other masks: figures of different runs could not be compared.
    feed = Feed(settings, image_size, rank_info, run, seed=0, view=config.view, order="sequential")
    if training is None:
        return feed
    own, others = (view.table_rows(np.arange(len(view))) for view in (feed.stream.view, training.view))
    if shared := len(np.intersect1d(own, others)):
        raise UsageError(
            f"--evaluation.view {config.view} shares {shared:,} images with what is trained on; make two "
            "views with the same tools/view.py --held-out PART, one with --split train and one with "
            "--split held-out, and pass the first as --data.view"
        )
    return feed


@torch.no_grad()
def evaluate(
    module: nn.Module,
    feed: Feed,
    parallel: ParallelConfig,
    rank_info: RankInfo,
    show: int,
    out: Path,
    control: Control,
) -> dict[str, float] | None:
    """Mean IoU by prompt and mask size, the same figure at any world size; see sa1b.sam.score.

    Collective. The module is left as it was.

    Args:
        module: wrapped `Interactive`.
        feed: of held-out images; goes from its beginning.
        show: images whose predicted masks are written down.
        out: folder of the run, for predictions.jsonl.
        control: of the run, asked for each micro-batch.

    Returns:
        The scores of `Score.result`; "damaged", the number of images that cannot be read and are left out,
        see OUT/damaged.jsonl; "empty", the number of masks without a pixel at the evaluated resolution, which
        are left out too. None: the run was asked to stop meanwhile.
    """
    training = module.training
    module.eval()
    model = declared(module)
    score = Score.empty(rank_info.device)
    counts = torch.zeros(2, dtype=torch.int64, device=rank_info.device)
    images = len(feed.stream.view)
    shown: list[tuple[int, str]] = []
    feed.load_state_dict({**feed.state_dict(), "position": 0})
    try:
        # As many micro-batches on all ranks, so that each of them asks as often.
        for batch in (batch for batches in feed.steps() for batch in batches):
            if control.poll():
                return None
            inputs = model.inputs(batch, seed=0)
            with autocast(parallel.precision, rank_info.device):
                found = module(*inputs, evaluate=True)
            weights = inputs[1].weights
            score.add(found["intersections"], found["unions"], batch.areas, weights)
            damaged = ~batch.valid & (batch.positions < images)
            empty = batch.valid[batch.masks.image] & (weights == 0)
            counts += torch.stack((damaged.sum(), empty.sum()))
            if bool((batch.positions < show).any()):
                shown += [line for line in prediction_lines(batch, weights, found) if line[0] < show]
    finally:
        feed.close()
        module.train(training)
    if rank_info.world_size > 1:
        score.all_reduce()
        dist.all_reduce(counts)
        of_all: list[list[tuple[int, str]]] = [[] for _ in range(rank_info.world_size)]
        dist.all_gather_object(of_all, shown)
        shown = [line for some in of_all for line in some]
    if show and rank_info.rank == 0:
        with control.writing():
            write_whole(out / "predictions.jsonl", "".join(line for _, line in sorted(shown)).encode())
    return score.result() | dict(zip(("damaged", "empty"), counts.tolist(), strict=True))


def prediction_lines(batch: Batch, weights: Tensor, found: dict[str, Tensor]) -> list[tuple[int, str]]:
    """Position of an image and its line of the file, for each image of a micro-batch that has masks.

    Args:
        weights: [M], 0 for masks that do not count.
        found: of `Interactive` in an evaluation.
    """
    image = batch.masks.image.cpu()
    drawn, image_size = found["masks"].cpu().numpy(), batch.images.shape[-1]
    unions = found["unions"][:, 0].clamp(min=1)
    iou = (found["intersections"][:, 0] / unions).double().cpu().numpy()
    predicted = found["predicted_iou"].double().cpu().numpy()
    points, mask_ids = batch.points.double().cpu().numpy(), batch.mask_ids.cpu().numpy()
    counts = (weights > 0).cpu()
    made = []
    for i, (image_id, position) in enumerate(zip(batch.ids.tolist(), batch.positions.tolist(), strict=True)):
        own = torch.nonzero((image == i) & counts).flatten().numpy()
        if not len(own):
            continue
        size = (int(batch.source_sizes[i, 0]), int(batch.source_sizes[i, 1]))
        # The part of the raster that the image takes, stretched to its source.
        rows, columns = (
            max(1, int((axis.sources() >= 0).sum())) for axis in framed(size, image_size, drawn.shape[-1])
        )
        runs = geometry.resize(runs_of(drawn[own][:, :rows, :columns]), *size)
        scale = np.array(size[::-1]) / framed_size(*size, image_size)[::-1]
        some = Predicted(mask_ids[own], points[own] * scale, iou[own], predicted[own], runs)
        made.append((position, some.line(image_id)))
    return made


def score(config: "Config", module: nn.Module, rank_info: RankInfo) -> None:
    """Evaluate a model without training and print the scores: --evaluate-only."""
    held_out = held_out_feed(config.evaluation, config.data, config.image_size, rank_info, config.out, None)
    assert held_out is not None  # refused by Config.check
    module = wrap(module, config.parallel, rank_info)
    show, control = config.evaluation.show, Control(rank_info)
    scores = evaluate(module, held_out, config.parallel, rank_info, show, config.out, control)
    control.check()
    if rank_info.rank == 0 and scores is not None:
        print(json.dumps(scores) if config.json_output else score_line(scores))
