"""The exit codes on the page about installation equal those in each command's help."""

import re
from importlib import import_module

import pytest

from sa1b.verbs import in_order, module_of
from tests.docs.blocks import REPOSITORY

VERBS = [verb for verb in in_order() if " " not in verb]
SUBVERBS = [verb for verb in in_order() if " " in verb]


def of_help(verb: str) -> dict[str, str]:
    """Code -> meaning, from the first part of a command's help."""
    module = import_module("sa1b.train") if verb == "train" else module_of(verb)
    (said,) = re.findall(r"Exit code (.*?)\.(?: |$)", " ".join((module.__doc__ or "").split()))
    return dict(part.split(": ", 1) for part in said.split("; "))


def of_page() -> dict[str, dict[str, str]]:
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    rows = re.findall(r"^\| `([\w ]+)` \|(.*)\|$", text, re.MULTILINE)
    return {
        verb: {
            code: cell for code, cell in zip("0123", map(str.strip, cells.split("|")), strict=True) if cell
        }
        for verb, cells in rows
    }


@pytest.mark.parametrize("verb", [*VERBS, *SUBVERBS])
def test_page_and_help_agree(verb: str) -> None:
    helped = of_help(verb)
    assert helped.pop("130").startswith("interrupted")
    assert {"0", "2"} <= helped.keys()
    assert of_page()[verb] == helped


def test_the_page_has_every_command() -> None:
    assert set(of_page()) == {*VERBS, *SUBVERBS}
