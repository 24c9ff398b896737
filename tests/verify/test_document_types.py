"""Values of a wrong type in the JSON documents of a dataset directory end in errors that name the file."""

import contextlib
import json
import random
import shutil

import numpy as np
import pytest

import sa1b
from sa1b import Dataset
from sa1b.errors import Sa1bError
from sa1b.ingest.finish import finish
from sa1b.verify.rebuild import rebuild_root, rebuild_tables
from sa1b.views.view import open_view, write_view
from tests.verify.checking import check_here

VALUES = [None, [], {}, "x", "../../x", 1, -1, 1.5, float("inf"), True, [None], {"": None}, 10**30, "a" * 64]


def places(value, path=()):
    """Every place in a document that can be changed."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from places(below, (*path, key))


def mutate(document, draw):
    """The document with one value replaced, or one key gone, and what was done."""
    changed = json.loads(json.dumps(document))
    path = draw.choice(list(places(changed)))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if draw.random() < 0.2:
        del holder[path[-1]]
        return changed, f"{path} gone"
    holder[path[-1]] = draw.choice([value for value in VALUES if value != holder[path[-1]]])
    return changed, f"{path} = {holder[path[-1]]!r}"


def view_of(root, digest):
    return open_view(root, Dataset(root).table, digest)


@pytest.mark.parametrize(
    ("seed", "mutations"),
    [(0, 3), (1, 3), *(pytest.param(seed, 25, marks=pytest.mark.slow) for seed in range(4))],
)
@pytest.mark.parametrize("kind", ["dataset.json", "tasks/sa_000002.json", "view"])
def test_a_wrong_type_is_an_expected_error_for_every_tool(roots, tmp_path, kind, seed, mutations):
    root = shutil.copytree(roots["plain"], tmp_path / "root")
    made = write_view(root, Dataset(root).table, np.arange(5, dtype=np.uint32), name="few")
    file = root / (f"views/{made.digest}.json" if kind == "view" else kind)
    written = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    document = json.loads(written[file])
    draw = random.Random(f"{kind} {seed}")
    tools = [
        sa1b.open,
        lambda root: view_of(root, "few"),
        lambda root: view_of(root, made.digest),
        rebuild_tables,
        lambda root: rebuild_root(root, workers=0, quiet=True),
        finish,
    ]
    for _ in range(mutations):
        changed, what = mutate(document, draw)
        data = (json.dumps(changed, indent=1) + "\n").encode()
        file.write_bytes(data)
        findings = check_here(root).findings
        assert findings or kind == "view", what
        assert "check_failed" not in {finding.kind for finding in findings}, what
        for tool in tools:
            file.write_bytes(data)
            try:
                with contextlib.suppress(Sa1bError):
                    tool(root)
            except Exception as error:
                raise AssertionError(f"{file.name}: {what}") from error
            for path in [path for path in root.rglob("*") if path.is_file() and path not in written]:
                path.unlink()
            for path, content in written.items():
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)
