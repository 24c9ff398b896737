"""A grounding model of a few thousand parameters, micro-batches for it, and its gradient on one of several ranks."""

from typing import Any

import torch
from torch import Tensor

from sa1b.engine.model import unwrap
from sa1b.engine.precision import grad_scaler
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.settings import OptimConfig, ParallelConfig
from sa1b.engine.step.gradients import clear, finish, micro_batch
from sa1b.engine.step.optim import make_optimizer
from sa1b.grounding.alignment import GroundingRecipe, Phrased, TextConfig
from sa1b.grounding.model import Grounding
from sa1b.sam.model import ModelConfig
from tests.engine.launch import group
from tests.engine.training import whole

SIZE, SIDE, DENSE, LENGTH = 32, 4, 16, 6
MASKS = 3  # largest number of masks of an image
BATCH = 6  # images of a step
MODEL = ModelConfig(
    image_size=SIZE, patch_size=8, width=16, depth=2, heads=2, global_blocks=(1,), window=2, channels=32
)


def build(capacity: int = BATCH * MASKS, vectors: int = 0, **recipe: Any) -> Grounding:
    torch.manual_seed(0)
    return Grounding(
        MODEL,
        TextConfig(width=16, depth=1, heads=2, kernel=3, vocabulary=11),
        GroundingRecipe(features=8, contrastive_weight=1.0, **recipe),
        tokenizer="bytes",
        length=LENGTH,
        vectors=vectors,
        capacity=capacity,
    )


def samples(positions: range, vectors: int = 0) -> tuple[Tensor, Phrased, Tensor]:
    """Images and phrases of these positions; an empty range has none.

    Some phrases occur in several images, some masks have no phrase, and image 1 has no mask.
    """
    images = torch.empty(len(positions), 3, SIZE, SIZE, dtype=torch.uint8)
    dense, image, counts, tokens, belongs, keys, points, values = [], [], [], [], [], [], [], []
    for index, position in enumerate(positions):
        generator = torch.Generator().manual_seed(position)
        images[index] = torch.randint(0, 256, (3, SIZE, SIZE), generator=generator)
        counts.append(position % (MASKS + 1) if position != 1 else 0)
        for number in range(counts[-1]):
            x, y = torch.randint(0, DENSE // 2, (2,), generator=generator).tolist()
            mask = torch.zeros(DENSE, DENSE, dtype=torch.uint8)
            mask[y : y + 4, x : x + 3 + number] = 1
            phrase = (position + number) % 4  # 4 phrases in all
            dense.append(mask)
            image.append(index)
            tokens.append([(phrase * 3 + at) % 11 for at in range(LENGTH)])
            belongs.append([at < 2 + phrase for at in range(LENGTH)])
            values.append([(phrase + at) % 3 - 1.0 for at in range(vectors)])
            keys.append(-1 if number == 2 and position == 3 else phrase)
            points.append([2.0 * x + 1, 2.0 * y + 1])
    count, used = len(dense), 0 if vectors else LENGTH
    masks = torch.stack(dense) if dense else torch.empty(0, DENSE, DENSE, dtype=torch.uint8)
    key = torch.tensor(keys, dtype=torch.int64)
    return (
        images,
        Phrased(
            dense=masks,
            coarse=masks[:, 2::4, 2::4].contiguous(),
            points=torch.tensor(points).reshape(-1, 2),
            image=torch.tensor(image, dtype=torch.int64),
            counts=tuple(counts),
            sizes=torch.full((len(positions), 2), SIZE),
            tokens=torch.tensor(tokens, dtype=torch.int64).reshape(count, LENGTH)[:, :used],
            belongs=torch.tensor(belongs, dtype=torch.bool).reshape(count, LENGTH)[:, :used],
            vectors=torch.tensor(values).reshape(count, vectors),
            keys=key,
            counted=key >= 0,
        ),
        torch.tensor(list(positions), dtype=torch.int64),
    )


def gradient(mode: str, shares: tuple[int, ...], cuts: int = 1, vectors: int = 0) -> dict[str, Any]:
    """The gradient of a step and its sums, on this rank of a group; `shares` are images of each rank.

    Args:
        cuts: micro-batches of a step.
    """
    config = ParallelConfig(mode=mode)  # type: ignore[arg-type]
    with group(config) as rank_info:
        module = wrap(build(vectors=vectors), config, rank_info)
        optimizer = make_optimizer(module, OptimConfig(), BATCH)
        scaler = grad_scaler("fp32", rank_info.device)
        first = sum(shares[: rank_info.rank])
        own = shares[rank_info.rank]
        totals: dict[str, Tensor] = {}
        for cut in range(cuts):
            part = range(first + cut * own // cuts, first + (cut + 1) * own // cuts)
            with micro_batch(module, last=cut + 1 == cuts):
                sums = module(*samples(part, vectors))
                sums["loss"].backward()
            totals = {name: totals.get(name, 0) + value.detach() for name, value in sums.items()}
        norm = finish(module, optimizer, scaler, totals["count"], rank_info, grad_clip=0.0)
        gradients = {
            name: whole(parameter.grad)
            for name, parameter in unwrap(module).named_parameters()
            if parameter.grad is not None
        }
        named = {name for name, _ in unwrap(module).named_parameters()}
        clear(module, optimizer)
        return {
            "gradients": gradients,
            "missing": sorted(named - gradients.keys()),
            "sums": {name: float(value) for name, value in totals.items()},
            "norm": float(norm),
        }


def gradients_of_cases(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: gradient(**arguments) for name, arguments in cases.items()}
