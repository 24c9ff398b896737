"""Values of a wrong type in the JSON documents of a dataset directory end in errors that name the file."""

import contextlib
import json
import random
import shutil

import pytest

import sa1b
from sa1b.errors import Sa1bError
from tests.datasets import add_view
from tests.kit import put, run
from tests.verify.checking import content

VALUES = [None, [], {}, "x", "../../x", 1, -1, 1.5, float("inf"), True, [None], {"": None}, 10**30, "a" * 64]
TOOLS = (["index", "ROOT", "--tables"], ["index", "ROOT"], ["reshard", "--out", "ROOT", "--finish"])


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


def read(root, view):
    sa1b.open(root)
    sa1b.Stream(root, view=view, global_batch=1, image_size=64)


def restore(root, written):
    for name, data in content(root).items():
        if data != written.get(name):
            put(root, name, written.get(name))
    for name in written.keys() - content(root).keys():
        put(root, name, written[name])


@pytest.mark.parametrize(
    ("seed", "mutations"),
    [(0, 3), (1, 3), *(pytest.param(seed, 25, marks=pytest.mark.slow) for seed in range(4))],
)
@pytest.mark.parametrize("kind", ["dataset.json", "tasks/sa_000002.json", "view"])
def test_a_wrong_type_is_an_expected_error_for_every_tool(roots, tmp_path, kind, seed, mutations):
    root = shutil.copytree(roots["plain"], tmp_path / "root")
    add_view(root, sorted(sample.image_id for sample in sa1b.open(root))[:5], "few")
    (digest,) = (path.stem for path in root.glob("views/*.json"))
    file = f"views/{digest}.json" if kind == "view" else kind
    written, draw = content(root), random.Random(f"{kind} {seed}")
    for _ in range(mutations):
        changed, what = mutate(json.loads(written[file]), draw)
        put(root, file, f"{json.dumps(changed, indent=1)}\n".encode())
        damaged = content(root)
        report = run("verify", root, "--json", code=1).json
        assert "check_failed" not in {one["kind"] for one in report["findings"]}, what
        for view in ("few", digest):
            with contextlib.suppress(Sa1bError):
                read(root, view)
        for words in TOOLS:
            done = run(*(str(root) if word == "ROOT" else word for word in words), code=None)
            assert done.code in (0, 1, 2, 3), what
            assert "Traceback" not in done.err, what
            restore(root, damaged)
        restore(root, written)
