"""The program of one rank: the steps of several cases with and without other work, timed.

Each case takes the same number of steps three times, on the same micro-batches, with a learning rate of 0:

    whole        with micro-batches from the loader; only with a dataset directory
    synchronised with the same micro-batches from memory
    alone        the same without any exchange between ranks: DDP's `no_sync`; for FSDP no reduction of
                 gradients, and parameters that stay gathered

Their differences are the time for data and for exposed communication, which no computation overlaps.

Without a dataset, a micro-batch has images of a pattern, and rectangles as masks. It has the shapes and
dtypes of the loader's batches, and each image has the largest number of masks. A step therefore takes as
long as a step with real images that have at least this number of masks.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sa1b.engine.config import Config, build
from sa1b.engine.model import Wrapper
from sa1b.engine.ranks.parallel import mode_of
from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import clear, micro_batch, warm_up
from sa1b.engine.step.optim import of_rank, set_lr
from sa1b.engine.step.run import TrainStep
from sa1b.masks import geometry
from sa1b.masks.runs import Runs
from sa1b.programs.scaling.cases import Case, Device, bind
from sa1b.stream.batch import Batch, collate
from sa1b.stream.sample import SampleMasks
from sa1b.stream.transform import Frame


def synthetic_batch(
    images: int, masks: int, image_size: int, target_size: int, first: int, device: torch.device
) -> Batch:
    """A micro-batch on a device: images that fill the padded square, each with `masks` masks.

    `target_size` is the size of the dense masks; another position `first` has other images.
    """
    across = torch.arange(image_size)
    pattern = (across[:, None] * 7 + across[None] * 13)[..., None] + torch.tensor([0, 85, 170])
    pixels = torch.stack([(pattern + 31 * (first + number)) % 256 for number in range(images)])
    samples = [_rectangles(first + number, masks, image_size) for number in range(images)]
    positions = list(range(first, first + images))
    batch = collate(pixels.to(torch.uint8), samples, positions, [True] * images, position=first)
    batch = batch.to(device)
    return replace(batch, dense=batch.masks.dense(target_size))


def _rectangles(position: int, count: int, size: int) -> SampleMasks:
    number = np.arange(count) + position
    side = np.maximum(size // 8, size // 2 - number * 5 % (size // 2))
    left, top = number * 37 % (size - side + 1), number * 61 % (size - side + 1)
    along = np.arange(size)
    rows = (along >= top[:, None]) & (along < (top + side)[:, None])
    columns = (along >= left[:, None]) & (along < (left + side)[:, None])
    runs = Runs.from_pixels(rows[:, :, None] & columns[:, None, :])
    corner = np.stack([left, top], 1).astype(np.float32)
    far = (side[:, None] - 1).astype(np.float32)
    ones = np.ones(count, np.float32)
    return SampleMasks(
        image_id=position,
        frame=Frame.whole_image(size, size, size),
        runs=runs,
        boxes=np.concatenate([corner, corner + far], 1),
        points=corner + np.floor(far / 2),
        areas=geometry.area(runs),
        predicted_iou=ones,
        stability_score=ones,
        mask_ids=np.full(count, -1),
        mask_index=np.arange(count),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of all ranks of one group of processes."""

    config: Config  # ranks and batches are replaced by those of each case
    cases: tuple[Case, ...]
    steps: int  # of each part
    device: Device
    threads: int  # of each rank, for computation and for the loader
    cpus: tuple[tuple[int, ...], ...]  # of each rank; empty: not bound
    port: int
    folder: Path  # for the damage log of the loader
    timeout: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step on one rank."""

    whole: tuple[float, ...]  # with the loader; empty without a dataset directory
    synchronised: tuple[float, ...]  # from memory
    alone: tuple[float, ...]  # empty for a pipeline, and if the GPU has too little memory
    queued: float  # share of the time in which the main thread waited for a CPU that other threads used


def run(launch: Launch, rank: int, report: Callable[[object], None]) -> None:
    """Measure and report all cases in a process of its own, whose CPUs and threads are changed."""
    world_size = launch.cases[0].ranks
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launch.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of the parent process
    }
    if launch.cpus:
        bind(launch.cpus[rank])
    torch.set_num_threads(launch.threads)
    for case in launch.cases:
        rank_info = start(case.parallel(launch.device, launch.timeout))
        report(measure(case, launch, rank_info))
        gc.collect()  # frees the model before the next one is built
        if launch.device == "cuda":
            torch.cuda.empty_cache()
    stop()


def measure(case: Case, launch: Launch, rank_info: RankInfo) -> StepTimes:
    """The times of one case on this rank. Collective."""
    config = replace(
        launch.config,
        data=replace(
            launch.config.data,
            global_batch=case.global_batch,
            micro_batch=case.micro_batch,
            threads=launch.threads,
        ),
        parallel=case.parallel(launch.device, launch.timeout),
    )
    step = TrainingStep(config, rank_info)
    whole: tuple[float, ...] = ()
    if config.data.root:
        divided = mode_of(config.parallel).divides_steps
        feed = Feed(config.data, config.image_size, rank_info, launch.folder, config.seed, divided=divided)
        try:
            step.warm_up([feed.peek()])
            step.take(list(feed.step()))
            kept: list[list[Batch]] = []
            whole, _ = _timed(launch.steps, rank_info, lambda number: step.take(_kept(feed.step(), kept)))
        finally:
            feed.close()
    else:
        kept = [_synthetic(case, config, rank_info, number) for number in range(launch.steps)]
        step.warm_up(kept[0])
        step.take(kept[0])
    synchronised, queued = _timed(launch.steps, rank_info, lambda number: step.take(kept[number]))
    alone = not isinstance(step.module, Wrapper)
    try:
        if alone:
            step.separate()
            step.take(kept[0])
    except torch.OutOfMemoryError:  # an unsharded copy of the model does not fit
        alone = False
    without: tuple[float, ...] = ()
    if alone:
        without, queued = _timed(launch.steps, rank_info, lambda number: step.take(kept[number]))
    return StepTimes(whole, synchronised, without, queued)


def _queued() -> float:
    """Seconds that this thread was ready to run without a CPU; 0 if the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _kept(batches: Iterator[Batch], kept: list[list[Batch]]) -> Iterator[Batch]:
    """The batches of a step one by one, which are also appended to `kept`."""
    kept.append([])
    for batch in batches:
        kept[-1].append(batch)
        yield batch


def _synthetic(case: Case, config: Config, rank_info: RankInfo, number: int) -> list[Batch]:
    data = config.data
    images, first = case.images, number * case.global_batch + rank_info.rank * case.images
    if not mode_of(config.parallel).divides_steps:
        images, first = case.global_batch, number * case.global_batch
    size = data.target_size or config.image_size // 4
    return [
        synthetic_batch(
            case.micro_batch,
            data.masks,
            config.image_size,
            size,
            first=first + offset,
            device=rank_info.device,
        )
        for offset in range(0, images, case.micro_batch)
    ]


def _timed(steps: int, rank_info: RankInfo, take: Callable[[int], None]) -> tuple[tuple[float, ...], float]:
    """Seconds of each call of `take`, which all ranks begin together; part of it waiting for a CPU."""
    if rank_info.world_size > 1:
        dist.barrier()
    seconds, queued = [], _queued()
    for number in range(steps):
        began = time.perf_counter()
        take(number)
        seconds.append(time.perf_counter() - began)
    return tuple(seconds), (_queued() - queued) / sum(seconds)


class TrainingStep:
    """The step of `sa1b.train` without records: forward, backward, gradient norm, optimizer."""

    def __init__(self, config: Config, rank_info: RankInfo) -> None:
        self.config, self.rank_info = config, rank_info
        self.step = self.finishing = TrainStep(build(config, None), config, rank_info)
        self.module, self.optimizer, self.scaler = self.step.module, self.step.optimizer, self.step.scaler
        for optimizer in (self.optimizer, of_rank(self.optimizer)):
            set_lr(optimizer, 0.0)
        # While parameters are gathered, the module has other parameters than the optimizer.
        self.weights = nn.ParameterList(
            weight for group in self.optimizer.param_groups for weight in group["params"]
        )
        self.zeros: list[Tensor] | None = None  # gradients of the shards after `separate`

    def warm_up(self, batches: Sequence[Batch]) -> None:
        warm_up(self.module, lambda: self.step.forward_backward(batches[0]))

    def separate(self) -> None:
        """From now on, steps exchange nothing with other ranks. The result of such a step is not used."""
        if isinstance(self.module, FSDPModule):
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_reshard_after_forward(False)
                    unit.set_reshard_after_backward(False)
                    unit.unshard()  # the last exchange
        # The gradients of gathered parameters are not those of the shards, which the optimizer updates.
        self.zeros = [torch.zeros_like(weight) for weight in self.weights]
        self.finishing = copy(self.step)
        self.finishing.module = self.weights
        self.finishing.rank_info = replace(self.rank_info, world_size=1, mesh=None)

    def take(self, batches: Sequence[Batch] | Iterator[Batch]) -> None:
        """One step; returns when the device has finished it."""
        _, count = self.config.micro_batches(self.rank_info.world_size)
        masks: Tensor | float = 0.0
        for number, batch in enumerate(batches, 1):
            with micro_batch(self.module, last=self.zeros is None and number == count):
                masks = masks + self.step.forward_backward(batch)["count"]
        if self.zeros is not None and isinstance(self.module, FSDPModule):
            for weight, zero in zip(self.weights, self.zeros, strict=True):
                weight.grad = zero
        assert isinstance(masks, Tensor)
        norm = self.finishing.finish(masks)
        # A sharded optimizer sends the weights that it has updated.
        self.scaler.step(self.optimizer if self.zeros is None else of_rank(self.optimizer))
        self.scaler.update()
        clear(self.module, self.optimizer)
        float(norm)  # waits for the device
