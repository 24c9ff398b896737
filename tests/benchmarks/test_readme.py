"""README's figures are those of the results file they name."""

import json
from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.readme import README, REPOSITORY, rewritten


def test_the_figures_in_the_readme_are_those_of_the_results() -> None:
    text = README.read_text()
    assert rewritten(text) == text


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks" / "results").glob("*-cores.json")))
def test_the_results_that_are_kept_can_be_shown(path: Path) -> None:
    document = json.loads(path.read_text())
    assert "VERDICT" in "\n".join(tables.all_tables(document))
    assert "<svg" in report.page(document)
