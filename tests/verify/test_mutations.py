"""A byte anywhere in a dataset directory, changed, lost or added, is found without decoding anything."""

import random
import re

import pytest

import sa1b
from tests.datasets import add_view
from tests.kit import files, put, run
from tests.shards.tiny_source import add_layer

TIME = re.compile(rb'"mtime_ns": \d+')  # of a source, in which copies differ
# Groups of files that are damaged one after the other, of which any damage is named beside that of the others.
GROUPS = {
    "shards, indexes, rows, views, the layer and quarantine": r"quarantine/|sa1b-|tasks/.*\.samples|views/.*(ids|rows)|layers/.*(bin|parquet)",
    "the sample table": r"samples-",
    "dataset.json": r"dataset\.json",
    "task files": r"tasks/.*\.json",
    "documents of a view and a layer": r"(views|layers)/.*\.json",
}


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


def is_named(name, report):
    folder = name.rpartition("/")[0] if name.startswith("layers/") else name
    return any(one["file"] in (name, folder) for one in report["findings"])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_every_mutation_is_found(each_root, seed):
    root, draw = each_root, random.Random(seed)
    add_view(root, sorted(sample.image_id for sample in sa1b.open(root))[:5], "few")
    add_layer(root)
    assert run("verify", root, "--json").json["findings"] == []
    written = files(root)
    for group, pattern in GROUPS.items():
        done = {}
        for name, data in written.items():
            changed, what = mutate(data, draw)
            is_alike = TIME.sub(b"", changed) == TIME.sub(b"", data)
            if re.match(pattern, name) and not is_alike:
                done[name] = what
                put(root, name, changed)
        report = run("verify", root, "--json", code=1).json
        assert [f"{name}: {what}" for name, what in done.items() if not is_named(name, report)] == [], group
        assert "check_failed" not in {one["kind"] for one in report["findings"]}
        for name in done:
            put(root, name, written[name])
