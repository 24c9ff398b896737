"""torchdata's StatefulDataLoader over a stream: its state resumes exactly, within epochs and between them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.stream.plan import ResumeError
from tests.stream.recorded import RECIPE, make_root

stateful = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="needs torchdata: pip install -e '.[examples]'"
)
EPOCHS = 3
EARLY = [pytest.param(2, used, marks=pytest.mark.slow) for used in (0, 1)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("stateful"), 23)


def make(root: Path, workers: int, *, batch: int = 4, micro: int = 2, **options: Any) -> Any:
    log = root.parent / "damage_log"
    stream = sa1b.Stream(root, global_batch=batch, micro_batch=micro, damage_log=log, **RECIPE, **options)
    keep = {"persistent_workers": True} if workers else {}
    return stateful.StatefulDataLoader(stream, batch_size=None, num_workers=workers, **keep)


def sequence(loader: Any, epochs: int) -> Iterator[list[int]]:
    """The image ids of each batch."""
    for _ in range(epochs):
        for batch in loader:
            yield batch.ids.tolist()


@pytest.fixture(scope="module")
def whole(root: Path) -> list[list[int]]:
    return list(sequence(make(root, 0), EPOCHS))


@pytest.mark.parametrize(("workers", "used"), [(0, 0), (0, 1), (0, 5), (0, 12), (2, 5), (2, 12), *EARLY])
def test_a_saved_state_resumes_exactly(root: Path, whole: list[list[int]], workers: int, used: int) -> None:
    steps = len(whole) // EPOCHS
    loader = make(root, workers)
    batches = sequence(loader, EPOCHS)
    assert [next(batches) for _ in range(used)] == whole[:used]
    state = loader.state_dict()
    batches.close()
    again = make(root, workers)
    again.load_state_dict(state)
    left = EPOCHS - max(used - 1, 0) // steps  # after the last batch of an epoch, nothing is left of it
    assert list(sequence(again, left)) == whole[used:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_between_two_epochs_continues_with_the_next_one(
    root: Path, whole: list[list[int]], workers: int
) -> None:
    loader = make(root, workers)
    first = list(sequence(loader, 1))
    again = make(root, workers)
    again.load_state_dict(loader.state_dict())
    assert first + list(sequence(again, 1)) == whole[: 2 * len(first)]


def test_a_state_of_other_workers_or_batches_is_refused(root: Path) -> None:
    loader = make(root, 0)
    next(iter(loader))
    again = make(root, 0, batch=2)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="global_batch 4, now 2"):
        next(iter(again))


@pytest.mark.parametrize(
    ("saved", "now", "differs"),
    [
        # Each has as many micro-batches as the other.
        ({"batch": 7, "micro": 4}, {"batch": 7, "micro": 5}, "micro_batch 4, now 5"),
    ],
)
def test_a_state_of_other_micro_batches_is_refused(root: Path, saved: Any, now: Any, differs: str) -> None:
    loader = make(root, 0, **saved)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    again = make(root, 0, **saved)
    again.load_state_dict(state)
    next(iter(again))
    again = make(root, 0, **now)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match=differs):
        next(iter(again))
