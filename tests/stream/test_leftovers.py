"""After every end of reading, no thread, process, descriptor, shared memory or temporary file remains."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.stream.leftovers import names, session, shared_memory
from tests.stream.reading import KINDS, first_lines, start
from tests.stream.recorded import make_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("leftovers"), 17)


def files(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_nothing_is_left_after_the_end_an_early_close_or_an_error_of_the_caller(
    root: Path, short_path: Path
) -> None:
    before, segments = files(root), names()
    process = start("+".join(KINDS), root, "endings", short_path / "tmp", forked=True)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, b"")
    ways = [json.loads(line) for line in out.splitlines()]
    expected = [(kind, way) for kind in KINDS for way in ("whole", "early", "broken")]
    assert [(way["kind"], way["way"]) for way in ways] == expected
    for way in ways:
        # With stream and loader still there, and without them.
        assert way["after"] == way["before"], (way["kind"], way["way"])
        assert way["at_last"] == way["empty"], (way["kind"], way["way"])
    assert session(process.pid) == []
    assert shared_memory([process.pid], segments) == []
    assert list((short_path / "tmp").iterdir()) == []
    assert files(root) == before


@pytest.mark.parametrize(
    ("kind", "whom"), [("loader", "process"), ("workers", "process"), ("workers", "group")]
)
def test_nothing_is_left_after_an_interrupt(root: Path, kind: str, whom: str, short_path: Path) -> None:
    """Ctrl-C in a terminal goes to the process and its workers, a scheduler's signal only to the process."""
    before, segments = files(root), names()
    process = start(kind, root, "endless", short_path / "tmp", forked=True)
    assert all(b"digest" in line for line in first_lines(process, 7))
    members = session(process.pid)
    if whom == "process":
        os.kill(process.pid, signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    left = json.loads(out.splitlines()[-1])
    assert left["after"]["children"] == []
    if kind == "loader":
        # An interrupt can stop torch's DataLoader while it receives a tensor; the tensor then stays until the
        # end.
        assert left["after"] == left["before"]
    assert session(process.pid) == []
    assert shared_memory(members, segments) == []
    # torch ends a worker that has not ended 5 s after the interrupt; the folder of the worker's socket then stays.
    left_behind = [path.name for path in (short_path / "tmp").iterdir()]
    assert [name for name in left_behind if kind == "loader" or not name.startswith("pymp-")] == []
    assert files(root) == before
