"""A byte anywhere in a dataset directory, changed, lost or added, is found without decoding anything."""

import random
import re

import numpy as np
import pytest

from sa1b import Dataset
from sa1b.views.view import write_view
from tests.shards.tiny_source import add_layer
from tests.verify.checking import check_here

# Of a warning's text and a view's selection only form and counts are checked; .options.json is not read any more.
UNSEALED = ("warnings.jsonl", "refused.jsonl", ".options.json")
TIME = re.compile(rb'"mtime_ns": \d+')  # of a source, in which copies differ


def mutate(data, draw):
    """The bytes with one change, and what it was."""
    changed, at = bytearray(data), draw.randrange(len(data))
    kind = draw.choice(["flip", "flip", "cut", "lose", "add", "zero"])
    if kind == "flip":
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "lose":
        del changed[at]
    elif kind == "add":
        changed.insert(at, draw.randrange(256))
    else:
        changed[at : at + 50] = bytes(len(changed[at : at + 50]))
    return bytes(changed), f"{kind} at {at}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_every_mutation_is_found(each_root, seed):
    root, draw = each_root, random.Random(seed)
    write_view(root, Dataset(root).table, np.arange(5, dtype=np.uint32))
    add_layer(root)
    assert check_here(root).findings == []
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name not in UNSEALED)
    for _ in range(15):
        path = draw.choice(
            [path for path in files if path.suffix != ".json" or not {"views", "layers"} & {*path.parts}]
        )
        data = path.read_bytes()
        changed, what = mutate(data, draw)
        if TIME.sub(b"", changed) == TIME.sub(b"", data):
            continue
        path.write_bytes(changed)
        found = check_here(root).findings
        path.write_bytes(data)
        assert found, f"{path.relative_to(root)}: {what}"
        assert "check_failed" not in {finding.kind for finding in found}
