"""The pages agree with the code and the results that they describe."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import readme
from sa1b.engine.presets import PRESETS
from tests.docs import generated


@pytest.mark.parametrize("page", generated.PAGES, ids=lambda page: page.stem)
def test_generated_tables_are_those_of_their_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generated.rewritten(text) == text, "run python -m tests.docs.generated"


def test_every_preset_and_every_setting_of_the_recipe_is_on_the_page_of_recipes() -> None:
    text = (generated.DOCS / "recipes.md").read_text(encoding="utf-8")
    names = {one.name for one in fields(PRESETS["vit_b"].recipe)}
    flags = {flag.replace("-", "_") for flag in re.findall(r"--recipe\.([a-z-]+)", text)}
    assert flags == names
    assert {name for name in PRESETS if f"`{name}`" not in text} == set()


def test_the_figures_on_the_page_of_benchmarks_are_those_of_the_results() -> None:
    text = (generated.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert readme.rewritten(text) == text
