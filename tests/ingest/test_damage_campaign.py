"""A seeded part of the second campaign of damaged sources; the whole of it is a command, see its module."""

from pathlib import Path

import pytest

from tests.ingest import damage_campaign


@pytest.mark.parametrize("cases", [2, pytest.param(8, marks=pytest.mark.slow)])  # of each model
def test_every_original_member_is_exact_in_the_output_or_listed(cases: int, tmp_path: Path) -> None:
    outcomes = [damage_campaign.run(0, number, tmp_path / "case") for number in range(13 * cases)]
    found = damage_campaign.summary(outcomes)
    assert found["failures"] == []
    # And the campaign is one: every model had its cases, in every container, and most of them lost something.
    assert {counts["cases"] for counts in found["models"].values()} == {cases}
    assert set(found["containers"]) == set(damage_campaign.CONTAINERS)
    assert found["records"] > 25 * cases
    assert found["pairs"] > found["exact"] > 0.5 * found["pairs"]
