"""Pipeline parallelism: each rank has some blocks of a model, and micro-batches pass through all ranks.

    pipeline = Pipeline(module, divide(module, world_size), rank_info, "1f1b", autocast)    # all ranks
    for number, inputs in enumerate(micro_batches):                     # of the complete step, on every rank
        with micro_batch(pipeline, last=number + 1 == len(micro_batches)):
            sums = pipeline.forward_backward(inputs, divisor)

The schedules are those of torch.distributed.pipelining. While the first micro-batches reach the last stage
and the last ones leave it, the other stages wait: with S equal stages and M micro-batches, for a fraction of
(S - 1) / (M + S - 1) of the step, with both schedules. GPipe keeps the activations of all micro-batches until
the backward passes begin. 1F1B keeps those of at most S micro-batches.
"""

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from sa1b.arguments import BadValue
from sa1b.console import command, counted
from sa1b.engine.data_config import DataConfig
from sa1b.engine.model import Divisible, Wrapper, declared
from sa1b.engine.ranks.agreement import DisagreementError
from sa1b.engine.ranks.parallel import Mode
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig, Schedule, autocast
from sa1b.errors import UsageError


class Pipeline(Wrapper):
    """One stage of a model; all ranks create it together, of the same divisible model.

    `stages` are the blocks of each rank: see `divide`. A step with fewer micro-batches than stages, as in a
    warm-up, uses GPipe. `autocast` makes the context of each forward pass. `counts`: this rank computes the
    losses; the sums of the other ranks are 0.
    """

    # A stage receives the stream before its first block, and sends back the gradient of this stream. It reads
    # everything else itself, such as images, targets and the keys of drop path. The parts of the model that
    # belong to other stages are on the meta device: their names and shapes are known on all ranks, and only
    # their own rank has their values.

    def __init__(
        self,
        module: nn.Module,
        stages: list[range],
        rank_info: RankInfo,
        schedule: Schedule,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__(module)
        self.counts = rank_info.rank == len(stages) - 1
        self._model = _divisible(module)
        self._stages, self._rank_info = stages, rank_info
        self._schedule_name, self._autocast = schedule, autocast
        owners = owners_of(module, stages)
        trained = {
            name for name, parameter in self._model.weights().named_parameters() if parameter.requires_grad
        }
        self.elsewhere = frozenset(name for name in trained if owners[name] != rank_info.rank)
        _drop(self._model.weights(), {name for name, rank in owners.items() if rank != rank_info.rank})
        move: Callable[..., nn.Module] = module._apply  # `to` refuses tensors on the meta device
        move(lambda tensor: tensor if tensor.is_meta else tensor.to(rank_info.device))
        self._inputs: list[tuple[Any, ...]] = []
        self._sums: dict[str, Tensor] = {}
        self._divisor = 1.0
        self._schedule: Any = None
        self._shape: tuple[int, torch.Size] | None = None  # micro-batches, and shape between stages

    def forward_backward(self, inputs: tuple[Any, ...], divisor: float) -> dict[str, Tensor]:
        """Take a micro-batch; with the last one, run forward and backward passes of the complete step.

        The inputs of the model's `forward` are the same on all ranks; ValueError: micro-batches of a step
        differ in size. The loss is divided by `divisor`. Returns the sums of the step from the last rank with
        its last micro-batch, without gradient; else zeros.
        """
        self._inputs.append(inputs)
        self._sums = self._zeros()
        if not self.last:
            return self._sums
        shapes = {self._model.stream(*arguments).shape for arguments in self._inputs}
        if len(shapes) > 1:
            self._inputs = []
            raise BadValue(
                f"micro-batches of a pipeline: must be equal, got the shapes {sorted(map(tuple, shapes))}; "
                "pass a --data.micro-batch that divides --data.global-batch"
            )
        count, self._divisor = len(self._inputs), divisor
        shape = (count, shapes.pop())
        if self._shape != shape:
            self._schedule, self._shape = self._make_schedule(count), shape
        numbers = torch.arange(count)  # on the CPU, where reading a number waits for no device
        try:
            self._schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # torch's error has shapes in place of the reason
            raise
        finally:
            self._inputs = []
        return self._sums

    def forward(self, *inputs: Any, **options: Any) -> dict[str, Tensor]:
        """Not available: no rank has the complete model."""
        raise NotImplementedError("a pipeline has no forward pass without a backward pass")

    def numbers(self, ids: list[Tensor]) -> dict[str, float]:
        """A number that represents the images of a step and their order; exact as float64."""
        return {"images": float(zlib.crc32(torch.cat(ids).cpu().numpy().tobytes()))}

    def check(self, step: int, ranks: Mapping[str, list[float]], folder: Path) -> None:
        """DisagreementError, on all ranks, if the stages have read different images in this step."""
        # A sample that is damaged for one rank only, which then reads a substitute, would otherwise pair the
        # features of one image with the masks of another.
        digests = ranks["images"]
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise DisagreementError(
                f"step {step}: {counted(len(others), 'stage')} of the pipeline (rank "
                f"{', '.join(map(str, others[:8]))}) read other images than rank 0, because a sample is "
                f"damaged for some ranks only; {folder / 'damaged.jsonl'} lists it. Repair that copy of the "
                f"dataset (see `{command('verify', '--help')}`), and start the same command again"
            )

    def _make_schedule(self, count: int) -> Any:
        """The schedule of steps with this number of micro-batches of the size of the collected ones."""
        rank, device = self._rank_info.rank, self._rank_info.device
        like = self._model.stream(*self._inputs[0])
        # Shapes are stated, so that torch runs no further passes to find them.
        stream = torch.empty(like.shape, dtype=like.dtype, device=device, requires_grad=True)
        loss = torch.zeros((), device=device, requires_grad=True)
        stage = PipelineStage(
            _Stage(self._compute),
            rank,
            len(self._stages),
            device,
            input_args=() if rank == 0 else (stream,),
            output_args=(loss,) if self.counts else (stream,),
        )
        fits = count >= len(self._stages)
        kind = Schedule1F1B if self._schedule_name == "1f1b" and fits else ScheduleGPipe
        # Losses are sums, which `sa1b.engine.step.gradients.finish` divides.
        return kind(stage, count, loss_fn=lambda loss, number: loss, scale_grads=False)

    def _compute(self, number: int, stream: Tensor | None) -> Tensor:
        """The forward pass of this stage: the stream after its blocks, or the loss."""
        inputs, blocks = self._inputs[number], self._stages[self._rank_info.rank]
        with self._autocast():
            if stream is None:
                stream = self._model.begin(*inputs)
            stream = self._model.through(stream, blocks, *inputs)
            if not self.counts:
                return stream.contiguous()  # as messages must be
            sums = self._model.end(stream, *inputs)
        for name, total in self._sums.items():
            self._sums[name] = total + sums[name].detach()
        return sums["loss"] / self._divisor

    def _zeros(self) -> dict[str, Tensor]:
        device = self._rank_info.device
        return {name: torch.zeros((), device=device) for name in (*self._model.figures, "count")}


class _Stage(nn.Module):
    """The module that torch calls for a micro-batch. It has no parameters of its own."""

    def __init__(self, compute: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, stream: Tensor | None = None, *, number: Tensor) -> Tensor:
        return self.compute(int(number), stream)


def divide(module: nn.Module, count: int) -> list[range]:
    """The blocks of each of `count` stages: consecutive, and equal numbers of them up to one. UsageError: the
    model is not divisible, has fewer blocks, or trains no parameter of a stage.
    """
    depth = _divisible(module).depth
    if depth < count:
        raise UsageError(
            f"--parallel.mode pipeline: {count} ranks for {depth} blocks leave some without a block; start "
            f"at most {depth} ranks, or pass --parallel.mode ddp"
        )
    stages = [range(depth * rank // count, depth * (rank + 1) // count) for rank in range(count)]
    owners = owners_of(module, stages)
    trained = declared(module).weights().named_parameters()
    working = {owners[name] for name, parameter in trained if parameter.requires_grad}
    if idle := sorted(set(range(count)) - working):
        raise UsageError(
            f"--optim.freeze: leaves nothing to train on stage {idle[0]} of the pipeline; freeze fewer "
            "parts, or pass --parallel.mode ddp"
        )
    return stages


def owners_of(module: nn.Module, stages: list[range]) -> dict[str, int]:
    """The rank that has each entry of the state dict of `weights()`."""
    model = declared(module)
    blocks = {block: rank for rank, stage in enumerate(stages) for block in stage}
    owners = {}
    for name in model.weights().state_dict():
        layer = model.layer_of(name)
        owners[name] = len(stages) - 1 if layer is None else blocks[max(layer - 1, 0)]
    return owners


def _divisible(module: nn.Module) -> Divisible:
    if isinstance(module, Divisible):
        return module
    raise UsageError(
        f"--parallel.mode pipeline: {type(module).__name__} cannot be divided into stages (see "
        "sa1b.engine.model.Divisible); pass --parallel.mode ddp, zero1 or fsdp"
    )


def _drop(weights: nn.Module, names: set[str]) -> None:
    """Replace parameters and buffers by tensors on the meta device, which have no values."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = weights.get_submodule(path)
        empty = torch.empty_like(getattr(owner, leaf), device="meta")
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        else:
            owner._buffers[leaf] = empty


class PipelineMode(Mode):
    """--parallel.mode pipeline: every rank reads all images of a step, and has some blocks of the model."""

    divides_steps = False
    checks_model = True

    def fitted(self, data: DataConfig, config: ParallelConfig, world_size: int) -> DataConfig:
        """The data with the largest micro-batches that a pipeline can use, unless they are set."""
        batch = data.global_batch
        if data.micro_batch is not None:
            return data
        least = world_size if config.schedule == "1f1b" else 1
        counts = (count for count in range(least, batch + 1) if batch % count == 0)
        return replace(data, micro_batch=batch // next(counts, batch))

    def check(self, config: ParallelConfig) -> None:
        if config.precision == "fp16":
            raise UsageError(
                "--parallel.precision fp16: does not fit --parallel.mode pipeline, whose stages would detect "
                "different overflows; pass --parallel.precision bf16"
            )

    def check_division(self, batch: int, size: int, count: int, config: ParallelConfig, ranks: int) -> None:
        """Every rank has all micro-batches of a step. They must be equal: stages send one shape only."""
        if batch % size:
            raise UsageError(
                f"--data.micro-batch {size}: does not divide --data.global-batch {batch}, and "
                "--parallel.mode pipeline needs equal micro-batches; pass one that does"
            )
        if config.schedule == "1f1b" and count < ranks:
            raise UsageError(
                f"--data.micro-batch {size}: {counted(count, 'micro-batch', 'es')} of a step for {ranks} "
                "stages, and 1f1b needs one for each; lower it, or pass --parallel.schedule gpipe"
            )

    def check_model(self, module: nn.Module, ranks: int) -> None:
        divide(module, ranks)

    def wrap(self, module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
        stages = divide(module, rank_info.world_size)
        context = partial(autocast, config.precision, rank_info.device)
        return Pipeline(module, stages, rank_info, config.schedule, context)


MODE = PipelineMode()
