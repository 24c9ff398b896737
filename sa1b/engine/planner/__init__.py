"""The cost of a run on a cluster that need not exist: hours, reads, checkpoints, memory, dollars.

    found = plan(config, cluster)
    found.hours, found.needed, found.limit          # 32.5, 52_060_000_000, "GPU compute"

A step takes the longest of three times, which overlap: the GPUs' time, the time in which the storage delivers
the images, and the time in which the processors decode them. The GPUs' time is that of the model's operations
at a fraction of the peak, and the part of the communication that computation does not hide. Communication is
that of a ring: each rank sends 2 (N - 1) / N of the gradients' bytes for an all-reduce, and half of it for a
gather or a reduce-scatter. Memory is measured: `sa1b.engine.planner.fake_step`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sa1b.console import command
from sa1b.engine.config import Config, build, with_steps
from sa1b.engine.evaluation import held_out_feed
from sa1b.engine.model import declared, stored
from sa1b.engine.planner.estimate import check_memory as check_memory
from sa1b.engine.planner.estimate import dry_run as dry_run
from sa1b.engine.planner.fake_step import StepMemory, kept_numbers, measure
from sa1b.engine.ranks.parallel import mode_of, rank_shares
from sa1b.engine.ranks.process_group import replicas_on
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import compute_dtype
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.optim import freeze
from sa1b.engine.watch.hardware import Cluster
from sa1b.errors import UsageError

NO_ROOT = "(all of SA-1B)"  # --data.root of a plan without data
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StoredImages:
    """The images of an epoch."""

    source: str  # description of the data
    images: int
    bytes: float  # of all images with their masks, as they are read
    files: int  # number of shards or tars
    kind: str  # "shard" or "tar"
    resized: int | None = None  # longer side to which the images were re-encoded, pixels; None: original size

    @property
    def decode_rate(self) -> float:
        """Images per second that one CPU core reads and decodes, with masks at 256 pixels."""
        # From benchmarks/results/intel-xeon-2-cores-parts.json, "stream": of images in original size, or of
        # images that were re-encoded at 1024 pixels.
        return 220.0 if self.resized is not None and self.resized <= 1024 else 74.0


# The totals of the download: 1000 tars of 11.3 GB on average. Shards without --image-size have the same size.
ALL_OF_SA1B = StoredImages(
    source="all of SA-1B, because there is no --data.root",
    images=11_185_362,
    bytes=11.30e12,
    files=1000,
    kind="tar",
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The estimates."""

    config: Config
    cluster: Cluster
    data: StoredImages
    parameters: int  # of the model
    trained: int  # those of them that are not frozen
    saved: int  # bytes of a checkpoint
    step_flops: float  # operations of a step for the largest number of masks
    memory: StepMemory  # bytes of each rank
    # if the micro-batch does not fit, the largest that does, measured; 0: none. None: it fits, or is 1
    fitting: int | None = None

    @property
    def compute(self) -> float:
        """Seconds of a step for the model's operations."""
        cluster = self.cluster
        return self.step_flops / (cluster.flops * cluster.mfu * cluster.world_size)

    @property
    def communication(self) -> float:
        """Seconds in which the links are busy in a step."""
        cluster, parallel, ranks = self.cluster, self.config.parallel, self.cluster.world_size
        if ranks == 1:
            return 0.0
        gradients = 4.0 * self.trained
        replicas = replicas_on(ranks, parallel.replicas)
        shards = ranks // replicas if parallel.mode == "fsdp" else ranks
        part = (shards - 1) / shards
        # A ring within a node uses its links; a ring over nodes passes each node's network once.
        rate = cluster.link
        if shards > cluster.gpus:
            rate = min(cluster.link, cluster.network)
        if parallel.mode != "fsdp":
            sent = 2 * part * gradients / (2 if parallel.compress in ("fp16", "bf16") else 1)
            sent += part * gradients if parallel.mode == "zero1" else 0.0  # updated parameters
            return sent / rate
        number = 4 if compute_dtype(parallel.precision) is None or parallel.wrap == "none" else 2
        gathers = (2 if parallel.shard == "full" and parallel.wrap != "none" else 1) * self._micro[1]
        reduced = gradients / (2 if parallel.reduce == "bf16" else 1)
        seconds = part * (gathers * number * self.parameters + reduced) / rate
        if replicas > 1:  # all ranks of a node send at once
            between = cluster.network / cluster.gpus if cluster.nodes > 1 else cluster.link
            seconds += 2 * (replicas - 1) / replicas * reduced / shards / between
        return seconds

    @property
    def exposed(self) -> float:
        """Seconds of communication in a step in which the GPUs wait."""
        # DDP sends during the backward pass of the last micro-batch only, FSDP during all passes.
        hiding = self.compute
        if self.config.parallel.mode != "fsdp":
            hiding *= 2 / 3 / self._micro[1]
        return max(self.cluster.exposed * self.communication, self.communication - hiding)

    @property
    def limits(self) -> dict[str, float]:
        """Seconds of a step by each of the limits."""
        cluster, batch = self.cluster, self.config.data.global_batch
        gpu = "GPU compute" if self.compute >= self.exposed else "network"
        seconds = {
            gpu: self.compute + self.exposed,
            "decoding": batch / (self.decode_rate * cluster.cpus * cluster.nodes),
        }
        if cluster.storage is not None:
            seconds["storage"] = batch * self.image_bytes / cluster.storage
        return seconds

    @property
    def limit(self) -> str:
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def seconds(self) -> float:
        return self.limits[self.limit]

    @property
    def decode_rate(self) -> float:
        """Images per second that a core decodes: the cluster's, or the measured one."""
        return self.cluster.decode_rate or self.data.decode_rate

    @property
    def image_bytes(self) -> float:
        """Bytes that are read for an image with its masks."""
        return self.data.bytes / self.data.images

    @property
    def epochs(self) -> float:
        return self.config.optim.steps * self.config.data.global_batch / self.data.images

    @property
    def hours(self) -> float:
        """Hours of the run, without evaluations and checkpoints that training waits for."""
        return self.config.optim.steps * self.seconds / _HOUR

    @property
    def read_rate(self) -> float:
        """Bytes per second that all nodes read."""
        return self.config.data.global_batch * self.image_bytes / self.seconds

    @property
    def cores(self) -> float:
        """CPU cores of each node that decoding keeps busy."""
        return self.config.data.global_batch / self.seconds / self.decode_rate / self.cluster.nodes

    @property
    def checkpoints(self) -> tuple[int, int]:
        """Checkpoints that the run writes, and the most that are kept at a time."""
        schedule, steps = self.config.checkpoint, self.config.optim.steps
        written = -(-steps // schedule.every)
        forever = steps // np.lcm(schedule.every, schedule.keep_every) if schedule.keep_every else 0
        return written, min(written, schedule.keep_last + int(forever))

    @property
    def needed(self) -> float:
        """Bytes of a GPU."""
        return self.memory.peak * (1 + self.cluster.fragmentation) + self.cluster.reserved

    @property
    def fits(self) -> bool:
        return self.needed <= self.cluster.gpu_memory

    @property
    def _micro(self) -> tuple[int, int]:
        return self.config.micro_batches(self.cluster.world_size)

    def exit_code(self) -> int:
        """0; 1 if a step does not fit the memory of a GPU."""
        return 0 if self.fits else 1

    def document(self) -> dict[str, Any]:
        """The estimates as a JSON document, in SI units."""
        cluster, config, data = self.cluster, self.config, self.data
        size, count = self._micro
        written, kept = self.checkpoints
        gpu_hours = self.hours * cluster.world_size
        return {
            "exit_code": self.exit_code(),
            "cluster": asdict(cluster),
            "ranks": cluster.world_size,
            "mode": config.parallel.mode,
            "precision": config.parallel.precision,
            "data": {**asdict(data), "bytes_per_image": self.image_bytes},
            "images_per_rank": data.images / cluster.world_size,
            "files_per_rank": data.files / cluster.world_size,
            "global_batch": config.data.global_batch,
            "micro_batch": size,
            "micro_batches": count,
            "parameters": self.parameters,
            "flops_per_step": self.step_flops,
            "steps_per_epoch": -(-data.images // config.data.global_batch),
            "steps": config.optim.steps,
            "epochs": self.epochs,
            "seconds_per_step": self.seconds,
            "seconds": {
                "compute": self.compute,
                "communication": self.communication,
                "exposed_communication": self.exposed,
                "storage": self.limits.get("storage"),
                "decoding": self.limits["decoding"],
            },
            "limited_by": self.limit,
            "hours_per_epoch": data.images / config.data.global_batch * self.seconds / _HOUR,
            "hours": self.hours,
            "read_bytes_per_second": {"all": self.read_rate, "per_node": self.read_rate / cluster.nodes},
            "decode_rate": self.decode_rate,
            "decoding_cores_per_node": self.cores,
            "checkpoint_bytes": self.saved,
            "checkpoints_written": written,
            "checkpoints_kept": kept,
            "checkpoint_bytes_written": written * self.saved,
            "memory_bytes": {**asdict(self.memory), "peak": self.memory.peak, "needed": self.needed},
            "fits": self.fits,
            "largest_micro_batch": self.fitting,
            "gpu_hours": gpu_hours,
            "dollars": None if cluster.price is None else gpu_hours * cluster.price,
        }


def plan(config: Config, cluster: Cluster) -> RunPlan:
    """Estimate a run. Measuring its memory takes 10 to 40 s, and about 3 times as long if it does not fit.
    `data.root` may be NO_ROOT. UsageError: settings do not fit each other or this cluster.
    """
    ranks = cluster.world_size
    if not mode_of(config.parallel).divides_steps:
        raise UsageError(
            "--parallel.mode pipeline: has no plan, because its stages need unequal memory; pass "
            f"--parallel.mode ddp or fsdp, or see the estimates of `{command('train')} --dry-run`"
        )
    data = (
        ALL_OF_SA1B
        if config.data.root == NO_ROOT and config.data.mix is None
        else _stored_images(config, ranks)
    )
    config = with_steps(config, data.images)
    memory = measure(config, ranks)
    with torch.device("meta"):
        module = build(config, None)
    freeze(module, config.optim)
    batch = config.data.global_batch
    trained = _numbers(module, trained=True)
    moments = 4 * trained * (3 if config.optim.ema else 2)
    compression = 4 * ranks * sum(kept_numbers(module, config.parallel))  # each rank has its own
    run_plan = RunPlan(
        config,
        cluster,
        data,
        parameters=_numbers(module),
        trained=trained,
        saved=sum(tensor.nbytes for tensor in stored(module).state_dict().values()) + moments + compression,
        step_flops=declared(module).flops(batch, batch * config.data.masks),
        memory=memory,
    )
    size, _ = config.micro_batches(ranks)
    if run_plan.fits or size == 1:
        return run_plan
    # The memory of batches and activations is proportional to the micro-batch.
    smallest = _with_micro_batch(run_plan, 1)
    each = max((run_plan.needed - smallest.needed) / (size - 1), 1.0)
    fitting = min(int(1 + (cluster.gpu_memory - smallest.needed) // each), size - 1)
    while fitting > 1 and not _with_micro_batch(run_plan, fitting).fits:
        fitting -= 1  # several micro-batches also need memory for gradients
    return replace(run_plan, fitting=fitting if smallest.fits else 0)


def _with_micro_batch(run_plan: RunPlan, size: int) -> RunPlan:
    config = replace(run_plan.config, data=replace(run_plan.config.data, micro_batch=size))
    return replace(run_plan, config=config, memory=measure(config, run_plan.cluster.world_size))


def _numbers(module: nn.Module, *, trained: bool = False) -> int:
    return sum(
        parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained
    )


def _stored_images(config: Config, world_size: int) -> StoredImages:
    rank_info = RankInfo(0, world_size, 0, torch.device("cpu"))
    shares = rank_shares(config.parallel, world_size)
    feed = Feed(config.data, config.image_size, rank_info, config.folder, config.seed, shares=shares)
    held_out_feed(config, rank_info, feed.stream)
    read, shards, stored = 0, 0, []
    for source in feed.stream.sources():
        table, rows = source.dataset.table, source.view.rows
        chosen = slice(None) if rows is None else rows
        read += int(
            table.jpg_bytes[chosen].sum(dtype=np.int64) + table.masks_bytes[chosen].sum(dtype=np.int64)
        )
        shards += int(np.unique(table.shard[chosen]).size)
        stored.append(source.dataset.manifest.get("options", {}).get("image_size"))
    view = "" if config.data.view is None else f", view {config.data.view}"
    return StoredImages(
        source=f"{config.data.mix or config.data.root}{view}",
        images=feed.images,
        bytes=float(read),
        files=shards,
        kind="shard",
        resized=None if None in stored else max(stored),
    )
