"""Schedules of two to four commands that write to one dataset directory, killed and stopped at random.

    python -m tests.ingest.schedules --count 300 --seed 1

Each schedule starts `reshard`, `--replace`, `--finish`, `--drop`, `index`, `fetch`, `layer` and `verify` beside each
other.
Some are killed, some are stopped and continued. Then the commands that `verify` prints are run until it finds
nothing, and the sources are converted again. At the end every source that no command dropped is there with all
images of one of its versions, byte-equal, and a complete layer is intact. A violation is printed with its seed; the exit code is then 1.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import sa1b
from tests import processes
from tests.shards import tiny

SOURCES = 3
ROUNDS = 6  # of advice that is followed
FLAGS = ("--images-per-shard", "3")
ADD_LAYER = ["layer", "add", "root", "masks", "--name", "round2", "--overwrite"]


def first_id(source: int) -> int:
    return 1000 * (source + 1)


def tar(world: Path, version: int, source: int) -> Path:
    return world / f"v{version}" / f"sa_{source:06d}.tar"


def ids_of(version: int, source: int) -> range:
    return range(first_id(source), first_id(source) + 4 + 3 * version)


def build(world: Path) -> None:
    """Two versions of each source, and a dataset directory of the first one."""
    for version in range(2):
        (world / f"v{version}").mkdir(parents=True)
        for source in range(SOURCES):
            tiny.make_tar(tar(world, version, source), ids_of(version, source))
    (world / "ids.txt").write_text(f"{first_id(SOURCES)}\n{first_id(SOURCES) + 2}\n")
    (world / "parts").mkdir()
    (world / "masks").mkdir()
    for image_id in map(first_id, range(SOURCES)):
        (world / "masks" / f"sa_{image_id}.json").write_bytes(tiny.pair(image_id)[1])
    tiny.make_tar(world / "parts" / f"sa_{SOURCES:06d}.tar", ids_of(0, SOURCES))
    run(world, ["reshard", "v0", "--out", "root", *FLAGS])


def start(world: Path, arguments: list[str]) -> processes.Process:
    return processes.Process(
        [sys.executable, "-m", "sa1b", *arguments], cwd=world, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(world: Path, arguments: list[str]) -> str:
    process = start(world, arguments)
    out: str = process.communicate(timeout=300)[0]
    return out


def commands(rng: random.Random, world: Path) -> Iterator[list[str]]:
    """Arguments of random commands."""
    while True:
        source, version = rng.randrange(SOURCES), rng.randrange(2)
        path, name = str(tar(world, version, source).relative_to(world)), f"sa_{source:06d}"
        yield rng.choice(
            (
                ["reshard", path, "--out", "root", "--replace", *FLAGS],
                ["reshard", f"v{version}", "--out", "root", "--replace", "--workers", "2", *FLAGS],
                ["reshard", path, "--out", "root", "--redo", name, "--replace", *FLAGS],
                ["reshard", "--out", "root", "--finish"],
                ["reshard", "--out", "root", "--drop", name],
                ["index", "root"],
                ["index", "root", "--tables"],
                ["fetch", "parts", "--ids", "ids.txt", "--out", "root", *FLAGS],
                ["verify", "root"],
                ADD_LAYER,
                ["layer", "drop", "root", "round2"],
                ["layer", "verify", "root", "round2"],
            )
        )


def disturb(rng: random.Random, running: list[processes.Process]) -> None:
    """Kill some of the commands, and stop and continue others."""
    for process in running:
        time.sleep(rng.uniform(0, 0.6))
        kind = rng.choice(("kill", "stop", "none"))
        with suppress(OSError):
            if kind == "kill":
                os.killpg(process.pid, signal.SIGKILL)
            elif kind == "stop":
                os.killpg(process.pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0, 0.4))
                os.killpg(process.pid, signal.SIGCONT)


def advice(world: Path) -> list[list[str]]:
    """The commands that `verify` prints, with the paths of the sources."""
    report = json.loads(run(world, ["verify", "root", "--json"]))
    found = []
    for text in (*report["notes"], *(one["remedy"] for one in report["findings"])):
        for line in re.findall("`([^`]+)`", text):
            words = shlex.split(re.sub(r"^.*?\bsa1b(?= )", "", line))
            if len(words) == 1:  # such as: convert their sources with `sa1b reshard`
                continue
            words = [re.sub(r"PATH/TO/(sa_\d+\.tar)", r"v1/\1", word) for word in words]
            words = [word.replace("PATH/TO/MASKS", "masks") for word in words]
            found.append([*words, "--replace"] if "--redo" in words else words)
    return [list(one) for one in dict.fromkeys(map(tuple, found))]


def schedule(folder: Path, seed: str) -> list[str]:
    """Run one schedule in a copy of the template; what is wrong at its end."""
    rng, world = random.Random(seed), folder / "world"
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(folder / "template", world)
    lines = [line for line, _ in zip(commands(rng, world), range(rng.randint(2, 4)), strict=False)]
    running = [start(world, line) for line in lines]
    disturb(rng, running)
    outputs = [process.communicate(timeout=300)[0] for process in running]
    found = [f"{line}: {out}" for line, out in zip(lines, outputs, strict=True) if "Traceback" in out]
    for _ in range(ROUNDS):
        todo = advice(world)
        if not todo:
            break
        for line in todo:
            if "Traceback" in (out := run(world, line)):
                found.append(f"{line}: {out}")
    dropped = {line[-1] for line in lines if "--drop" in line}
    found += wrong(world, dropped, whole=False)
    out = run(world, ["reshard", "v1", "--out", "root", "--replace", *FLAGS])
    run(world, ADD_LAYER)
    found += wrong(world, set(), whole=True)
    found += [] if layers(world) == {"round2": True} else ["no layer at the end"]
    if (report := json.loads(run(world, ["verify", "root", "--deep", "--json"])))["exit_code"] != 0:
        found.append(f"damaged after all: {report['findings'][:2]} {out}")
    return [f"{seed}: {lines}: {one}" for one in found]


def layers(world: Path) -> dict[str, bool]:
    """The names of layers, and whether each is complete."""
    return {path.name: (path / "layer.json").exists() for path in world.glob("root/layers/*")}


def wrong(world: Path, dropped: set[str], *, whole: bool) -> list[str]:
    """Images that are missing, or other than those of the sources.

    Args:
        whole: all sources were converted; otherwise one that dataset.json lists as pending may be missing.
    """
    document = json.loads((world / "root" / "dataset.json").read_text())
    dataset = sa1b.open(world / "root")
    stored = set(dataset.table.image_id.tolist())
    found = []
    for source in range(SOURCES):
        own = {image_id for image_id in stored if image_id in range(first_id(source), first_id(source + 1))}
        name = f"sa_{source:06d}"
        if own not in [set(ids_of(version, source)) for version in range(2)] and not (
            not own and not whole and (name in dropped or name in document.get("pending", []))
        ):
            found.append(f"{name} has {sorted(own)}")
    jpegs = {image_id: tiny.pair(image_id)[0] for image_id in stored}
    found += [f"image {one}: other bytes" for one in stored if dataset.by_id(one).jpeg != jpegs[one]]
    for name in [name for name, is_complete in layers(world).items() if is_complete]:
        if json.loads(out := run(world, ["layer", "verify", "root", name, "--json"]))["exit_code"]:
            found.append(f"layer {name}: {out}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="number of schedules")
    parser.add_argument("--seed", type=int, default=1, help="repeats a campaign")
    chosen = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "template")
        for number in range(chosen.count):
            for line in schedule(Path(folder), f"{chosen.seed}-{number}"):
                count += 1
                print(line, flush=True)
    print(f"{chosen.count} schedules, seed {chosen.seed}: {count} violations")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
