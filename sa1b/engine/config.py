"""All settings of a run: command line, validation, equality on all ranks. Those of a model are a subclass of
`Config`.
"""

import contextlib
import io
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
from torch import nn

from sa1b.arguments import Range, plain_words, was_url
from sa1b.console import counted, usage_errors
from sa1b.engine import settings
from sa1b.engine.checkpoint import folder as checkpoint_files
from sa1b.engine.checkpoint.bucket import local_folder, saved
from sa1b.engine.mix_file import roots_of
from sa1b.engine.model import Scorer, declared
from sa1b.engine.ranks import agreement
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import HealthConfig
from sa1b.engine.watch.metrics import LoggingConfig
from sa1b.engine.watch.signals import deadline_of
from sa1b.engine.weights import load_weights
from sa1b.errors import UsageError
from sa1b.shards.manifest import DATASET
from sa1b.storage.protocols import kind_of, protocol_of
from sa1b.stream.order import micro_batch_count, whole_share


@dataclass(frozen=True, slots=True)
class Config(ABC):
    """A run, without the settings of its model.

    Attributes:
        preset: Set of defaults for all other flags.
        out: Folder of the run: checkpoints, metrics, resolved configuration; or its URL in an object store.
        scratch: With a URL as --out or --init: local folder for files before upload and after download; by
            default sa1b-USERID in the system's folder for temporary files.
        seed: Seed of the initial weights, the order of samples and every other random value.
        init: Weights to start from: a published file (.safetensors, .pth), a checkpoint, the folder of a
            run, or the URL of one of these.
        resume: auto: resume from the newest good checkpoint in --out, if there is one. no: refuse to start
            if --out has checkpoints.
        deadline: Time before which the run stops with a checkpoint and exit code 0: HH:MM (the next one on
            this machine's clock), +HH:MM (after the start), or a date and time such as 2026-01-31T06:30. It
            leaves time for the longest of the last 16 steps and, once the first checkpoint since the start
            is complete, for one like the newest. All ranks stop when one reaches it on its own clock.
        dry_run: Print ranks, batch arithmetic, memory and time estimates, and stop.
        evaluate_only: Evaluate --init, or the newest checkpoint in --out, and stop.
        json_output: With --evaluate-only: print the scores as JSON.
        data: Dataset and batches.
        parallel: Ranks and devices.
        optim: Optimizer and schedule.
        checkpoint: Schedule of checkpoints.
        evaluation: Schedule and data of evaluations.
        health: Losses that are not finite, and ranks that hang.
        logging: Recorded figures.
    """

    reads_text: ClassVar[bool] = False  # whether the model reads `Batch.texts`

    preset: str = ""
    out: str = "run"
    scratch: Path | None = None
    seed: int = 0
    init: str | None = None
    resume: Literal["auto", "no"] = "auto"
    deadline: str | None = None
    dry_run: bool = False
    evaluate_only: bool = False
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    data: settings.DataConfig = field(default_factory=settings.DataConfig)
    parallel: settings.ParallelConfig = field(default_factory=settings.ParallelConfig)
    optim: settings.OptimConfig = field(default_factory=settings.OptimConfig)
    checkpoint: settings.CheckpointConfig = field(default_factory=settings.CheckpointConfig)
    evaluation: settings.EvaluationConfig = field(default_factory=settings.EvaluationConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def folder(self) -> Path:
        """Folder of the run on this machine; the ranks of a machine share it."""
        return local_folder(self.out, self.scratch) if self.is_remote else Path(self.out)

    @property
    def is_remote(self) -> bool:
        """Whether the run is in an object store: `folder` then contains files until they are uploaded."""
        return bool(protocol_of(self.out))

    @property
    def initial_weights(self) -> str | None:
        """--init of a new run; None if the run resumes, because the file may be missing then."""
        return None if saved(self.out, self.scratch) else self.init

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Size of the padded square that the model takes, pixels."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model (`sa1b.engine.model`), with weights from torch's generator."""

    def scorer(self, device: torch.device) -> Scorer:
        """The scorer of an evaluation of the model; UsageError: the model has none."""
        why = f"the model of {type(self).__name__} has no evaluation"
        raise UsageError(f"--evaluation: {why}; drop --evaluation.view and --evaluate-only")

    def resolved(self) -> "Config":
        """The settings with values that are read from files when the run starts; raises UsageError."""
        return self

    def check(self) -> None:
        """Refuse settings that do not fit together; UsageError names the flag."""
        evaluation, coco = self.evaluation, self.evaluation.coco is not None
        if coco and (not self.evaluate_only or self.dry_run):
            raise UsageError("--evaluation.coco: is not for training; pass --evaluate-only, and no --dry-run")
        set_endpoint(self)
        if not self.data.root and self.data.mix is None and not coco:
            raise UsageError("--data.root: missing; pass the folder that `sa1b reshard` made, or its URL")
        if self.data.text is not None and not self.reads_text:
            why = f"the model of {type(self).__name__} reads no text"
            raise UsageError(f"--data.text {self.data.text}: {why}; drop it, or pass --preset grounding")
        Range(0, below=1 << 63).check("--seed", self.seed)
        deadline_of(self.deadline)  # is refused now
        _check_out(self)
        if evaluation.view is not None or self.evaluate_only:
            self.scorer(torch.device("cpu"))
        if self.evaluate_only and evaluation.view is None and not coco:
            raise UsageError("--evaluate-only: no images are named; pass --evaluation.view or .coco")
        if self.json_output and not self.evaluate_only:
            raise UsageError("--json: is for --evaluate-only; a training run writes OUT/metrics.jsonl")

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """Images of the largest micro-batch of a rank, and the number of micro-batches in a step."""
        data = self.data
        try:
            share = whole_share(data.global_batch, world_size, data.block_size)
        except ValueError as error:
            raise settings.with_flags(error) from None
        size = min(data.micro_batch or share, share)
        return size, micro_batch_count(data.global_batch, world_size, size, block_size=data.block_size)

    def step_images(self, world_size: int) -> str:
        batch, (size, count) = self.data.global_batch, self.micro_batches(world_size)
        product = counted(count, "micro-batch", "es")
        times = "x" if batch == world_size * count * size else "of up to"
        product = f"{counted(world_size, 'rank')} x {product} {times} {counted(size, 'image')}"
        return f"{counted(batch, 'image')} = {product}"

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return document


def build(config: Config, weights: str | None) -> nn.Module:
    """The model with weights from the seed or --init, which rank 0 prints; UsageError: they do not fit."""
    torch.manual_seed(config.seed)  # so that every rank has the same weights
    module = config.build()
    if weights is not None:
        _print([load_weights(declared(module), weights, config.scratch)])
    return module


def _print(notes: list[str]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stderr.writelines(f"{note}\n" for note in notes)


def parse(
    arguments: Sequence[str],
    description: str | None,
    presets: Mapping[str, Config],
    prog: str | None = None,
    *,
    root: str = "",
    world_size: int | None = None,
    on_cpu: str | None = None,
) -> Config:
    """The settings of a command line; the preset, by default the first or `on_cpu`, decides the defaults.
    `root`: --data.root and --data.text if the flags are missing; if empty, they are required.
    """
    arguments, notes = plain_words(arguments), list[str]()
    passed = _passed(arguments)
    preset = passed.get("preset") or next(iter(presets))
    if on_cpu and "preset" not in passed and not passed.keys() & {"help", "init", "evaluate-only"}:
        preset = on_cpu
        notes.append(f"--preset {preset}: the default without a GPU; pass --preset to train another model")
    default = presets.get(preset, next(iter(presets.values())))
    optim, steps = default.optim, passed.get("optim.steps", "")
    fitting = tuple(name for name in ("warmup", "cooldown") if f"optim.{name}" not in passed)
    if "optim.epochs" in passed:  # once the number of images is known, see `with_steps`
        optim = replace(optim, fitting=fitting)
    elif steps.isdecimal():
        with contextlib.suppress(UsageError):  # a passed flag does not fit, and its own message follows
            optim, shortened = optim.fitted(int(steps), fitting)
            notes += shortened
    default = replace(default, optim=optim)
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    if "parallel.mode" not in passed and ranks > 1:
        default = replace(default, parallel=replace(default.parallel, mode="ddp"))
        notes.append("--parallel.mode ddp: the default with several ranks")
    if root:
        text = root if default.reads_text else None
        default = replace(default, data=replace(default.data, root=root, text=text))
    prog, is_first = prog or program(), int(os.environ.get("RANK", "0")) == 0
    help_of_one = contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO())
    with help_of_one, usage_errors(prog, "--data.root"):
        config: Config = tyro.cli(
            type(default),
            prog=prog,
            description=description,
            args=arguments,
            default=default,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    config.check()
    config.parallel.check(ranks)
    if not config.evaluate_only:
        config.micro_batches(ranks)
    _print(notes)
    return config


def _passed(arguments: Sequence[str]) -> dict[str, str]:
    values = {}
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            values[name[2:].replace("_", "-")] = value if equals else following
    return values


def program() -> str:
    """The command that started this process: "torchrun -m sa1b.train", "python sa1b/train.py"."""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    spec = sys.modules["__main__"].__spec__  # set by -m; then argv has the path of the module
    return f"{launcher} {sys.argv[0] if spec is None else f'-m {spec.name}'}"


def with_steps(config: Config, images: int) -> Config:
    """The settings with --optim.steps from --optim.epochs, if that is set; `images`: of an epoch."""
    optim = config.optim
    if optim.epochs is None:
        return config
    steps = max(math.ceil(optim.epochs * images / config.data.global_batch), 1)
    optim, notes = replace(optim, fitting=()).fitted(steps, optim.fitting)
    _print(notes)
    return replace(config, optim=optim)


def set_endpoint(config: Config) -> None:
    """Make --data.endpoint that of --out and --init too, unless their environment variable is set."""
    for url in (config.out, config.init or ""):
        kind = kind_of(url)
        if protocol_of(url) and kind.endpoint and config.data.endpoint is not None:
            os.environ.setdefault(kind.endpoint_variable, config.data.endpoint)


def _check_out(config: Config) -> None:
    out, inside, roots = config.out, f"{config.out.rstrip('/')}/", roots_of(config.data)
    if config.is_remote:
        in_dataset = any(root and inside.startswith(f"{root.rstrip('/')}/") for root in roots)
    else:
        folders = [Path(root).resolve() for root in roots if root and "://" not in root]
        in_dataset = any(map(config.folder.resolve().is_relative_to, folders))
    if in_dataset or (config.folder / DATASET).exists():
        raise UsageError(f"--out {out}: is a dataset directory or inside one; name another")
    if was_url(out) and not config.is_remote and not config.folder.exists():
        raise UsageError(f"--out {out}: no folder; did you mean {out.replace(':/', '://', 1)}?")
    if kind_of(out).is_read_only:
        raise UsageError(f"--out {out}: {protocol_of(out)} can only be read; pass a folder or an s3:// URL")
    if run := checkpoint_files.run_around(out if config.is_remote else str(config.folder.resolve())):
        why = "is in the checkpoints of a run, which it would damage"
        raise UsageError(f"--out {out}: {why}; pass --out {run} to resume")


def agree(config: Config, rank_info: RankInfo, **digests: Any) -> None:
    """DisagreementError, on all ranks, if settings or `digests` of a rank differ from those of rank 0."""
    document = config.document()
    del document["scratch"]  # machines may have different disks
    values = {f"--{flag}": value for flag, value in leaves(document)} | digests
    agreement.agree({name: (0, value) for name, value in values.items()}, rank_info)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Flag without its dashes, and value, of each setting of a document."""
    if not isinstance(value, dict):
        yield path.replace("_", "-"), value
        return
    for name, part in value.items():
        yield from leaves(part, f"{path}.{name}" if path else name)
