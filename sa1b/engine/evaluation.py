"""Evaluation on held-out images: the scorer of the model, or mean IoU after 1, 3, 5 clicks and with a box.

Two protocols for clicks:

    uniform    clicks are uniform random pixels of the mask or of the error, IoU at the resolution of the
               losses: cheap, for curves of a training run
    sam        clicks at the centres of masks and errors, IoU at source resolution, as in the paper
               (sa1b.sam.protocol); also by mask size, and for the oracle's choice of three candidates
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.console import command
from sa1b.engine.coco_evaluation import detection_line, evaluate_coco, read_coco
from sa1b.engine.control import Control
from sa1b.engine.feed import DataConfig, Feed
from sa1b.engine.gradients import autocast
from sa1b.engine.metrics import score_line
from sa1b.engine.model import declared
from sa1b.engine.parallel import ParallelConfig, wrap
from sa1b.engine.phase import Phases
from sa1b.engine.ranks import RankInfo
from sa1b.errors import UsageError
from sa1b.gallery.predictions import Predicted
from sa1b.masks import geometry
from sa1b.masks.dense import runs_of
from sa1b.masks.grid import framed_size
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import Runs
from sa1b.sam import protocol
from sa1b.sam.prediction import at_source
from sa1b.sam.protocol import ImageTruth, SamProtocol
from sa1b.sam.score import PROMPTS, Score
from sa1b.storage.atomic import write_whole
from sa1b.stream.batch import Batch
from sa1b.stream.dataset import Stream

if TYPE_CHECKING:
    from sa1b.engine.config import Config

_PREFETCHED = 8  # images that each rank prepares in advance


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Schedule, data and protocol of evaluations.

    Attributes:
        view: View to evaluate on (`sa1b view ROOT --held-out ... --split held-out`); it must share no image
            with the training view.
        every: Steps between evaluations; there is also one at the end. 0: no evaluation during training.
        protocol: uniform: clicks at uniform random pixels, IoU at the resolution of the losses, for curves.
            sam: clicks at the centres of errors, IoU at source resolution, as in the paper.
        masks: Largest number of masks per image; the choice is the same in every evaluation.
        coco: With --evaluate-only: a COCO-format annotation file to evaluate on instead of a view, with the
            protocol sam and the annotations' boxes; see sa1b.engine.coco_evaluation.
        images: With coco: the folder of its images.
        detections: With coco: a file of COCO results whose boxes are the prompts; the result is the average
            precision.
        show: Number of images, from the start of the view, whose predicted masks are written to
            OUT/predictions.jsonl. `sa1b gallery ROOT --predictions` draws them beside the annotated masks.
    """

    view: str | None = None
    every: int = 0
    protocol: Literal["uniform", "sam"] = "uniform"
    masks: int = 16
    coco: Path | None = None
    images: Path | None = None
    detections: Path | None = None
    show: int = 24

    def __post_init__(self) -> None:
        if self.every < 0 or self.masks < 1 or self.show < 0:
            raise UsageError(
                f"--evaluation.masks {self.masks}, --evaluation.every {self.every}, --evaluation.show "
                f"{self.show}: must be at least 1, 0 and 0"
            )
        if (self.coco is None) != (self.images is None):
            raise UsageError(
                "--evaluation.coco, --evaluation.images: one of them is missing; pass both, annotations "
                "and images"
            )
        if self.detections is not None and self.coco is None:
            raise UsageError(
                "--evaluation.detections: --evaluation.coco is missing; pass the annotations it belongs to"
            )
        if self.coco is not None and self.view is not None:
            raise UsageError("--evaluation.coco, --evaluation.view: two sets of images; pass one")


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
        training: the training feed, which must share no image with the view; None: nothing is trained.

    Raises:
        UsageError: the two share images; the message contains their number.
    """
    if config.view is None:
        return None
    # One image at a time: larger batches round differently in matrix products, and the number of ranks and
    # --data.micro-batch would change the scores.
    settings = replace(
        data,
        masks=config.masks,
        strategy="uniform",
        global_batch=rank_info.world_size,
        micro_batch=1,
        prefetch=max(data.prefetch, _PREFETCHED),
    )
    # The seed is constant: another seed would choose other masks, and runs could not be compared.
    feed = Feed(settings, image_size, rank_info, run, seed=0, view=config.view, order="sequential")
    if training is None:
        return feed
    own, others = (view.table_rows(np.arange(len(view))) for view in (feed.stream.view, training.view))
    if shared := len(np.intersect1d(own, others)):
        raise UsageError(
            f"--evaluation.view {config.view}: shares {shared:,} images with the training data; make two "
            f"views with the same `{command('view')} --held-out PART`, one with --split train and one with "
            "--split held-out, and pass the first as --data.view"
        )
    return feed


class Scorer(Protocol):
    """The results of an evaluation: sums over all images, and masks to show."""

    def add(self, module: nn.Module, inputs: Any, batch: Batch) -> None:
        """Evaluate a micro-batch: call the module once, on every rank, with `inputs`."""
        ...

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        """Position and line of predictions.jsonl for each image of the micro-batch that was added last."""
        ...

    def all_reduce(self) -> None:
        """Add the sums of all ranks; collective."""
        ...

    def result(self) -> dict[str, float]:
        """The scores by name; "empty" is the number of masks that are left out, without a pixel."""
        ...


@runtime_checkable
class Scored(Protocol):
    """A model with its own scorer."""

    def scorer(self, device: torch.device) -> Scorer: ...


class ClickScorer:
    """Mean IoU by prompt and mask size; see sa1b.sam.score.

    Args:
        published: clicks of the protocol sam, not uniform ones.
    """

    def __init__(self, published: bool, device: torch.device) -> None:
        self.published = published
        self.score = Score.empty(device, protocol.PROMPTS if published else PROMPTS, by_size=published)
        self.empty = torch.zeros((), dtype=torch.int64, device=device)
        self._last: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None

    def add(self, module: nn.Module, inputs: Any, batch: Batch) -> None:
        """See `Scorer`."""
        rows = torch.nonzero(batch.valid[batch.masks.image]).flatten()
        if self.published:
            found = module(*inputs, protocol=SamProtocol(source_truth(batch)))
        else:
            found = module(*inputs, evaluate=True)
            found = {name: values[rows] for name, values in found.items()}
        weights = torch.ones_like(batch.areas[rows]) if self.published else inputs[1].weights[rows]
        self.score.add(found["intersections"], found["unions"], batch.areas[rows], weights)
        self.empty += (weights == 0).sum()
        self._last = rows, weights, found

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        """See `Scorer`."""
        assert self._last is not None
        rows, weights, found = self._last
        return prediction_lines(batch, rows[weights > 0], weights > 0, found)

    def all_reduce(self) -> None:
        """See `Scorer`."""
        self.score.all_reduce()
        dist.all_reduce(self.empty)

    def result(self) -> dict[str, float]:
        """See `Score.result`."""
        return self.score.result() | {"empty": int(self.empty)}


@torch.no_grad()
def evaluate(
    module: nn.Module,
    feed: Feed,
    config: EvaluationConfig,
    parallel: ParallelConfig,
    rank_info: RankInfo,
    out: Path,
    control: Control,
    phases: Phases,
) -> dict[str, float] | None:
    """The scores of a model, the same figures at any world size.

    Collective. The module's mode and weights are unchanged.

    Args:
        module: wrapped model.
        feed: feed of held-out images; read from its start.
        config: the protocol, and the number of images whose predicted masks are written.
        out: folder of the run, for predictions.jsonl.
        control: control of the run; polled for each micro-batch.
        phases: phases of this rank; "evaluation" begins with each micro-batch.

    Returns:
        The result of the scorer. "damaged" is the number of images that cannot be read and are left out,
        see OUT/damaged.jsonl. "empty" is the number of masks without a pixel at the evaluated resolution,
        which are left out too; it is 0 with the protocol sam, because every mask has a pixel at source
        resolution. None if a stop was requested meanwhile.
    """
    training = [part for part in module.modules() if part.training]  # frozen parts are not
    module.eval()
    model = declared(module)
    scorer: Scorer
    if isinstance(model, Scored):
        scorer = model.scorer(rank_info.device)
    else:
        scorer = ClickScorer(config.protocol == "sam", rank_info.device)
    damaged = torch.zeros((), dtype=torch.int64, device=rank_info.device)
    images = len(feed.stream.view)
    shown: list[tuple[int, str]] = []
    feed.load_state_dict({**feed.state_dict(), "position": 0})
    try:
        # All ranks have the same number of micro-batches, so they poll equally often.
        batches = (batch for batches in feed.steps() for batch in batches)
        for number, batch in enumerate(batches, 1):
            phases.enter("evaluation", number)
            if control.poll():
                return None
            with autocast(parallel.precision, rank_info.device):
                scorer.add(module, model.inputs(batch, seed=0), batch)
            damaged += (~batch.valid & (batch.positions < images)).sum()
            if bool((batch.positions < config.show).any()):
                shown += [line for line in scorer.predictions(batch) if line[0] < config.show]
    finally:
        feed.close()
        for part in training:
            part.training = True
    if rank_info.world_size > 1:
        scorer.all_reduce()
        dist.all_reduce(damaged)
        of_all: list[list[tuple[int, str]]] = [[] for _ in range(rank_info.world_size)]
        dist.all_gather_object(of_all, shown)
        shown = [line for some in of_all for line in some]
    if config.show and rank_info.rank == 0:
        with control.writing():
            write_whole(out / "predictions.jsonl", "".join(line for _, line in sorted(shown)).encode())
    return scorer.result() | {"damaged": int(damaged)}


def source_truth(batch: Batch) -> list[ImageTruth]:
    """The masks at source resolution for each image of a batch; an invalid image has none."""
    runs = batch.masks.runs.cpu().numpy().view(np.uint32)
    offsets = batch.masks.offsets.cpu().numpy()
    made, start = [], 0
    for count, valid, size in zip(
        batch.masks.counts, batch.valid.tolist(), batch.source_sizes.tolist(), strict=True
    ):
        own = offsets[start : start + (count if valid else 0) + 1]
        masks = Runs(runs[own[0] : own[-1]], own - own[0], *size)
        corners = geometry.bbox(masks).astype(np.float64)
        corners[:, 2:] += corners[:, :2] - 1
        made.append(ImageTruth(rasterize(masks, dtype=np.bool_).astype(np.bool_, copy=False), corners))
        start += count
    return made


def prediction_lines(
    batch: Batch, rows: Tensor, counted: Tensor, found: dict[str, Tensor]
) -> list[tuple[int, str]]:
    """Position and line of the file, for each image of a micro-batch that has masks.

    Args:
        rows: int64 [N], the evaluated masks of the batch.
        counted: bool [K], which of the masks in `found` are evaluated.
        found: result of an evaluation of K masks. Their logits become masks at source resolution as in
            `sa1b.predict`.
    """
    image = batch.masks.image[rows].cpu()
    found = {name: values[counted].cpu() for name, values in found.items()}
    image_size = batch.images.shape[-1]
    iou = (found["intersections"][:, 0] / found["unions"][:, 0].clamp(min=1)).double().numpy()
    predicted = found["predicted_iou"].double().numpy()
    # The protocol sam chooses its own clicks.
    points = found.get("points", batch.points[rows].cpu()).double().numpy()
    mask_ids = batch.mask_ids[rows].cpu().numpy()
    made = []
    for i, (image_id, position) in enumerate(zip(batch.ids.tolist(), batch.positions.tolist(), strict=True)):
        own = torch.nonzero(image == i).flatten().numpy()
        if not len(own):
            continue
        size = (int(batch.source_sizes[i, 0]), int(batch.source_sizes[i, 1]))
        taken = framed_size(*size, image_size)
        runs = runs_of(at_source(found["logits"][own], size, taken, image_size).numpy())
        scale = np.array(size[::-1]) / taken[::-1]
        some = Predicted(mask_ids[own], points[own] * scale, iou[own], predicted[own], runs)
        made.append((position, some.line(image_id)))
    return made


def score(config: "Config", build: Callable[[], nn.Module], rank_info: RankInfo, phases: Phases) -> None:
    """Evaluate a model without training and print the scores: --evaluate-only.

    Args:
        build: builds the model; called after the data is opened.
    """
    if config.evaluation.coco is not None:
        _print(config, _coco_scores(config, config.evaluation.coco, build, rank_info), rank_info)
        return
    held_out = held_out_feed(
        config.evaluation, config.data, config.image_size, rank_info, config.folder, None
    )
    assert held_out is not None  # refused by Config.check
    phases.reading = held_out.reading
    module = wrap(build(), config.parallel, rank_info)
    control = Control(rank_info)
    scores = evaluate(
        module, held_out, config.evaluation, config.parallel, rank_info, config.folder, control, phases
    )
    control.check()
    if scores is not None:
        _print(config, scores, rank_info)


def _coco_scores(
    config: "Config", annotations: Path, build: Callable[[], nn.Module], rank_info: RankInfo
) -> dict[str, float]:
    folder, detections = config.evaluation.images, config.evaluation.detections
    assert folder is not None  # refused by EvaluationConfig
    images = read_coco(annotations, folder, detections)
    module = wrap(build(), config.parallel, rank_info)
    return evaluate_coco(
        module,
        images,
        annotations,
        config.image_size,
        config.parallel,
        rank_info,
        detected=detections is not None,
    )


def _print(config: "Config", scores: dict[str, float], rank_info: RankInfo) -> None:
    if rank_info.rank == 0:
        line = detection_line if "ap" in scores else score_line
        print(json.dumps(scores) if config.json_output else line(scores))
