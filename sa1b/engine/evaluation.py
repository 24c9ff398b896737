"""How good the model is: mean IoU after 1, 3 and 5 clicks and with a box, on images it never trains on."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sa1b.engine import prediction
from sa1b.engine.feed import DataConfig, Feed
from sa1b.engine.parallel import ParallelConfig
from sa1b.engine.place import Place
from sa1b.engine.precision import autocast
from sa1b.errors import UsageError
from sa1b.sam.score import Score
from sa1b.storage.atomic import write_whole
from sa1b.stream.dataset import Stream

_LOG = logging.getLogger(__name__)


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
    place: Place,
    run: Path,
    training: Stream | None,
) -> Feed:
    """The feed of an evaluation: every image of the view once over all ranks.

    Args:
        training: must share no image with the view; None: nothing is trained.

    Raises:
        UsageError: it does; the message says how many.
    """
    batch = max(place.world, min(data.global_batch, place.world * (data.micro_batch or data.global_batch)))
    settings = replace(data, masks=config.masks, strategy="uniform", global_batch=batch)
    # Another seed would score other masks: figures of different runs could not be compared.
    feed = Feed(settings, image_size, place, run, seed=0, view=config.view, order="sequential")
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
    module: nn.Module, feed: Feed, parallel: ParallelConfig, place: Place, show: int, out: Path
) -> dict[str, float]:
    """Mean IoU by prompt and mask size, the same figure at any world size; see sa1b.sam.score.

    Collective. The module is left as it was.

    Args:
        module: wrapped `Interactive`.
        feed: of held-out images; goes from its beginning.
        show: images whose predicted masks are written down.
        out: folder of the run, for predictions.jsonl.
    """
    training = module.training
    module.eval()
    score = Score.empty(place.device)
    shown: list[tuple[int, str]] = []
    beginning = {**feed.state_dict(), "position": 0}
    feed.load_state_dict(beginning)
    for micros in feed.steps():
        for micro in micros:
            targets = micro.targets
            with autocast(parallel.precision, place.device):
                found = module(micro.images, targets, micro.image_keys, evaluate=True)
            score.add(found["intersections"], found["unions"], micro.areas, targets.weights)
            if bool((micro.positions < show).any()):
                shown += [line for line in prediction.lines(micro, found) if line[0] < show]
    feed.close()
    if place.world > 1:
        score.all_reduce()
        of_all: list[list[tuple[int, str]]] = [[] for _ in range(place.world)]
        dist.all_gather_object(of_all, shown)
        shown = [line for some in of_all for line in some]
    if show and place.rank == 0:
        try:
            write_whole(out / "predictions.jsonl", "".join(line for _, line in sorted(shown)).encode())
        except OSError as error:  # the scores do not depend on it
            _LOG.warning("the predicted masks are not written: %s", error)
    module.train(training)
    return score.result()
