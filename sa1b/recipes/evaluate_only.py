"""Evaluation without training: --evaluate-only."""

import json
from collections.abc import Callable
from pathlib import Path

from torch import nn

from sa1b.engine.checkpoint.resume import check_files
from sa1b.engine.config import Config, build, has_checkpoints
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.metrics import score_line
from sa1b.engine.watch.phase import Phases
from sa1b.engine.watch.signals import WriteError
from sa1b.errors import UsageError
from sa1b.recipes.coco_evaluation import detection_line, evaluate_coco, read_coco
from sa1b.storage.folder import FolderStore


def score(config: "Config", build: Callable[[], nn.Module], rank_info: RankInfo, phases: Phases) -> None:
    """Evaluate a model, built after the data is opened, and print the scores: --evaluate-only."""
    if config.evaluation.coco is not None:
        _print(config, _coco_scores(config, config.evaluation.coco, build, rank_info), rank_info)
        return
    held_out = held_out_feed(
        config.evaluation, config.data, config.image_size, rank_info, config.folder, None
    )
    assert held_out is not None  # refused by Config.check
    phases.reading = held_out.reading
    if config.evaluation.show:
        check_files(FolderStore(config.folder), config.out, "predictions.jsonl")
    module = wrap(build(), config.parallel, rank_info)
    control, scorer = _Writing(rank_info, limit=config.data.deadline), config.scorer(rank_info.device)
    assert scorer is not None  # refused by Config.check
    scores = evaluate(
        module,
        held_out,
        scorer,
        config.evaluation,
        config.parallel,
        rank_info,
        config.folder,
        control,
        phases,
    )
    if scores is not None:
        _print(config, scores, rank_info)
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


def _coco_scores(
    config: "Config", annotations: Path, build: Callable[[], nn.Module], rank_info: RankInfo
) -> dict[str, float]:
    folder, detections = config.evaluation.images, config.evaluation.detections
    assert folder is not None  # refused by EvaluationConfig
    images = read_coco(annotations, folder, detections, deadline=config.data.deadline)
    module = wrap(build(), config.parallel, rank_info)
    return evaluate_coco(
        module,
        images,
        annotations,
        config.image_size,
        config.parallel,
        rank_info,
        detected=detections is not None,
        deadline=config.data.deadline,
    )


def _print(config: "Config", scores: dict[str, float], rank_info: RankInfo) -> None:
    if rank_info.rank == 0:
        line = detection_line if "ap" in scores else score_line
        print(json.dumps(scores) if config.json_output else line(scores))


def scored_model(config: Config) -> nn.Module:
    """The model for --evaluate-only, with the weights of --init or of the run's newest checkpoint."""
    if config.init is None and not has_checkpoints(config):
        raise UsageError(
            f"--evaluate-only: --out {config.out} has no checkpoint; pass --init WEIGHTS, or the --out of "
            "a run"
        )
    return build(config, config.init or config.out)
