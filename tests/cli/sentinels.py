"""Hostile command lines against the files of a user: no command changes or removes what it did not make.

    python -m tests.cli.sentinels --count 1000 --seed 1

A world has source tars, two dataset directories, an export, a run and many files of a user, old and new, beside
them and inside them, some with names that look like the program's. Each command gets paths and names that point
at them, in every argument and flag of `FLAGS`, which has all that take a path or a name: a folder of the user,
`..`, a symbolic link, the source, the output, names with slashes. After each command every file of the user is
there with its bytes, except one that the command line names as a file to write, and so is every shard if the
command is none that writes shards. A violation is printed with its command line; the exit code is then 1.
"""

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.export.export import export
from sa1b.programs.export.source_tars import SourceTars
from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from tests import processes

OLD = 400 * 24 * 3600.0
FOLDERS = ("user", "user/thesis/data", "user/.hidden", "user/empty-but-for-this", "out", "out/tasks", "tars")
LOOKALIKES = (
    *("out/tasks/my.expected", "out/quarantine/sa_000000/notes.txt", "out/quarantine/mine/1.jpg"),
    *("out/samples.bin", "out/samples-old.bin", "out/sa1b-notes.tar", "out/views/notes.txt"),
    *("out/layers/a/notes.txt", "out/layers/mine/masks.bin"),
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


def build(world: Path, *, with_run: bool = True) -> None:
    """Make a world in an empty folder; the run of a training takes the longest."""
    write_tars(world / "tars", tars=2, images_per_tar=4, seed=5, long_side=64, workers=1)
    reshard([world / "tars"], world / "out", Options(images_per_shard=2), Policy(), IngestRun(quiet=True))
    export(world / "out", world / "export", SourceTars(), workers=1, quiet=True)
    (world / "tars" / "ids.txt").write_text("1\n2\n")
    if with_run:
        run(world, ["train", "--data.root", "out", "--out", "run", *FLAGS["train"][0]])
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


# Verb -> fixed arguments -> for each positional argument and flag that takes a path or a name: kind and default.
# A flag without a default is left out of most command lines.
PATH, NAME = "path", "name"
Flags = dict[str, tuple[str, str | None]]
SOURCES: Flags = {"SOURCE": (PATH, "tars"), "--links": (PATH, None), "--ignore": (NAME, None)}
WRITES: Flags = {"--spill": (PATH, None), "--scratch": (PATH, None), "--redo": (NAME, None)}
COCO: Flags = {"--images": (PATH, None), "--md5": (PATH, None), "--rename": ("rename", None)}
FLAGS: dict[str, tuple[list[str], Flags]] = {
    "synthesize": (["--tars", "1", "--images-per-tar", "1", "--long-side", "64"], {"OUT": (PATH, "new")}),
    "plan": ([], {**SOURCES, "--out": (PATH, "out"), "--scratch": (PATH, None)}),
    "reshard": ([], {**SOURCES, "--out": (PATH, "out"), **WRITES, **COCO}),
    "reshard --replace": ([], {**SOURCES, "--out": (PATH, "out"), **WRITES, **COCO}),
    "reshard --task 0/2": ([], {**SOURCES, "--out": (PATH, "new"), **WRITES, **COCO}),
    "reshard --finish": ([], {"--out": (PATH, "out")}),
    "reshard --drop": ([], {"NAME": (NAME, "sa_000001"), "--out": (PATH, "out")}),
    "fetch": ([], {**SOURCES, "--ids": (PATH, "tars/ids.txt"), "--out": (PATH, "new"), "--index": (PATH, None), **WRITES}),
    "verify": ([], {"ROOT": (PATH, "out"), "--state": (PATH, None), "--scratch": (PATH, None)}),
    "gallery": (["--overwrite"], {"ROOT": (PATH, "out"), "--out": (PATH, "page.html"), "--view": (NAME, None), "--layers": (NAME, None), "--predictions": (PATH, None)}),
    "view": (["--held-out", "20%"], {"ROOT": (PATH, "out"), "--name": (NAME, "a"), "--out": (PATH, None), "--layers": (NAME, None)}),
    "view --missing skip": ([], {"ROOT": (PATH, "out"), "--ids": (PATH, "tars/ids.txt"), "--name": (NAME, "a"), "--out": (PATH, None)}),
    "locate": ([], {"ROOT": (PATH, "out"), "--ids": (PATH, "tars/ids.txt"), "--links": (PATH, None)}),
    "layer add": ([], {"ROOT": (PATH, "out"), "FILE": (PATH, "tars"), "--name": (NAME, "a"), "--on": (NAME, None)}),
    "layer add --overwrite": ([], {"ROOT": (PATH, "out"), "FILE": (PATH, "tars"), "--name": (NAME, "a")}),
    "layer drop": ([], {"ROOT": (PATH, "out"), "NAME": (NAME, "a")}),
    "layer verify": ([], {"ROOT": (PATH, "out"), "NAME": (NAME, "a")}),
    "query": ([], {"ROOT": (PATH, "out"), "SQL": ("sql", "SELECT image_id FROM images"), "--parquet": (PATH, None)}),
    "query --overwrite": ([], {"ROOT": (PATH, "out"), "SQL": ("sql", "SELECT image_id FROM images"), "--as-view": (NAME, "q"), "--layers": (NAME, None), "--out": (PATH, None)}),
    "bench": (["--seconds", "0.1"], {"ROOT": (PATH, "out"), "--view": (NAME, None), "--cache": (PATH, None)}),
    "doctor": (["--only", "space", "--only", "dataset"], {"ROOT": (PATH, "out"), "--out": (PATH, None)}),
    "convert": ([], {"SOURCE": (PATH, "run"), "--out": (PATH, "new.safetensors"), "--scratch": (PATH, None)}),
    "convert --overwrite": ([], {"SOURCE": (PATH, "run"), "--out": (PATH, "run/w.pth"), "--scratch": (PATH, None)}),
    "convert --to safetensors --overwrite": ([], {"SOURCE": (PATH, "run"), "--out": (PATH, "new"), "--scratch": (PATH, None)}),
    "replay": (["--step", "1"], {"RUN": (PATH, "run"), "--out": (PATH, "new"), "--weights": (PATH, None)}),
    "seen": ([], {"RUN": (PATH, "run"), "--out": (PATH, "new.parquet")}),
    "annotate": (["--points-per-side", "2"], {"IMAGES": (PATH, "export"), "--weights": (PATH, "run"), "--out": (PATH, "new"), "--shards": (PATH, None), "--name": (NAME, None), "--on": (NAME, None), "--view": (NAME, None)}),
    "slurm": (["reshard", "tars", "--out", "out"], {"--logs": (PATH, "."), "--name": (NAME, None)}),
    "index": ([], {"ROOT": (PATH, "out"), "--scratch": (PATH, None)}),
    "index --tables": ([], {"ROOT": (PATH, "out"), "--scratch": (PATH, None)}),
    **{
        f"export --to {to}": ([], {"ROOT": (PATH, "out"), "--out": (PATH, "export"), "--view": (NAME, None), "--val-view": (NAME, None), "--ids": (PATH, None), "--link-from": (PATH, None), "--layers": (NAME, None), "--join": ("rename", None)})
        for to in ("sa1b", "coco", "yolo-seg", "folders", "webdataset", "images --overwrite", "sa1b --overwrite")
    },
    "copy": ([], {"ROOT": (PATH, "out"), "DEST": (PATH, "new"), "--shards": (NAME, None), "--view": (NAME, None), "--scratch": (PATH, None)}),
    "train": (
        ["--preset", "tiny", "--optim.steps", "1", "--data.global-batch", "2", "--data.micro-batch", "2"],
        {"--data.root": (PATH, "out"), "--out": (PATH, "run"), "--init": (PATH, None), "--scratch": (PATH, None),
         "--data.view": (NAME, None), "--data.cache": (PATH, None), "--data.text": (PATH, None), "--data.tokenizer": (PATH, None),
         "--evaluation.view": (NAME, None), "--evaluation.coco": (PATH, None), "--evaluation.images": (PATH, None),
         "--evaluation.detections": (PATH, None)},
    ),
}  # fmt: skip
RARE = {"train": 0.3, "annotate": 0.3, "bench": 0.3, "doctor": 0.3}  # slow ones
HOSTILE_PATHS = (".", "..", "", "/proc/self/fdinfo", "~", "user/*", "out/..", "-", "a\nb", "\u2028")
HOSTILE_NAMES = (
    *(
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
    ),
    *("sa_000000", "sa_000001", "a/b", "~", "*", "notes", "../views/notes"),
)
PLACES = ("link", "user/to-out", "new", "export", "run", "user/empty-folder", "out/dataset.json")


def command_line(rng: random.Random, world: Path) -> list[str]:
    """The arguments of a hostile command."""

    def path() -> str:
        text = rng.choice((*FOLDERS, *LOOKALIKES, *PLACES))
        hostile = rng.choice((*HOSTILE_PATHS, f"../{world.name}"))
        forms = (text, f"./{text}/", str(world / text), f"user/../{text}", f"file://{world / text}", hostile)
        return rng.choice(forms[:5] if rng.random() < 0.9 else forms)

    def name() -> str:
        return rng.choice((*HOSTILE_NAMES, str(world / "user"), path()))

    verbs = list(FLAGS)
    verb = rng.choices(verbs, [RARE.get(one, 1.0) for one in verbs])[0]
    fixed, flags = FLAGS[verb]
    words = [*verb.split()]
    hostile = rng.sample(list(flags), min(len(flags), rng.randint(1, 3)))
    for flag, (kind, default) in flags.items():
        value = default
        if flag in hostile and kind not in ("sql", "fixed"):
            value = f"{name()}={name()}" if kind == "rename" else path() if kind == PATH else name()
        if value is not None:
            words += [flag, value] if flag.startswith("--") else [value]
    return [*words, *fixed]


def run(world: Path, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return processes.run(
        [sys.executable, "-m", "sa1b", *arguments], capture_output=True, text=True, check=False, cwd=world, timeout=300,
        env={**os.environ, "HOME": str(world.parent / "home"), "TMPDIR": str(world.parent)},
    )  # fmt: skip


def shards(world: Path) -> dict[str, str]:
    """Path -> digest of the shards and of dataset.json, which only some commands may write."""
    found = [world / "out" / "dataset.json", *(world / "out").glob("sa1b-0*")]
    return {str(one.relative_to(world)): hashlib.sha256(one.read_bytes()).hexdigest() for one in found}


def violations(world: Path, before: dict[str, str], arguments: list[str]) -> list[str]:
    """Files of the user that a command changed or removed, without those that it was told to write."""
    after = of_user(world)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    told = {os.path.realpath(world / one.removeprefix("file://")) for one in arguments if "\0" not in one}
    return [name for name in changed if os.path.realpath(world / name) not in told or name not in after]


def campaign(folder: Path, commands: int | Sequence[list[str]], seed: int = 0) -> list[str]:
    """Run so many hostile commands, or the given ones, each on a fresh world; a line for each violation."""
    build(folder / "template", with_run=isinstance(commands, int))
    assert len(read_tasks(folder / "template" / "out")) == 2
    stored = shards(folder / "template")
    found, ends = [], Counter[str]()
    world = folder / "world"
    given = None if isinstance(commands, int) else commands
    for number in range(commands if isinstance(commands, int) else len(commands)):
        rng = random.Random(f"{seed}-{number}")
        shutil.rmtree(world, ignore_errors=True)
        shutil.copytree(folder / "template", world, symlinks=True)
        before = of_user(world)
        arguments = command_line(rng, world) if given is None else given[number]
        done = run(world, arguments)
        ends[f"{arguments[0]} {done.returncode}"] += 1
        what = [f"{name}: changed or gone" for name in violations(world, before, arguments)]
        if arguments[0] not in ("reshard", "fetch", "index", "copy"):
            now = shards(world)
            told = {os.path.realpath(world / one.removeprefix("file://")) for one in arguments}
            lost = [name for name in stored if now.get(name) != stored[name]]
            what += [f"{name}: changed" for name in lost if os.path.realpath(world / name) not in told]
        if "Traceback (most recent call last)" in done.stderr:
            what.append(f"a traceback: {done.stderr.splitlines()[-1]}")
        lines = [f"seed {seed}-{number}: sa1b {arguments}: {one}" for one in what]
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        found += lines
    print(f"exit codes: {dict(sorted(ends.items()))}")
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
    print(f"{chosen.count} command lines, seed {chosen.seed}: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
