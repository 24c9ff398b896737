"""Ways to damage a checkpoint in its bytes, also with right digests; test_hostile.py has the pickles.

spoil(newest, older, Random(seed))      one of them
"""

import hashlib
import os
import shutil
from pathlib import Path
from random import Random

MANIFEST = "manifest.sha256"


def seal(checkpoint: Path) -> None:
    """Make the digests of the manifest those of the files."""
    files = sorted(file for file in checkpoint.iterdir() if file.name != MANIFEST)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (checkpoint / MANIFEST).write_text("".join(lines))


NAMES = (".metadata", "__0_0.distcp", "state.json", MANIFEST)


def spoil(newest: Path, older: Path, random: Random) -> str:
    """Damage a checkpoint in one way; returns a description."""
    return random.choice(WAYS)(newest, older, random)


def _flip(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    data = bytearray(path.read_bytes())
    position = random.randrange(len(data))
    data[position] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return f"flip at {position} of {path.name}"


def _cut(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    length = random.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"cut {path.name} to {length}"


def _zero(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    data = path.read_bytes()
    start = random.randrange(len(data) - 8)
    length = random.randint(8, 4096)
    path.write_bytes((data[:start] + bytes(length))[: len(data)] + data[start + length :])
    return f"zeros from {start} of {path.name}"


def _grow(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    path.write_bytes(path.read_bytes() + random.choice([b"\n", b" ", b"\0", random.randbytes(50)]))
    return f"grow {path.name}"


def _swap(newest: Path, older: Path, random: Random) -> str:
    names = random.sample(NAMES, random.randint(1, len(NAMES)))
    for name in names:
        shutil.copy(older / name, newest / name)
    return f"the older one's {names}"


def _remove(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    path.unlink()
    return f"remove {path.name}"


def _add(newest: Path, older: Path, random: Random) -> str:
    name = random.choice(["__1_0.distcp", "notes.txt", ".metadata.tmp", "state.json~", "__0_.metadata"])
    (newest / name).write_bytes(random.choice([b"", (newest / ".metadata").read_bytes()]))
    return f"add {name}"


def _link(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(NAMES[:3])
    path.unlink()
    path.symlink_to(older / path.name)
    return f"link {path.name}"


def _edit(newest: Path, older: Path, random: Random) -> str:
    path = newest / random.choice(["state.json", MANIFEST])
    step = int(newest.name.removeprefix("step-"))
    ways = [(str(step), str(step + 1)), ("\n", "\n\n"), ("  ", " ")]
    old, new = random.choice(ways if path.name == MANIFEST else [*ways, ('"step"', '"Step"'), (": ", ":")])
    path.write_text(path.read_text().replace(old, new))
    return f"{old!r} to {new!r} in {path.name}"


def _edit_and_seal(newest: Path, older: Path, random: Random) -> str:
    path = newest / "state.json"
    step = int(newest.name.removeprefix("step-"))
    text = random.choice(
        [
            path.read_text().replace(f'"step": {step}', f'"step": {step + 1}'),
            path.read_text().replace('"step"', '"Step"'),
            path.read_text().replace('"state"', '"status"'),
            "[1, 2]",
            "",
            "{" * 100_000,
            "\x00",
            (older / "state.json").read_text(),
        ]
    )
    path.write_text(text)
    seal(newest)
    return f"state.json is {text[:20]!r}, sealed"


WAYS = (
    _flip,
    _flip,
    _cut,
    _zero,
    _grow,
    _swap,
    _remove,
    _add,
    _link,
    _edit,
    _edit_and_seal,
)
