"""The pages agree with the code and the results that they describe."""

import json
import pydoc
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sa1b.engine.watch.control import StepFigures
from sa1b.engine.watch.hardware import SAMPLED
from sa1b.engine.watch.metrics import Window, figures_of
from sa1b.engine.watch.watchdog import Phases
from sa1b.recipes.presets import SAM_PRESETS
from sa1b.sam.interactive import Interactive
from sa1b.stream.stats import BUSY, STAGES, LoaderSettings
from tests.docs import generated


@pytest.mark.parametrize("page", generated.PAGES, ids=lambda page: page.stem)
def test_generated_tables_are_those_of_their_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generated.rewritten(text) == text, "run python -m tests.docs.generated"


def test_every_preset_and_every_setting_of_the_recipe_is_on_the_page_of_recipes() -> None:
    text = (generated.DOCS / "recipes.md").read_text(encoding="utf-8")
    names = {one.name for one in fields(SAM_PRESETS["vit_b"].recipe)}
    flags = {flag.replace("-", "_") for flag in re.findall(r"--recipe\.([a-z-]+)", text)}
    assert flags == names
    assert {name for name in SAM_PRESETS if f"`{name}`" not in text} == set()


def names_of_the_api() -> list[str]:
    text = (generated.DOCS / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)", text, re.MULTILINE)


@pytest.mark.parametrize("name", names_of_the_api())
def test_a_name_of_the_api_has_a_docstring_that_names_each_field(name: str) -> None:
    found: Any = pydoc.locate(name)
    assert found is not None
    documented = re.findall(r"^ +(\w+): ", found.__doc__, re.MULTILINE)
    missing = {one.name for one in fields(found)} - set(documented) if is_dataclass(found) else set()
    assert missing == set()


def test_the_api_lists_what_pages_and_examples_import() -> None:
    root, listed = generated.DOCS.parent, names_of_the_api()
    texts = [*generated.DOCS.glob("*.md"), root / "README.md", *root.glob("examples/*.py")]
    imports = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    for notebook in root.glob("examples/*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        imports += "\n" + "\n".join("".join(cell["source"]) for cell in cells)
    named = {
        f"{module}.{name}"
        for module, names in re.findall(r"^ *from (sa1b[\w.]*) import ([\w, ]+)$", imports, re.MULTILINE)
        for name in names.split(", ")
    }
    own = {id(pydoc.locate(name)) for name in listed}
    modules = {name.rpartition(".")[0] for name in listed} | {*listed}
    assert {
        name
        for name in named
        if id(pydoc.locate(name)) not in own and name.rpartition(".")[0] not in listed and name not in modules
    } == set()


def test_the_api_lists_every_class_of_error() -> None:
    sources = (generated.DOCS.parent / "sa1b").rglob("*.py")
    classes = dict(
        found
        for path in sources
        for found in re.findall(r"^class (\w+)\(([^)]+)\):", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    errors = {"Sa1bError"}
    while more := {name for name, bases in classes.items() if errors & {*bases.split(", ")}} - errors:
        errors |= more
    text = (generated.DOCS / "api.md").read_text(encoding="utf-8")
    modules = {"sa1b.errors", "sa1b.storage.errors"}
    whole = {name for name in errors if any(hasattr(pydoc.locate(module), name) for module in modules)}
    assert len(errors) > 30
    assert {name for name in errors - whole if f".{name}\n" not in text} == set()


def test_every_field_of_a_step_in_metrics_is_on_the_page_of_training() -> None:
    text = (generated.DOCS / "training.md").read_text(encoding="utf-8")
    table = text[text.index("| field | meaning") :].split("\n\n")[0]
    on_page = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    means = dict.fromkeys(Interactive.figures, 0.0)
    worst = ("worst_loss", "worst_position", "worst_id_high", "worst_id_low")
    numbers = ("data_wait", "peak_memory", *SAMPLED, *worst)
    figures = StepFigures(means, 1.0, 1, 1.0, 0.0, {name: [0.0] for name in numbers})
    recorded = figures_of(figures, Phases(), 1e-3, 1.0)
    assert on_page == {"step", *recorded}


def test_every_field_of_a_window_and_every_stage_of_a_loader_is_on_its_page() -> None:
    text = (generated.DOCS / "training.md").read_text(encoding="utf-8")
    written: dict[str, dict[str, Any]] = {}
    metrics: Any = SimpleNamespace(window=lambda step, kind, summary: written.update({kind: summary}))
    window = Window(["a"], 1, metrics, LoaderSettings(1, 1, True, False, None, 64, False))
    for step in (1, 2):
        numbers = {name: [1.0] for name in (*BUSY, "data_wait", "forward", "gpu_clock_mhz")}
        window.add(step, numbers, 10.0)
    for kind, fields_of in written.items():
        table = text[text.index(f"| field of `{kind}` |") :].split("\n\n")[0]
        assert [row.split("`")[1] for row in table.splitlines()[2:]] == list(fields_of)
        nested = {name for value in fields_of.values() if isinstance(value, dict) for name in value}
        assert all(f"`{name}`" in table for name in nested)
    guide = (generated.DOCS / "failures.md").read_text(encoding="utf-8")
    advised = guide[guide.index("### Ranks wait for data") : guide.index("### A slow rank")]
    assert all(f"`{stage}`" in advised for stage in STAGES)
