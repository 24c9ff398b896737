"""Loss of power during ingest, replayed from a recorded log; a part of driver.py.

For each cut point the dataset directory is built as a crash may leave it. A dataset that opens must return
the original samples, and the next run must produce the bytes of an uninterrupted run.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sa1b
from sa1b.errors import Sa1bError
from sa1b.shards import manifest
from sa1b.shards.layer import layer_names
from sa1b.storage.open import open_store
from sa1b.verify.layer_check import verify_layer
from tests.faults import replay

Samples = dict[int, tuple[bytes, Any]]


def samples(root: Path) -> Samples:
    """Every sample of a dataset directory, read and verified."""
    return {sample.image_id: (sample.jpeg, sample.annotations.to_json()) for sample in sa1b.open(root)}


def opened(root: Path, expected: Samples) -> str | None:
    """The error in a dataset that opens; None if it has no error or does not open."""
    try:
        dataset = sa1b.open(root)
    except Sa1bError:
        return None
    except Exception as error:
        return f"open: {type(error).__name__}: {error}"
    try:
        for sample in dataset:
            if expected.get(sample.image_id) != (sample.jpeg, sample.annotations.to_json()):
                return f"image {sample.image_id} is not the original"
        for name, is_complete in layer_names(open_store(root)).items():
            if is_complete and (problems := verify_layer(str(root), name, quiet=True).problems):
                return f"layer {name}: {problems[0]}"
    except Exception as error:
        return f"opened, then {type(error).__name__}: {error}"
    return None


def cut_points(count: int, operations: list[replay.Operation], seed: int) -> list[tuple[int, str]]:
    """(completed operations, seed of the losses); three of four points are outside of writes to files."""
    writes = [at for at, operation in enumerate(operations, 1) if operation.kind == replay.WRITE]
    others = [at for at in range(1, len(operations) + 1) if at not in set(writes)]
    rng = random.Random(seed)
    points: list[tuple[int, str]] = []
    while len(points) < count:
        for at in [*rng.sample(others, len(others)), *rng.sample(writes, min(len(writes), len(others) // 3))]:
            points.append((at, f"{seed} {len(points)}"))
    return sorted(points[:count])


def power(
    before: Callable[[Path], None],
    recorded: Callable[[Path, Path], None],
    again: Callable[[Path], str | None],
    contents: Callable[[Path], dict[str, bytes]],
    work: Path,
    count: int,
    seed: int,
) -> dict[str, Any]:
    """Record one run, interrupt it at `count` points, and check each result.

    Args:
        before: makes the dataset directory in its state before the run.
        recorded: executes the run on it and records a log.
        again: repeats the run in another process; returns its error output.
        contents: the files of a dataset directory.
    """
    root, log = work / "recorded", work / "log"
    before(root)
    root.mkdir(parents=True, exist_ok=True)
    snapshot = replay.scan(root)
    expected_samples = samples(root) if (root / manifest.DATASET).exists() else {}
    recorded(root, log)
    expected = contents(root)
    expected_samples |= samples(root)
    operations = replay.read_log(log, root)
    complete = replay.State(snapshot, operations).everything()
    wrong: list[Any] = []
    if {name: data for name, data in complete.items() if data is not None} != expected:
        names = [name for name in complete | expected if complete.get(name) != expected.get(name)]
        wrong.append(["the log does not give what is there", sorted(names)])
    points = cut_points(count, operations, seed)
    crashed = work / "crashed"
    opens = 0
    for at, what_is_lost in points:
        shutil.rmtree(crashed, ignore_errors=True)
        replay.write(replay.State(snapshot, operations[:at]).crash(random.Random(what_is_lost)), crashed)
        where = f"after operation {at}, seed {what_is_lost!r} ({operations[at - 1]})"
        opens += (crashed / manifest.DATASET).exists()
        if (problem := opened(crashed, expected_samples)) is not None:
            wrong.append([where, problem])
        if (problem := again(crashed)) is not None:
            wrong.append([where, f"not repaired by the next run: {problem}"])
            continue
        found = contents(crashed)
        if found != expected:
            names = sorted(name for name in found | expected if found.get(name) != expected.get(name))
            wrong.append([where, "other files after the next run", names])
    kinds = Counter(replay.NAMES[operation.kind] for operation in operations)
    return {"operations": dict(kinds), "points": len(points), "had_dataset": opens, "wrong": wrong}
