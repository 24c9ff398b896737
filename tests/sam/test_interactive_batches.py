"""Results of a mask do not depend on the rest of the batch, the device or other ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from tests.engine.launch import launch
from tests.sam.sketch import PLAIN, SMALL, case, part, trained

pytestmark = pytest.mark.usefixtures("one_thread")


# --- Independence of the rest of the batch


def test_a_split_or_permuted_micro_batch_has_the_same_prompts_answers_and_sums():
    images, targets, keys = case()
    whole, sums = trained(PLAIN, (images, targets, keys))
    first = targets.image == 0
    halves = []
    for chosen, chosen_images in ((first, slice(0, 1)), (~first, slice(1, 3))):
        moved = targets.image[chosen] - chosen_images.start
        piece = part(targets, chosen, image=moved, sizes=targets.sizes[chosen_images])
        halves.append(trained(PLAIN, (images[chosen_images], piece, keys[chosen_images])))
    turned, order = torch.tensor([2, 0, 1]), torch.randperm(12)
    shuffled = part(targets, order, image=turned.argsort()[targets.image[order]], sizes=targets.sizes[turned])
    permuted, permuted_sums = trained(PLAIN, (images[turned], shuffled, keys[turned]))
    for number, call in enumerate(whole.decodes):
        for name in ("points", "labels", "logits", "iou"):
            value = getattr(call, name)
            joined = torch.cat([getattr(sketch.decodes[number], name) for sketch, _ in halves])
            assert torch.equal(joined, value)
            assert torch.equal(getattr(permuted.decodes[number], name), value[order])
    of_images, of_permuted = sums.pop("of_images"), permuted_sums["of_images"]
    torch.testing.assert_close(torch.cat([half["of_images"] for _, half in halves]), of_images)
    torch.testing.assert_close(of_permuted, of_images[turned])
    for column, name in enumerate(("loss", "iou_last", "count")):
        torch.testing.assert_close(of_images[:, column].sum(), sums[name].detach())
    for name, value in sums.items():
        torch.testing.assert_close(halves[0][1][name] + halves[1][1][name], value)
        torch.testing.assert_close(permuted_sums[name], value)


def test_the_real_model_gives_the_same_sums_and_gradients_for_a_split_micro_batch():
    torch.manual_seed(0)
    model = Sam(SMALL)
    interactive = Interactive(model, Recipe(clicks=0))
    images, targets, keys = case()
    whole = interactive(images, targets, keys)
    expected = torch.autograd.grad(whole["loss"], list(model.parameters()))
    first = targets.image == 0
    pieces = [
        interactive(images[:1], part(targets, first, sizes=targets.sizes[:1]), keys[:1]),
        interactive(
            images[1:],
            part(targets, ~first, image=targets.image[~first] - 1, sizes=targets.sizes[1:]),
            keys[1:],
        ),
    ]
    loss = pieces[0]["loss"] + pieces[1]["loss"]
    torch.testing.assert_close(loss, whole["loss"])
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_same_step_twice_is_the_same_to_the_bit():
    torch.manual_seed(0)
    interactive = Interactive(Sam(SMALL), Recipe())
    one, other = interactive(*case()), interactive(*case())
    for name, value in one.items():
        assert torch.equal(other[name], value)


def test_scores_are_the_same_in_whatever_batch():
    images, targets, keys = case()
    _, whole = trained(Recipe(), evaluate=True)
    for number in range(3):
        chosen = targets.image == number
        alone = part(
            targets, chosen, image=torch.zeros_like(targets.image[chosen]), sizes=targets.sizes[number, None]
        )
        _, found = trained(Recipe(), (images[number, None], alone, keys[number, None]), evaluate=True)
        for name, value in whole.items():
            assert torch.equal(found[name], value[chosen])


@pytest.mark.parametrize("images", [0, 2])
def test_a_micro_batch_without_masks_has_scores_of_none(images):
    found = Interactive(Sam(SMALL), Recipe())(*case(0, images), evaluate=True)
    assert {len(value) for value in found.values()} == {0}


# --- Devices and ranks


class Waits(TorchDispatchMode):
    """Records operations for which the host would wait for a GPU: their result determines a shape or is copied."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "unique",
        "bincount",
        "repeat_interleave.Tensor",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if name.startswith("index") and isinstance(args[1], (list, tuple)):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                self.found.append(name)
        elif any(name == known or name.startswith(f"{known}.") for known in self.NAMES):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_waiting_is_noticed():
    values = torch.arange(4)
    for waits in (values[1].item, values.nonzero, lambda: values[values > 1]):
        with Waits() as mode:
            waits()
        assert mode.found


@pytest.mark.parametrize("evaluate", [False, True])
def test_no_round_waits_for_the_device(evaluate):
    interactive = Interactive(Sam(SMALL), Recipe())
    inputs = case()
    with Waits() as mode:
        found = interactive(*inputs, evaluate=evaluate)
        if not evaluate:
            found["loss"].backward()
    assert mode.found == []


def gradients_of_a_rank(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    parallel = nn.parallel.DistributedDataParallel(Interactive(Sam(SMALL), Recipe()))
    for masks, images in ((6, 2) if rank == 0 else (0, 0), (0, 1) if rank == 0 else (3, 1)):
        parallel.zero_grad()
        parallel(*case(masks, images))["loss"].backward()
        gradients = {name: parameter.grad for name, parameter in parallel.module.named_parameters()}
        torch.save(gradients, f"{folder}/{rank}-{images}-{masks}.pt")
    dist.destroy_process_group()


def test_a_rank_without_masks_or_images_takes_part_in_ddp_without_a_search_for_unused_parameters(tmp_path):
    launch(gradients_of_a_rank, 2, str(tmp_path))
    torch.manual_seed(0)
    interactive = Interactive(Sam(SMALL), Recipe())
    for files, masks, images in ((("0-2-6", "1-0-0"), 6, 2), (("0-1-0", "1-1-3"), 3, 1)):
        interactive.zero_grad()
        interactive(*case(masks, images))["loss"].backward()
        for file in files:
            found = torch.load(tmp_path / f"{file}.pt")
            for name, parameter in interactive.named_parameters():
                torch.testing.assert_close(2 * found[name], parameter.grad, rtol=1e-3, atol=1e-4)
