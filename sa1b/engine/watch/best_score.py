"""The best score of a run's evaluations, by which a checkpoint is kept and a run may end early."""

import math
from collections.abc import Mapping

import torch.distributed as dist

from sa1b.console import counted
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import EvaluationConfig
from sa1b.errors import UsageError


class BestScore:
    """The best score of a run, and the evaluations since then; the same on all ranks.

    `step`: after which the best score was found; None: without --evaluation.best, or before an evaluation.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self.step: int | None = None
        self.score = -math.inf
        self.since = 0

    def add(self, step: int, scores: Mapping[str, float]) -> None:
        """Add an evaluation; a score that is not a number is no better. UsageError: it has no such score."""
        name = self._config.best
        if name is None:
            return
        if name not in scores:
            raise UsageError(f"--evaluation.best {name}: not a score; choose from {', '.join(scores)}")
        self.since += 1
        if scores[name] is not None and scores[name] > self.score:
            self.step, self.score, self.since = step, scores[name], 0

    @property
    def exhausted(self) -> bool:
        """Whether --evaluation.patience ends the run."""
        return 0 < self._config.patience <= self.since

    def share(self, earlier: Mapping[int, Mapping[str, float]], rank_info: RankInfo) -> None:
        """Add the evaluations before this start, by step, that rank 0 has read; collective."""
        of_first = [earlier]
        if rank_info.world_size > 1:
            dist.broadcast_object_list(of_first, src=0)
        for step, scores in sorted(of_first[0].items()):
            self.add(step, scores)

    def lines(self, out: str) -> list[str]:
        """What is printed at the end of the run in `out`."""
        if self.step is None:
            return []
        at = (
            f"{out}/checkpoints/{folder_name(self.step)}"
            if self.step
            else "the weights before the first step"
        )
        lines = [f"best: {at} with {self._config.best} {self.score:.4g}"]
        if self.exhausted:
            since = counted(self.since, "evaluation")
            lines.append(f"stopped: {since} without a better score (--evaluation.patience)")
        return lines
