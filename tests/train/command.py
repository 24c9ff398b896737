"""The training command in real processes on a small dataset, and the files in its output folder.

`torchrun` starts it as a user does: its ranks are new interpreters. `start` starts the ranks with the variables
that torchrun sets; they are forked (tests/processes.py), which saves 3 s of processor time for each.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import sa1b
from sa1b.stream.order import Order
from tests import kit, processes
from tests.processes import REPOSITORY, Process, rank_environments
from tests.shards import tiny

FIRST_ID = 11_188  # of the second tar of `sa1b synthesize`
IMAGES = 16  # an epoch ends within the steps
STEPS = 4
BATCH = 5  # not a multiple of 2 or 3 ranks
# In micro-batches of 2: two ranks have 2 + 0 and 2 + 1 images, one of them an empty micro-batch.
FLAGS = (
    *("--preset", "tiny", "--model.image-size", "64", "--model.width", "32", "--model.depth", "2"),
    *("--model.heads", "2", "--model.global-blocks", "1", "--model.window", "2", "--model.channels", "32"),
    *("--model.pixel-features", "8"),
    *("--model.drop-path", "0.3", "--data.global-batch", str(BATCH), "--data.micro-batch", "2"),
    *("--data.masks", "4", "--data.flip", "0.5", "--data.threads", "1", "--optim.steps", str(STEPS)),
    *("--optim.warmup", "2", "--checkpoint.every", "2", "--logging.tensorboard", "False"),
)
SECOND_FLAGS = (
    *("--preset", "small", "--data.threads", "1", "--optim.steps", str(STEPS), "--checkpoint.every", "2"),
    *("--logging.tensorboard", "False"),
)
GROUNDING_FLAGS = (
    *("--preset", "grounding_tiny", "--model.image-size", "64", "--model.width", "32", "--model.heads", "2"),
    *("--model.window", "2", "--model.channels", "32", "--model.drop-path", "0.3", "--text.width", "32"),
    *("--text.depth", "1", "--text.heads", "2", "--data.global-batch", str(BATCH), "--data.masks", "4"),
    *("--data.threads", "1", "--optim.steps", str(STEPS), "--optim.warmup", "2", "--checkpoint.every", "2"),
    *("--logging.tensorboard", "False"),
)
DISTILL_FLAGS = (  # also needs --distill.teacher
    *("--preset", "distill_tiny", "--model.image-size", "64", "--model.width", "16", "--model.heads", "1"),
    *("--model.window", "2", "--model.channels", "32", "--model.pixel-features", "8"),
    *("--model.drop-path", "0.3", "--data.global-batch", str(BATCH), "--data.micro-batch", "2"),
    *("--data.threads", "1", "--optim.steps", str(STEPS), "--optim.warmup", "2", "--checkpoint.every", "2"),
    *("--logging.tensorboard", "False"),
)
FLAGS_OF_MODELS = {
    "sam": FLAGS,
    "reconstruction": SECOND_FLAGS,
    "grounding": GROUNDING_FLAGS,
    "distill": DISTILL_FLAGS,
    "backbone": (*DISTILL_FLAGS, "--model.backbone", "repvit_m1_0", "--model.depth", "0"),
}
PATIENCE = 600  # seconds until a command counts as hanging
AFTER_FAILURE = 120  # seconds until it does after one of its ranks has failed


def make_root(folder: Path, images: int = 23) -> Path:
    """A root of a few small synthetic images, ids from FIRST_ID on, and FOLDER/phrases.parquet."""
    flags = ("--tars", 1, "--first-tar", 1, "--images-per-tar", images, "--long-side", 160, "--workers", 1)
    kit.run("synthesize", folder, *flags, "--phrases")
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=7)
    return folder / "root"


def add_views(root: Path) -> Path:
    """Make the views "train" and "held-out", which share no image; returns the root."""
    for split in ("train", "held-out"):
        tool = [sys.executable, "-m", "sa1b", "view", str(root), "--held-out", "40%", "--split", split]
        processes.run([*tool, "--name", split], cwd=REPOSITORY, check=True, capture_output=True)
    return root


@dataclass(frozen=True)
class Ended:
    """How the ranks of a command ended.

    Attributes:
        codes: exit code of each rank; minus the signal that killed it.
        outputs: stdout and stderr of each rank.
    """

    codes: list[int]
    outputs: list[str]


def start(
    root: Path,
    out: Path | str,
    *flags: str,
    ranks: int = 1,
    mode: str = "none",
    mishap: dict[str, Any] | None = None,
    of_rank: Sequence[Sequence[str]] = (),
    model: str = "sam",
    folders: Sequence[Path] = (),
    stuck: int | None = None,
    until: Callable[[], bool] | None = None,
    program: str | None = None,
) -> Ended:
    """Run the command on so many ranks and wait.

    of_rank: further flags of single ranks; folders: in which they run; stuck: a rank that does not end by
    itself and is killed when `until` holds, by default when another rank has ended.
    """
    own = [*FLAGS_OF_MODELS[model]]
    if model == "grounding":
        own += ["--data.text", str(root.parent / "phrases.parquet")]
    common = ["--data.root", str(root), "--out", str(out), *own, "--parallel.mode", mode, *flags]
    program = program or getattr(mishap, "program", "tests.train.rank")
    with tempfile.TemporaryDirectory() as folder, rank_environments(ranks) as environments:
        processes = []
        for rank, environment in enumerate(environments):
            arguments = [*common, *(of_rank[rank] if of_rank else ())]
            with Path(folder, str(rank)).open("w") as log:
                processes.append(
                    Process(
                        [sys.executable, "-m", program, model, json.dumps(mishap), *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=folders[rank] if folders else REPOSITORY,
                        env=environment,
                    )
                )
        end = time.monotonic() + PATIENCE
        if stuck is not None:
            others = [process for rank, process in enumerate(processes) if rank != stuck]
            until = until or (lambda: any(process.poll() is not None for process in others))
            while not until() and processes[stuck].poll() is None and time.monotonic() < end:
                if others and all(process.poll() is not None for process in others):
                    break
                time.sleep(0.05)
            processes[stuck].kill()
        failed = False
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if not failed and any(process.returncode for process in processes):
                failed, end = True, min(end, time.monotonic() + AFTER_FAILURE)
            time.sleep(0.02)
        hanging = [process for process in processes if process.poll() is None]
        for process in hanging:
            process.kill()
            process.wait()
        outputs = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
    assert not hanging, f"{len(hanging)} of {ranks} ranks hang: {outputs}"
    return Ended([process.wait() for process in processes], outputs)


def in_turn(
    root: Path, out: Path, runs: Sequence[Sequence[str]], *flags: str, ranks: int = 1, mode: str = "none"
) -> list[Ended]:
    """How each of these runs of SAM ended, which the same ranks start in turn.

    Before the last one, none may fail after the group of the ranks was made.
    """
    common = ["--data.root", str(root), "--out", str(out), *FLAGS, "--parallel.mode", mode, *flags]
    command = [
        sys.executable,
        "-m",
        "tests.train.rank",
        "several",
        json.dumps([[*common, *one] for one in runs]),
    ]
    with rank_environments(ranks) as environments:
        started = [
            Process(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=one
            )
            for one in environments
        ]
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    parts = [re.split(r"^exit code (\d+)\n", output, flags=re.MULTILINE) for output in outputs]
    assert [len(part) for part in parts] == [2 * len(runs) + 1] * ranks, outputs
    return [
        Ended([int(part[number + 1]) for part in parts], [part[number] for part in parts])
        for number in range(0, 2 * len(runs), 2)
    ]


def train_to_end(root: Path, out: Path, *flags: str, ranks: int = 1, mode: str = "none", **more: Any) -> Path:
    """Like `start`; all ranks must end well. Returns `out`."""
    ended = start(root, out, *flags, ranks=ranks, mode=mode, **more)
    assert ended.codes == [0] * ranks, "\n".join(ended.outputs)
    return out


def torchrun(
    root: Path,
    out: Path,
    *flags: str,
    ranks: int,
    mode: str,
    restarts: int = 0,
    mishap: dict[str, Any] | None = None,
    agent: str | None = None,
) -> Process:
    """Start the command under torchrun, or its agent (agent.py); its output goes to a file beside `out`."""
    script = ["sa1b/train.py"]
    if mishap is not None:
        script = ["-m", getattr(mishap, "program", "tests.train.rank"), "sam", json.dumps(mishap)]
    program = ["torch.distributed.run", "--standalone"]
    if agent:
        program = [agent, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        script = [json.dumps(mishap)]
    command = [
        *(sys.executable, "-m", *program, f"--nproc-per-node={ranks}"),
        *(f"--max-restarts={restarts}", *script),
        *("--data.root", str(root), "--out", str(out), *(SECOND_FLAGS if agent else FLAGS)),
        *("--parallel.mode", mode, *flags),
    ]
    with _log(out).open("w") as log:
        return Process(command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, start_new_session=True)


def output_of(process: Process, out: Path) -> str:
    """Wait for the end of the command; returns its output."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        process.wait(60)
        raise AssertionError(f"it hangs: {_log(out).read_text()}") from None
    return _log(out).read_text()


def _log(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def lines(out: Path) -> list[dict[str, Any]]:
    """Steps and evaluations in metrics.jsonl, without the lines of the run's starts."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "run" in found[0]
    return [line for line in found if "run" not in line]


def starts(out: Path) -> list[dict[str, Any]]:
    """The line of each start of the run."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["run"] for line in found if "run" in line]


def figures(out: Path, *names: str) -> list[list[Any]]:
    """Of each step line, in order: its step and these figures."""
    return [[line["step"], *(line[name] for name in names)] for line in lines(out) if "loss" in line]


def losses(out: Path) -> list[float]:
    """Of all steps, each of which has exactly one line."""
    found = figures(out, "loss")
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return [loss for _, loss in found]


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All of a checkpoint: weights and optimizer state."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/all.pt")
        found: dict[str, Tensor] = torch.load(f"{folder}/all.pt", weights_only=True)
    return found


def checkpoint_steps(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in out.glob("checkpoints/step-*") if path.name[5:].isdecimal())


def newest(out: Path) -> Path:
    """Its newest checkpoint, whose files have the digests of the manifest."""
    folder = out / "checkpoints" / f"step-{checkpoint_steps(out)[-1]:08d}"
    assert not unproved(folder)
    return folder


def unproved(checkpoint: Path) -> list[str]:
    """The files of a checkpoint that its manifest does not prove, those that it lacks, and those that it adds."""
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.iterdir()
        if path.name != "manifest.sha256"
    }
    with contextlib.suppress(OSError, ValueError):
        lines = (checkpoint / "manifest.sha256").read_text().splitlines()
        expected = {name: digest for digest, name in (line.split("  ") for line in lines)}
        return sorted({name for name, _ in digests.items() ^ expected.items()})
    return ["manifest.sha256"]


def assert_same_state(one: Path, other: Path) -> None:
    """Two runs ended with bit-identical weights and optimizer."""
    first, second = tensors(newest(one)), tensors(newest(other))
    assert any(name.endswith("exp_avg_sq") for name in first)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


@cache
def ids_of_steps(root: Path, steps: int, seed: int = 0) -> list[list[int]]:
    """The image ids of each step, by the formula of the order."""
    dataset = sa1b.open(root)
    order = Order(len(dataset), dataset.table.ids_digest, seed)
    found = []
    for step in range(steps):
        positions = torch.arange(step * BATCH, (step + 1) * BATCH).numpy()
        found.append([int(dataset.table.image_id[row]) for row in order.rows(positions)])
    return found


def recorded(into: Path, ranks: int) -> dict[int, list[list[int]]]:
    """By step, what each rank noted: `mishap` with "into"."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        for line in (into / f"{rank}.jsonl").read_text().splitlines():
            noted = json.loads(line)
            found.setdefault(noted["step"], []).append(noted["ids"])
    return found


def processes_of(out: Path) -> list[str]:
    """Command lines of processes that still work on a run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(out) in words:
                found.append(words)
    return found
