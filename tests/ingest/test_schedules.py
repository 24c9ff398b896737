"""Commands beside each other, killed and stopped: nothing is lost, and the advice of verify repairs."""

from pathlib import Path

import pytest

from tests.ingest import schedules


@pytest.mark.slow  # quick: kills, faults and two commands, each alone, in this folder
def test_no_image_is_lost(tmp_path: Path) -> None:
    schedules.build(tmp_path / "template")
    assert schedules.schedule(tmp_path, "quick") == []


@pytest.mark.slow
def test_no_image_is_lost_in_many_schedules(tmp_path: Path) -> None:
    schedules.build(tmp_path / "template")
    assert [line for number in range(40) for line in schedules.schedule(tmp_path, f"slow-{number}")] == []
