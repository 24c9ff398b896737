"""Dataset directories and batches have the values that were recorded."""

import json
from importlib.metadata import version

import pytest

from tests.golden import compare, data_values

FOLDER = compare.FOLDER / "data"
EXPECTED = compare.expected("data")
# Libraries that determine bytes of JPEGs, of mask records and of decoded pixels.
MADE_WITH = json.loads((FOLDER / "root" / "dataset.json").read_text())["versions"]
OTHER = [
    name for name in ("opencv-python-headless", "simplejpeg", "zstandard") if version(name) != MADE_WITH[name]
]
BYTES = ("reshard", "options", "forms", "exports")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", data_values.SECTIONS)
def test_values_are_those_that_were_recorded(name, tmp_path):
    if OTHER and name in BYTES:
        pytest.skip(f"not installed: {', '.join(f'{one} {MADE_WITH[one]}' for one in OTHER)}")
    expected = {key: value for key, value in EXPECTED.items() if key.partition("/")[0] == name}
    found = data_values.section(name, FOLDER, tmp_path / name)
    if OTHER:
        found, expected = compare.without(found, "pixels"), compare.without(expected, "pixels")
    compare.check(found, expected)


def test_a_value_that_differs_is_named():
    old = {"a": {"b": [1, 2.0, None], "c": "x"}, "d": 1.0, "e": True}
    assert compare.differences({**old, "d": 1.0 + 1e-9}, old) == []
    new = {"a": {"b": [1, 2.1, None], "f": "x"}, "d": 1.0, "e": 1}
    assert [line.split(": ")[0] for line in compare.differences(new, old)] == ["a/c", "a/f", "a/b/1", "e"]
