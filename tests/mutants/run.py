"""Runs tests on copies of the repository, each with one defect of mutants.toml, and prints which test finds it.

    python -m tests.mutants.run --gate              # the tests that are marked as gate
    python -m tests.mutants.run --all 12 40         # all tests of the rooms of two mutants, except slow ones

A mutant is killed if a test fails that passes again without the change, or if the tests do not end in time. The
results are added to results.json, except those with --rooms.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
USUAL = 50  # mutants of a run without numbers; the others are spares
OF_ALL = "golden"  # the room of every mutant
_MARK = "SA1B_TEST_MUTANT"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    number: int
    kind: str  # fsync, draw or logic
    behaviour: str
    rooms: list[str]
    changes: list[tuple[str, str, str]]  # file, old text, new text

    def texts(self, folder: Path) -> dict[str, tuple[str, str]]:
        """File -> its text without and with the changes. ValueError: an old text is not there exactly once."""
        found: dict[str, tuple[str, str]] = {}
        for file, old, new in self.changes:
            text, changed = found.get(file) or ((folder / file).read_text(),) * 2
            if (count := changed.count(old)) != 1:
                raise ValueError(f"mutant {self.number}: its old text is {count} times in {file}")
            found[file] = text, changed.replace(old, new)
        return found


def mutants() -> list[Mutant]:
    entries = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
    found = []
    for entry in entries:
        changes = [(one["file"], one["old"], one["new"]) for one in (entry, *entry.get("also", []))]
        found.append(Mutant(entry["number"], entry["kind"], entry["behaviour"], entry["rooms"], changes))
    return found


@dataclass
class Trials:
    folder: Path  # for the copies
    gate: bool
    limit: float  # seconds of one mutant
    stopped: bool = False

    def killed_by(self, mutant: Mutant) -> tuple[str, float]:
        """The first test that finds a mutant, or, in capitals, why it is not killed; and seconds."""
        copy, texts = self.folder / str(mutant.number), mutant.texts(self.folder / "clean")
        shutil.copytree(self.folder / "clean", copy)
        for file, (_, changed) in texts.items():
            (copy / file).write_text(changed)
        rooms = [f"tests/{room}" for room in (OF_ALL, *mutant.rooms) if (copy / "tests" / room).exists()]
        began = time.monotonic()
        code, output = self._pytest(copy, ["-m", "gate" if self.gate else "not slow", *rooms])
        seconds = round(time.monotonic() - began, 1)
        for file, (text, _) in texts.items():
            (copy / file).write_text(text)
        known = {0: "ALIVE", 5: "NO TEST", -signal.SIGKILL: f"no end within {self.limit:g} s"}
        result = known.get(code, f"BROKEN, pytest ended with {code}: {output[-500:]}")
        if code == 1 and (tests := _FAILED.findall(output)):
            fails_too = self._pytest(copy, tests[:1])[0] != 0
            result = f"BROKEN, fails without the mutant too: {tests[0]}" if fails_too else tests[0]
        shutil.rmtree(copy, ignore_errors=True)
        return result, seconds

    def _pytest(self, copy: Path, words: list[str]) -> tuple[int, str]:
        temporary = copy / ".tmp"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {_MARK: f"{copy}/", "PYTHONPATH": str(copy), "TMPDIR": str(temporary)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
        options = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command, log = [sys.executable, "-m", "pytest", *options, *words], copy / ".log"
        with log.open("wb") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **streams)
        timer = threading.Timer(0 if self.stopped else self.limit, _kill, [f"{copy}/"])
        timer.start()
        code = process.wait()
        timer.cancel()
        _kill(f"{copy}/")  # what the tests have left
        return code, log.read_text(errors="replace")


def _copy(folder: Path) -> None:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(words, cwd=REPOSITORY, text=True).split("\0"):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)


def _kill(mark: str) -> None:
    """End the processes of a copy, or of all copies in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0{_MARK}={mark}".encode() in b"\0" + (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gate", action="store_true", help="tests that are marked as gate (default)")
    which.add_argument("--all", action="store_true", help="all tests of the rooms, except slow ones")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a mutant, then it is killed")
    parser.add_argument("--rooms", help="such as masks,test_kit.py: these in place of those of the mutants")
    parser.add_argument("numbers", type=int, nargs="*", help=f"mutants; by default 1 to {USUAL}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [one for one in mutants() if one.number in (arguments.numbers or range(1, USUAL + 1))]
    if arguments.rooms:
        chosen = [replace(one, rooms=arguments.rooms.split(",")) for one in chosen]
    left = 0
    with tempfile.TemporaryDirectory(prefix="sa1b-mutants-") as folder:
        trials = Trials(Path(folder), not arguments.all, arguments.limit)
        _copy(Path(folder) / "clean")  # once: the working tree may change meanwhile
        with ThreadPoolExecutor(arguments.jobs) as pool:
            try:
                running = {pool.submit(trials.killed_by, mutant): mutant for mutant in chosen}
                for one in as_completed(running):
                    mutant, (result, seconds) = running[one], one.result()
                    left += result.startswith(("ALIVE", "BROKEN", "NO TEST"))
                    print(
                        f"{mutant.number:3} {seconds:7.1f} s  {mutant.behaviour}\n{'':15}{result}", flush=True
                    )
                    if not arguments.rooms:
                        _record("all" if arguments.all else "gate", mutant, result, seconds)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                trials.stopped = True
                _kill(f"{folder}/")
                raise
    print(f"{len(chosen) - left} of {len(chosen)} are killed")
    return 1 if left else 0


def _record(tests: str, mutant: Mutant, result: str, seconds: float) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"gate": {}, "all": {}}
    results[tests][f"{mutant.number}"] = {"behaviour": mutant.behaviour, "result": result, "seconds": seconds}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
