"""After a short training, the model finds the regions of phrases in images that it has never seen."""

import json
import sys
from pathlib import Path

import pytest

from sa1b.programs.synthetic.source_tars import PHRASES, write_tars
from sa1b.views import verb_view as view
from tests import processes
from tests.gallery.test_gallery import made
from tests.shards.tiny import ingest_tar

STEPS = 160


@pytest.mark.slow
def test_the_first_region_for_a_phrase_is_right_five_times_as_often_as_by_chance(tmp_path: Path) -> None:
    """160 steps of 8 images take a minute and a half with two threads."""
    source, root, out = tmp_path / "source", tmp_path / "shards", tmp_path / "run"
    write_tars(source, tars=2, images_per_tar=200, long_side=256, simple=True, phrases=True, workers=2)
    for tar in sorted(source.glob("*.tar")):
        ingest_tar(tar, root)
    for split in ("train", "held-out"):
        view.main(str(root), held_out="20%", split=split, name=split)
    flags = {
        "--preset": "grounding_tiny", "--data.root": root, "--data.view": "train", "--out": out,
        "--data.text": source / PHRASES, "--data.text-column": "texts", "--optim.steps": STEPS,
        "--evaluation.view": "held-out", "--evaluation.every": STEPS, "--logging.tensorboard": False,
    }  # fmt: skip
    words = [str(word) for flag in flags.items() for word in flag]
    processes.run([sys.executable, "-m", "sa1b.train", *words], cwd=tmp_path, check=True, capture_output=True)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    before, after = (line["evaluation"] for line in lines if "evaluation" in line)
    assert before["recall_at_1"] < 2 * before["chance_at_1"]
    assert after["phrases"] > 500
    assert after["recall_at_1"] > 5 * after["chance_at_1"]
    assert after["recall_at_5"] > after["recall_at_1"]
    assert after["miou_region"] >= after["recall_at_1"]
    page, _ = made(root, tmp_path, "--predictions", out / "predictions.jsonl")
    scores = [iou for data in page.pictures.values() for iou in data["iou"]]
    assert scores.count(1) > 5 * len(scores) * after["chance_at_1"]
