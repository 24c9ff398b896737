"""What a run takes before it is started: `plan` of `sa1b plan train`, `dry_run` of `sa1b train --dry-run`.

Weights, gradients and the optimizer follow from the number of parameters and the mode. Activations are
measured on fake tensors, which have shapes and storages, and no memory. On a GPU they have the same formats;
kernels and compiled code usually store less, and workspaces and gaps come on top.
"""

import warnings
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sa1b.arguments import Range
from sa1b.console import counted
from sa1b.engine.checkpoint.tensors import bytes_of
from sa1b.engine.config import Config, build, with_steps
from sa1b.engine.evaluation import held_out_feed
from sa1b.engine.model import declared
from sa1b.engine.precision import autocast, compute_dtype
from sa1b.engine.ranks.parallel import units
from sa1b.engine.ranks.process_group import replicas_on, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.optim import freeze, lr_line
from sa1b.engine.watch.hardware import peak_seconds
from sa1b.engine.weights import load_weights
from sa1b.errors import UsageError
from sa1b.report import rounded
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import RaggedMasks
from sa1b.stream.text import Texts

NO_ROOT = "(all of SA-1B)"  # --data.root of a plan without data
# The totals of the download; shards without --image-size have the same size.
_WHOLE = {"source": "all of SA-1B, because there is no --data.root", "images": 11_185_362, "bytes": 11.30e12}
ALL_OF_SA1B: dict[str, Any] = {**_WHOLE, "files": 1000, "kind": "tar", "resized": None}
# Images that a core reads and decodes in a second (benchmarks/test_stream.py): original size, and 1024 px.
DECODED, DECODED_1024 = 74.0, 220.0
RUNS_PER_MASK = 300  # mean of synthetic images with the statistics of SA-1B
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of each rank in a step."""

    parameters: int  # weights and buffers of the model (or of this rank's shard) and of a teacher
    gradients: int
    optimizer: int  # AdamW's two moments, and the running mean of the weights
    batches: int  # micro-batches on the device: in use, complete and in flight
    communication: int  # parameters that FSDP has gathered
    activations: int  # all other tensors: for the backward pass, and intermediate results
    offloaded: int = 0  # part of the first three that --parallel.offload keeps in host memory

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        states = self.parameters + self.gradients + self.optimizer - self.offloaded
        return states + self.batches + self.communication + self.activations


def measure(config: Config, world_size: int) -> StepMemory:
    """The memory of a step, in 5 to 20 s of a CPU; UsageError names the flag that does not fit the ranks."""
    parallel, data, half = config.parallel, config.data, compute_dtype(config.parallel.precision)
    images, count = config.micro_batches(world_size)
    module, is_sharded = _model(config, images), parallel.mode == "fsdp"
    groups = units(declared(module).fsdp_units(), parallel.wrap) if is_sharded else []
    gathered = [nn.ModuleList(part for unit in group for part in unit) for group in groups]
    for unit in gathered if half else ():
        unit.to(half)  # as FSDP gathers them, so that autocast copies no weights
    quiet, eager = warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager")
    with quiet, eager, FakeTensorMode(), _Live() as live:
        module._apply(lambda one: torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=_CPU))
        weights = live.bytes
        batch = blank_batch(images, data.masks, config.image_size, data.target_size or config.image_size // 4)
        if data.text is not None:
            batch = replace(batch, texts=_blank_texts(images * data.masks, data.text_tokens, data.text_width))
        of_batch = live.bytes - weights
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        before = live.peak = live.bytes
        with autocast(parallel.precision, _CPU):
            sums = module(*declared(module).inputs(batch, config.seed))
        sums["loss"].backward()
        activations = live.peak - before

    shards = world_size // replicas_on(world_size, parallel.replicas) if is_sharded else 1
    every, trained, in_units = numbers(module), numbers(module, trained=True), [*map(numbers, gathered)]
    # Rank 0 has the larger part of a tensor that cannot be divided equally.
    held = sum(
        -(-len(one) // shards) * (one.numel() // len(one)) if one.ndim else 1 for one in module.parameters()
    )
    own, size = trained * held // every, 2 if half else 4
    # Parameters outside of the units stay gathered in float32, and the buffer of the last gather is kept.
    root = 4 * (held * shards - sum(in_units))
    last = size * in_units[-1] if in_units else root
    last += size * sum(in_units) if parallel.shard == "grad_op" else 0
    parameters = weights + (4 - size) * sum(in_units) - 4 * (every - held)
    gradients = 4 * (own if is_sharded and count == 1 else trained)
    optimizer = 4 * own * (3 if config.optim.ema else 2)
    batches, communication = (data.prefetch + 2) * of_batch, root + last if is_sharded else 0
    offloaded = parameters + gradients + optimizer if parallel.offload != "none" else 0
    return StepMemory(parameters, gradients, optimizer, batches, communication, activations, offloaded)


def numbers(module: nn.Module, *, trained: bool = False) -> int:
    return sum(one.numel() for one in module.parameters() if one.requires_grad or not trained)


def _model(config: Config, images: int) -> nn.Module:
    """The model without values, for micro-batches of so many images."""
    data = replace(config.data, global_batch=images, micro_batch=None, block_size=1)
    with torch.device("meta"):
        module = build(replace(config, data=data, parallel=ParallelConfig()), None)
    freeze(module, config.optim)
    return module


class _Live(TorchDispatchMode):
    """Context that counts the bytes of live tensors created in it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


class _BlankMasks(RaggedMasks):
    """Masks of zeros, whose runs have no values on fake tensors."""

    def dense(self, size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        return torch.zeros(len(self), *[size or self.image_size] * 2, dtype=torch.uint8)


def blank_batch(images: int, masks: int, image_size: int, target_size: int) -> Batch:
    """A micro-batch with the shapes and dtypes of the loader's, of zeros."""
    total, whole = images * masks, torch.int64

    def of(count: int, dtype: torch.dtype = whole, **shapes: tuple[int, ...]) -> dict[str, Any]:
        return {name: torch.zeros(count, *shape, dtype=dtype) for name, shape in shapes.items()}

    runs = of(total * RUNS_PER_MASK, torch.int32, runs=()) | of(total + 1, offsets=())
    runs |= of(total, image=(), sizes=(2,), taken=(2,))
    return Batch(
        images=torch.zeros(images, image_size, image_size, 3, dtype=torch.uint8).permute(0, 3, 1, 2),
        masks=_BlankMasks(**runs, counts=(masks,) * images, image_size=image_size),
        position=0,
        dense=torch.zeros(total, target_size, target_size, dtype=torch.uint8),
        **of(total, torch.float32, boxes=(4,), points=(2,), predicted_iou=(), stability_score=()),
        **of(total, areas=(), mask_ids=(), mask_index=()),
        **of(images, ids=(), source_sizes=(2,), framed_sizes=(2,), windows=(4,), positions=()),
        **of(images, torch.bool, flipped=(), valid=()),
    )


def _blank_texts(count: int, length: int, width: int) -> Texts:
    tokens = torch.zeros(0 if width else count * length, dtype=torch.int32)
    offsets, keys = torch.zeros(count + 1, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    return Texts(tokens, offsets, torch.zeros(count, width), keys, "mask_id", length)


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs, and the assumptions under which their time is estimated. Rates are of one direction."""

    gpu: str  # name of the type of GPU
    nodes: int
    gpus: int  # GPUs of a node, and ranks on it
    flops: float  # operations per second of a GPU at its peak
    gpu_memory: float  # bytes of a GPU
    link: float  # bytes per second between GPUs of a node
    network: float  # bytes per second of a node to others
    mfu: float  # fraction of the peak that a step without communication reaches
    exposed: float  # fraction of the communication that computation does not hide, at least
    cpus: int  # CPU cores of a node for decoding
    # images per second that a core reads and decodes; None: measured, see `StoredImages`
    decode_rate: float | None
    storage: float | None  # bytes per second that the storage delivers to all nodes; None: not limited
    reserved: float  # bytes of a GPU that tensors cannot use
    fragmentation: float  # fraction of the tensors' bytes that the allocator cannot reuse
    price: float | None  # dollars for a GPU hour

    def __post_init__(self) -> None:
        Range(above=0, most=1).check("--mfu", self.mfu)

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus


def plan(config: Config, cluster: Cluster, rate: float | None = None) -> dict[str, Any]:
    """The estimates of a run as a JSON document, in SI units; `cluster`: the flags of `sa1b plan train`.
    `rate`: measured images per second of a GPU, in place of the fraction of the peak.

    A step takes the longest of three times, which overlap: that of the GPUs, that in which the storage
    delivers the images, and that in which processors decode them. The GPUs take the model's operations at a
    fraction of the peak, and the communication that computation does not hide.
    """
    ranks, schedule = cluster.world_size, config.checkpoint
    is_whole = config.data.root == NO_ROOT and config.data.mix is None
    data = ALL_OF_SA1B if is_whole else _stored_images(config, ranks)
    config = with_steps(config, data["images"])
    memory, (size, count) = measure(config, ranks), config.micro_batches(ranks)
    module, batch, steps = _model(config, size), config.data.global_batch, config.optim.steps
    trained, flops = numbers(module, trained=True), declared(module).flops(batch, batch * config.data.masks)
    if rate is not None:
        cluster = replace(cluster, mfu=flops / batch * rate / cluster.flops)
    is_small = data["resized"] is not None and data["resized"] <= 1024
    decoded = cluster.decode_rate or (DECODED_1024 if is_small else DECODED)
    cluster = replace(cluster, decode_rate=decoded)
    compute = flops / (cluster.flops * cluster.mfu * ranks)
    sent = _communication(config, cluster, numbers(module), trained)
    # DDP sends during the backward pass of the last micro-batch only, FSDP during all passes.
    hidden = compute if config.parallel.mode == "fsdp" else compute * 2 / 3 / count
    exposed = max(cluster.exposed * sent, sent - hidden)
    gpus = "GPU compute" if compute >= exposed else "network"
    limits = {gpus: compute + exposed, "decoding": batch / (decoded * cluster.cpus * cluster.nodes)}
    if cluster.storage is not None:
        limits["storage"] = batch * data["bytes"] / data["images"] / cluster.storage
    limit = max(limits, key=lambda name: limits[name])
    hours, written = steps * limits[limit] / 3600, -(-steps // schedule.every)
    forever = int(steps // np.lcm(schedule.every, schedule.keep_every)) if schedule.keep_every else 0
    saved = bytes_of(module, 3 if config.optim.ema else 2)
    fits = (needed := _needed(memory, cluster)) <= cluster.gpu_memory
    return {
        "exit_code": int(not fits),
        "cluster": asdict(cluster),
        "ranks": ranks,
        "data": data,
        "images_per_rank": data["images"] / ranks,
        "files_per_rank": data["files"] / ranks,
        "global_batch": batch,
        "micro_batch": size,
        "micro_batches": count,
        "parameters": numbers(module),
        "flops_per_step": flops,
        "steps_per_epoch": -(-data["images"] // batch),
        "steps": steps,
        "epochs": steps * batch / data["images"],
        "seconds_per_step": limits[limit],
        "seconds": {"compute": compute, "communication": sent, "exposed_communication": exposed}
        | {name: limits.get(name) for name in ("storage", "decoding")},
        "limited_by": limit,
        "hours": hours,
        "checkpoint_bytes": saved,
        "checkpoints_written": written,
        "checkpoints_kept": min(written, schedule.keep_last + forever),
        "checkpoint_bytes_written": written * saved,
        "memory_bytes": {**asdict(memory), "peak": memory.peak, "needed": needed},
        "fits": fits,
        "largest_micro_batch": None if fits or size == 1 else _fitting(config, cluster, memory, size),
        "gpu_hours": hours * ranks,
        "dollars": None if cluster.price is None else hours * ranks * cluster.price,
    }


def _needed(memory: StepMemory, cluster: Cluster) -> float:
    return memory.peak * (1 + cluster.fragmentation) + cluster.reserved


def _fitting(config: Config, cluster: Cluster, memory: StepMemory, size: int) -> int | None:
    """The largest micro-batch that fits; None: the model trains with one micro-batch only."""
    # Batches and activations are proportional to it; several micro-batches also need memory for gradients.
    each = (memory.activations + memory.batches) / size * (1 + cluster.fragmentation)
    fitting = min(size - 1, max(0, int(size - (_needed(memory, cluster) - cluster.gpu_memory) / each)))
    for images in range(fitting, 0, -1):
        smaller = replace(config, data=replace(config.data, micro_batch=images))
        try:
            if _needed(measure(smaller, cluster.world_size), cluster) <= cluster.gpu_memory:
                return images
        except UsageError:
            return None
    return 0


def _communication(config: Config, cluster: Cluster, every: int, trained: int) -> float:
    """Seconds in which the links are busy in a step, in rings: 2 (N - 1) / N of the bytes for an all-reduce,
    half of it for a gather or a reduce-scatter.
    """
    parallel, ranks = config.parallel, cluster.world_size
    replicas = replicas_on(ranks, parallel.replicas)
    shards = ranks // replicas if parallel.mode == "fsdp" else ranks
    # A ring within a node uses its links; a ring over nodes passes each node's network once.
    part = (shards - 1) / shards
    rate = min(cluster.link, cluster.network) if shards > cluster.gpus else cluster.link
    if parallel.mode != "fsdp":
        return part * 8 * trained / (1 if parallel.compress == "none" else 2) / rate
    size = 4 if compute_dtype(parallel.precision) is None or parallel.wrap == "none" else 2
    passes = 2 if parallel.shard == "full" and parallel.wrap != "none" else 1
    gathered = passes * config.micro_batches(ranks)[1] * size * every
    reduced = 4 * trained / (2 if parallel.reduce == "bf16" else 1)
    # Replicas: all ranks of a node send at once.
    between = cluster.network / cluster.gpus if cluster.nodes > 1 else cluster.link
    return part * (gathered + reduced) / rate + 2 * (replicas - 1) / replicas * reduced / shards / between


def _stored_images(config: Config, world_size: int) -> dict[str, Any]:
    data = replace(config.data, text=None, text_column="text", text_key=None)
    rank_info = RankInfo(0, world_size, 0, _CPU)
    feed = Feed(data, config.image_size, rank_info, config.folder, config.seed)
    held_out_feed(replace(config, data=data), rank_info, feed.stream)
    read, shards, sizes = 0, 0, []
    for source in feed.stream.sources().values():
        table, rows = source.dataset.table, source.view.rows
        chosen = slice(None) if rows is None else rows
        read += int(sum(one[chosen].sum(dtype=np.int64) for one in (table.jpg_bytes, table.masks_bytes)))
        shards += len(np.unique(table.shard[chosen]))
        sizes.append(source.dataset.manifest.get("options", {}).get("image_size"))
    return {
        "source": f"{data.mix or data.root}{f', view {data.view}' if data.view else ''}",
        "images": feed.images,
        "bytes": float(read),
        "files": shards,
        "kind": "shard",
        "resized": None if None in sizes else max(sizes),
    }


def dry_run(config: Config, rank_info: RankInfo) -> None:
    """Open the data and the initial weights of a run, and print its estimates on rank 0."""
    ranks, side, data = rank_info.world_size, config.image_size, config.data
    feed = Feed(data, side, rank_info, config.folder, config.seed)
    config = with_steps(config, feed.images)
    held_out_feed(config, rank_info, feed.stream)
    stop()  # a model may exchange values in its forward pass, and rank 0 goes on alone
    module = _model(config, config.micro_batches(ranks)[0])
    if rank_info.rank > 0:
        return
    model, steps, parallel = declared(module), config.optim.steps, config.parallel
    if (weights := config.initial_weights) is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            load_weights(model, weights, config.scratch)
    work = data.global_batch, data.global_batch * data.masks
    ideal = peak_seconds(model, *work, parallel.precision, rank_info)
    time = "no estimate of the time: the peak of this device is not known"
    if ideal is not None:
        time = f"{ideal:.2f} s at the GPUs' peak, of which 40 % is good"
    try:
        found = asdict(memory := measure(config, ranks))
        sizes = {name: rounded(size / 1e9) for name, size in found.items()}
        offloaded = sizes.pop("offloaded")
        parts = ", ".join(f"{name} {size}" for name, size in sizes.items())
        text = f"{rounded(memory.peak / 1e9)} GB a rank for tensors, measured without values: {parts}"
        text += f" ({offloaded} GB of them in host memory)" if memory.offloaded else ""
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # The shapes of a model may depend on values, which fake tensors lack.
        text = f"not measured: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    epochs = f"{rounded(steps * data.global_batch / feed.images)} epochs of {counted(feed.images, 'image')}"
    print(f"""\
ranks         {ranks} x {rank_info.device.type}, mode {parallel.mode}, precision {parallel.precision}
batch         {config.step_images(ranks)}
run           {counted(steps, "step")} = {epochs}
model         {numbers(module) / 1e6:.1f} M parameters at {side} x {side}
step          {rounded(model.flops(*work) / 1e12)} TFLOP for up to {data.masks} masks an image; {time}
{lr_line(config.optim, data.global_batch)}
peak memory   {text}""")
