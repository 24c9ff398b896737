"""The smallest preset can learn: it overfits eight images."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Masks of a few pixels have none at the size of the decoder's masks.
LARGE = "area_fraction >= 0.005 and area_fraction <= 0.5"


def command(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sa1b", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_eight_images_are_overfitted_to_an_iou_above_0_9_at_five_clicks(tmp_path: Path) -> None:
    source, shards, run = tmp_path / "source", tmp_path / "shards", tmp_path / "run"
    command("synthesize", source, "--tars", 1, "--images-per-tar", 8, "--long-side", 640, "--workers", 1)
    command("reshard", source, "--out", shards, "--workers", 1)
    command("view", shards, "--masks-where", LARGE, "--name", "eight")
    trained = ("--preset", "tiny", "--data.root", shards, "--out", run, "--data.view", "eight")
    schedule = ("--optim.steps", 300, "--optim.weight-decay", 0, "--data.flip", 0, "--recipe.clicks", 2)
    command("train", *trained, *schedule, "--checkpoint.every", 300)
    evaluated = ("--preset", "tiny", "--data.root", shards, "--out", run, "--evaluation.view", "eight")
    scores = json.loads(command("train", *evaluated, "--evaluate-only", "--json"))
    assert scores["masks"] > 50
    assert scores["miou_5_clicks"] > 0.9
