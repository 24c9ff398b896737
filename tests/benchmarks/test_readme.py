"""README's figures are those of the results file they name."""

from benchmarks.readme import README, rewritten


def test_the_figures_in_the_readme_are_those_of_the_results() -> None:
    text = README.read_text()
    assert rewritten(text) == text
