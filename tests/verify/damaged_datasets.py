"""Damaged dataset directories whose printed advice is followed until `verify` says Clean.

    python -m tests.verify.damaged_datasets --count 500 --seed 1

A world has tars, a folder, a file in COCO's format with hashed ids, a fetched part, a view and a layer in one
dataset directory. Each case removes, cuts, empties, changes, exchanges or renames one or two of its files, of every kind.
Then the commands that `verify` prints are run as printed, with or without the sources, until it prints none.
No command may reduce the images that the dataset serves or an intact shard holds. With the sources the end is
Clean, and every image is there with its bytes. A violation is printed with its seed; the exit code is then 1.
"""

import argparse
import hashlib
import io
import json
import random
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sa1b
from sa1b.errors import Sa1bError
from tests.kit import run
from tests.shards import tiny
from tests.shards.tiny_source import add_layer
from tests.verify.checking import commands_in

ROUNDS = 40  # of advice that is followed; in half of the cases one command, chosen at random, in each
PART = (901, 903, 904, 907)  # the images that were fetched of sa_000009
KINDS = {  # pattern of the files of a kind in a dataset directory
    "document": "dataset.json",
    "table": "samples-*.bin",
    "task": "tasks/*.json",
    "rows": "tasks/*.samples",
    "shard": "*.tar",
    "index": "*.parquet",
    "list": "quarantine/*/*.jsonl",
    "kept": "quarantine/*/0*",
    "view": "views/*.json",
    "view data": "views/*.[ir]*s",
    "layer": "layers/*/*",
    "folder": "*/",  # all files of tasks/, quarantine/, views/ or layers/
}
ACTIONS = ("remove", "cut", "empty", "flip", "swap", "foreign", "rename", "move")


@dataclass(frozen=True)
class Template:
    """A world with an intact dataset directory `root`, and what it holds."""

    world: Path
    images: dict[int, tuple[bytes, Any]]  # id -> JPEG and annotations
    shards: dict[str, set[int]]  # sha256 of a shard -> its images


def build(folder: Path) -> Template:
    """Make the world in a folder: `src`, `root`, and `other`, a dataset directory with other images."""
    world, src = folder / "template", folder / "template" / "src"
    src.mkdir(parents=True)
    odd = tiny.document(103)
    odd["annotations"][0]["area"] += 1
    members = [*tiny.pairs(range(100, 107)), *tiny.pair_members(107, text=b"{"), ("notes.txt", b"no member")]
    members = [(name, tiny.encode(odd) if name.endswith("103.json") else data) for name, data in members]
    tiny.write_tar(src / "sa_000001.tar", members)
    tiny.make_tar(src / "sa_000002.tar", range(200, 204), gzip=False)
    tiny.make_tar(src / "sa_000009.tar", range(900, 908))
    (src / "ids.txt").write_text("\n".join(map(str, PART)))
    (src / "photos").mkdir()
    for name, data in tiny.pairs(range(300, 305), seed=None):
        (src / "photos" / Path(name).name).write_bytes(data)
    (src / "images").mkdir()
    images, annotations = [], []
    for number in range(4):
        (src / "images" / f"{number}.jpg").write_bytes(tiny.pair(400 + number)[0])
        images.append({"id": number, "file_name": f"{number}.jpg", "height": 48, "width": 64})
        box = [[3 + number, 2, 30, 4, 20, 30]]
        annotations.append({"id": number, "image_id": number, "segmentation": box, "category_id": 1})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (src / "train.json").write_text(json.dumps(document))
    make(world / "root", [src / f"sa_00000{n}.tar" for n in (1, 2, 9)] + [src / "photos", src / "train.json"])
    for number in (1, 2, 9):
        tiny.make_tar(world / "other-src" / f"sa_00000{number}.tar", range(5000 * number, 5000 * number + 7))
    make(world / "other", sorted((world / "other-src").iterdir()))
    root = world / "root"
    held = {sample.image_id: (sample.jpeg, sample.annotations.to_json()) for sample in sa1b.open(root)}
    shards = {digest(path): ids_in(path.read_bytes()) for path in root.glob("*.tar")}
    assert len(held) == len(set[int]().union(*shards.values())) == 24
    run("verify", root)
    return Template(world, held, shards)


def make(root: Path, paths: list[Path]) -> None:
    """A dataset directory of sources, with a view and a layer."""
    *tars, last = paths
    options: dict[str, Any] = {"images_per_shard": 3, "workers": 1, "quiet": True}
    if root.name == "root":
        (part,) = (path for path in tars if path.stem == "sa_000009")
        tars.remove(part)
        sa1b.reshard([*tars, last], root, images=last.parent / "images", image_ids="hash", **options)
        run("fetch", part, "--ids", last.parent / "ids.txt", "--out", root, "--images-per-shard", 3)
    else:
        sa1b.reshard(paths, root, **options)
    run("view", root, "--held-out", "30%", "--name", "held")
    add_layer(root)


def ids_in(shard: bytes) -> set[int]:
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        return {int(name[3:-4]) for name in tar.getnames() if name.endswith(".jpg")}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damage(rng: random.Random, world: Path, kind: str, action: str) -> str:
    """Damage one file of a kind in a random way of this action; what was done."""
    root = world / "root"
    found = sorted(root.glob(KINDS[kind]))
    if not found:
        return f"no {kind} left"
    path = rng.choice(found)
    if kind == "folder":
        shutil.rmtree(path)
        return f"removed {path.name}/"
    data, what = path.read_bytes(), f"{action} {path.relative_to(root)}"
    other = rng.choice([one for one in found if one != path] or [path])
    if action == "remove":
        path.unlink()
    elif action == "empty":
        path.write_bytes(b"")
    elif action == "cut":
        path.write_bytes(data[: rng.randrange(len(data) or 1)])
    elif action == "flip" and data:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    elif action == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        what += f" with {other.name}"
    elif action == "foreign":  # a file of the same kind of another dataset directory
        strangers = sorted((world / "other").glob(KINDS[kind]))
        same = [one for one in strangers if one.name == path.name] or strangers
        path.write_bytes(rng.choice(same).read_bytes() if same else b"foreign")
    elif action == "move":  # in the place of another one, which is gone
        path.replace(other)
        what += f" over {other.name}"
    elif action == "rename":
        new = re.sub(r"\d(?=[^\d]*$)", lambda digit: str((int(digit[0]) + rng.randint(1, 9)) % 10), path.name)
        name = rng.choice((new, f"{path.name}.bak", f"copy-of-{path.name}"))
        what += f" to {name}"
        path.replace(path.with_name(name))
    return what


def advised(report: dict[str, Any]) -> list[list[str]]:
    """The commands in a report of `verify`, in its order, as words without the program."""
    found = []
    for text in (*report["notes"], *(one["remedy"] for one in report["findings"])):
        # Not such as: convert their sources with `sa1b reshard`.
        found += [words for words in commands_in(text) if len(words) > 1]
        if removal := re.match(r"remove (.+) and rebuild the view", text):
            found.append(["rm", *shlex.split(removal[1])])
        if move := re.match(r"move (.+) to another folder", text):
            found.append(["mv", move[1]])
    return [list(one) for one in dict.fromkeys(map(tuple, found))]


def typed(words: Iterable[str], world: Path) -> list[str]:
    """Advice with the real paths, which a user puts in."""
    places = {
        "IDS.txt": "src/ids.txt",
        "IMAGES": "src/images",
        "photos.tar": "src/photos",
        "train.tar": "src/train.json",
        "MASKS": "src/photos",
    }
    return [
        re.sub(r"PATH/TO/(.+)", lambda one: f"{world}/{places.get(one[1], f'src/{one[1]}')}", word)
        for word in words
    ]


def needs_source(words: Iterable[str]) -> bool:
    return any(word.startswith("PATH/TO/") for word in words)


def safe(template: Template, world: Path) -> set[int]:
    """Images that the dataset serves with their bytes, or an intact shard holds, under any name."""
    found = {
        one for path in (world / "root").rglob("*.tar*") for one in template.shards.get(digest(path), ())
    }
    with suppress(Sa1bError, OSError, ValueError, KeyError):
        dataset = sa1b.open(world / "root")
        for image_id in dataset.table.image_id.tolist():
            with suppress(Sa1bError, OSError, ValueError, KeyError):
                sample = dataset.by_id(image_id)
                if (sample.jpeg, sample.annotations.to_json()) == template.images.get(image_id):
                    found.add(image_id)
    return found


def follow(template: Template, world: Path, rng: random.Random, *, sources: bool) -> list[str]:
    """Run the advice of `verify` until it has none; what is wrong."""
    found, log, said = [], [], set[str]()
    before = safe(template, world)
    all_at_once = rng.random() < 0.5
    for _ in range(ROUNDS):
        done = run("verify", world / "root", "--json", code=None)
        if done.code == 2 and not done.out:  # nothing is left to repair
            return [*found, f"verify: {done.err}"] if before else found
        report = done.json
        todo = [words for words in advised(report) if sources or not needs_source(words)]
        todo = [words for words in todo if sources or shlex.join(words) not in said]
        for words in todo if all_at_once else rng.sample(todo, min(1, len(todo))):
            said.add(shlex.join(words))
            if words[0] == "rm":
                Path(words[1]).unlink()
                continue
            if words[0] == "mv":
                Path(words[1]).replace(world / "moved")
                continue
            ended = run(*typed(words, world), code=None)
            log.append(f"{shlex.join(typed(words, world))}: {ended.code} {ended.err.strip()[-300:]}")
            if table := re.search(r"(/\S+\.bin): lists .* move this file to another folder", ended.err):
                Path(table[1]).replace(world / "moved")
            if "Traceback" in ended.err:
                found.append(f"a traceback of {words}: {ended.err}")
            now = safe(template, world)
            if lost := sorted(before - now):
                found.append(f"{words} lost {lost}")
            before = now
        if not todo:
            break
    missing = sorted(template.images.keys() - served(template, world))
    code = report["exit_code"]
    if sources and (code != 0 or missing):
        found.append(f"at the end: exit code {code}, missing {missing}")
    elif not sources and code == 0 and (lost := sorted(before & set(missing))):
        found.append(f"Clean without {lost}, which are in intact shards")
    if found:
        found += [*log, *map(str, report["findings"][:3]), *report["notes"]]
    return found


def served(template: Template, world: Path) -> set[int]:
    """Images that the dataset serves with their bytes."""
    return safe(Template(template.world, template.images, {}), world)


def case(template: Template, folder: Path, seed: str, damages: list[tuple[str, str]]) -> list[str]:
    """Damage a copy of the world and follow the advice; what is wrong at its end."""
    rng, world = random.Random(seed), folder / "world"
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(template.world, world)
    what = [damage(rng, world, *one) for one in damages]
    sources = rng.random() < 0.7
    found = follow(template, world, rng, sources=sources)
    return [f"{seed}: {'; '.join(what)}; {'with' if sources else 'without'} sources: {one}" for one in found]


def damages(count: int, seed: int) -> list[list[tuple[str, str]]]:
    """All single damages, then random combinations of two."""
    single = [(kind, action) for kind in KINDS for action in (ACTIONS if kind != "folder" else ("remove",))]
    rng = random.Random(seed)
    found = [[one] for one in single] + [rng.choices(single, k=2) for _ in range(count)]
    return found[:count]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="number of damaged directories")
    parser.add_argument("--seed", type=int, default=1, help="repeats a campaign")
    parser.add_argument("--only", type=int, help="run the case with this number alone")
    chosen = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        template = build(Path(folder))
        for number, one in enumerate(damages(chosen.count, chosen.seed)):
            if chosen.only in (None, number):
                found = case(template, Path(folder), f"{chosen.seed}-{number}", one)
                print(*found, sep="\n" if found else "", end="\n" if found else "", flush=True)
                bad += bool(found)
    print(f"{chosen.count} damaged directories, seed {chosen.seed}: {bad} with violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
