"""A student that has learned the embeddings of its teacher predicts masks almost as well, in unseen images."""

import json
import sys
from pathlib import Path

import pytest

from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.views import verb_view as view
from tests import processes
from tests.shards.tiny import ingest_tar

STEPS = 300
# Without pixel features, which would find most masks without the image encoder.
SIZES = ("--model.pixel-features", "0", "--model.channels", "64", "--logging.tensorboard", "False")


@pytest.mark.slow
def test_a_student_reaches_three_quarters_of_its_teacher(tmp_path: Path) -> None:
    """Five minutes with two threads."""
    source, root = tmp_path / "source", tmp_path / "shards"
    write_tars(source, tars=2, images_per_tar=150, long_side=480, simple=True, workers=2)
    for tar in sorted(source.glob("*.tar")):
        ingest_tar(tar, root)
    for split in ("train", "held-out"):
        view.main(str(root), held_out="10%", split=split, name=split)

    def scores(preset: str, out: str, *flags: str) -> list[float]:
        """The mean IoU of the first step and of the last one, after five clicks."""
        command = [sys.executable, "-m", "sa1b.train", "--preset", preset, "--out", out, *SIZES, *flags]
        command += ["--data.root", "shards", "--data.view", "train", "--evaluation.view", "held-out"]
        command += ["--optim.steps", str(STEPS), "--evaluation.every", str(STEPS)]
        processes.run(command, cwd=tmp_path, check=True, capture_output=True)
        lines = map(json.loads, (tmp_path / out / "metrics.jsonl").read_text().splitlines())
        return [line["evaluation"]["miou_5_clicks"] for line in lines if "evaluation" in line]

    _, teacher = scores("tiny", "teacher")
    before, student = scores("distill_tiny", "student", "--distill.teacher", "teacher")
    assert student > 0.75 * teacher
    assert student > 1.5 * before
