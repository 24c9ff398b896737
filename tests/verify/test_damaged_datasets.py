"""The printed advice repairs a damaged dataset directory and never reduces the number of its images.

The campaign is damaged_datasets.py.
"""

import pytest

from tests.verify import damaged_datasets

FOUND = {  # damage after which advice lost images, or did not end in Clean
    "two task files": [("task", "empty"), ("task", "flip")],
    "a task file over another": [("task", "move")],
    "exchanged shards": [("shard", "swap")],
    "a task file and dataset.json": [("task", "remove"), ("document", "remove")],
    "rows, and an index of another shard": [("rows", "cut"), ("index", "swap")],
    "no task files, and a shard": [("folder", "remove"), ("shard", "flip")],
    "a renamed task file": [("kept", "remove"), ("task", "rename")],
    "a shard in place of another, and a table": [("table", "foreign"), ("shard", "move")],
    "a table of another directory, no dataset.json": [("table", "foreign"), ("document", "empty")],
    "a table of another directory": [("table", "foreign")],
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return damaged_datasets.build(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("name", FOUND)
def test_advice_never_reduces_the_number_of_images(template, tmp_path, name):
    assert damaged_datasets.case(template, tmp_path, name, FOUND[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_advice_repairs_any_damage(template, tmp_path, part):
    cases = list(enumerate(damaged_datasets.damages(500, 3)))[part::10]
    found = [damaged_datasets.case(template, tmp_path, f"3-{number}", one) for number, one in cases]
    assert [line for lines in found for line in lines] == []
