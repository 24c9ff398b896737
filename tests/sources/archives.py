"""A small archive of random files, and the results of the archive reader."""

import json
import random

from tests.shards import tiny
from tests.shards.tiny import pair, tar_bytes

FILES = [(f"./sa_{i}.jpg", random.Random(i).randbytes(300 + 400 * i)) for i in range(6)]
GOOD = tar_bytes(FILES)


def files(items):
    return [(item.name, item.data) for item in items if getattr(item, "kind", None) == "file"]


def damage(items):
    return [item for item in items if hasattr(item, "length")]


def reasons(items):
    return [item.reason for item in damage(items)]


def offset_of(number, data=GOOD):
    """Where the header of FILES[number] begins."""
    return data.index(FILES[number][0].encode() + b"\0")


def replaced(data, start, new):
    return data[:start] + new + data[start + len(new) :]


def without(*numbers):
    return [file for number, file in enumerate(FILES) if number not in numbers]


def extract(members, *, images, annotations=None):
    """Write pairs as files: jpgs into `images`, the rest into `annotations`."""
    for name, data in members:
        folder = images if name.endswith("jpg") or annotations is None else annotations
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.rsplit("/", 1)[-1]).write_bytes(data)


def check_exact(root, ids):
    assert tiny.read_back(root) == {i: (pair(i)[0], json.loads(pair(i)[1])) for i in ids}
