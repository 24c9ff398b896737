"""No command changes or removes a file of a user that it was not told to write; the campaign is sentinels.py."""

from pathlib import Path

import pytest

from tests.cli import sentinels


def test_commands_leave_the_files_of_a_user(tmp_path: Path) -> None:
    fixed = [
        ["reshard", "--out", "out", "--finish"],
        ["reshard", "--out", "out", "--drop", "sa_000000"],
        ["reshard", "tars", "--out", "out", "--redo", "sa_000000", "--spill", "user"],
        ["index", "out", "--tables"],
        ["verify", "out", "--state", "user/empty.txt"],
        ["export", "out", "--to", "sa1b", "--out", "export", "--overwrite"],
    ]
    assert sentinels.campaign(tmp_path, fixed) == []


@pytest.mark.slow
def test_hostile_command_lines_leave_the_files_of_a_user(tmp_path: Path) -> None:
    assert sentinels.campaign(tmp_path, 300, seed=7) == []
