"""The settings of data, ranks, optimizer, evaluations and checkpoints."""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sa1b.arguments import Range, check_cache_flags, check_fields
from sa1b.engine.precision import Precision
from sa1b.errors import UsageError
from sa1b.stream.sample import Strategy
from sa1b.stream.text import BYTES, Key, Text


def with_flags(error: ValueError) -> UsageError:
    """Convert an error about arguments of `Stream` to one about the flags that set them."""
    names = "|".join(setting.name for setting in fields(DataConfig))
    message = re.sub(rf"\b({names})=", lambda match: f"--data.{match[1].replace('_', '-')} ", str(error))
    return UsageError(message if message.startswith("--data.") else f"--data: {message}")


def group_size(groups: str) -> int | None:
    """The least parameters of a group of `--parallel.wrap`; None: no groups; UsageError: another form."""
    if groups == "none":
        return None
    size = re.fullmatch(r"size:(\d+(?:\.\d+)?)([KMG]?)", groups)
    if groups != "block" and (size is None or not float(size[1]) > 0):
        way = "pass block, none, or a size such as size:100M"
        raise UsageError(f"--parallel.wrap {groups}: not a kind of group; {way}")
    return 1 if size is None else max(round(float(size[1]) * 1000 ** " KMG".index(size[2] or " ")), 1)


_FLAGS_OF_MODES = {
    "fsdp": ("shard", "replicas", "offload", "wrap", "reduce"),
    "ddp": ("static_graph", "find_unused", "broadcast_buffers", "bucket", "compress"),
}

_NEEDS = (
    *(("coco", "images"), ("images", "coco"), ("detections", "coco")),
    *(("every", "view"), ("best", "view"), ("patience", "best"), ("patience", "every")),
)
_SECONDS = Range(above=0, unit=" seconds")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Dataset, choice of samples and batch sizes.

    Attributes:
        root: Folder that `sa1b reshard` made, or its URL (s3://...).
        mix: File of several datasets and their weights (YAML), instead of a root:
            `sources: {NAME: {root: FOLDER, weight: 1}}`; see the page Mixing datasets.
        view: Name, digest or path of the view to train on (made by `sa1b view`); by default all images.
        layers: Layers of masks that training reads with the shards, in this order (made by `sa1b layer add`).
        global_batch: Images of a step over all ranks.
        micro_batch: Images that a rank computes at a time, by default its share of a step. A smaller value
            takes less memory and does not change the step.
        masks: Largest number of masks per image; 0: images only, for models that read no mask.
        strategy: How masks are chosen. uniform: all are equally likely. area: one of each class of sizes.
            quality: those with high scores more often. coverage: all within as few epochs as possible.
        flip: Probability of mirroring an image left and right.
        min_pixels: Masks with fewer pixels at the target size are not trained on; evaluations include them.
        block_size: Neighbouring images that are read together, for disks that are slow at random reads.
        target_size: Side of the square in which losses and scores are computed, pixels; by default a quarter
            of the image size, as the decoder's masks.
        threads: Threads of each process of the loader; by default 2, and with one process the rank's share of
            the CPUs, at most 8.
        processes: Processes of each rank that read and decode; by default 1 if its share is below 4 CPUs,
            else as many as occupy them with their threads. 1: threads of the training process.
        prefetch: Micro-batches that are prepared in advance; at least two for each of several processes.
        decode: Where JPEG files are decoded: cpu, or gpu (needs the extra gpu). auto: on the CPU, until rates
            on a GPU are known. Pixels differ slightly, so keep one choice for a whole run.
        endpoint: URL of an object store other than Amazon's, by default $AWS_ENDPOINT_URL; without that
            variable, also of --out and --init.
        deadline: Seconds that a read may take over all its attempts before training stops.
        cache: Folder on a local disk for data read from a URL; later epochs read it from there. Samples do
            not change.
        cache_bytes: Limit of the cache for the dataset directory, in bytes; required with a cache.
        text: Table of texts of images or masks, for models that read text: Parquet, JSON, JSON lines, CSV or
            TSV, as path or URL. If an id has several texts (a list), each visit takes one of them.
        text_column: Column of the texts: strings, lists of strings, or embeddings (lists of numbers).
        text_key: Column of the ids; by default mask_id if the table has one, else image_id.
        text_tokens: Largest number of tokens of a text; longer texts are truncated.
        text_width: Numbers of an embedding, if the column has embeddings; 0: it has strings.
        tokenizer: How texts become numbers: bytes (of UTF-8), a .json file of the library tokenizers, or
            MODULE:FUNCTION, a function that returns a list of int for a text.
    """

    root: str = ""
    mix: str | None = None
    view: str | None = None
    layers: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    global_batch: Annotated[int, Range(1)] = 256
    micro_batch: Annotated[int | None, Range(1)] = None
    masks: Annotated[int, Range(0)] = 64
    strategy: Strategy = "uniform"
    flip: Annotated[float, Range(0, 1)] = 0.0
    min_pixels: Annotated[int, Range(0)] = 0
    block_size: Annotated[int, Range(1)] = 1
    target_size: Annotated[int | None, Range(1)] = None
    threads: Annotated[int | None, Range(1)] = None
    processes: Annotated[int | None, Range(1)] = None
    prefetch: Annotated[int, Range(1)] = 2
    decode: Literal["auto", "cpu", "gpu"] = "auto"
    endpoint: str | None = None
    deadline: Annotated[float, Range(above=0, unit=" seconds")] = 300.0
    cache: str | None = None
    cache_bytes: Annotated[int | None, Range(1)] = None
    text: str | None = None
    text_column: str = "text"
    text_key: Key | None = None
    text_tokens: Annotated[int, Range(1)] = 64
    text_width: Annotated[int, Range(0)] = 0
    tokenizer: str = BYTES

    def __post_init__(self) -> None:
        check_fields(self, "data")
        check_cache_flags("--data.cache", self.cache, self.cache_bytes)

    def texts(self) -> Text | None:
        if self.text is None:
            return None
        return Text(self.text, self.text_column, self.text_key, self.tokenizer, self.text_tokens)


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
        replicas: For fsdp: copies of the model, each sharded over world size / replicas ranks, at least two.
            If this number does not fit, as after the loss of a machine, the largest smaller divisor of the
            world size is used, so that no rank holds a larger part of the model.
        offload: For fsdp: where shards and optimizer state are stored: on the device (none), in host
            memory (cpu), or in pinned host memory (pinned: faster copies, GPU only).
        wrap: For fsdp: parameters that are gathered together. block: those of an encoder block. size:100M: of
            consecutive blocks, at least 100 million. none: the complete model, in float32.
        reduce: For fsdp: number format in which gradients are summed over the ranks. bf16 halves the sent
            bytes and rounds the gradient.
        compress: For ddp: number format to which gradients are rounded while they are sent.
        bucket: For ddp: MiB of gradients that are sent together.
        static_graph: For ddp: promise that every step runs the same graph, so that torch can optimise it.
        find_unused: For ddp: search each step's graph for parameters without a gradient, for models with a
            branch that only some steps use. SAM has none.
        broadcast_buffers: For ddp: after each step, all ranks take the buffers of rank 0, such as the
            statistics of BatchNorm layers. Each rank normalises with its own images.
        timeout_first: Seconds that a rank waits for the others until the first step is done, which includes
            reading, compiling and connecting; also the limit of the write of a checkpoint.
        timeout: Seconds that a rank waits for the others after the first step, more than --data.deadline:
            while the storage of one rank is down, that rank retries and the others wait for it.
        sync_batchnorm: Compute the statistics of BatchNorm layers over all ranks; GPUs only.
        cudnn_attention: On a GPU, let torch choose the attention of cuDNN, which it prefers. Without it,
            torch chooses flash attention or its own.
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

    def check(self, world_size: int) -> None:
        """UsageError: settings do not fit each other or the number of ranks; the message names the flag."""
        check_fields(self, "parallel")
        if self.mode == "none" and world_size > 1:
            many = f"this run has {world_size}"
            raise UsageError(f"--parallel.mode none: is for one process, {many}; pass ddp or fsdp")
        group_size(self.wrap)
        defaults = ParallelConfig()
        for mode, flags in _FLAGS_OF_MODES.items():
            for flag in flags if mode != self.mode else ():
                if getattr(self, flag) != getattr(defaults, flag):
                    name = f"--parallel.{flag.replace('_', '-')}"
                    raise UsageError(f"{name}: is for --parallel.mode {mode}, not {self.mode}; drop one")


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
            evaluated and exported instead of the weights. In the first steps the decay is smaller and
            equals (1 + step) / (10 + step). A run with a running mean cannot resume without it; one without
            can resume with it, and the mean starts from the weights after the next step.
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
        for flag, schedule in (("min_lr_ratio", "cosine"), ("cooldown", "rsqrt")):
            if getattr(self, flag) and self.schedule != schedule:
                name = f"--optim.{flag.replace('_', '-')}"
                raise UsageError(f"{name}: is for --optim.schedule {schedule}, not {self.schedule}; drop one")
        if self.warmup + max(self.cooldown, 1) > self.steps:
            both = f" and --optim.cooldown {self.cooldown} together" if self.cooldown else ""
            least = f"must be less than --optim.steps {self.steps}"
            raise UsageError(f"--optim.warmup {self.warmup}{both}: {least}")
        marks = pairwise([self.warmup, *self.milestones])
        if self.schedule == "step" and any(mark >= other for mark, other in marks):
            raise UsageError(f"--optim.milestones {self.milestones}: must ascend, after --optim.warmup")

    def fitted(self, steps: int, fitting: Collection[str]) -> tuple["OptimConfig", list[str]]:
        """These settings with other steps, and notes: those of `fitting` that do not fit are shortened."""
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
        every: Steps between evaluations; 0: only the one at the end, which there always is.
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
        for flag, other in _NEEDS:
            if (value := getattr(self, flag)) and not getattr(self, other):
                raise UsageError(f"--evaluation.{flag} {value}: needs --evaluation.{other}; pass both")

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
        asynchronous: Continue training while a checkpoint is written (the default), which takes host memory
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
