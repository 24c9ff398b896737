"""Settings that differ from those of the checkpoint are named when a run resumes."""

from typing import Any

import pytest

from sa1b.engine.checkpoint import resume
from sa1b.recipes.presets import PRESETS

CONFIG = PRESETS["tiny"].document()


def changed(name: str, value: Any) -> dict[str, Any]:
    part, _, field = name.partition(".")
    return {**CONFIG, part: {**CONFIG[part], field: value}}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optim.lr", 0.5, "--optim.lr 0.003 -> 0.5"),
        ("recipe.clicks", 3, "--recipe.clicks 1 -> 3"),
        ("model.drop_path", 0.5, "--model.drop-path 0.0 -> 0.5"),
        ("data.global_batch", 4, "--data.global-batch 8 -> 4"),
        ("data.masks", 4, "--data.masks 16 -> 4"),
        ("data.flip", 0.0, "--data.flip 0.5 -> 0.0"),
        ("data.tokenizer", "words.json", "--data.tokenizer bytes -> words.json"),
        ("parallel.precision", "bf16", "--parallel.precision fp32 -> bf16"),
        ("parallel.compress", "powersgd:4", "--parallel.compress none -> powersgd:4"),
        ("parallel.reduce", "bf16", "--parallel.reduce fp32 -> bf16"),
        ("optim.freeze", ["mask_decoder"], "--optim.freeze (none) -> mask_decoder"),
    ],
)
def test_settings_that_change_the_training_are_named_with_both_values(
    name: str, value: Any, said: str
) -> None:
    assert resume.changes(CONFIG, changed(name, value), 1200) == [
        f"settings that differ from those of step 1,200: {said}"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("data.root", "elsewhere"), ("data.threads", 3), ("parallel.mode", "ddp"), ("logging.every", 9)],
)
def test_settings_that_do_not_change_it_are_not(name: str, value: Any) -> None:
    assert resume.changes(CONFIG, changed(name, value), 1200) == []


def test_a_setting_that_an_older_checkpoint_does_not_know_is_no_difference() -> None:
    older = {**CONFIG, "optim": {name: value for name, value in CONFIG["optim"].items() if name != "ema"}}
    assert resume.changes(older, CONFIG, 1) == []
