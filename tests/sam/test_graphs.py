"""Iterations recorded as CUDA graphs give the losses and gradients of iterations that are not recorded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten

from sa1b.sam.interactive import Interactive
from sa1b.sam.iteration import MOST, Graphs
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import rounded_up
from tests.sam.sketch import SMALL
from tests.sam.test_iteration import compare, micro_batch, pair

COUNTS = ((4, 4), (4, 4), (4, 3), (3, 3), (4, 4), (2, 3), (0, 0), (5, 7), (7, 7), (4, 1))


class Repeated(Graphs):
    """A replay computes the recorded function again, on the recorded tensors."""

    def __init__(self):
        super().__init__()
        self.replays = 0

    def supports(self, x):
        return True

    def _record(self, function, inputs):
        own = [x.detach().clone() for x in inputs]
        outputs = function(*own)

        def replay():
            self.replays += 1
            for old, new in zip(tree_flatten(outputs)[0], tree_flatten(function(*own))[0], strict=True):
                if old is not None:
                    old.copy_(new)

        return SimpleNamespace(replay=replay), own, outputs


def trained(interactive, counts, device="cpu", autocast=None, rate=0.01):
    """The sums and gradients of a micro-batch; then a step of plain gradient descent."""
    interactive.zero_grad()
    images, targets, keys = micro_batch(counts)
    moved = {
        name: value.to(device)
        for name in targets.__slots__
        if isinstance(value := getattr(targets, name), torch.Tensor)
    }
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        sums = interactive(images.to(device), replace(targets, **moved), keys.to(device))
    sums["loss"].backward()
    trained = [parameter for parameter in interactive.parameters() if parameter.requires_grad]
    found = [parameter.grad.clone() for parameter in trained]
    with torch.no_grad():
        torch._foreach_sub_(trained, [rate * parameter.grad for parameter in trained])
    return {name: value.detach().clone() for name, value in sums.items()}, found


def test_sums_and_gradients_of_a_micro_batch_stay_when_the_next_one_is_replayed(one_thread):
    _, recorded = pair(Recipe(clicks=1, unprompted=0))
    recorded._graphs = Repeated()
    images, targets, keys = micro_batch((4, 4))

    def gradients(sums):
        recorded.zero_grad()
        sums["loss"].backward()
        return [parameter.grad.clone() for parameter in recorded.parameters()]

    expected = gradients(recorded(images, targets, keys))
    first = recorded(images, targets, keys)
    before = {name: value.tolist() for name, value in first.items()}
    second = recorded(images, replace(targets, weights=0.5 * targets.weights), keys)
    assert recorded._graphs.replays == 2
    assert {name: value.tolist() for name, value in first.items()} == before
    assert float(second["count"]) == 0.5 * before["count"]
    for one, other in zip(gradients(first), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [{}, {"pixel_features": 8}])
def test_replays_give_the_losses_and_gradients_of_other_batches_and_weights(one_thread, sizes):
    plain, recorded = pair(Recipe(clicks=2, unprompted=1), **sizes)
    recorded._graphs = graphs = Repeated()
    for counts in COUNTS:
        compare(trained(recorded, counts), trained(plain, counts), 2e-5)
    assert graphs.replays == 6  # of 9 batches with masks; there are three kinds of them


def test_what_cannot_be_recorded_is_computed_and_said_once(one_thread, caplog):
    class Failing(Repeated):
        def _record(self, function, inputs):
            raise RuntimeError("out of memory")

    plain, recorded = pair(Recipe(clicks=1, unprompted=0))
    recorded._graphs = Failing()
    for _ in range(3):
        compare(trained(recorded, (4, 3)), trained(plain, (4, 3)), 2e-5)
    assert caplog.messages == ["no CUDA graphs are used: out of memory; pass --model.no-cuda-graphs"]


def test_parameters_at_other_addresses_are_not_recorded(one_thread):
    graphs, kept = Repeated(), []
    for number in range(2 * MOST):
        kept.append(torch.full((2,), float(number)))
        found = graphs(lambda x, fixed=kept[-1]: x + fixed, [torch.ones(2)], [kept[-1]], "sum")
        assert found.tolist() == [number + 1.0] * 2
    assert graphs.replays == 0
    assert len(graphs._found) == MOST


def test_numbers_of_masks_are_rounded_up_by_at_most_a_quarter():
    found = [rounded_up(count) for count in range(1, 200)]
    assert all(count <= one <= 1.25 * count for count, one in enumerate(found, 1))
    assert found[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert rounded_up(64) == 64
    assert len(set(found)) == 27


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{}, {"pixel_features": 8}, {"lora_rank": 3}])
def test_on_a_gpu_replays_give_the_losses_and_gradients_of_other_batches_and_weights(sizes):
    recipe = Recipe(clicks=2, unprompted=1)
    plain, recorded = (one.cuda() for one in pair(recipe, **sizes))
    plain.model.config = replace(plain.model.config, cuda_graphs=False)
    for counts in COUNTS:
        # Products in TF32, which a GPU chooses by shape, have an error of 1e-3.
        compare(trained(recorded, counts, "cuda"), trained(plain, counts, "cuda"), 2e-3)
    assert sum(one is not None for one in recorded._graphs._found.values()) == 3
    assert not recorded._graphs._fails


@pytest.mark.gpu
def test_on_a_gpu_replays_read_the_weights_of_the_step_under_autocast():
    torch.manual_seed(0)
    interactive = Interactive(Sam(SMALL), Recipe(clicks=2, unprompted=1)).cuda()
    losses = [float(trained(interactive, (4, 4), "cuda", torch.bfloat16)[0]["loss"]) for _ in range(40)]
    assert losses[-1] < 0.95 * losses[4]  # weights that were converted once would give the same loss
