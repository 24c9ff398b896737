"""Training computes the values that were recorded: see training_values.py."""

import json
import tarfile
from importlib.metadata import version

import pytest

from tests.golden import compare, training_values

FOLDER = compare.FOLDER / "training"
EXPECTED = compare.expected("training")
# With AVX-512, AVX2 and SSE4.2 the losses of ten steps differ by at most 1e-6, norms of gradients and of weights by 7e-6.
TOLERANCE = 1e-5
SCORES, MASKS = 1e-4, 1e-3  # pixels at the borders of masks


def tolerance(key):
    return MASKS if key.endswith("/masks") else SCORES if key.startswith("scores/") else TOLERANCE


def other_libraries():
    """Those that determine the pixels of images, in other versions than where the values were recorded."""
    with tarfile.open(FOLDER / "inputs.tar.xz") as archive:
        made_with = json.load(archive.extractfile("root/dataset.json"))["versions"]
    return [name for name in ("opencv-python-headless", "simplejpeg") if version(name) != made_with[name]]


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    if others := other_libraries():
        pytest.skip(f"other versions of {', '.join(others)}")
    return training_values.sections(FOLDER, tmp_path_factory.mktemp("training") / "work")


@pytest.mark.parametrize("name", training_values.SECTIONS)
def test_training_computes_the_values_that_were_recorded(name, sections):
    found = sections[name]()
    expected = {key: value for key, value in EXPECTED.items() if key.partition("/")[0] == name}
    assert found.keys() == expected.keys()
    lines = [compare.differences({key: found[key]}, {key: expected[key]}, tolerance(key)) for key in found]
    assert not any(lines), "\n".join(line for of_key in lines for line in of_key[:10])
