"""Runs whose checkpoints are disturbed: killed at an operation on a file, cut off from power, on a full disk.

`python -m tests.train.disturbed WHAT WORK --seed N --count N [--bucket]`, with faults.so preloaded, prints as JSON what
went wrong. Each run is a child of this process, which has imported the package, and trains the model of
reconstruction.py by the command line. `--bucket`: --out is the URL of a folder that has the interface of a bucket, for
which FSSPEC_LOCAL_AUTO_MKDIR=1 must be set.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sa1b.train import main as train
from tests.engine import reconstruction
from tests.faults import Faults, replay
from tests.train.command import checkpoint_steps, unproved
from tests.train.inside import make_root

FLAGS = (
    *("--preset", "small", "--data.global-batch", "2", "--data.threads", "1", "--optim.steps", "5"),
    *("--checkpoint.every", "1", "--checkpoint.keep-last", "2", "--checkpoint.tolerate", "9"),
    *("--logging.tensorboard", "False"),
)
LONGEST = 120  # seconds; a run takes one


class Campaign:
    """A dataset directory, and runs on it that are compared with an undisturbed one."""

    def __init__(self, work: Path, bucket: bool) -> None:
        self.work, self.bucket, self.faults = work, bucket, Faults()
        self.folder = work / ("bucket" if bucket else "runs")  # of the runs
        self.folder.mkdir(parents=True)
        self.root = make_root(work)
        self.wrong: list[Any] = []
        code, text, self.operations = self.run("whole", self.faults.arm)
        assert code == 0, text

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"

    def run(self, name: str, arm: Callable[[Path], object] = lambda _: None) -> tuple[int, str, int]:
        """Exit code, or minus the signal that killed it; output; number of operations. `arm` gets the folder whose files
        are disturbed: that of the checkpoints, or in a bucket that of the run.
        """
        disturbed = self.folder / name if self.bucket else self.checkpoints(name)
        disturbed.mkdir(parents=True, exist_ok=True)
        out = [f"local://{self.folder / name}", "--scratch", str(self.work / "scratch")]
        out = out if self.bucket else [str(self.folder / name)]
        log, count = self.work / "log", self.work / "count"
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST)
            for descriptor in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
            code = 1
            with contextlib.suppress(BaseException):
                arm(disturbed)
                words = [*FLAGS, "--data.root", str(self.root), "--out", *out]
                code = train(reconstruction.PRESETS, arguments=words)
                count.write_text(str(self.faults.calls()))
                sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, log.read_text(), int(count.read_text()) if code == 0 else 0

    def anew(self, name: str = "run") -> None:
        for folder in (self.folder / name, self.work / "scratch"):
            shutil.rmtree(folder, ignore_errors=True)

    def tensors(self, name: str) -> dict[str, bytes]:
        """The files with the tensors of its newest checkpoint."""
        newest = max(self.checkpoints(name).glob("step-????????"))
        return {path.name: path.read_bytes() for path in newest.glob("*.distcp")}

    def committed(self, where: str, name: str = "run") -> list[int]:
        """The checkpoints with a final name, each of which must be whole."""
        found = checkpoint_steps(self.folder / name)
        for step in found:
            if names := unproved(self.checkpoints(name) / f"step-{step:08}"):
                self.wrong.append([where, f"step {step} is torn", names])
        return found

    def goes_on(self, where: str, name: str = "run") -> None:
        """The same command, undisturbed, must end as if nothing had happened."""
        if self.bucket:  # which has an object whole or not at all, unlike this folder
            for manifest in self.checkpoints(name).glob("*/manifest.sha256"):
                if not manifest.read_bytes().endswith(b"  state.json\n"):
                    manifest.unlink()
        else:
            self.committed(where, name)
        code, text, _ = self.run(name)
        left, expected = ({path.name for path in self.checkpoints(one).iterdir()} for one in (name, "whole"))
        if code or "damaged" in text or left != expected or self.tensors(name) != self.tensors("whole"):
            self.wrong.append([where, code, sorted(left), text[-2000:]])


def kill(campaign: Campaign, count: int, seed: int) -> int:
    """The number of runs that were killed, each at an operation."""
    operations = range(1, campaign.operations + 1)
    killed = 0
    for at in random.Random(seed).sample(operations, min(count, len(operations))) if count else operations:
        campaign.anew()
        code, text, _ = campaign.run("run", partial(campaign.faults.arm, kill_at=at))
        killed += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            campaign.wrong.append([at, code, text[-2000:]])
        campaign.goes_on(f"killed at operation {at} of {campaign.operations}")
    return killed


def full(campaign: Campaign, count: int, seed: int) -> int:
    """The number of runs that ended with an error; each had a disk of another size."""
    size = 6 * sum(path.stat().st_size for path in max(campaign.checkpoints("whole").iterdir()).iterdir())
    failed = 0
    for space in sorted(random.Random(seed).sample(range(size), count)):
        campaign.anew()
        code, text, _ = campaign.run("run", partial(campaign.faults.arm, disk_bytes=space))
        failed += code == 1
        if code not in (0, 1) or "Traceback" in text or (code and "No space left on device" not in text):
            campaign.wrong.append([space, code, text[-2000:]])
        campaign.goes_on(f"{space} bytes of disk")
    return failed


def power(campaign: Campaign, count: int, seed: int, *, flushed: bool) -> int:
    """The number of states after a loss of power in which there was a checkpoint."""
    recorded, log = campaign.checkpoints("recorded"), campaign.work / "operations"
    recorded.mkdir(parents=True)
    before = replay.scan(recorded)

    def record(folder: Path) -> None:
        if not flushed:
            os.fsync = lambda _: None
        campaign.faults.record(folder, log)

    code, text, _ = campaign.run("recorded", record)
    assert code == 0, text
    operations = replay.read_log(log, recorded)
    points = random.Random(seed).sample(range(1, len(operations) + 1), min(count, len(operations)))
    opened = 0
    for at in sorted(points):
        campaign.anew()
        shutil.copytree(
            campaign.folder / "recorded", campaign.folder / "run", ignore=lambda *_: ["checkpoints"]
        )
        state = replay.State(before, operations[:at]).crash(random.Random(f"{seed} {at}"))
        replay.write(state, campaign.checkpoints("run"))
        where = f"no power after operation {at}, {operations[at - 1]}"
        found = campaign.committed(where)
        opened += bool(found)
        if (durable := _durable(operations[:at], recorded)) > max(found, default=0):
            campaign.wrong.append([where, f"step {durable} is lost", found])
        campaign.goes_on(where)
    return opened


def _durable(operations: list[replay.Operation], folder: Path) -> int:
    """The step of the newest checkpoint whose name is on the disk."""
    named = durable = 0
    for one in operations:
        if one.kind == replay.RENAME and re.fullmatch(r"step-\d{8}", str(one.second)):
            named = int(one.second.name[5:])
        elif one.kind == replay.SYNC and one.inode == folder.stat().st_ino:
            durable = named
    return durable


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["kill", "full", "power"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--count", type=int, default=0, help="points to try; kill: 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--forget-flushes", action="store_true", help="power: as if nothing were flushed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    campaign = Campaign(given.work.resolve(), given.bucket)
    if given.what == "power":
        hits = power(campaign, given.count, given.seed, flushed=not given.forget_flushes)
    else:
        hits = {"kill": kill, "full": full}[given.what](campaign, given.count, given.seed)
    json.dump({"hits": hits, "operations": campaign.operations, "wrong": campaign.wrong}, sys.stdout)


if __name__ == "__main__":
    main()
