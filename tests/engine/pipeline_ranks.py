"""Steps of a pipeline and of one process with the same micro-batches; the tests check their results."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.engine.checkpoint import tensors
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.ranks.agreement import agree
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.pipeline import Pipeline
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import CheckpointConfig, ParallelConfig, grad_scaler
from sa1b.engine.step.gradients import clear, finish, micro_batch
from sa1b.engine.step.optim import lr_at, make_optimizer, set_lr
from sa1b.errors import UsageError
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from tests.engine.launch import group
from tests.engine.training import MODEL, OPTIM, MicroBatch, Run, samples

IMAGES, MICRO_BATCHES = 2, 4
STEPS = {"fp32": 3, "bf16": 2}  # the second one has a micro-batch without masks
DEPTH = 3


def model() -> Interactive:
    torch.manual_seed(200)
    sizes = dataclasses.replace(MODEL, depth=DEPTH, drop_path=0.4, pixel_features=4, global_blocks=(1,))
    return Interactive(Sam(sizes), Recipe(clicks=1, unprompted=0))


def begin(
    rank_info: RankInfo, config: ParallelConfig, change: Callable[[nn.Module], object] | None = None
) -> Run:
    module = model()
    if change is not None:
        change(module)
    module = wrap(module, config, rank_info)
    optimizer = make_optimizer(module, OPTIM, IMAGES * MICRO_BATCHES)
    scaler = grad_scaler(config.precision, rank_info.device)
    return Run(rank_info, config, MICRO_BATCHES, OPTIM, module.train(), optimizer, scaler)


def step(run: Run, number: int, images: int = IMAGES) -> None:
    """A step of the run; a pipeline and a single process read the same images."""
    set_lr(run.optimizer, lr_at(run.optim, IMAGES * MICRO_BATCHES, number))
    loss, count = torch.zeros(()), torch.zeros(())
    for micro in range(MICRO_BATCHES):
        first = (number * MICRO_BATCHES + micro) * IMAGES
        batch = samples(range(first, first + (images if micro else IMAGES)))
        if (number, micro) == (1, 2):
            batch = without_masks(batch)
        one, counted = run.accumulate(batch, last=micro + 1 == MICRO_BATCHES)
        loss, count = loss + one, count + counted
    norm = finish(run.module, run.optimizer, run.scaler, count, run.rank_info, grad_clip=run.optim.grad_clip)
    run.losses.append(float(loss))
    run.norms.append(float(norm))
    if not run.gradients:
        run.gradients = {name: one.grad.clone() for name, one in run.named() if one.grad is not None}
    run.scaler.step(run.optimizer)
    clear(run.module, run.optimizer)


def without_masks(batch: MicroBatch) -> MicroBatch:
    images, targets, keys = batch
    names = ("masks", "boxes", "points", "image", "weights", "keys")
    return images, dataclasses.replace(targets, **{name: getattr(targets, name)[:0] for name in names}), keys


def own(run: Run) -> dict[str, torch.Tensor]:
    """The tensors of this rank, copied."""
    return {name: one.detach().clone() for name, one in tensors.gather(run.module, run.optimizer).items()}


def traces(configs: dict[str, ParallelConfig]) -> dict[str, dict[str, Any]]:
    """Losses, norms, first gradients and last tensors of this rank, and what disagrees with the other ranks."""
    found = {}
    for name, config in configs.items():
        with group(config) as rank_info:
            run = begin(rank_info, config)
            for number in range(STEPS[config.precision]):
                step(run, number)
            agree(run.module, rank_info)
            found[name] = {
                "losses": run.losses,
                "norms": run.norms,
                "gradients": run.gradients,
                "tensors": own(run),
                "parameters": len(list(run.named())),
            }
    return found


def refusals(config: ParallelConfig) -> list[str]:
    """Messages for a model with a frozen stage, one that is not divisible, and unequal micro-batches."""

    def frozen(module: nn.Module) -> None:
        module.get_submodule("model.image_encoder").requires_grad_(False)

    found = []
    with group(config) as rank_info:
        for change in (frozen, lambda module: setattr(module, "stream", None)):
            try:
                begin(rank_info, config, change)
            except UsageError as error:
                found.append(str(error))
        run = begin(rank_info, config)
        try:
            step(run, 0, images=1)
        except ValueError as error:
            found.append(str(error))
        step(run, 0)  # works after the error
        found.append(str(run.norms))
    return found


def save(folder: Path, config: ParallelConfig) -> dict[str, torch.Tensor]:
    """The tensors of this rank when a checkpoint was saved."""
    with group(config) as rank_info:
        run = begin(rank_info, config)
        step(run, 0)
        checkpoints = Checkpoints(folder, CheckpointConfig())
        checkpoints.save(1, run.module, run.optimizer, {"position": 8})
        saved = own(run)
        checkpoints.close()
        return saved


def load(folder: Path, configs: dict[str, ParallelConfig]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of this rank after it has loaded the checkpoint in each mode, shards as complete tensors."""
    loaded = {}
    for name, config in configs.items():
        with group(config) as rank_info:
            run = begin(rank_info, config)
            checkpoints = Checkpoints(folder, CheckpointConfig())
            assert checkpoints.resume(run.module, run.optimizer) == {"position": 8}
            agree(run.module, rank_info)
            found = tensors.gather(run.module, run.optimizer)
            loaded[name] = {key: getattr(one, "full_tensor", one.clone)() for key, one in found.items()}
            checkpoints.close()
    return loaded


class _Clock:
    """Work that takes a fixed time on any machine: it sleeps.

    Attributes:
        spent: seconds of work so far.
        kept, most: forward passes of blocks whose backward pass has not run: now, and at most so far.
    """

    def __init__(self) -> None:
        self.seconds = self.spent = 0.0
        self.kept = self.most = 0

    def work(self, times: float) -> None:
        began = time.perf_counter()
        time.sleep(times * self.seconds)
        self.spent += time.perf_counter() - began


class _Work(torch.autograd.Function):
    """The identity; the backward pass takes twice as long as the forward pass, as in a network."""

    @staticmethod
    def forward(context: Any, stream: Tensor, clock: _Clock) -> Tensor:
        context.clock = clock
        clock.work(1.0)
        clock.kept += 1
        clock.most = max(clock.most, clock.kept)
        return stream.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        context.clock.work(2.0)
        context.clock.kept -= 1
        return gradient, None


class Sleeping(nn.Module):
    """A divisible model of six equal blocks; its beginning and its end take almost no time."""

    figures = ("loss",)
    shown: ClassVar[dict[str, str]] = {}
    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(torch.ones(()) for _ in range(self.depth))
        self.clock = _Clock()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.end(self.through(self.begin(images), range(self.depth), images), images)

    def stream(self, images: Tensor) -> Tensor:
        return images.to("meta")

    def begin(self, images: Tensor) -> Tensor:
        return images

    def through(self, stream: Tensor, blocks: range, images: Tensor) -> Tensor:
        for block in blocks:
            stream = _Work.apply(stream * self.blocks[block], self.clock)
        return stream

    def end(self, stream: Tensor, images: Tensor) -> dict[str, Tensor]:
        return {"loss": stream.square().mean(), "count": torch.ones(())}

    def weights(self) -> nn.Module:
        return self

    def layer_of(self, name: str) -> int | None:
        return int(name.split(".")[1]) + 1

    def _not_called(self, *_: Any) -> Any:
        raise NotImplementedError

    inputs = read_weights = load_weights = fsdp_units = decays = flops = _not_called


def waiting(
    configs: dict[str, ParallelConfig], counts: list[int], seconds: float, steps: int
) -> dict[tuple[str, int], tuple[list[float], int]]:
    """For each schedule and number of micro-batches: waits of this rank, and the micro-batches that it keeps.

    Args:
        counts: micro-batches of a step.
        seconds: of the forward pass of a block.
        steps: number of measured steps; a wait is the part of a step in which this rank does not work.
    """
    found = {}
    for name, config in configs.items():
        with group(config) as rank_info:
            model = Sleeping()
            module = wrap(model, config, rank_info)
            assert isinstance(module, Pipeline)
            for count in counts:
                waits, model.clock.most = [], 0
                for number in range(steps + 1):  # the first one connects
                    model.clock.seconds = seconds if number else 0.0
                    dist.barrier()
                    began, model.clock.spent = time.perf_counter(), 0.0
                    for micro in range(count):
                        with micro_batch(module, last=micro + 1 == count):
                            module.forward_backward((torch.zeros(1, 16, 16, 256),), 1.0)
                    dist.barrier()
                    waits.append(1 - model.clock.spent / (time.perf_counter() - began))
                own = model.depth // rank_info.world_size  # blocks of this rank
                found[name, count] = waits[1:], model.clock.most // own
    return found
