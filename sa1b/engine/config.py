"""All settings of a run: presets, the command line, and that every rank has the same.

Each part stands beside the code that it configures; here they come together.
"""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro

from sa1b.engine.checkpoint.checkpoints import CheckpointConfig
from sa1b.engine.evaluation import EvaluationConfig
from sa1b.engine.feed import DataConfig
from sa1b.engine.health import HealthConfig
from sa1b.engine.metrics import LoggingConfig
from sa1b.engine.optim import OptimConfig
from sa1b.engine.parallel import ParallelConfig
from sa1b.engine.ranks import DisagreementError, RankInfo
from sa1b.errors import UsageError
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import Recipe

Preset = Literal["tiny", "vit_b", "vit_l", "vit_h"]


@dataclass(frozen=True, slots=True)
class Config:
    """A run.

    Attributes:
        preset: Where all other defaults come from. tiny: learns something in minutes on two CPU cores. vit_b,
            vit_l, vit_h: the published models with the recipe of their paper.
        out: Folder of the run: checkpoints, metrics, resolved configuration.
        seed: Of the initial weights, the order of samples and every other draw.
        init: Weights to start from: .safetensors, the published .pth, a checkpoint or the folder of a run.
        resume: auto: go on from the newest good checkpoint in --out, if there is one. no: refuse to start
            where there are checkpoints.
        dry_run: Print ranks, batch arithmetic, memory and time estimates, and stop.
        evaluate_only: Evaluate --init, or the newest checkpoint in --out, and stop.
        json_output: With --evaluate-only: print the scores as JSON.
        data: What is read.
        model: Sizes of the model.
        recipe: Prompts and losses.
        parallel: How the work is shared.
        optim: Optimizer and schedule.
        checkpoint: When checkpoints are written.
        evaluation: When and on what the model is evaluated.
        health: What happens when a loss is not finite.
        logging: What is written down.
    """

    preset: Preset = "vit_b"
    out: Path = Path("run")
    seed: int = 0
    init: Path | None = None
    resume: Literal["auto", "no"] = "auto"
    dry_run: bool = False
    evaluate_only: bool = False
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    recipe: Recipe = field(default_factory=Recipe)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return found


def _published(model: Preset, **recipe: Any) -> Config:
    """A model of the paper with its batch, rate, schedule, layer decay and drop path."""
    drop_path, batch = recipe.pop("drop_path"), recipe["reference_batch"]
    return Config(
        preset=model,
        data=DataConfig(global_batch=batch),
        model=replace(MODELS[model], drop_path=drop_path),
        optim=OptimConfig(**recipe),
    )


# "Segment Anything" (Kirillov et al. 2023), appendix A, "Training recipe": ViT-H at batch 256 for 90,000
# steps; ViT-B and ViT-L at batch 128 for 180,000, with milestones at the same parts of the run.
PRESETS: dict[str, Config] = {
    "tiny": Config(
        preset="tiny",
        data=DataConfig(global_batch=8, masks=16),
        model=MODELS["tiny"],
        # A weighted cross entropy in place of the focal loss: from random weights the latter answers "all
        # background" for some hundred steps, on pictures of which most is background.
        recipe=Recipe(
            clicks=1, unprompted=0, focal_weight=1, focal_alpha=0.75, focal_gamma=0,
            checkpoint_iterations=False
        ),
        optim=OptimConfig(
            lr=1e-3,
            reference_batch=8,
            schedule="cosine",
            steps=300,
            warmup=10,
            layer_decay=1.0,
            weight_decay=0.05,
            min_lr_ratio=0.1,
        ),
        checkpoint=CheckpointConfig(every=100),
    ),
    "vit_b": _published(
        "vit_b", lr=8e-4, reference_batch=128, layer_decay=0.6, drop_path=0.6, steps=180_000,
        milestones=(120_000, 173_332),
    ),
    "vit_l": _published(
        "vit_l", lr=4e-4, reference_batch=128, layer_decay=0.8, drop_path=0.4, steps=180_000,
        milestones=(120_000, 173_332),
    ),
    "vit_h": _published("vit_h", lr=8e-4, reference_batch=256, layer_decay=0.8, drop_path=0.4),
}  # fmt: skip


def parse(arguments: Sequence[str], description: str | None) -> Config:
    """The settings of a command line. `--preset` first decides what all other flags default to.

    Raises:
        UsageError: what was asked for does not fit together; the message names the flag.
        SystemExit: help was asked for, or a flag cannot be read; only rank 0 says so.
    """
    preset = "vit_b"
    for word, following in pairwise([*arguments, ""]):
        name, _, value = word.partition("=")
        if name == "--preset":
            preset = value or following
    silent = int(os.environ.get("RANK", "0")) > 0
    with contextlib.ExitStack() as stack:
        if silent:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        config = tyro.cli(
            Config,
            prog=f"torchrun {Path(sys.argv[0]).name}",
            description=description,
            args=list(arguments),
            default=PRESETS.get(preset, PRESETS["vit_b"]),
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    _check(config)
    return config


def _check(config: Config) -> None:
    """Refuse what does not fit together.

    Raises:
        UsageError
    """
    if not config.data.root:
        raise UsageError("--data.root is missing: the folder that tools/reshard.py made, or its URL")
    for flag, value in _numbers(config.document()):
        if not math.isfinite(value):
            raise UsageError(f"--{flag} is {value}")
    if not 0 <= config.seed < 1 << 63:
        raise UsageError(f"--seed is {config.seed}; it must be at least 0 and below 2**63")
    if config.out.exists() and not config.out.is_dir():
        raise UsageError(f"--out {config.out} is a file: name a folder, new or of a run to go on with")
    low = config.model.image_size // 4
    if config.data.target_size is not None and config.data.target_size < low:
        raise UsageError(
            f"--data.target-size {config.data.target_size} is below the {low} pixels of the decoder's masks "
            f"(--model.image-size {config.model.image_size} / 4)"
        )
    if config.evaluation.every and config.evaluation.view is None:
        raise UsageError(
            "--evaluation.every needs --evaluation.view: a view that tools/view.py made with --held-out and "
            "--split held-out"
        )
    if config.evaluate_only and config.evaluation.view is None:
        raise UsageError("--evaluate-only needs --evaluation.view")
    if config.json_output and not config.evaluate_only:
        raise UsageError("--json is for --evaluate-only")
    if config.evaluation.view is not None and config.evaluation.view == config.data.view:
        raise UsageError(f"--evaluation.view and --data.view are both {config.data.view!r}")


def _numbers(document: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The flags that are numbers with a fraction."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from _numbers(value, f"{path}.{name}" if path else name.replace("_", "-"))
    elif isinstance(document, list):
        for value in document:
            yield from _numbers(value, path)
    elif isinstance(document, float):
        yield path.replace("_", "-"), document


def agree(config: Config, rank_info: RankInfo) -> Config:
    """The configuration of rank 0, which every rank holds its own against.

    Raises:
        DisagreementError: on all ranks, if one was given another one; the message names the first flag.
    """
    if rank_info.world_size == 1 or not dist.is_initialized():
        return config
    own = config.document()
    sent: list[Any] = [own]
    dist.broadcast_object_list(sent, src=0)
    refused = None
    if (difference := _difference(sent[0], own)) is not None:
        flag, first, other = difference
        refused = f"--{flag} is {other!r} on rank {rank_info.rank} and {first!r} on rank 0"
    # A rank that left alone would leave the others waiting for it.
    of_all: list[str | None] = [None] * rank_info.world_size
    dist.all_gather_object(of_all, refused)
    for one in of_all:
        if one is not None:
            raise DisagreementError(one)
    return config


def _difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(one, dict):
        for name in one:
            flag = f"{path}.{name}" if path else name
            if (found := _difference(one[name], other[name], flag.replace("_", "-"))) is not None:
                return found
        return None
    return None if one == other else (path, one, other)
