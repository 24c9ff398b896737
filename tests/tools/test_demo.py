"""`make demo` as a whole: minutes of training, so it is slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_trains_a_model_that_beats_the_untrained_one_and_shows_its_masks(tmp_path: Path) -> None:
    command = [sys.executable, "tools/demo.py", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in (tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()]
    scores = [line["evaluation"] for line in lines if "evaluation" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert scores[-1]["miou_1_click"] >= scores[0]["miou_1_click"] + 0.15
    assert losses[-1] < losses[0]
    assert f"{scores[-1]['miou_1_click']:.3f}" in done.stdout
    assert 'class="stage twin"' in (tmp_path / "demo/gallery.html").read_text()
    assert (tmp_path / "demo/.gitignore").read_text() == "*\n"
    # Once more: finished steps are recognised, the model is not trained again.
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"{scores[-1]['miou_1_click']:.3f}" in again.stdout
    later = [json.loads(line) for line in (tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()]
    assert [line for line in later if "run" not in line] == [line for line in lines if "run" not in line]
