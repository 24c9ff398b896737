"""Ranks that hang on request: `python -m tests.engine.watched FOLDER STALL`, with torchrun's variables.

Each rank runs steps of a phase "compute" and a collective, under a watchdog, until the file FOLDER/end exists.
A file FOLDER/<what>-<rank> makes the rank hang:

    loop    in a loop of Python, until the file is removed
    read    in the phase "data", in opening the file, which is a FIFO
    lock    in a function in C that keeps the interpreter's lock: opening the file, which is a FIFO

`python -m tests.engine.watched PORT_FILE` is the store of the ranks, which writes its port to the file.
"""

import ctypes
import os
import sys
import threading
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from sa1b.engine.ranks.process_group import start
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.phase import Phases
from sa1b.engine.watch.signals import explain
from sa1b.engine.watch.watchdog import Watchdog


def hang(folder: Path, rank: int) -> None:
    if (loop := folder / f"loop-{rank}").exists():
        ended: list[bool] = []
        threading.Thread(target=wait_for_removal, args=(loop, ended), daemon=True).start()
        while not ended:
            pass
    if (lock := folder / f"lock-{rank}").exists():
        lock_interpreter(lock)


def lock_interpreter(path: Path) -> None:
    ctypes.PyDLL(None).open(bytes(path), os.O_RDONLY)  # unlike CDLL, it keeps the lock
    path.unlink()


def read(path: Path) -> None:
    if path.exists():
        path.open().close()
        path.unlink()


def wait_for_removal(path: Path, ended: list[bool]) -> None:
    while path.exists():
        time.sleep(0.05)
    ended.append(True)


def main(folder: Path, stall: float) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = ParallelConfig(mode="ddp", device="cpu", timeout=600, timeout_first=600)
    phases = Phases()
    phases.reading = lambda: "image 5 in shard.tar at offset 512"
    rank_info = start(config)
    try:
        with Watchdog(stall, config, folder / "run", rank_info, phases):
            for step in count():
                phases.begin(step)
                with phases.part("data", 1):
                    read(folder / f"read-{rank}")
                with phases.part("compute", 1):
                    hang(folder, rank)
                with phases.part("sync"):
                    ends = torch.tensor(float((folder / "end").exists()))
                    dist.all_reduce(ends)
                if ends:
                    break
                (folder / f"step-{rank}").write_text(str(step))
                time.sleep(0.02)
    except Exception as error:
        sys.stderr.write(explain(error, rank, world_size))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def store(port_file: Path) -> None:
    serving = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port_file.with_suffix(".partial").write_text(str(serving.port))
    port_file.with_suffix(".partial").rename(port_file)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        store(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
