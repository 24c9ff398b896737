"""Losses with compressed gradients beside uncompressed ones: `pytest benchmarks/test_convergence.py -s`.

Trains the preset tiny on two ranks of one thread, 200 steps on 200 synthetic images for each form of
compression, with the same images and initial weights: a quarter of an hour on two cores. `--record` adds the
curves to the figures; `python -m benchmarks.curves` draws them.
"""

import json
import subprocess
import sys
from pathlib import Path

from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.sources.discovery import discover

IMAGES, STEPS, WINDOW = 200, 200, 20
CASES = {
    "ddp, float32": ("--parallel.mode", "ddp"),
    "ddp, compress bf16": ("--parallel.mode", "ddp", "--parallel.compress", "bf16"),
    "ddp, compress fp16": ("--parallel.mode", "ddp", "--parallel.compress", "fp16"),
    "ddp, compress powersgd:4": (
        *("--parallel.mode", "ddp", "--parallel.compress", "powersgd:4"),
        *("--parallel.compress-after", "20"),
    ),
    "ddp, compress powersgd:1": (
        *("--parallel.mode", "ddp", "--parallel.compress", "powersgd:1"),
        *("--parallel.compress-after", "20"),
    ),
    "fsdp, reduce bf16": ("--parallel.mode", "fsdp", "--parallel.reduce", "bf16"),
}


def test_convergence(tmp_path: Path, figures: dict[str, dict[str, object]]) -> None:
    synthetic.write_tar(tmp_path / "sa_000000.tar", images=IMAGES, first_id=1, long_side=320)
    (source,) = discover([tmp_path / "sa_000000.tar"]).sources
    root = tmp_path / "root"
    root.mkdir()
    ingest(source, root, Options(), Policy())
    write_dataset(root, read_tasks(root))
    found = {}
    for number, (name, flags) in enumerate(CASES.items()):
        out = tmp_path / f"run-{number}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "sa1b.train", "--preset", "tiny", "--data.root", str(root), "--out", str(out)),
            *("--optim.steps", str(STEPS), "--logging.tensorboard", "False", *flags),
        ]
        subprocess.run(command, check=True, capture_output=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        assert len(losses) == STEPS
        found[name] = [sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, STEPS, WINDOW)]
        print(f"{name:<26}" + " ".join(f"{loss:.3f}" for loss in found[name]), flush=True)
    figures["convergence"] = {"steps": WINDOW, "losses": found}
