"""A training run of a few steps on a SAM or the second model, in the form of the training loop."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sa1b.engine.model import unwrap
from sa1b.engine.precision import autocast, grad_scaler
from sa1b.engine.ranks.agreement import agree_on_weights
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import OptimConfig, ParallelConfig
from sa1b.engine.step.gradients import clear, finish, micro_batch, warm_up
from sa1b.engine.step.optim import freeze, lr_at, make_optimizer, set_lr
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets
from tests.engine.reconstruction import Reconstruction

SIZE, RASTER = 32, 8
MODEL = ModelConfig(
    image_size=SIZE, patch_size=16, width=16, depth=2, heads=2, global_blocks=(1,), window=2, channels=32
)
BATCH = 5  # images of a step: not a multiple of any tested world size
# Some gradients are zero except for rounding errors, because a key's bias does not change attention. A large
# epsilon prevents full steps of Adam on these errors.
OPTIM = OptimConfig(
    lr=1e-2, batch_scaling="none", warmup=2, steps=10, milestones=(8,), epsilon=1e-3, grad_clip=0.2
)

MicroBatch = tuple[Tensor, Targets, Tensor]
Batches = Callable[[RankInfo, int, int], Iterator[tuple[Any, ...]]]


def build(seed: int = 0) -> Interactive:
    # With other initial weights, rounding errors can change the sign of a ReLU's input and exceed the
    # tolerance of 1e-5.
    torch.manual_seed(200 + seed)
    return Interactive(Sam(MODEL), Recipe(clicks=1, unprompted=0))


def samples(positions: range) -> MicroBatch:
    """Images and masks of these positions; an empty range has none."""
    images = torch.empty(len(positions), 3, SIZE, SIZE, dtype=torch.uint8)
    masks, image, keys, weights, boxes = [], [], [], [], []
    for index, position in enumerate(positions):
        generator = torch.Generator().manual_seed(position)
        images[index] = torch.randint(0, 256, (3, SIZE, SIZE), generator=generator)
        for number in range(1 + position % 3):
            x, y = torch.randint(0, RASTER // 2, (2,), generator=generator).tolist()
            mask = torch.zeros(RASTER, RASTER, dtype=torch.uint8)
            mask[y : y + 3, x : x + 2 + number] = 1
            masks.append(mask)
            image.append(index)
            keys.append(1000 * position + number)
            weights.append(float(number != 1 or position % 2))  # one mask has the weight 0
            boxes.append([4 * x + 0.5, 4 * y + 0.5, 4 * (x + 2 + number) - 0.5, 4 * (y + 3) - 0.5])
    corners = torch.tensor(boxes).reshape(-1, 4)
    targets = Targets(
        masks=torch.stack(masks) if masks else torch.empty(0, RASTER, RASTER, dtype=torch.uint8),
        boxes=corners,
        points=corners[:, :2] + 4.0,
        image=torch.tensor(image, dtype=torch.int64),
        weights=torch.tensor(weights),
        keys=torch.tensor(keys, dtype=torch.int64),
        sizes=torch.full((len(positions), 2), SIZE),
    )
    return images, targets, torch.tensor(positions, dtype=torch.int64)


def micro_batches(rank_info: RankInfo, step: int, accumulation: int) -> Iterator[MicroBatch]:
    """This rank's part of a step, in the same number of micro-batches on every rank; some are empty."""
    begin, end = (
        step * BATCH + rank * BATCH // rank_info.world_size for rank in (rank_info.rank, rank_info.rank + 1)
    )
    for number in range(accumulation):
        low, high = (begin + k * (end - begin) // accumulation for k in (number, number + 1))
        yield samples(range(low, high))


def build_second(seed: int = 0) -> Reconstruction:
    """The second model, whose step takes a tenth of the time of SAM's."""
    torch.manual_seed(seed)
    return Reconstruction(SIZE, 16, 32, 2)


def second_batches(rank_info: RankInfo, step: int, accumulation: int) -> Iterator[tuple[Any, ...]]:
    """Like `micro_batches`, for the second model."""
    for images, _, positions in micro_batches(rank_info, step, accumulation):
        hide = (torch.arange((SIZE // 16) ** 2) + positions[:, None]) % 3 == 0
        yield images, hide, torch.ones(len(images)), torch.zeros(len(images))


@dataclass
class Run:
    """A run between two steps, and its recorded values."""

    rank_info: RankInfo
    config: ParallelConfig
    accumulation: int
    optim: OptimConfig
    module: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    batches: Batches = micro_batches
    losses: list[float] = field(default_factory=list)  # sums of this rank
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # clipped gradient of the first step

    def accumulate(self, micro: tuple[Any, ...], *, last: bool) -> tuple[Tensor, Tensor]:
        with micro_batch(self.module, last=last):
            with autocast(self.config.precision, self.rank_info.device):
                sums = self.module(*micro)
            torch.autograd.backward(self.scaler.scale(sums["loss"]))
        return sums["loss"].detach(), sums["count"].detach()

    def step(self, number: int, spoil: Callable[[nn.Module], object] = lambda _: None) -> None:
        set_lr(self.optimizer, lr_at(self.optim, BATCH, number))
        loss, count = torch.zeros(()), torch.zeros(())
        for index, micro in enumerate(self.batches(self.rank_info, number, self.accumulation)):
            one, counted = self.accumulate(micro, last=index + 1 == self.accumulation)
            loss, count = loss + one, count + counted
        spoil(self.module)
        norm = finish(
            self.module, self.optimizer, self.scaler, count, self.rank_info, grad_clip=self.optim.grad_clip
        )
        self.losses.append(float(loss))
        self.norms.append(float(norm))
        if not self.gradients:
            self.gradients = {
                name: whole(parameter.grad) for name, parameter in self.named() if parameter.grad is not None
            }
        self.scaler.step(self.optimizer)
        self.scaler.update()
        clear(self.module, self.optimizer)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return unwrap(self.module).named_parameters()

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in self.named()}

    def state(self) -> Any:
        return deepcopy(get_state_dict(self.module, self.optimizer))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def begin(
    rank_info: RankInfo,
    config: ParallelConfig,
    accumulation: int = 1,
    optim: OptimConfig = OPTIM,
    state: Any = None,
    primed: bool = True,
    second: bool = False,
) -> Run:
    """A run before its first step, new or from a state; `second`: of the second model."""
    model = (build_second if second else build)(seed=0 if state is None else 1)
    freeze(model, optim)
    module = wrap(model, config, rank_info)
    optimizer = make_optimizer(module, optim, BATCH)
    run = Run(
        rank_info,
        config,
        accumulation,
        optim,
        module,
        optimizer,
        grad_scaler(config.precision, rank_info.device),
        second_batches if second else micro_batches,
    )
    if state is not None:
        set_state_dict(
            module, optimizer, model_state_dict=deepcopy(state[0]), optim_state_dict=deepcopy(state[1])
        )
        agree_on_weights(module, rank_info)
    if primed:
        first = next(run.batches(RankInfo(0, 1, 0, rank_info.device), 0, 2))  # two images
        warm_up(module, lambda: run.accumulate(first, last=True))
    return run
