"""Runs the suite on machines that misbehave, and lists the tests whose result depends on it.

    python -m tests.hunt                                      # one run of each kind
    python -m tests.hunt --runs 5 --kinds stops disk -- tests/stream -x

Each run has a new random order. A test that failed is repeated alone on the quiet machine: if it fails there
too, it is broken; if not, it depends on the machine, which is a defect of the test or of the program.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests import faults

KINDS = {
    "load": "on one core, beside four processes that compute",
    "stops": "its processes are stopped for up to 2 s at random",
    "clock": "the clock of the calendar jumps by up to 30 s, in both directions",
    "disk": "each flush, rename and opening of a file to write takes up to 20 ms",
    "order": "in another random order, in four processes",
}
_MARK = "SA1B_TEST_HUNT"


@contextmanager
def _busy() -> Iterator[None]:
    """Four processes that compute on the core of this process."""
    with ExitStack() as stack:
        for _ in range(4):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@contextmanager
def _stops(mark: str, rng: random.Random) -> Iterator[None]:
    """Stop and continue processes of the suite."""
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(rng.uniform(0, 0.5)):
            pids = list(_processes(mark))
            pid = rng.choice(pids) if pids else 0
            with suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "TtZ":
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        time.sleep(rng.choice((0.01, 0.1, 2)))
                    finally:
                        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _processes(mark: str) -> Iterator[int]:
    """The processes of a run, without the one that starts them all."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                wanted in (folder / "environ").read_bytes()
                and b"pytest\0-n" not in (folder / "cmdline").read_bytes()
            ):
                yield int(folder.name)


def _failed(words: list[str], environment: dict[str, str], log: Path) -> set[str]:
    """The tests that fail in a run of pytest."""
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-rfE", *words],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text(errors="replace")
    if done.returncode not in (0, 1):
        raise SystemExit(f"{log}: pytest ended with {done.returncode}\n{text[-2000:]}")
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", text, re.MULTILINE))


def hunted(kind: str, words: list[str], folder: Path, seed: int) -> set[str]:
    """The tests that fail in a run on a machine of one kind.

    Args:
        kind: one of KINDS.
        words: arguments of pytest.
        folder: for the log and the compiled library.
        seed: of this run.
    """
    mark = f"{kind}-{seed}"
    environment = {**os.environ, _MARK: mark}
    with ExitStack() as stack:
        if kind == "load":
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(cores)})
            stack.callback(os.sched_setaffinity, 0, cores)
            stack.enter_context(_busy())
        elif kind == "stops":
            stack.enter_context(_stops(mark, random.Random(seed)))
        elif kind in ("clock", "disk"):
            library = faults.build(folder, "machine")
            if library is None:
                raise SystemExit(f"{kind}: needs a C compiler")
            setting = {"clock": ("SA1B_TEST_CLOCK", "30"), "disk": ("SA1B_TEST_DISK", "20")}[kind]
            environment |= {"LD_PRELOAD": str(library), setting[0]: setting[1]}
        processes = "4" if kind == "order" else "2"
        options = ["-n", processes, "--dist", "loadfile", "-m", "not slow", f"--randomly-seed={seed}"]
        return _failed([*options, *words], environment, folder / f"{mark}.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="runs of each kind")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="\n".join(f"{kind}: {text}" for kind, text in KINDS.items()),
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sa1b-hunt-"))
    print(f"logs: {folder}", file=sys.stderr)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for number in range(arguments.runs):
        for kind in arguments.kinds:
            seed = random.randrange(1 << 31)
            failed = hunted(kind, arguments.pytest, folder, seed)
            print(f"{kind}, run {number + 1}, seed {seed}: {len(failed)} failed", file=sys.stderr)
            for test in failed:
                found[test].append(kind)
    alone = _failed(sorted(found), dict(os.environ), folder / "alone.log") if found else set()
    results = {
        test: {"failed": sorted(kinds), "fails_alone": test in alone} for test, kinds in sorted(found.items())
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for test, result in results.items():
            print(f"{test}: {', '.join(result['failed'])}{' (and alone)' if result['fails_alone'] else ''}")
        print(
            f"{arguments.runs * len(arguments.kinds)} runs: {len(results)} tests failed, {len(alone)} of them alone too"
        )
    return 1 if results else 0


if __name__ == "__main__":
    sys.exit(main())
