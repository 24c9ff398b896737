"""Batches on a GPU have the values of the CPU, however late the copies and the caller's own work are.

One program reads streams on both devices, as a caller who is behind: its work on a batch, a copy on the device, is
only queued when it drops the batch. Stub libraries of CUDA, whose device has a name that ends with "(null)", copy
at once; late_copies.c delays each copy until something waits for it. Their kernels do nothing, so that only what is
copied is compared.
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sa1b
from sa1b.masks.proved import MASKS, RASTER_IN_USE
from sa1b.train import main as train
from tests.engine import reconstruction
from tests.shards import tiny_source

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_host]

BATCHES = 14
EMPTY = {
    "global_batch": 5,
    "micro_batch": 2,
    "world_size": 2,
}  # rank 0 has micro-batches of 2 images and of none


def is_stub() -> bool:
    return torch.cuda.get_device_name().endswith("(null)")


# What is read; each is called with a folder and a device


def stream(folder: Path, name: str = "one", **options: Any) -> sa1b.Stream:
    step = {"global_batch": 6, "micro_batch": 3, "image_size": 64, "masks": 4, "flip": 0.5, "epochs": None}
    return sa1b.Stream(folder / name, damage_log=folder / "damaged.jsonl", **(step | options))


def described(folder: Path) -> sa1b.Stream:
    text = sa1b.Text(folder / "text.csv", column="text", key="image_id", tokenizer="bytes", length=32)
    return stream(folder, text=text)


def mix(folder: Path) -> sa1b.Mix:
    return sa1b.Mix({name: (stream(folder, name), weight) for name, weight in (("one", 2), ("two", 1))})


def loaded(
    folder: Path, device: str, *, of: Any = stream, ends: tuple[int, ...] = (BATCHES,), **options: Any
) -> Iterator[sa1b.Batch]:
    """The batches of a Loader, whose iterations end after so many; the next one continues."""
    dense = None if is_stub() else 32
    loader = sa1b.Loader(of(folder), device=device, dense=dense, quiet=True, **({"threads": 3} | options))
    for end in ends:
        yield from islice(loader, end)


def moved(folder: Path, device: str, *, workers: int | None = None, pin: bool = True) -> Iterator[sa1b.Batch]:
    """The batches of a Stream or, with workers, of a DataLoader, which the caller moves."""
    batches: Any = stream(folder)
    if workers is not None:
        pinned = pin and device == "cuda"
        batches = DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=pinned)
    elif pin and device == "cuda":
        batches = map(sa1b.Batch.pin_memory, batches)
    return (batch.to(device, non_blocking=True) for batch in islice(batches, BATCHES))


def returned(folder: Path, device: str) -> Iterator[sa1b.Batch]:
    """Batches that come back, complete at once."""
    return (batch.to("cpu", non_blocking=True) for batch in moved(folder, device))


READ: dict[str, Callable[[Path, str], Iterator[sa1b.Batch]]] = {
    "one thread": partial(loaded, threads=1, prefetch=1),
    "more in flight": partial(loaded, prefetch=4),
    "empty micro-batches": partial(loaded, of=partial(stream, **EMPTY)),
    "texts": partial(loaded, of=described),
    "mix": partial(loaded, of=mix),
    "early ends": partial(loaded, ends=(1, 5, 2, 6), prefetch=3),
    "pageable": partial(moved, pin=False),
    "pinned": moved,
    "pinned by a DataLoader": partial(moved, workers=0),
    "of workers": partial(moved, workers=1, pin=False),
    "pinned of workers": partial(moved, workers=1),
    "back": returned,
}
# How many batches the caller has beside the one that it uses, and in how many streams it works; 0: the default one.
CALLERS = {"drops": (0, 0), "keeps": (4, 0), "has streams": (1, 2)}
CASES = [f"{name}, {caller}" for name in READ for caller in CALLERS]


# The program


def tensors(record: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a batch, also of its masks and texts; not the memory that they share."""
    found: dict[str, Tensor] = {}
    for name in (field.name for field in fields(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor) and name != "buffer":
            found[prefix + name] = value
        elif is_dataclass(value):
            found |= tensors(value, f"{name}.")
    return found


def used(batch: sa1b.Batch) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(batch).items()}


def behind(
    batches: Iterator[sa1b.Batch], beside: int, streams: list[Any], traffic: Any
) -> list[dict[str, Tensor]]:
    """What a caller finds whose work on the device begins late, and who waits for it at the end only."""
    held, found = deque[tuple[sa1b.Batch, Any]](), list[dict[str, Tensor]]()
    for number in count():
        traffic()
        with torch.cuda.stream(streams[number % len(streams)]):
            held.extend((batch, torch.cuda.current_stream()) for batch in islice(batches, 1))
        if number < beside:
            continue
        if not held:
            break
        with torch.cuda.stream(held[0][1]):
            torch.cuda._sleep(2_000_000)
            found.append(used(held.popleft()[0]))
    for one in streams:
        one.synchronize()
    return found


def traffic_of_others() -> Callable[[], object]:
    """Other copies to the device, behind which those of the loader wait; late_copies.c needs none."""
    side, size = torch.cuda.Stream(), 0 if is_stub() else 1 << 26
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        with torch.cuda.stream(side):
            memory.to("cuda", non_blocking=True)

    return copy


def differences(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[str]:
    assert len(found) == len(expected)
    different = []
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            if name == "dense" and is_stub():  # of a kernel
                continue
            own, same = tensor.cpu(), theirs[name]
            if own.dtype != same.dtype or not torch.equal(own, same):
                different.append(f"{name} of batch {number}")
    return different


@dataclass(frozen=True, slots=True)
class Observed(reconstruction.ReconstructionConfig):
    """A run that keeps what its model is given, in `given`."""

    def build(self) -> nn.Module:
        model, inputs = reconstruction.ReconstructionConfig.build(self), reconstruction.Reconstruction.inputs

        def observed(batch: sa1b.Batch, seed: int) -> tuple[Any, ...]:
            given.append(used(batch))
            return inputs(model, batch, seed)

        model.inputs = observed
        return model


given: list[dict[str, Tensor]] = []


def trained(folder: Path, device: str) -> list[dict[str, Tensor]]:
    """What the model of a training run is given in three steps."""
    given.clear()
    flags = "--data.flip 0.5 --data.masks 4 --data.threads 3 --optim.steps 3 --logging.tensorboard False"
    words = ["--data.root", folder / "one", "--out", folder / f"run on {device}", "--parallel.device", device]
    words += flags.split()
    with ExitStack() as ending:
        if is_stub():  # whose kernels write nothing: each would be found wrong, and torch's read sizes of 0
            ending.enter_context(mock.patch("sa1b.train.prove_for_run"))
            RASTER_IN_USE[MASKS] = True
        code = train({"small": Observed()}, arguments=[str(word) for word in words])
    # Where a kernel wrote nothing, the run may read nonsense and stop.
    assert code == 0 or (is_stub() and device == "cuda")
    torch.cuda.synchronize()
    return list(given)


def is_late() -> bool:
    """Whether a copy from pinned memory reads what is written there after it was queued."""
    memory = torch.ones(8).pin_memory()
    there = memory.to("cuda", non_blocking=True)
    memory.fill_(2)
    return there.tolist() == [2.0] * 8


def main(folder: Path) -> None:
    # First, when unused memory holds 0, so that a run whose kernels write nothing goes on as far as it can.
    on_cpu, on_gpu = (trained(folder, device) for device in ("cpu", "cuda"))
    assert len(on_gpu) >= 4  # those of one step, and the first one once more before it
    report: dict[str, Any] = {"training": differences(on_gpu, on_cpu[: len(on_gpu)]), "is late": is_late()}
    traffic = traffic_of_others()
    for name, read in READ.items():
        expected = [used(batch) for batch in read(folder, "cpu")]
        assert len(expected) == BATCHES
        for caller, (beside, streams) in CALLERS.items():
            own = [torch.cuda.Stream() for _ in range(streams)] or [torch.cuda.current_stream()]
            found = behind(iter(read(folder, "cuda")), beside, own, traffic)
            report[f"{name}, {caller}"] = differences(found, expected)
    print(json.dumps(report))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("late")
    for name, ids in (("one", range(100, 117)), ("two", range(200, 207))):
        tar = tiny_source.write_source(folder / f"{name}.tar", tiny_source.pairs(ids, seed=ids[0]))
        tiny_source.make_root(folder / name, [tar], {"images_per_shard": 5})
    texts = (f"{one},{'word ' * (one % 5)}{one}\n" for one in range(100, 117))
    (folder / "text.csv").write_text("".join(["image_id,text\n", *texts]))
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    if is_stub():
        late, source = folder / "late.so", Path(__file__).with_name("late_copies.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", late, source, "-ldl", "-lpthread"], check=True)
        environment["LD_PRELOAD"] = str(late)
    program = f"import pathlib, tests.stream.test_late_copies as t; t.main(pathlib.Path({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["is late"] or not is_stub()
    return found


@pytest.mark.parametrize("case", CASES)
def test_batches_on_the_device_are_those_of_the_cpu_while_copies_are_late(
    report: dict[str, Any], case: str
) -> None:
    assert report[case] == []


def test_a_model_is_trained_on_the_images_of_the_cpu_while_copies_are_late(report: dict[str, Any]) -> None:
    assert report["training"] == []
