"""Hostile command lines against the files of a user: no command changes or removes what it did not make.

    python -m tests.cli.sentinels --count 1000 --seed 1

A world has source tars, two dataset directories, an export, a run and many files of a user, old and new, beside
them and inside them, some with names that look like the program's. Each command gets paths and names that point
at them: a folder of the user, `..`, a symbolic link, the source, the output, names with slashes. After each
command every file of the user is there with its bytes, except one that the command line names as a file to
write. A violation is printed with its command line; the exit code is then 1.
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sa1b.export.export import export
from sa1b.export.source_tars import SourceTars
from sa1b.ingest.ingest import Policy
from sa1b.ingest.reshard import reshard
from sa1b.ingest.worker import Run
from sa1b.shards.manifest import Options, read_tasks
from sa1b.synthetic.source_tars import write_tars
from tests import processes

OLD = 400 * 24 * 3600.0
FOLDERS = ("user", "user/thesis/data", "user/.hidden", "user/empty-but-for-this", "out", "out/tasks", "tars")
LOOKALIKES = (
    *("out/tasks/my.expected", "out/quarantine/sa_000000/notes.txt", "out/quarantine/mine/1.jpg"),
    *("out/samples.bin", "out/samples-old.bin", "out/sa1b-notes.tar", "out/views/notes.txt"),
    *(
        "out/.partial/keep.txt",
        "user/.partial/staging-mine/data",
        "user/.sa1b-spill/data",
        "user/samples.bin",
    ),
    *("user/step-1/notes.txt", "user/quarantine/x/1.jpg", "user/tasks/a.claim", "user/.state.jsonl"),
    *("user/.export.partial/mine.txt", "user/sa_000000.tar.part", "export/notes.txt", "export/sub/x.jpg"),
    *("export/.export.partial/mine.txt", "run/notes.txt", "run/checkpoints/notes/1.txt", "other/note"),
)


def build(world: Path) -> None:
    """Make a world in an empty folder."""
    write_tars(world / "tars", tars=2, images_per_tar=4, seed=5, long_side=64, workers=1)
    reshard([world / "tars"], world / "out", Options(images_per_shard=2), Policy(), Run(quiet=True))
    export(world / "out", world / "export", SourceTars(), workers=1, quiet=True)
    ours = {path for path in world.rglob("*") if path.is_file() and path.parts[-2] != "tars"}
    for number, folder in enumerate((*FOLDERS, *LOOKALIKES)):
        path = world / folder / "results.csv" if folder in FOLDERS else world / folder
        assert path not in ours
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine {number}\n")
        if number % 2:
            os.utime(path, (time.time() - OLD,) * 2)
    (world / "user" / "empty.txt").touch()
    (world / "user" / "empty-folder").mkdir()
    (world / "link").symlink_to("user")
    (world / "user" / "to-out").symlink_to("../out")


def of_user(world: Path) -> dict[str, str]:
    """Path -> digest of every file, link and folder of the user."""
    found = {}
    for path in sorted(world.rglob("*")):
        name = path.relative_to(world).as_posix()
        is_own = (
            name.startswith(("user", "tars", "other", "link")) or name in LOOKALIKES or path.suffix == ".csv"
        )
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_dir() and is_own:
            found[name] = "folder"
        elif path.is_file() and is_own:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def command_line(rng: random.Random, world: Path) -> list[str]:
    """The arguments of a hostile command."""

    def path() -> str:
        text = rng.choice(
            (*FOLDERS, *LOOKALIKES, "link", "user/to-out", "new", "export", "run", "user/empty-folder")
        )
        forms: tuple[Callable[[], str], ...] = (
            lambda: text,
            lambda: f"./{text}/",
            lambda: str(world / text),
            lambda: f"user/../{text}",
            lambda: f"file://{world / text}",
            lambda: rng.choice(
                (
                    ".",
                    "..",
                    "",
                    "/proc/self/fdinfo",
                    "~",
                    "user/*",
                    "out/..",
                    f"../{world.name}",
                    "-",
                    "a\nb",
                    "\u2028",
                )
            ),
        )
        return rng.choice(forms[:5] if rng.random() < 0.9 else forms)()

    def name() -> str:
        names = (
            "..",
            "../user",
            "../../user",
            ".",
            "",
            "a//b",
            "sa_000000/",
            "sa_000000.tar",
            "../tasks",
            "user",
            "mine",
        )
        return rng.choice((*names, "sa_000000", "sa_000001", "\0", "a/b", "~", "*", str(world / "user")))

    out = rng.choice(("out", "out", "out", path()))
    spill = ["--spill", path()] if rng.random() < 0.5 else []
    ids = ["--ids", rng.choice(("tars/ids.txt", path()))]
    lines: tuple[Callable[[], list[str]], ...] = (
        lambda: ["reshard", rng.choice(("tars", path())), "--out", path(), *spill],
        lambda: ["reshard", "tars/sa_000000.tar", "--out", out, "--replace", *spill],
        lambda: ["reshard", "tars", "--out", out, "--redo", name(), *spill],
        lambda: ["reshard", "--out", out, "--drop", name()],
        lambda: ["reshard", "--out", out, "--finish"],
        lambda: ["reshard", "tars", "--out", path(), "--task", "0/2", "--rename", f"{name()}={name()}"],
        lambda: ["fetch", rng.choice(("tars", path())), *ids, "--out", path(), *spill],
        lambda: ["verify", rng.choice(("out", path())), "--state", path()],
        lambda: ["index", rng.choice(("out", path())), *rng.choice(([], ["--tables"]))],
        lambda: ["view", rng.choice(("out", path())), "--masks-where", "area > 5", "--name", name()],
        lambda: ["view", "out", "--held-out", "20%", "--name", "a", "--out", path()],
        lambda: ["copy", rng.choice(("out", path())), path()],
        lambda: ["export", rng.choice(("out", path())), "--to", rng.choice(("sa1b", "coco", "yolo-seg", "folders", "webdataset")),
                 "--out", path(), *rng.choice(([], ["--overwrite"]))],
        lambda: ["export", "out", "--to", "sa1b", "--out", "export", "--overwrite"],
        lambda: ["gallery", "out", "--out", path()],
        lambda: ["query", "out", "SELECT * FROM images", "--parquet", path()],
        lambda: ["locate", path(), "--ids", path()],
        lambda: ["synthesize", path(), "--tars", "1", "--images-per-tar", "1", "--long-side", "64"],
        lambda: ["convert", path(), "--out", path()],
        lambda: ["plan", path(), "--out", path()],
    )  # fmt: skip
    return rng.choice(lines)()


def violations(world: Path, before: dict[str, str], arguments: list[str]) -> list[str]:
    """Files of the user that a command changed or removed, without those that it was told to write."""
    after = of_user(world)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    told = {os.path.realpath(world / one.removeprefix("file://")) for one in arguments if "\0" not in one}
    return [name for name in changed if os.path.realpath(world / name) not in told or name not in after]


def campaign(folder: Path, commands: int | Sequence[list[str]], seed: int = 0) -> list[str]:
    """Run so many hostile commands, or the given ones, each on a fresh world; a line for each violation."""
    build(folder / "template")
    assert len(read_tasks(folder / "template" / "out")) == 2
    found = []
    world = folder / "world"
    given = None if isinstance(commands, int) else commands
    for number in range(commands if isinstance(commands, int) else len(commands)):
        rng = random.Random(f"{seed}-{number}")
        shutil.rmtree(world, ignore_errors=True)
        shutil.copytree(folder / "template", world, symlinks=True)
        before = of_user(world)
        arguments = command_line(rng, world) if given is None else given[number]
        arguments = [one for one in arguments if "\0" not in one]
        done = processes.run(
            [sys.executable, "-m", "sa1b", *arguments], capture_output=True, text=True, check=False, cwd=world, timeout=300,
            env={**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder)},
        )  # fmt: skip
        what = [f"{name}: changed or gone" for name in violations(world, before, arguments)]
        if "Traceback (most recent call last)" in done.stderr:
            what.append(f"a traceback: {done.stderr.splitlines()[-1]}")
        found += [f"seed {seed}-{number}: sa1b {arguments}: {one}" for one in what]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="number of command lines")
    parser.add_argument("--seed", type=int, default=1, help="repeats a campaign")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), chosen.count, chosen.seed)
    print(*found, f"{chosen.count} command lines, seed {chosen.seed}: {len(found)} violations", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
