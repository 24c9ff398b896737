"""A run so small that it writes hundreds of checkpoints per second, and kinds of damage to checkpoints."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.checkpoint.sealed_folder import MANIFEST, measure, seal
from sa1b.engine.settings import CheckpointConfig


class SmallRun:
    """Set every number of model and optimizer to the step."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def become(self, step: int) -> None:
        for parameter, values in self.optimizer.state.items():
            for tensor in (parameter, *values.values()):
                tensor.fill_(step)

    def steps(self) -> set[float]:
        """The set of all numbers; it has one element if the state is consistent."""
        tensors = [*self.model.parameters()]
        for values in self.optimizer.state.values():
            tensors += values.values()
        return set(torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist())


def write_run(run: Path, steps: tuple[int, ...], **options: Any) -> SmallRun:
    """Create a run that saves at these steps."""
    small = SmallRun()
    checkpoints = Checkpoints(run, CheckpointConfig(**options))
    for step in steps:
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})
    checkpoints.close()
    return small


def resume(run: Path) -> tuple[Any, SmallRun]:
    small = SmallRun()
    small.become(-1)
    checkpoints = Checkpoints(run, CheckpointConfig())
    try:
        return checkpoints.resume(small.model, small.optimizer), small
    finally:
        checkpoints.close()


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / folder_name(step)


def save_until_killed(run: Path, first: int) -> None:
    torch.set_num_threads(1)
    small = SmallRun()
    checkpoints = Checkpoints(run, CheckpointConfig())
    for step in range(first, first + 100_000):
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})


def reseal(folder: Path) -> None:
    """Update the digests to the current files."""
    step = int(folder.name.removeprefix("step-"))
    (folder / MANIFEST).unlink()
    seal(folder, step, {path.name: measure(path) for path in folder.iterdir()})


class Hostile:
    """An object that creates a file when it is unpickled without checks."""

    def __init__(self, canary: Path, function: str) -> None:
        self.canary, self.function = canary, function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.function == "system":
            return os.system, (f"touch {self.canary}",)
        if self.function == "open":
            return open, (str(self.canary), "w")
        return exec, (f"open({str(self.canary)!r}, 'w').close()",)


FUNCTIONS = ("system", "open", "exec")
NAMES = (".metadata", "__0_0.distcp", "state.json", MANIFEST)


def spoil(newest: Path, older: Path, canary: Path, random: Random) -> str:
    """Damage a checkpoint in one way; returns a description."""
    return random.choice(WAYS)(newest, older, canary, random)


def _flip(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    data = bytearray(path.read_bytes())
    position = random.randrange(len(data))
    data[position] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return f"flip at {position} of {path.name}"


def _cut(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    length = random.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"cut {path.name} to {length}"


def _zero(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    data = path.read_bytes()
    start = random.randrange(len(data) - 8)
    length = random.randint(8, 4096)
    path.write_bytes((data[:start] + bytes(length))[: len(data)] + data[start + length :])
    return f"zeros from {start} of {path.name}"


def _grow(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    path.write_bytes(path.read_bytes() + random.choice([b"\n", b" ", b"\0", random.randbytes(50)]))
    return f"grow {path.name}"


def _swap(newest: Path, older: Path, canary: Path, random: Random) -> str:
    names = random.sample(NAMES, random.randint(1, len(NAMES)))
    for name in names:
        shutil.copy(older / name, newest / name)
    return f"the older one's {names}"


def _remove(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES)
    path.unlink()
    return f"remove {path.name}"


def _add(newest: Path, older: Path, canary: Path, random: Random) -> str:
    name = random.choice(["__1_0.distcp", "notes.txt", ".metadata.tmp", "state.json~", "__0_.metadata"])
    (newest / name).write_bytes(random.choice([b"", (newest / ".metadata").read_bytes()]))
    return f"add {name}"


def _link(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(NAMES[:3])
    path.unlink()
    path.symlink_to(older / path.name)
    return f"link {path.name}"


def _edit(newest: Path, older: Path, canary: Path, random: Random) -> str:
    path = newest / random.choice(["state.json", MANIFEST])
    step = int(newest.name.removeprefix("step-"))
    old, new = random.choice([(str(step), str(step + 1)), ('"step"', '"Step"'), (": ", ":"), ("\n", "\n\n")])
    path.write_text(path.read_text().replace(old, new))
    return f"{old!r} to {new!r} in {path.name}"


def _edit_and_seal(newest: Path, older: Path, canary: Path, random: Random) -> str:
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
    reseal(newest)
    return f"state.json is {text[:20]!r}, sealed"


def _hostile_table(newest: Path, older: Path, canary: Path, random: Random) -> str:
    """A pickle that runs code, alone or inside a valid table, with matching digests."""
    path = newest / ".metadata"
    hostile = Hostile(canary, random.choice(FUNCTIONS))
    kind = random.choice(["alone", "planner_data", "storage_meta", "storage_data", "tensors", "version"])
    data: Any = hostile
    if kind != "alone":
        data = pickle.loads(path.read_bytes())
        if kind == "storage_data":
            data.storage_data[next(iter(data.storage_data))] = hostile
        elif kind == "tensors":
            data.state_dict_metadata["model.weight"] = hostile
        else:
            setattr(data, kind, hostile)
    path.write_bytes(pickle.dumps(data, protocol=random.choice([2, 3, 4, 5])))
    reseal(newest)
    return f"hostile table: {kind}, sealed"


def _wrong_table(newest: Path, older: Path, canary: Path, random: Random) -> str:
    """A table with wrong contents but without code, with matching digests."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    path = newest / ".metadata"
    data = pickle.loads(path.read_bytes())
    key = random.choice(list(data.storage_data))
    tensor = data.state_dict_metadata[key.fqn]
    kind = random.choice(["bytes", "outside", "elsewhere", "size", "dtype", "missing", "part", "transform"])
    if kind == "bytes":
        data.state_dict_metadata[key.fqn] = BytesStorageMetadata()
    elif kind == "outside":
        data.storage_data[key].length += 1 << 20
    elif kind == "elsewhere":
        data.storage_data[key].relative_path = f"../{older.name}/__0_0.distcp"
    elif kind == "size":
        tensor.size = torch.Size([7, *tensor.size])
    elif kind == "dtype":
        tensor.properties = "float32"
    elif kind == "missing":
        del data.storage_data[key]
    elif kind == "part":
        tensor.chunks.clear()
    else:
        data.storage_data[key].transform_descriptors = ["zstd"]
    path.write_bytes(pickle.dumps(data))
    reseal(newest)
    return f"wrong table: {kind} of {key.fqn}, sealed"


def _hostile_payload(newest: Path, older: Path, canary: Path, random: Random) -> str:
    """A pickle that runs code instead of a tensor, with matching digests."""
    hostile = Hostile(canary, random.choice(FUNCTIONS))
    payload = io.BytesIO()
    kind = random.choice(["archive", "legacy", "pickle"])
    if kind == "pickle":
        pickle.dump(hostile, payload)
    else:
        torch.save(hostile, payload, _use_new_zipfile_serialization=kind == "archive")
    table, file = newest / ".metadata", newest / "__0_0.distcp"
    data = pickle.loads(table.read_bytes())
    key = random.choice(list(data.storage_data))
    data.storage_data[key].offset = file.stat().st_size
    data.storage_data[key].length = len(payload.getvalue())
    file.write_bytes(file.read_bytes() + payload.getvalue())
    table.write_bytes(pickle.dumps(data))
    reseal(newest)
    return f"hostile payload: {kind} at {key.fqn}, sealed"


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
    _hostile_table,
    _wrong_table,
    _hostile_payload,
)
