"""All rounds of a micro-batch: who is prompted with what, what is trained, and that nothing depends on others.

Most tests put a sketch of a model in the place of Sam: arithmetic on single numbers, so that a mask's answers
are the same bits in any batch, and a record of every call.
"""

import socket
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sa1b.sam import clicks
from sa1b.sam.draws import draws, kept_branches
from sa1b.sam.interactive import Interactive, Targets
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe

SIZE = 64
SMALL = ModelConfig(
    image_size=SIZE, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, drop_path=0.3
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sketch(nn.Module):
    """Draws a diamond around every prompt; brighter pixels and the fed mask count too."""

    def __init__(self, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=SIZE, depth=3, drop_path=drop_path)
        self.gain = nn.Parameter(torch.tensor(3.0))
        self.radius = nn.Parameter(torch.tensor([9.0, 4.0, 8.0, 13.0]))
        self.embeds: list[SimpleNamespace] = []
        self.decodes: list[SimpleNamespace] = []

    def embed(self, images: Tensor, keep: Tensor | None = None, sizes: Tensor | None = None) -> Tensor:
        self.embeds.append(SimpleNamespace(images=images, keep=keep, sizes=sizes))
        embeddings = images[:, :1, ::16, ::16].float() / 255 * self.gain
        return embeddings if keep is None else embeddings * keep[:, 1, None, None, None]

    def decode(self, embeddings, image, points, labels, low_res=None, has_low_res=None):
        place = torch.arange(SIZE // 4) * 4 + 1.5
        logits = embeddings[image].repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        for slot in range(points.shape[1]):
            sign = (labels[:, slot] > 0).float() - (labels[:, slot] == 0).float()
            x, y = points[:, slot, 0, None, None], points[:, slot, 1, None, None]
            distance = (place - x).abs() + (place[:, None] - y).abs()
            near = self.radius[:, None, None] - distance[:, None]
            logits = logits + sign[:, None, None, None] * near.clamp(min=-6)
        if low_res is not None:
            logits = logits + 0.25 * low_res
        iou = 0.5 + 0.01 * logits[:, :, 3, 3] - 0.003 * logits[:, :, 5, 9]
        call = SimpleNamespace(points=points, labels=labels, low_res=low_res, has_low_res=has_low_res)
        if logits.requires_grad:
            logits.retain_grad()
            iou.retain_grad()
        call.logits, call.iou = logits, iou
        self.decodes.append(call)
        return logits, iou


def case(masks: int = 12, images: int = 3, raster: int = 16) -> tuple[Tensor, Targets, Tensor]:
    """Images, the targets of their masks (boxes of pixels), and the images' keys."""
    torch.manual_seed(0)
    sizes = torch.tensor([[64, 43], [48, 64], [64, 64]])[:images]
    image = torch.arange(masks) * images // max(masks, 1)
    low = 4 * torch.randint(0, 7, (masks, 2))
    boxes = torch.cat((low, low + 4 * torch.randint(1, 4, (masks, 2))), dim=1).float()
    centres = (torch.arange(raster) + 0.5) * (SIZE / raster)
    x0, y0, x1, y1 = boxes.T[..., None]
    columns, rows = (x0 < centres) & (centres < x1), (y0 < centres) & (centres < y1)
    targets = Targets(
        masks=(rows[:, :, None] & columns[:, None, :]).to(torch.uint8),
        boxes=boxes,
        points=(boxes[:, :2] + 1.5),
        image=image,
        weights=torch.ones(masks),
        keys=draws(torch.tensor(7), torch.arange(masks)),
        sizes=sizes,
    )
    pictures = torch.randint(0, 256, (images, 3, SIZE, SIZE), dtype=torch.uint8)
    return pictures, targets, draws(torch.tensor(8), torch.arange(images))


def part(targets: Targets, masks: Tensor, **changed: Tensor) -> Targets:
    chosen = {field.name: getattr(targets, field.name) for field in fields(targets)}
    return Targets(
        **{name: chosen[name][masks] for name in chosen if name != "sizes"}
        | {"sizes": targets.sizes}
        | changed
    )


def trained(recipe: Recipe, inputs=None, **options) -> tuple[Sketch, dict[str, Tensor]]:
    sketch = Sketch()
    return sketch, Interactive(sketch, recipe)(*(inputs or case()), **options)


PLAIN = Recipe(checkpoint_rounds=False)


# --- Rounds and prompts


def test_the_encoder_runs_once_and_the_decoder_eleven_times():
    sketch, _ = trained(PLAIN)
    assert len(sketch.embeds) == 1
    assert len(sketch.decodes) == 11


def test_the_first_prompt_is_a_point_or_a_noised_box_of_the_masks_key():
    images, targets, keys = case(40)
    sketch, _ = trained(PLAIN, (images, targets, keys))
    sizes = targets.sizes[targets.image]
    boxes = clicks.noised_boxes(targets.boxes, targets.keys, sizes, 0.1, 20 * SIZE / 1024)
    points, labels = clicks.first_prompts(targets.points, boxes, targets.keys, 0.5)
    assert torch.equal(sketch.decodes[0].points, points)
    assert torch.equal(sketch.decodes[0].labels, labels)
    assert set(labels[:, 0].tolist()) == {clicks.FOREGROUND, clicks.TOP_LEFT}
    assert sketch.decodes[0].low_res is None


def test_each_mask_gets_eight_clicks_one_empty_slot_and_a_last_round_without_a_new_prompt():
    sketch, _ = trained(PLAIN)
    calls = sketch.decodes
    assert [call.labels.shape[1] for call in calls] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]
    for before, after in pairwise(calls):
        known = before.labels.shape[1]
        assert torch.equal(after.labels[:, :known], before.labels)
        assert torch.equal(after.points[:, :known], before.points)
    added = calls[-1].labels[:, 2:]
    rests = clicks.resting_rounds(case()[1].keys, 8, 2)[:, :-1]
    assert torch.equal(added == clicks.NOTHING, rests)
    assert ((added == clicks.NOTHING).sum(dim=1) == 1).all()


def test_clicks_lie_where_the_answer_with_the_highest_predicted_iou_was_wrong():
    _, targets, _ = case()
    sketch, _ = trained(PLAIN)
    sizes = targets.sizes[targets.image].tolist()
    seen = set()
    for number, (before, after) in enumerate(pairwise(sketch.decodes)):
        if after.labels.shape[1] == before.labels.shape[1]:
            continue
        for mask in range(len(targets.keys)):
            candidates = before.logits[mask, 1:] if number == 0 else before.logits[mask, :1]
            chosen = before.iou[mask, 1:].argmax() if number == 0 else 0
            answer, truth = candidates[chosen].detach().numpy() > 0, targets.masks[mask].numpy() == 1
            rows, columns = sizes[mask]
            answer[(np.arange(16) + 0.5) * 4 > rows] = False
            answer[:, (np.arange(16) + 0.5) * 4 > columns] = False
            label = after.labels[mask, -1].item()
            column, row = ((after.points[mask, -1] - 1.5) / 4).long().tolist()
            if label == clicks.NOTHING:
                continue
            if (answer != truth).any():
                assert answer[row, column] != truth[row, column]
            assert label == truth[row, column]
            seen.add(label)
    assert seen == {clicks.FOREGROUND, clicks.BACKGROUND}


def test_the_logits_of_that_answer_are_fed_back_without_gradient():
    sketch, _ = trained(PLAIN)
    for number, (before, after) in enumerate(pairwise(sketch.decodes)):
        chosen = 1 + before.iou[:, 1:].argmax(dim=1) if number == 0 else torch.zeros(12, dtype=torch.int64)
        assert torch.equal(after.low_res[:, 0], before.logits[torch.arange(12), chosen])
        assert not after.low_res.requires_grad
        assert after.has_low_res.all()


def test_prompts_that_a_recipe_leaves_out_have_no_rounds():
    sketch, _ = trained(replace(PLAIN, clicks=0, unprompted=0))
    assert len(sketch.decodes) == 1
    sketch, _ = trained(replace(PLAIN, clicks=3, unprompted=0))
    assert [call.labels.shape[1] for call in sketch.decodes] == [2, 3, 4, 5]
    assert (sketch.decodes[-1].labels[:, 2:] != clicks.NOTHING).all()


def test_drop_path_is_drawn_from_the_images_keys_in_training_only():
    sketch = Sketch(drop_path=0.5)
    interactive = Interactive(sketch, PLAIN)
    images, targets, keys = case()
    interactive(images, targets, keys)
    interactive(images, targets, keys, evaluate=True)
    interactive.eval()(images, targets, keys)
    assert torch.equal(sketch.embeds[0].keep, kept_branches(keys, 3, 0.5))
    assert sketch.embeds[1].keep is None
    assert sketch.embeds[2].keep is None


# --- Losses


def reference_parts(logits, truth, predicted, inside, recipe):
    """Focal loss, dice loss, squared error of the IoU, and the IoU, of one predicted mask."""
    probability = 1 / (1 + np.exp(-logits))
    of_other = np.where(truth, 1 - probability, probability)
    surprise = np.logaddexp(0, np.where(truth, -logits, logits))  # -log of the probability of the truth
    weight = np.where(truth, recipe.focal_alpha, 1 - recipe.focal_alpha)
    focal = (weight * of_other**recipe.focal_gamma * surprise).mean()
    dice = 1 - (2 * (probability * truth).sum() + 1) / (probability.sum() + truth.sum() + 1)
    mask = (logits > 0) & inside
    iou = (mask & truth).sum() / max((mask | truth).sum(), 1)
    return focal, dice, (predicted - iou) ** 2, iou


def reference_sums(sketch, targets, recipe):
    """What a training step sums, from the recorded answers, one mask after the other."""
    totals = np.zeros(5)  # focal, dice, IoU loss, first and last IoU
    inside = clicks.inside_image(targets.sizes[targets.image], SIZE, targets.masks.shape[1]).numpy()
    for mask, weight in enumerate(targets.weights.tolist()):
        of_rounds, ious = [], []
        for number, call in enumerate(sketch.decodes):
            kinds = (1, 2, 3) if number == 0 else (0,)
            parts = [
                reference_parts(
                    call.logits[mask, kind].detach().double().numpy(),
                    targets.masks[mask].numpy() == 1,
                    call.iou[mask, kind].item(),
                    inside[mask],
                    recipe,
                )
                for kind in kinds
            ]
            best = min(parts, key=lambda one: recipe.focal_weight * one[0] + recipe.dice_weight * one[1])
            quality = best[2] if recipe.iou_masks == "best" else np.mean([one[2] for one in parts])
            of_rounds.append((best[0], best[1], quality))
            ious.append(parts[int(np.argmax([call.iou[mask, kind].item() for kind in kinds]))][3])
        combined = np.mean(of_rounds, axis=0) if recipe.rounds == "mean" else np.sum(of_rounds, axis=0)
        totals += weight * np.array([*combined, ious[0], ious[-1]])
    return totals


@pytest.mark.parametrize("rounds", ["mean", "sum"])
@pytest.mark.parametrize("iou_masks", ["best", "all"])
def test_the_sums_are_those_of_the_masks_taken_one_by_one(rounds, iou_masks):
    recipe = replace(
        PLAIN, rounds=rounds, iou_masks=iou_masks, focal_weight=7.0, dice_weight=2.0, iou_weight=3.0
    )
    images, targets, keys = case()
    targets = replace(targets, weights=torch.tensor([1.0, 0.0, 0.5, 2.0] * 3))
    sketch, found = trained(recipe, (images, targets, keys))
    expected = reference_sums(sketch, targets, recipe)
    names = ("focal", "dice", "iou_loss", "iou_first", "iou_last")
    np.testing.assert_allclose([found[name].item() for name in names], expected, rtol=2e-5)
    assert found["loss"].item() == pytest.approx(expected[:3] @ [7, 2, 3], rel=2e-5)
    assert found["count"].item() == 10.5
    assert all(not found[name].requires_grad for name in (*names, "count"))


def test_of_the_first_three_masks_the_best_is_trained_and_later_mask_0_alone():
    sketch, found = trained(PLAIN)
    found["loss"].backward()
    moved = [call.logits.grad.abs().sum(dim=(2, 3)) > 0 for call in sketch.decodes]
    predictions = [call.iou.grad != 0 for call in sketch.decodes]
    assert (moved[0].sum(dim=1) == 1).all()
    assert not moved[0][:, 0].any()
    assert moved[0].any(dim=0).sum() > 1  # not the same one for all
    assert torch.equal(predictions[0], moved[0])
    for later in (*moved[1:], *predictions[1:]):
        assert later[:, 0].all()
        assert not later[:, 1:].any()


def test_all_three_predicted_ious_are_trained_where_the_recipe_says_so():
    sketch, found = trained(replace(PLAIN, iou_masks="all"))
    found["loss"].backward()
    assert (sketch.decodes[0].iou.grad[:, 1:] != 0).all()


def test_larger_targets_are_met_by_larger_logits():
    recipe = replace(PLAIN, clicks=0, unprompted=1)
    images, targets, keys = case(raster=40)
    sketch, found = trained(recipe, (images, targets, keys))
    for call in sketch.decodes:
        call.logits = functional.interpolate(call.logits, (40, 40), mode="bilinear", align_corners=False)
    expected = reference_sums(sketch, targets, recipe)
    np.testing.assert_allclose([found["focal"].item(), found["dice"].item()], expected[:2], rtol=2e-5)
    assert sketch.decodes[1].low_res.shape == (12, 1, 16, 16)


def test_targets_smaller_than_the_decoders_masks_are_refused():
    with pytest.raises(ValueError, match="targets of 15 pixels for an image size of 64.* 16"):
        trained(PLAIN, case(raster=15))


def test_computing_rounds_again_in_backward_changes_no_bit():
    torch.manual_seed(0)
    model = Sam(SMALL)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        found = Interactive(model, Recipe(checkpoint_rounds=again))(*case())
        found["loss"].backward()
        gradients.append([found["loss"].detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_losses_are_float32_and_finite_under_autocast():
    torch.manual_seed(0)
    model = Sam(SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Interactive(model, Recipe())(*case())
    found["loss"].backward()
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize(("masks", "images"), [(4, 2), (0, 2), (0, 0)])
def test_all_parameters_get_gradients_of_zeros_where_nothing_counts(masks, images):
    torch.manual_seed(0)
    model = Sam(SMALL)
    pictures, targets, keys = case(masks, images)
    found = Interactive(model, Recipe())(pictures, replace(targets, weights=torch.zeros(masks)), keys)
    found["loss"].backward()
    assert all(value == 0 for value in found.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_all_parameters_are_trained_where_masks_count():
    torch.manual_seed(0)
    model = Sam(replace(SMALL, drop_path=0.0))
    Interactive(model, Recipe())(*case())["loss"].backward()
    untrained = {name for name, parameter in model.named_parameters() if not parameter.grad.any()}
    # Of the first round's three masks, one that is the best for no mask is not trained.
    ambiguous = [f"mask_decoder.output_hypernetworks_mlps.{kind}." for kind in (1, 2, 3)]
    idle = [prefix for prefix in ambiguous if any(name.startswith(prefix) for name in untrained)]
    assert len(idle) < 3
    assert [name for name in untrained if not name.startswith(tuple(idle) or ("none",))] == []


def test_a_model_learns_the_masks_it_is_shown():
    torch.manual_seed(0)
    recipe = Recipe(clicks=1, unprompted=1, checkpoint_rounds=False)
    interactive = Interactive(Sam(replace(SMALL, drop_path=0.0)), recipe)
    optimizer = torch.optim.AdamW(interactive.parameters(), 4e-3)
    found = []
    for _ in range(60):
        sums = interactive(*case(3))
        optimizer.zero_grad()
        (sums["loss"] / 3).backward()
        optimizer.step()
        found.append((sums["loss"].item() / 3, sums["iou_last"].item() / 3))
    assert found[0][1] < 0.3
    assert found[-1][0] < 0.2 * found[0][0]
    assert found[-1][1] > 0.8


# --- Nothing depends on the rest of the batch


def test_a_split_or_permuted_micro_batch_has_the_same_prompts_answers_and_sums():
    images, targets, keys = case()
    whole, sums = trained(PLAIN, (images, targets, keys))
    first = targets.image == 0
    halves = []
    for chosen, pictures in ((first, slice(0, 1)), (~first, slice(1, 3))):
        moved = targets.image[chosen] - pictures.start
        piece = part(targets, chosen, image=moved, sizes=targets.sizes[pictures])
        halves.append(trained(PLAIN, (images[pictures], piece, keys[pictures])))
    turned, order = torch.tensor([2, 0, 1]), torch.randperm(12)
    shuffled = part(targets, order, image=turned.argsort()[targets.image[order]], sizes=targets.sizes[turned])
    permuted, permuted_sums = trained(PLAIN, (images[turned], shuffled, keys[turned]))
    for number, call in enumerate(whole.decodes):
        for name in ("points", "labels", "logits", "iou"):
            value = getattr(call, name)
            joined = torch.cat([getattr(sketch.decodes[number], name) for sketch, _ in halves])
            assert torch.equal(joined, value)
            assert torch.equal(getattr(permuted.decodes[number], name), value[order])
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


# --- Evaluation


def test_masks_are_scored_after_one_three_and_five_clicks_and_for_the_exact_box():
    _, targets, _ = case()
    sketch, found = trained(Recipe(), evaluate=True)
    calls = sketch.decodes
    assert [call.labels.shape[1] for call in calls] == [2, 3, 4, 5, 6, 2]
    assert torch.equal(calls[0].points[:, 0], targets.points - 0.5)
    assert torch.equal(calls[-1].points.flatten(1), targets.boxes)
    assert calls[-1].labels.unique(dim=0).tolist() == [[clicks.TOP_LEFT, clicks.BOTTOM_RIGHT]]
    assert calls[-1].low_res is None
    inside = clicks.inside_image(targets.sizes[targets.image], SIZE, 16).numpy()
    for column, call, many in (
        (0, calls[0], True),
        (1, calls[2], False),
        (2, calls[4], False),
        (3, calls[5], True),
    ):
        for mask in range(12):
            kind = 1 + int(call.iou[mask, 1:].argmax()) if many else 0
            answer, truth = (
                (call.logits[mask, kind].numpy() > 0) & inside[mask],
                targets.masks[mask].numpy() == 1,
            )
            assert found["intersections"][mask, column] == (answer & truth).sum()
            assert found["unions"][mask, column] == (answer | truth).sum()


def test_an_evaluation_has_no_gradient_and_whole_numbers():
    _, found = trained(Recipe(), evaluate=True)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in found.items()}
    raster = case()[1].masks.shape[-1]
    assert shapes == {
        "intersections": (torch.int64, (12, 4)),
        "unions": (torch.int64, (12, 4)),
        "masks": (torch.bool, (12, raster, raster)),
        "predicted_iou": (torch.float32, (12,)),
    }
    assert not any(value.requires_grad for value in found.values())


def test_the_masks_of_an_evaluation_are_those_that_the_first_click_is_scored_with():
    _, targets, _ = case()
    _, found = trained(Recipe(), evaluate=True)
    truth = targets.masks.bool()
    assert torch.equal((found["masks"] & truth).flatten(1).sum(1), found["intersections"][:, 0])


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
    """Records operations whose result decides a shape or comes to the host: a GPU would be waited for."""

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


def gradients_of_a_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    parallel = nn.parallel.DistributedDataParallel(Interactive(Sam(SMALL), Recipe()))
    for masks, images in ((6, 2) if rank == 0 else (0, 0), (0, 1) if rank == 0 else (3, 1)):
        parallel.zero_grad()
        parallel(*case(masks, images))["loss"].backward()
        gradients = {name: parameter.grad for name, parameter in parallel.module.named_parameters()}
        torch.save(gradients, f"{folder}/{rank}-{images}-{masks}.pt")
    dist.destroy_process_group()


def test_a_rank_without_masks_or_images_takes_part_in_ddp_without_a_search_for_unused_parameters(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(gradients_of_a_rank, (port, str(tmp_path)), 2, start_method="spawn")
    torch.manual_seed(0)
    interactive = Interactive(Sam(SMALL), Recipe())
    for files, masks, images in ((("0-2-6", "1-0-0"), 6, 2), (("0-1-0", "1-1-3"), 3, 1)):
        interactive.zero_grad()
        interactive(*case(masks, images))["loss"].backward()
        for file in files:
            found = torch.load(tmp_path / f"{file}.pt")
            for name, parameter in interactive.named_parameters():
                torch.testing.assert_close(2 * found[name], parameter.grad, rtol=1e-3, atol=1e-4)


# --- The recipe


def test_the_recipe_is_the_published_one_by_default():
    recipe = Recipe()
    assert (recipe.focal_weight, recipe.dice_weight, recipe.iou_weight) == (20, 1, 1)
    assert (recipe.box_probability, recipe.box_noise, recipe.box_noise_limit) == (0.5, 0.1, 20)
    assert (recipe.clicks, recipe.unprompted) == (8, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"box_probability": 1.5}, "box_probability is 1.5"),
        ({"clicks": -1}, "clicks is -1"),
        ({"rounds": "median"}, "rounds is 'median'; known are mean, sum"),
        ({"iou_masks": "none"}, "iou_masks is 'none'; known are best, all"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changed)
