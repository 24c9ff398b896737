"""The program of a rank: steps alone need no other rank, and synchronised steps do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sa1b.engine.ranks.process_group import start
from sa1b.programs.scaling.cases import Case
from sa1b.programs.scaling.rank import Launch, TrainingStep, measure, synthetic_batch
from sa1b.recipes.presets import PRESETS, SamConfig
from tests.engine.launch import launch

SIZE = 64
CPU = torch.device("cpu")


def config_of(case: Case) -> SamConfig:
    preset = PRESETS["tiny"]
    return replace(
        preset,
        model=replace(preset.model, image_size=SIZE, width=32, depth=2, heads=2),
        data=replace(preset.data, masks=3, global_batch=case.global_batch, micro_batch=case.micro_batch),
        parallel=case.parallel("cpu", 30),
    )


def step_of(case: Case) -> TrainingStep:
    config = config_of(case)
    return TrainingStep(config, start(config.parallel))


def take_alone(modes: tuple[str, ...]) -> list[str]:
    """On rank 0, steps that exchange nothing, while rank 1 waits; in some modes of two ranks, or a pipeline."""
    problems = []
    for mode in modes:
        step = step_of(Case(mode, "bf16", 2, 2, 1))
        rank = step.rank_info.rank
        batches = [synthetic_batch(1, 3, SIZE, SIZE // 4, 2 * rank + n, CPU) for n in range(2)]
        step.warm_up(batches)
        before = [weight.detach().clone() for weight in step.weights]
        step.take(batches)
        step.separate()
        dist.barrier()
        if rank == 0:
            step.take(batches)
            step.take(batches)
        # Rank 1 is here already: a collective of rank 0 would have met this one, of another size.
        numbers = torch.full((1000,), float(rank))
        dist.all_reduce(numbers)
        if not bool((numbers == 1).all()):
            problems.append(f"{mode}: a step alone has exchanged something")
        for weight, old in zip(step.weights, before, strict=True):
            if not torch.equal(weight.detach(), old):
                problems.append(f"{mode}: the learning rate is not 0")
                break
    if modes:
        return problems
    case = Case("pipeline", "bf16", 2, 1, 1)
    config = config_of(case)
    given = Launch(config, (case,), 2, "cpu", 1, (), 0, Path(), 30)
    times = measure(case, given, start(config.parallel))
    if (len(times.synchronised), times.alone) != (2, ()):
        problems.append(f"pipeline: {times}")
    return problems


@pytest.mark.parametrize(
    "modes",
    [
        ("fsdp-full",),
        pytest.param(("ddp", "fsdp-grad_op", "zero1"), marks=pytest.mark.slow),
        pytest.param((), id="pipeline", marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_steps_alone_exchange_nothing_and_no_step_changes_the_weights(modes: tuple[str, ...]) -> None:
    assert launch(take_alone, 2, modes) == [[], []]


@pytest.mark.parametrize("masks", [1, 7])
def test_a_synthetic_batch_is_one_of_the_loader(masks: int) -> None:
    batch = synthetic_batch(2, masks, SIZE, SIZE // 4, 5, CPU)
    assert batch.images.shape == (2, 3, SIZE, SIZE)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(batch.images[0], batch.images[1])
    assert batch.positions.tolist() == [5, 6]
    assert batch.dense is not None
    assert batch.dense.shape == (2 * masks, SIZE // 4, SIZE // 4)
    assert bool(batch.dense.flatten(1).any(1).all())
    pixels = batch.masks.dense()
    x, y = batch.points.long().unbind(1)
    assert bool((pixels[torch.arange(len(pixels)), y, x] == 1).all())
    rows, columns = pixels.any(2), pixels.any(1)
    assert batch.boxes[:, 1].tolist() == rows.int().argmax(1).tolist()
    assert batch.boxes[:, 2].tolist() == (SIZE - 1 - columns.flip(1).int().argmax(1)).tolist()
    assert batch.areas.tolist() == pixels.flatten(1).sum(1).tolist()
