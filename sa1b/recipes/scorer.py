"""The scorer of SAM, mean IoU after 1, 3, 5 clicks and with a box, predicted masks, and --evaluate-only.

Two protocols for clicks:

    uniform    clicks are uniform random pixels of the mask or of the error, IoU at the resolution of the
               losses: cheap, for curves of a training run
    sam        clicks at the centres of masks and errors, IoU at source resolution, as in the paper
               (sa1b.sam.protocol); also by mask size, and for the oracle's choice of three candidates
"""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.engine.checkpoint.bucket import saved
from sa1b.engine.checkpoint.folder import check_files
from sa1b.engine.config import Config, build
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.metrics import score_line
from sa1b.engine.watch.signals import WriteError
from sa1b.engine.watch.watchdog import Phases
from sa1b.errors import UsageError
from sa1b.masks import geometry
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import Runs
from sa1b.recipes.coco_evaluation import detection_line, evaluate_coco, read_coco
from sa1b.sam import protocol
from sa1b.sam.prediction import at_source
from sa1b.storage.store import FolderStore
from sa1b.stream.batch import Batch


class ClickScorer:
    """Mean IoU by prompt and mask size; see sa1b.sam.protocol. `published`: its clicks, not uniform ones."""

    def __init__(self, published: bool, device: torch.device) -> None:
        self.published = published
        self.empty = torch.zeros((), dtype=torch.int64, device=device)
        prompts = protocol.PROMPTS if published else protocol.QUICK_PROMPTS
        empty = partial(protocol.Score, device, prompts, by_size=published)
        self._scores = defaultdict[str, protocol.Score](empty)  # of all images, "", and of each source
        self._last: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None

    def add(self, module: nn.Module, inputs: Any, batch: Batch) -> None:
        rows = torch.nonzero(batch.valid[batch.masks.image]).flatten()
        if self.published:
            outputs = module(*inputs, protocol=protocol.SamProtocol(source_truth(batch)))
        else:
            outputs = module(*inputs, evaluate=True)
            outputs = {name: values[rows] for name, values in outputs.items()}
        weights = torch.ones_like(batch.areas[rows]) if self.published else inputs[1].weights[rows]
        for name in ("", *set(batch.source)):
            counted = weights
            if name:
                of_source = torch.tensor([source == name for source in batch.source], device=weights.device)
                counted = weights * of_source[batch.masks.image[rows]]
            self._scores[name].add(outputs["intersections"], outputs["unions"], batch.areas[rows], counted)
        self.empty += (weights == 0).sum()
        self._last = rows, weights, outputs

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        assert self._last is not None
        rows, weights, outputs = self._last
        rows, found = rows[weights > 0], {name: values[weights > 0].cpu() for name, values in outputs.items()}
        iou = found["intersections"][:, 0] / found["unions"][:, 0].clamp(min=1)
        points = found.get("points", batch.points[rows])  # the protocol sam chooses its own clicks

        def runs_of(masks: npt.NDArray[np.int64], source: protocol.Size, taken: protocol.Size) -> Runs:
            """At source resolution as in `sa1b.predict`."""
            return Runs.from_pixels(
                at_source(found["logits"][masks], source, taken, batch.images.shape[-1]).numpy()
            )

        return protocol.prediction_lines(batch, rows, points, iou, found["predicted_iou"], runs_of)

    def all_reduce(self) -> None:
        dist.all_reduce(self.empty)
        names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(names, ["", *self._scores])  # a rank may have had no image of a source
        for name in sorted(set(chain(*names))):
            dist.all_reduce(self._scores[name].sums)

    def result(self) -> dict[str, float]:
        """The scores; those of a source of a mixture have its name after a slash."""
        all_images = self._scores[""].result() | {"empty": int(self.empty)}
        return all_images | {
            f"{figure}/{name}": value
            for name, score in sorted(self._scores.items())
            for figure, value in score.result().items()
            if name
        }


def source_truth(batch: Batch) -> list[protocol.ImageTruth]:
    """The masks at source resolution for each image of a batch; an invalid image has none."""
    runs = batch.masks.runs.cpu().numpy().view(np.uint32)
    offsets = batch.masks.offsets.cpu().numpy()
    made, start = [], 0
    for count, valid, size in zip(
        batch.masks.counts, batch.valid.tolist(), batch.source_sizes.tolist(), strict=True
    ):
        bounds = offsets[start : start + (count if valid else 0) + 1]
        masks = Runs(runs[bounds[0] : bounds[-1]], bounds - bounds[0], *size)
        corners = geometry.bbox(masks).astype(np.float64)
        corners[:, 2:] += corners[:, :2] - 1
        made.append(
            protocol.ImageTruth(rasterize(masks, dtype=np.bool_).astype(np.bool_, copy=False), corners)
        )
        start += count
    return made


def score(config: Config, build: Callable[[], nn.Module], rank_info: RankInfo, phases: Phases) -> None:
    """Evaluate a model, built after the data is opened, and print the scores: --evaluate-only."""
    coco, folder, control = config.evaluation.coco, config.evaluation.images, None
    scores: dict[str, float] | None
    if coco is not None and folder is not None:
        images = read_coco(coco, folder, config.evaluation.detections)
        module = wrap(build(), config.parallel, rank_info)
        scores = evaluate_coco(module, images, config, rank_info)
    else:
        held_out = held_out_feed(config, rank_info, None)
        assert held_out is not None  # refused by Config.check
        phases.reading = held_out.loader.reading
        if config.evaluation.show:
            check_files(FolderStore(config.folder), config.out, "predictions.jsonl")
        module = wrap(build(), config.parallel, rank_info)
        control = _Writing(rank_info, limit=config.data.deadline)
        scores = evaluate(module, held_out, config, rank_info, control=control, phases=phases)
    if scores is not None and rank_info.rank == 0:
        line, shown = detection_line if "ap" in scores else score_line, scores | config.evaluation.how(scores)
        print(json.dumps(shown) if config.json_output else line(shown))
    if control is not None:
        control.check()


class _Writing(Control):
    """A control whose failed write does not end the evaluation: `check` reports it after the scores."""

    def write(self, path: Path, work: Callable[[], object]) -> None:
        try:
            self.within(path, work)
        except OSError as error:
            self.failure = WriteError(
                f"{error.filename or path}: cannot be written ({error.strerror or error}); "
                "the scores are complete, the predicted masks are missing: pass --evaluation.show 0 to go "
                "without them, or an --out that this user can write"
            )


def scored_model(config: Config) -> nn.Module:
    """The model for --evaluate-only, with the weights of --init or of the run's newest checkpoint."""
    if config.init is None and not saved(config.out, config.scratch):
        raise UsageError(
            f"--evaluate-only: --out {config.out} has no checkpoint; pass --init WEIGHTS, or the --out of "
            "a run"
        )
    return build(config, config.init or config.out)
