"""What worker processes of a DataLoader cost beside threads: processor time an image, and memory.

`pytest benchmarks/test_data_loader.py -s` prints two tables, on Linux. Both have two workers. For the time,
both make dense masks and take turns, so that other work on the machine affects both alike. For the memory,
each runs in a process of its own, after the others; other programs that use the same torch make it smaller.
"""

import os
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from benchmarks import process_tree
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.measured import Running
from benchmarks.peers.task import Place, Task
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.shards.documents import Options

IMAGES, BATCH, BATCHES, ROUNDS = 96, 8, 30, 5
TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-loader")
    write_tars(folder / "tars", tars=1, images_per_tar=IMAGES, seed=0, long_side=1024, workers=1)
    reshard([folder / "tars"], folder / "shards", Options(), Policy(), IngestRun(quiet=True))
    return folder / "shards"


def seconds() -> float:
    """Processor time of this process and its living children."""
    total = sum(os.times()[:2])
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = process.read_text().rpartition(") ")[2].split()
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) * TICK
    return total


def batches(kind: str, root: Path) -> Iterator[sa1b.Batch]:
    stream = sa1b.Stream(root, global_batch=BATCH, image_size=1024, masks=64, epochs=None)
    if kind == "threads":
        yield from sa1b.Loader(stream, threads=2, dense=256, quiet=True)
    for batch in DataLoader(stream, batch_size=None, num_workers=2):
        batch.masks.dense(256)
        yield batch


def test_worker_processes_cost_little_more_than_threads(root: Path) -> None:
    torch.set_num_threads(1)  # threads of torch that wait for work take processor time
    found: dict[str, list[float]] = {"threads": [], "processes": []}
    for _ in range(ROUNDS):
        for kind, times in found.items():
            reader = batches(kind, root)
            deque(islice(reader, 6), maxlen=0)  # its workers have started
            began = seconds()
            deque(islice(reader, BATCHES), maxlen=0)  # keeps no batch: memory is reused
            times.append(1e3 * (seconds() - began) / BATCHES / BATCH)
            del reader
    print(f"\n{'two workers':12}{'ms an image':>12}{'rounds':>40}")
    for kind, times in found.items():
        print(f"{kind:12}{statistics.median(times):12.2f}  {' '.join(f'{one:.2f}' for one in times):>38}")


def test_memory_of_worker_processes(root: Path) -> None:
    print(f"\n{'two workers':12}{'masks':>8}{'MB':>8}  not shared, of each process")
    for size in (1024, 256, None):
        for kind, name in (("threads", "sa1b.Loader"), ("processes", "sa1b.Stream in DataLoader")):
            running = Running(CONTENDERS[name], Place(root, root.parent), Task(size), workers=2)
            try:
                running.first()
                with process_tree.Watch(running.process.pid) as watch:
                    running.ask("pass")
            finally:
                running.stop()
            alone = ", ".join(f"{one / 1e6:.0f}" for one in watch.alone.values())
            print(f"{kind:12}{size or 'runs':>8}{watch.peak / 1e6:8.0f}  {alone}")
