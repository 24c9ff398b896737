"""The demo of `make demo`: makes synthetic tars, verified shards, a trained model and a gallery.

Every step is a command that also works on real tars. The demo prints each command before it runs it. The demo
may be run again; finished steps are recognised.

The images are simple scenes of a few large objects. On the 33 held-out images (410 masks) the model reaches a
mean IoU of 0.62 at one click and 0.86 at five. On scenes with SA-1B's statistics (25 held-out images, 277
masks of at least 0.5 % of the image) the same model and losses reach 0.50 and 0.74 after 289 steps of 4.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tyro.conf import Positional

from sa1b.console import run

PYTHON = os.path.relpath(sys.executable)


def main(folder: Positional[Path] = Path("demo"), workers: int = 2) -> int:
    """Make synthetic source tars, reshard and verify them, train a small model, draw a gallery.

    Args:
        folder: Folder for all files; created if it is missing.
        workers: Worker processes.
    """
    source, shards, run, gallery = (folder / name for name in ("source", "shards", "run", "gallery.html"))
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")  # git ignores the folder in any repository
    phrases = source / "phrases.parquet"
    if not all(path.exists() for path in (source / "sa_000000.tar", source / "sa_000001.tar", phrases)):
        _step("make two synthetic source tars with simple scenes", "synthesize", source,
              "--tars", 2, "--images-per-tar", 150, "--long-side", 480, "--simple", "--phrases",
              "--workers", workers, "--overwrite")  # fmt: skip
    _step("convert the source tars to indexed shards", "reshard", source, "--out", shards,
          "--images-per-shard", 64, "--workers", workers, "--ignore", phrases.name)  # fmt: skip
    _step("check every byte, image and mask of the shards", "verify", shards, "--deep",
          "--workers", workers)  # fmt: skip
    # A model with an input of 256 x 256 pixels cannot learn masks of a few pixels in two minutes.
    large = ["--masks-where", "area_fraction >= 0.005 and area_fraction <= 0.5", "--held-out", "12%"]
    _step("select most images for training", "view", shards, *large, "--name", "train")
    _step("select the other images for evaluation", "view", shards, *large, "--split", "held-out",
          "--name", "held-out")  # fmt: skip
    _train(
        "train a small model with two processes; an interrupted training resumes",
        *("--preset", "tiny", "--parallel.mode", "ddp", "--out", run, "--data.root", shards),
        *("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.every", 100),
    )
    _step("make a page of images with true and predicted masks", "gallery", shards, "--view", "held-out",
          "--predictions", run / "predictions.jsonl", "--sort", "image_id", "--out", gallery,
          "--overwrite")  # fmt: skip
    before, after = _scores(run)
    print(f"""
Done in {time.monotonic() - began:.0f} s.
  source tars    {source}
  shards, index  {shards}
  trained model  {run}
  gallery        {gallery.resolve().as_uri()}

                             untrained   trained
  loss                       {before["loss"]:9.3f} {after["loss"]:9.3f}
  mIoU at 1 click, held out  {before["miou_1_click"]:9.3f} {after["miou_1_click"]:9.3f}
  mIoU at 5 clicks           {before["miou_5_clicks"]:9.3f} {after["miou_5_clicks"]:9.3f}

Next:
  open {gallery} in a browser
  {PYTHON} -c "import sa1b; print(sa1b.open('{shards}')[0].runs)"
  {PYTHON} -m sa1b reshard sa_000020.tar --out shards    # with a tar of your own
  {PYTHON} -m sa1b train --preset grounding_tiny --data.root {shards} --data.view train \\
      --data.text {phrases} --out {folder / "words"}    # finds what phrases describe""")
    return 0


def _step(what: str, verb: str, *arguments: object) -> None:
    _do(what, ["-m", "sa1b", verb, *map(str, arguments)])


def _train(what: str, *arguments: object) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    _do(what, [*torchrun, "-m", "sa1b.train", *map(str, arguments)])


def _scores(run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """First and last loss and evaluation of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    scores = [line["evaluation"] for line in lines if "evaluation" in line]
    return {"loss": losses[0], **scores[0]}, {"loss": losses[-1], **scores[-1]}


def _do(what: str, words: list[str]) -> None:
    shown = shlex.join([PYTHON, *words])
    print(f"\n== {what}\n$ {shown}", flush=True)
    # One thread per process, because the threads of two trainers would compete for two cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run([sys.executable, *words], check=False, env=environment).returncode
    if code:
        print(f"\nstopped: this command failed with exit code {code}:\n  {shown}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    run(main, __doc__)
