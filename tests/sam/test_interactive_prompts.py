"""The prompts of training and evaluation, for a substitute model."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from sa1b.masks.raster_torch import inside_image
from sa1b.sam import clicks
from sa1b.sam.clicks import kept_branches
from sa1b.sam.interactive import Interactive
from sa1b.sam.iteration import first_prompts
from sa1b.sam.recipe import Recipe
from tests.sam.sketch import PLAIN, SIZE, Sketch, case, trained

pytestmark = pytest.mark.usefixtures("one_thread")


# --- Iterations and prompts


def test_the_encoder_runs_once_and_the_decoder_eleven_times():
    sketch, _ = trained(PLAIN)
    assert len(sketch.embeds) == 1
    assert len(sketch.decodes) == 11


def test_the_first_prompt_is_a_point_or_a_noised_box_of_the_masks_key():
    images, targets, keys = case(40)
    sketch, _ = trained(PLAIN, (images, targets, keys))
    points, labels = first_prompts(PLAIN, targets, SIZE)
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
    rests = clicks.unprompted_iterations(case()[1].keys, 8, 2)[:, :-1]
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
        assert after.counts == (4, 4, 4)


def test_prompts_that_a_recipe_leaves_out_have_no_iterations():
    sketch, _ = trained(replace(PLAIN, clicks=0, unprompted=0))
    assert len(sketch.decodes) == 1
    sketch, _ = trained(replace(PLAIN, clicks=3, unprompted=0))
    assert [call.labels.shape[1] for call in sketch.decodes] == [2, 3, 4, 5]
    assert (sketch.decodes[-1].labels[:, 2:] != clicks.NOTHING).all()


def test_drop_path_depends_on_the_images_keys_in_training_only():
    sketch = Sketch(drop_path=0.5)
    interactive = Interactive(sketch, PLAIN)
    images, targets, keys = case()
    interactive(images, targets, keys)
    interactive(images, targets, keys, evaluate=True)
    interactive.eval()(images, targets, keys)
    assert torch.equal(sketch.embeds[0].keep, kept_branches(keys, 3, 0.5))
    assert sketch.embeds[1].keep is None
    assert sketch.embeds[2].keep is None


# --- Evaluation


def test_masks_are_scored_after_one_three_and_five_clicks_and_for_the_exact_box():
    _, targets, _ = case()
    sketch, found = trained(Recipe(), evaluate=True)
    calls = sketch.decodes
    assert [call.labels.shape[1] for call in calls] == [2, 3, 4, 5, 6, 2]
    assert torch.equal(calls[0].points[:, 0], targets.points - 0.5)
    assert torch.equal(calls[-1].points.flatten(1), targets.boxes - 0.5)
    assert calls[-1].labels.unique(dim=0).tolist() == [[clicks.TOP_LEFT, clicks.BOTTOM_RIGHT]]
    assert calls[-1].low_res is None
    inside = inside_image(targets.sizes[targets.image], SIZE, 16).numpy()
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
    size = case()[1].masks.shape[-1]
    assert shapes == {
        "intersections": (torch.int64, (12, 4)),
        "unions": (torch.int64, (12, 4)),
        "logits": (torch.float32, (12, size, size)),
        "predicted_iou": (torch.float32, (12,)),
    }
    assert not any(value.requires_grad for value in found.values())


def test_the_masks_of_an_evaluation_are_those_that_the_first_click_is_scored_with():
    _, targets, _ = case()
    _, found = trained(Recipe(), evaluate=True)
    truth = targets.masks.bool()
    assert torch.equal(((found["logits"] > 0) & truth).flatten(1).sum(1), found["intersections"][:, 0])


# --- The recipe


def test_the_recipe_is_the_published_one_by_default():
    recipe = Recipe()
    assert (recipe.focal_weight, recipe.dice_weight, recipe.iou_weight) == (20, 1, 1)
    assert (recipe.box_probability, recipe.box_noise, recipe.box_noise_limit) == (0.5, 0.1, 20)
    assert (recipe.clicks, recipe.unprompted) == (8, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"box_probability": 1.5}, "--recipe.box-probability 1.5: must be from 0 to 1"),
        ({"clicks": -1}, "--recipe.clicks -1: must be at least 0"),
        ({"iteration_loss": "median"}, "--recipe.iteration-loss 'median': must be mean or sum"),
        ({"iou_loss": "cubed"}, "--recipe.iou-loss 'cubed': must be squared or absolute"),
        ({"iou_masks": "none"}, "--recipe.iou-masks 'none': must be best or all"),
        ({"box_noise_kind": "even"}, "--recipe.box-noise-kind 'even': must be normal or uniform"),
        ({"box_masks": "two"}, "--recipe.box-masks 'two': must be three or one"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changed)
