"""The best checkpoint by a score, and a run that stops because its score no longer improves."""

from pathlib import Path

import pytest

from tests.train.command import checkpoint_steps, lines, losses, start

BEST = ("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.best", "miou_1_click")
STILL = (
    "--optim.lr",
    "1e-12",
    "--evaluation.every",
    "1",
    "--evaluation.patience",
    "2",
    "--checkpoint.every",
    "3",
)


@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)])
def test_a_run_whose_score_stays_the_same_stops_and_is_finished(
    parted: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    ended = start(parted, out, *BEST, *STILL, mode=mode, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.outputs
    assert [line["step"] for line in lines(out) if "evaluation" in line] == [0, 1, 2]
    assert checkpoint_steps(out) == [2]
    assert "\nstopped: 2 evaluations without a better score (--evaluation.patience)\n" in ended.outputs[0]
    assert "\nbest: the weights before the first step with miou_1_click 0." in ended.outputs[0]
    again = start(parted, out, *BEST, *STILL, mode=mode, ranks=ranks)
    assert again.codes == [0] * ranks, again.outputs
    assert len(losses(out)) == 2


def test_the_checkpoint_of_the_best_score_is_written_and_named(parted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = start(
        parted, out, *BEST, "--evaluation.every", "1", "--checkpoint.every", "50", "--optim.lr", "0.05"
    )
    assert ended.codes == [0], ended.outputs
    scores = {line["step"]: line["evaluation"]["miou_1_click"] for line in lines(out) if "evaluation" in line}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert checkpoint_steps(out) == sorted({4} | ({best} if best else set()) | set(improved(scores)))
    named = f"checkpoints/step-{best:08d}" if best else "the weights before the first step"
    assert f"{named} with miou_1_click {scores[best]:.4g}\n" in ended.outputs[0]


def improved(scores: dict[int, float]) -> list[int]:
    """Steps of the newest two of the checkpoints that were written for a better score, or at the end."""
    better = [
        step for step in scores if step and all(scores[one] < scores[step] for one in scores if one < step)
    ]
    return sorted({*better, 4})[-2:]


def test_a_score_that_the_model_does_not_have_is_refused_before_the_first_step(
    parted: Path, tmp_path: Path
) -> None:
    ended = start(parted, tmp_path / "run", *BEST[:-1], "miou")
    assert ended.codes == [2]
    assert "error: --evaluation.best miou: not a score; choose from masks, miou_1_click," in ended.outputs[0]
    assert losses(tmp_path / "run") == []
    assert checkpoint_steps(tmp_path / "run") == []
