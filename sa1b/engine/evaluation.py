"""Evaluation on held-out images, with the scorer that the settings bring."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sa1b.console import command
from sa1b.engine.config import Config
from sa1b.engine.model import declared
from sa1b.engine.precision import autocast
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.watchdog import EVALUATION, Phases
from sa1b.errors import UsageError
from sa1b.storage.atomic import write_whole
from sa1b.stream.batch_stream import BatchStream


def held_out_feed(config: Config, rank_info: RankInfo, training: BatchStream | None) -> Feed | None:
    """The feed of an evaluation: every image of the view once over all ranks; None without a view."""
    evaluation = config.evaluation
    if evaluation.view is None:
        return None
    # One image at a time: larger batches round differently, and the number of ranks would change scores.
    settings = replace(
        config.data,
        layers=evaluation.layers,
        masks=evaluation.masks,
        strategy="uniform",
        global_batch=rank_info.world_size,
        micro_batch=1,
        prefetch=max(config.data.prefetch, 8),
    )
    # The seed is constant: another seed would choose other masks, and runs could not be compared.
    size, view = config.image_size, evaluation.view
    feed = Feed(settings, size, rank_info, config.folder, seed=0, view=view, order="sequential")
    if training is None:
        return feed
    shared = 0
    for source in feed.stream.sources().values():
        for other in training.sources().values():
            if source.dataset.root == other.dataset.root:
                rows = [part.view.table_rows(np.arange(len(part.view))) for part in (source, other)]
                shared += len(np.intersect1d(rows[0], rows[1]))
    if shared:
        raise UsageError(
            f"--evaluation.view {view}: shares {shared:,} images with the training data; make two views with "
            f"`{command('view')} --held-out PART`, and pass that of --split train as --data.view"
        )
    return feed


@torch.no_grad()
def evaluate(
    module: nn.Module, feed: Feed, config: Config, rank_info: RankInfo, *, control: Control, phases: Phases
) -> dict[str, float] | None:
    """The scores and the number of damaged images; None: a stop was requested meanwhile. Collective."""
    training = [part for part in module.modules() if part.training]  # frozen parts are not
    module.eval()
    model, scorer = declared(module), config.scorer(rank_info.device)
    damaged = torch.zeros((), dtype=torch.int64, device=rank_info.device)
    images, show = feed.images, config.evaluation.show
    shown: list[tuple[int, str]] = []
    feed.load_state_dict({**feed.state_dict(), "position": 0})
    try:
        for number, batch in enumerate(feed, 1):
            phases.enter(EVALUATION, number)
            if control.poll():
                return None
            with autocast(config.parallel.precision, rank_info.device):
                scorer.add(module, model.inputs(batch, seed=0), batch)
            damaged += (~batch.valid & (batch.positions < images)).sum()
            if bool((batch.positions < show).any()):
                shown += [line for line in scorer.predictions(batch) if line[0] < show]
    finally:
        feed.close()
        for part in training:
            part.training = True
    if rank_info.world_size > 1:
        scorer.all_reduce()
        dist.all_reduce(damaged)
        shown = [line for some in rank_info.gather(shown) for line in some]
    if show and rank_info.rank == 0:
        path, lines = config.folder / "predictions.jsonl", "".join(line for _, line in sorted(shown))
        control.write(path, lambda: write_whole(path, lines.encode()))
    return scorer.result() | {"damaged": int(damaged)}
