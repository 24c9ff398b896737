"""Runs inside a process with faults.so preloaded: repeats ingest in forked children with faults.

Prints the results by kind of fault as one line of JSON. The tests start it; see `__init__.py`.
"""

import argparse
import gzip
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sa1b.ingest.finish import finish
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.shards import manifest
from sa1b.shards.documents import Options
from sa1b.shards.staging import remove_leftovers
from sa1b.sources.discovery import discover
from sa1b.storage import atomic
from tests.faults import Faults
from tests.faults.power import Samples, opened, samples
from tests.faults.power import power as replayed
from tests.ingest.inside import add_layer

OPTIONS = Options(images_per_shard=6)
Run = Callable[[Path, Path], None]
_LONGEST = 60  # seconds; a run takes one


def make(source: Path, root: Path) -> None:
    """One run of ingest on a dataset directory, in this process."""
    root.mkdir(parents=True, exist_ok=True)
    tasks = manifest.read_tasks(root)
    for one in discover([source]).sources:
        task = tasks.get(one.name)
        if task is None or task.source["size"] != one.size:
            ingest(one, root, OPTIONS, Policy(), replace_images=True)
    remove_leftovers(root)
    finish(root)


def make_layer(source: Path, root: Path) -> None:
    """One run that writes a layer, or writes it again."""
    del source
    add_layer(root, overwrite=True)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a dataset directory."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def forked(
    source: Path,
    root: Path,
    faults: Faults,
    *,
    log: Path | None = None,
    flushed: bool = True,
    run: Run = make,
    **fault: int,
) -> tuple[int, str]:
    """Run `make`, or another function, in a child with a fault or a recording; returns its wait status and its error output.

    If not `flushed`, the child's flushes have no effect, as if the code contained none.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(_LONGEST)
        if not flushed:
            os.fsync = lambda descriptor: None
        if log is not None:
            # After a power failure, the machine restarts before the next run.
            atomic.this_machine = lambda: "0123456789ab"  # another name than now
            faults.record(root, log)
        else:
            faults.arm(root, **fault)
        code = 0
        try:
            run(source, root)
        except BaseException as error:
            shown = (
                f"{type(error).__name__}: {error}" if isinstance(error, OSError) else traceback.format_exc()
            )
            os.write(writer, shown.encode()[-4000:])
            code = 1
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        message = file.read().decode()
    return os.waitpid(child, 0)[1], message


@dataclass
class Scenario:
    """A run that is disturbed: `before` makes the dataset directory that it begins with."""

    source: Path
    run: Run = make
    before: Callable[[Path], None] = lambda root: None

    def start(self, root: Path) -> Path:
        """The directory in its state before the run."""
        shutil.rmtree(root, ignore_errors=True)
        self.before(root)
        return root

    def undisturbed(self, root: Path) -> tuple[dict[str, bytes], Samples]:
        """The files that the run gives, and the samples."""
        self.run(self.source, self.start(root))
        return contents(root), samples(root)


def scenarios(source: Path) -> dict[str, Scenario]:
    """A source is converted, a layer is written, and another layer is replaced by it."""

    def first(root: Path) -> None:
        make(source, root)

    def second(root: Path) -> None:
        first(root)
        add_layer(root, images=2)

    return {
        "shards": Scenario(source),
        "layer": Scenario(source, make_layer, first),
        "replaced layer": Scenario(source, make_layer, second),
    }


def crash(scenario: Scenario, work: Path, count: int, faults: Faults) -> dict[str, object]:
    """Kill the process at its k-th step, run again, and compare; for `count` random k, or for all of them."""
    expected, original = scenario.undisturbed(work / "clean")
    source, run = scenario.source, scenario.run
    points: list[int] | None = None
    if count:
        faults.arm(scenario.start(work / "counted"))
        run(source, work / "counted")
        total = faults.calls()
        points = sorted(random.Random(0).sample(range(1, total + 1), min(count, total)))
    killed, different = 0, []
    k = 0
    while points is None or k < len(points):
        at = k + 1 if points is None else points[k]
        root = scenario.start(work / "crashed")
        status, message = forked(source, root, faults, run=run, kill_at=at)
        if not os.WIFSIGNALED(status):
            if status:
                different.append([at, message])
            if points is None:
                break
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed += 1
        if (problem := opened(root, original)) is not None:
            different.append([at, problem])
        status, message = forked(source, root, faults, run=run)
        if status or contents(root) != expected:
            different.append([at, message])
        k += 1
    return {"killed": killed, "different": different}


def disk(scenario: Scenario, work: Path, step: int, seeds: int, faults: Faults) -> dict[str, object]:
    """A disk that becomes full, in steps of so many bytes, or, if 0, fails at random with so many seeds: the
    run must report an error or have the right result.
    """
    expected, original = scenario.undisturbed(work / "clean")
    source, run = scenario.source, scenario.run
    before = contents(scenario.start(work / "full"))
    total = sum(len(data) for name, data in expected.items() if before.get(name) != data)
    cases = [{"disk_bytes": size} for size in range(0, total + total // 4, step)] if step else []
    cases += [{"seed": seed, "one_in": 60} for seed in range(seeds)]
    failed, corrupt, unnamed = 0, [], []
    for case in cases:
        root = scenario.start(work / "full")
        status, message = forked(source, root, faults, run=run, **case)
        if status:
            failed += 1
            if str(root) not in message:
                unnamed.append([case, message])
            # What is complete must be correct even at this moment.
            if (problem := opened(root, original)) is not None:
                corrupt.append([case, problem])
        elif contents(root) != expected:
            corrupt.append([case, "succeeded with other bytes"])
        status, message = forked(source, root, faults, run=run)
        if status or contents(root) != expected:
            corrupt.append([case, f"not repaired by the next run: {message}"])
    return {"failed": failed, "corrupt": corrupt, "unnamed": unnamed}


def power(
    source: Path, work: Path, count: int, seed: int, faults: Faults, *, flushed: bool
) -> dict[str, object]:
    """The power fails while a source is converted, while a second one is added, while one is replaced, and
    while a layer is written.

    `source` has other/sa_000001.tar and larger/<its name> beside it.
    """
    damaged = _with_damage(source, work / source.name)
    other = source.with_name("other") / "sa_000001.tar"

    larger = source.with_name("larger") / source.name

    def both(root: Path) -> None:
        make(other, root)
        make(larger, root)

    # A source with damage does not replace one that has more images.
    scenarios: dict[str, tuple[Callable[[Path], None], Path]] = {
        "first": (lambda root: None, damaged),
        "second": (lambda root: make(other, root), damaged),
        "replaced": (both, source),
    }
    scenarios["layer"] = (lambda root: make(other, root), other)
    found: dict[str, object] = {}
    for name, (before, new) in scenarios.items():
        work_of = make_layer if name == "layer" else make

        def recorded(root: Path, log: Path, new: Path = new, run: Run = work_of) -> None:
            status, message = forked(new, root, faults, log=log, flushed=flushed, run=run)
            assert not status, message

        def again(root: Path, new: Path = new, run: Run = work_of) -> str | None:
            status, message = forked(new, root, faults, run=run)
            return message or f"status {status}" if status else None

        found[name] = replayed(before, recorded, again, contents, work / name, count, seed)
    return found


def _with_damage(source: Path, path: Path) -> Path:
    """A copy with a damaged header and a damaged annotation file, which go to quarantine."""
    archive = bytearray(gzip.decompress(source.read_bytes()))
    places = [match.start() for match in re.finditer(rb"ustar", archive)]
    archive[places[3]] ^= 1
    archive[archive.index(b'"annotations"')] ^= 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive)
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", help="crash, full, eio or power, or several of them, joined with commas")
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument(
        "--count", type=int, default=0, help="crash, power: points to try, 0: all; eio: seeds"
    )
    parser.add_argument("--seed", type=int, default=0, help="power: of the points and of what is lost")
    parser.add_argument("--step", type=int, default=65536, help="full: bytes between two sizes of the disk")
    parser.add_argument("--forget-flushes", action="store_true", help="power: as if nothing were flushed")
    arguments = parser.parse_args()
    faults = Faults()
    json.dump({what: run(what, arguments, faults) for what in arguments.what.split(",")}, sys.stdout)


def run(what: str, arguments: argparse.Namespace, faults: Faults) -> dict[str, object]:
    """The result of one kind of fault."""
    work = arguments.work.resolve() / what
    if what == "power":
        flushed = not arguments.forget_flushes
        return power(arguments.source, work, arguments.count, arguments.seed, faults, flushed=flushed)
    found: dict[str, object] = {}
    for name, scenario in scenarios(arguments.source).items():
        place = work / name
        if what == "crash":
            found[name] = crash(scenario, place, arguments.count, faults)
        elif what == "full":
            # A layer has a few kB.
            step = arguments.step if name == "shards" else arguments.step // 128
            found[name] = disk(scenario, place, step, 0, faults)
        else:
            found[name] = disk(scenario, place, 0, arguments.count or 100, faults)
    return found


if __name__ == "__main__":
    main()
