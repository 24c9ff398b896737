"""The package stays within the budgets of `[tool.sa1b.budget]`: `make size` prints the figures."""

from pathlib import Path
from typing import Any

from tests import house, size


def test_lines_files_docstrings_and_circles_are_within_the_budget() -> None:
    budgets = size.budgets()
    assert {name: value for name, value in size.figures().items() if value > budgets[name]} == {}


def test_no_room_is_larger_than_its_ceiling_and_each_has_one() -> None:
    found, ceilings = size.rooms(), size.budgets()["rooms"]
    assert {room: lines for room, lines in found.items() if lines > ceilings.get(room, 0)} == {}
    assert set(ceilings) == set(found)


def test_data_that_goes_back_is_within_the_budget(tmp_path: Path) -> None:
    found = {name: len(route.returns) for name, route in size.routes(tmp_path).items()}
    assert len(found) == 5
    assert max(found.values()) <= size.budgets()["returns"], found


def test_a_call_into_the_file_of_a_caller_is_a_return() -> None:
    names: dict[str, Any] = {}
    for name, text in (("a", "def begin(): middle(end)\ndef end(): pass"), ("b", "def middle(call): call()")):
        exec(compile(text, f"{size.PACKAGE}/{name}.py", "exec"), names)
    with size.Route() as route:
        names["begin"]()
    assert (route.steps, route.returns) == ({("a.py", "b.py"), ("b.py", "a.py")}, {("b.py", "a.py")})


def test_the_picture_of_the_house_is_that_of_the_layers() -> None:
    assert house.PICTURE.read_text() == house.svg(), "write it with: python -m tests.house"
