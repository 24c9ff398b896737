"""The settings of ranks, optimizer, evaluations and checkpoints, and the number formats of a step.

| precision | matrix products                                | everything else, weights, optimizer |
|-----------|------------------------------------------------|-------------------------------------|
| fp32      | float32                                        | float32                             |
| tf32      | float32 with 10-bit mantissas, on tensor cores | float32                             |
| bf16      | bfloat16 by autocast                           | float32 where autocast keeps it     |
| fp16      | float16 by autocast, loss scaled               | float32 where autocast keeps it     |

The weights are float32 in every mode. With FSDP the weights of the model's units are gathered in the format
of the matrix products (`sa1b.engine.ranks.parallel.wrap`): autocast would round them to it anyway.
"""

import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch.amp.grad_scaler import GradScaler

from sa1b.arguments import Range, check_fields
from sa1b.console import counted
from sa1b.engine.ranks.network import Network
from sa1b.errors import UsageError

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype in which autocast computes matrix products; None: no autocast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def set_float32(precision: Precision, device: torch.device) -> None:
    """Set the precision of float32 products in this process: exact, or tf32. Torch's default is tf32 for
    convolutions. UsageError: the device does not support tf32 or bf16.
    """
    if precision == "tf32" and device.type != "cuda":
        raise UsageError("--parallel.precision tf32: needs a GPU; pass fp32 or bf16")
    if precision in ("tf32", "bf16") and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UsageError(
                f"--parallel.precision {precision}: needs a GPU of compute capability 8.0, this one has "
                f"{major}.{minor}; pass fp16 or fp32"
            )
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Context for every forward pass, also in evaluations; the backward pass runs outside of it."""
    dtype = compute_dtype(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def grad_scaler(precision: Precision, device: torch.device) -> GradScaler:
    """The scaler of losses for fp16; for other formats it does nothing."""
    # All ranks detect the same overflows: DDP leaves the same gradients on all ranks, and for FSDP's shards
    # torch takes the maximum over the mesh. The `state_dict` is a dictionary of numbers, empty unless fp16.
    return GradScaler(device.type, enabled=precision == "fp16")


# Flags that have an effect in some modes only, with their defaults and these modes.
_FLAGS_OF_MODES = (
    ("shard", "full", ("fsdp",)),
    ("replicas", 1, ("fsdp",)),
    ("offload", "none", ("fsdp",)),
    ("wrap", "block", ("fsdp",)),
    ("reduce", "fp32", ("fsdp",)),
    ("static_graph", False, ("ddp",)),
    ("find_unused", False, ("ddp",)),
    ("broadcast_buffers", False, ("ddp",)),
    ("bucket", 25, ("ddp",)),
    ("compress", "none", ("ddp",)),
)

_SECONDS = Range(above=0, unit=" seconds")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks, devices and precision.

    Attributes:
        mode: none: one process. ddp: every rank has the complete model. fsdp: ranks have shards of the model,
            gradients and optimizer state.
        precision: Number format of the matrix products; weights and optimizer are always float32.
        device: auto: the GPU of this rank if there is one, else the CPU.
        shard: For fsdp. full: shard parameters too. grad_op: shard gradients and optimizer only; parameters
            stay gathered between forward and backward.
        replicas: For fsdp: copies of the model; each is sharded over world size / replicas ranks, at least
            two. If this number does not fit, as after the loss of a machine, the largest smaller divisor of
            the world size is used, so that no rank holds more than replicas / world size of the model.
        offload: For fsdp: where shards and optimizer state are stored: on the device (none), in host
            memory (cpu), or in pinned host memory (pinned: faster copies, GPU only).
        wrap: For fsdp: parameters that are gathered together. block: those of an encoder block. size:100M:
            those of consecutive blocks, until there are at least 100 million parameters. none: the complete
            model, in float32.
        reduce: For fsdp: number format in which gradients are summed over the ranks. bf16 halves the sent
            bytes and rounds the gradient.
        compress: For ddp: number format to which gradients are rounded while they are sent.
        bucket: For ddp: MiB of gradients that are sent together.
        static_graph: For ddp: promise that every step runs the same graph, so that torch can
            optimise it.
        find_unused: For ddp: search the graph of each step for parameters without a gradient, for
            models with a branch that only some steps use. SAM has none.
        broadcast_buffers: For ddp: after each step, all ranks take the buffers of rank 0, such as
            the statistics of BatchNorm layers. Each rank normalises with its own images.
        timeout_first: Seconds that a rank waits for the others until the first step is done, which includes
            reading, compiling and connecting; also the limit of the write of a checkpoint.
        timeout: Seconds that a rank waits for the others after the first step. It must
            exceed --data.deadline: while the storage of one rank is down, that rank retries and the others
            wait for it.
        sync_batchnorm: Compute the statistics of BatchNorm layers over all ranks; GPUs only.
        cudnn_attention: On a GPU, let torch choose the attention of cuDNN, which it prefers. Without it,
            torch chooses flash attention or its own.
        network: Network between the machines; --dry-run prints the variables of NCCL and gloo that are set,
            and why. Variables that are set already are kept. auto: infiniband if a port is active, else
            ethernet.
    """

    mode: Literal["none", "ddp", "fsdp"] = "none"
    precision: Precision = "fp32"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    shard: Literal["full", "grad_op"] = "full"
    replicas: Annotated[int, Range(1)] = 1
    offload: Literal["none", "cpu", "pinned"] = "none"
    wrap: Annotated[str, tyro.conf.arg(metavar="block|size:NUMBER|none")] = "block"
    reduce: Literal["fp32", "bf16"] = "fp32"
    compress: Literal["none", "fp16", "bf16"] = "none"
    bucket: Annotated[int, Range(1, unit=" MiB")] = 25
    static_graph: bool = False
    find_unused: bool = False
    broadcast_buffers: bool = False
    timeout_first: Annotated[float, _SECONDS] = 1800.0
    timeout: Annotated[float, _SECONDS] = 600.0
    sync_batchnorm: bool = False
    cudnn_attention: bool = True
    network: Network = "auto"

    def check(self, world_size: int) -> None:
        """UsageError: settings do not fit each other or the number of ranks; the message names the flag."""
        check_fields(self, "parallel")
        if self.mode == "none" and world_size > 1:
            raise UsageError(
                f"--parallel.mode none: is for one process, this run has {world_size}; "
                "pass --parallel.mode ddp or fsdp"
            )
        for flag, default, modes in _FLAGS_OF_MODES:
            if self.mode not in modes and getattr(self, flag) != default:
                raise UsageError(
                    f"--parallel.{flag.replace('_', '-')}: is for --parallel.mode {' or '.join(modes)}, not "
                    f"{self.mode}; drop one"
                )
        for option, other in (("static_graph", "find_unused"), ("sync_batchnorm", "broadcast_buffers")):
            if getattr(self, option) and getattr(self, other):
                names = [f"--parallel.{flag.replace('_', '-')}" for flag in (option, other)]
                raise UsageError(f"{', '.join(names)}: exclude each other; drop one")


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Optimizer, learning rates and schedule.

    Attributes:
        lr: Learning rate of the last layer after warm-up, at the reference batch.
        reference_batch: Global batch, in images, for which --optim.lr is specified.
        batch_scaling: How the learning rate scales with the global batch: linear, sqrt, or none.
        schedule: step: a tenth at each milestone. cosine: half a cosine down to --optim.min-lr-ratio times
            the learning rate. rsqrt: 1 / sqrt(1 + t / timescale), t steps after warm-up, and linearly to zero
            at the end (Zhai et al., "Scaling Vision Transformers", 2022).
        steps: Length of the schedule in steps.
        epochs: Length of the schedule in epochs, such as 2 or 0.5, in place of --optim.steps; rounded up to
            complete steps.
        warmup: Steps in which the learning rate rises linearly.
        milestones: For step: steps after which the learning rate falls to a tenth.
        min_lr_ratio: For cosine: fraction of the learning rate at the end.
        timescale: For rsqrt: steps after warm-up until the learning rate has fallen by the square root of 2.
        cooldown: For rsqrt: number of last steps, in which the learning rate falls linearly to zero.
        layer_decay: Ratio of the learning rates of each layer and the next one; 1: the same for all layers.
            The model numbers its layers.
        weight_decay: Weight decay; biases, norms and position embeddings have none.
        beta1: Decay of the running mean of gradients.
        beta2: Decay of the running mean of squared gradients.
        epsilon: Added to the root of the running mean of squared gradients.
        grad_clip: Largest norm of the gradient over all parameters; 0: no limit.
        ema: Decay of the running mean of the weights, such as 0.9999; 0: no running mean. The mean is
            evaluated and exported instead of the weights. The decay of the first steps is smaller: it
            is (1 + step) / (10 + step). A run with a running mean cannot resume without it. A run without a
            running mean can resume with it; the mean then starts from the weights of the checkpoint.
        freeze: Parts of the model that are not trained, by the names of its submodules (image_encoder).
            They run as in evaluation, without drop path or dropout.
        fitting: no flag. Of warmup and cooldown those that were not passed beside --optim.epochs.
    """

    lr: Annotated[float, Range(above=0)] = 8e-4
    reference_batch: Annotated[int, Range(above=0)] = 256
    batch_scaling: Literal["linear", "sqrt", "none"] = "linear"
    schedule: Literal["step", "cosine", "rsqrt"] = "step"
    steps: Annotated[int, Range(above=0)] = 90_000
    epochs: Annotated[float | None, Range(above=0)] = None
    warmup: Annotated[int, Range(0)] = 250
    milestones: tuple[int, ...] = (60_000, 86_666)
    min_lr_ratio: Annotated[float, Range(0, 1)] = 0.0
    timescale: Annotated[int, Range(above=0)] = 1_000
    cooldown: Annotated[int, Range(0)] = 0
    layer_decay: Annotated[float, Range(above=0, most=1)] = 0.8
    weight_decay: Annotated[float, Range(0)] = 0.1
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    beta2: Annotated[float, Range(0, below=1)] = 0.999
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    grad_clip: Annotated[float, Range(0)] = 1.0
    ema: Annotated[float, Range(0, below=1)] = 0.0
    freeze: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    fitting: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        if self.min_lr_ratio and self.schedule != "cosine":
            raise UsageError(
                f"--optim.min-lr-ratio: is for --optim.schedule cosine, not {self.schedule}; drop one"
            )
        if self.cooldown and self.schedule != "rsqrt":
            raise UsageError(
                f"--optim.cooldown: is for --optim.schedule rsqrt, not {self.schedule}; drop one"
            )
        if self.cooldown and self.warmup + self.cooldown > self.steps:
            raise UsageError(
                f"--optim.warmup {self.warmup}, --optim.cooldown {self.cooldown}: must not be more than "
                f"--optim.steps {self.steps} together"
            )
        if self.warmup >= self.steps:
            raise UsageError(f"--optim.warmup {self.warmup}: must be less than --optim.steps {self.steps}")
        marks = pairwise([self.warmup, *self.milestones])
        if self.schedule == "step" and any(mark >= other for mark, other in marks):
            raise UsageError(
                f"--optim.milestones {self.milestones}: must be in ascending order and after "
                f"--optim.warmup {self.warmup}"
            )

    def with_steps(self, images: int, global_batch: int) -> tuple["OptimConfig", list[str]]:
        """These settings with `steps` computed from `epochs`; unchanged if `epochs` is None."""
        if self.epochs is None:
            return self, []
        steps = max(math.ceil(self.epochs * images / global_batch), 1)
        try:
            return replace(self, fitting=()).fitted(steps, self.fitting)
        except UsageError as error:
            raise UsageError(
                f"--optim.epochs {self.epochs:g}: is {counted(steps, 'step')}; {error}"
            ) from None

    def fitted(self, steps: int, fitting: Collection[str]) -> tuple["OptimConfig", list[str]]:
        """These settings with another number of steps, and lines that describe what changed.

        Args:
            fitting: of warmup and cooldown those that may be shortened in proportion, if they do not fit.
        UsageError: the steps do not fit the schedule.
        """
        changed: dict[str, Any] = {"steps": steps}
        notes = list[str]()
        for name in fitting if steps <= self.warmup + self.cooldown else ():
            if before := getattr(self, name):
                changed[name] = before * steps // self.steps
                notes.append(
                    f"--optim.{name} {changed[name]}: the preset's {before} of {self.steps:,} steps, in "
                    f"proportion to --optim.steps {steps}"
                )
        return replace(self, **changed), notes


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Schedule, data and protocol of evaluations.

    Attributes:
        view: View to evaluate on (`sa1b view ROOT --held-out ... --split held-out`); it must share no image
            with the training view.
        layers: Layers of masks that evaluations read with the shards; by default none, also where training
            reads some, so that scores of runs with different layers can be compared.
        every: Steps between evaluations; there is also one at the end. 0: only the one at the end.
        protocol: uniform: clicks at uniform random pixels, IoU at the resolution of the losses, for curves.
            sam: clicks at the centres of errors, IoU at source resolution, as in the paper.
        masks: Largest number of masks per image; the choice is the same in every evaluation.
        coco: With --evaluate-only: a COCO-format annotation file to evaluate on instead of a view, with the
            protocol sam and the annotations' boxes; see sa1b.recipes.coco_evaluation.
        images: With coco: the folder of its images.
        detections: With coco: a file of COCO results whose boxes are the prompts; the result is the average
            precision.
        best: Name of a score in an evaluation, such as miou_1_click, of which a larger value is better. The
            checkpoint with the largest one is written and kept, and named when the run ends.
        patience: With best and every: number of evaluations in a row without a better score after which the
            run stops; 0: never.
        show: Number of images, from the start of the view, whose predicted masks are written to
            OUT/predictions.jsonl. `sa1b gallery ROOT --predictions` draws them beside the annotated masks.
    """

    view: str | None = None
    layers: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    every: Annotated[int, Range(0)] = 0
    protocol: Literal["uniform", "sam"] = "uniform"
    masks: Annotated[int, Range(1)] = 16
    coco: Path | None = None
    images: Path | None = None
    detections: Path | None = None
    best: Annotated[str | None, tyro.conf.arg(metavar="SCORE")] = None
    patience: Annotated[int, Range(0)] = 0
    show: Annotated[int, Range(0)] = 24

    def __post_init__(self) -> None:
        check_fields(self, "evaluation")
        if (self.coco is None) != (self.images is None):
            raise UsageError(
                "--evaluation.coco, --evaluation.images: one of them is missing; pass both, annotations "
                "and images"
            )
        if self.detections is not None and self.coco is None:
            raise UsageError(
                "--evaluation.detections: --evaluation.coco is missing; pass the annotations it belongs to"
            )
        if self.best is not None and self.view is None:
            raise UsageError(f"--evaluation.best {self.best}: needs --evaluation.view; pass a held-out view")
        if self.patience and (self.best is None or not self.every):
            raise UsageError(
                f"--evaluation.patience {self.patience}: counts evaluations without a better score; pass "
                "--evaluation.best and --evaluation.every too"
            )
        if self.coco is not None and self.view is not None:
            raise UsageError("--evaluation.coco, --evaluation.view: two sets of images; pass one")

    def how(self, scores: Collection[str]) -> dict[str, str | int | None]:
        """Protocol, place of clicks and most masks of an image (None: all) of a mean IoU; else nothing."""
        if "masks" not in scores:
            return {}
        protocol, limit = (self.protocol, self.masks) if self.coco is None else ("sam", None)
        clicks = "centres" if protocol == "sam" else "random pixels"
        return {"protocol": protocol, "clicks": clicks, "masks_per_image": limit}


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Settings of checkpoints: when they are written, and how many are kept.

    Attributes:
        every: Steps between checkpoints.
        keep_last: Number of newest checkpoints to keep; by default two, in case one is damaged. The disk
            needs space for one more.
        keep_every: Also keep the checkpoints whose step is a multiple of this; 0: none.
        asynchronous: Continue training while a checkpoint is written (the default). This takes host memory
            for a copy of each rank's tensors. With --checkpoint.no-asynchronous, training waits.
        tolerate: Number of consecutive failed writes after which the run still continues; the older
            checkpoint is kept.
    """

    every: Annotated[int, Range(1)] = 1000
    keep_last: Annotated[int, Range(1)] = 2
    keep_every: Annotated[int, Range(0)] = 0
    asynchronous: bool = True
    tolerate: Annotated[int, Range(0)] = 2

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
