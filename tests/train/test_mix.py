"""Training on a mixture: figures by source, exact resume with other ranks, weights that change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import BATCH, STEPS, lines, losses, make_root, start, train_to_end

Shared = Callable[[str, Callable[[Path], object]], Path]
SCHEDULE = "schedule: [{from_step: 3, weights: {sa1b: 1, mine: 1}}]\n"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("mine"), 3)


def mix(folder: Path, parted: Path, mine: Path, schedule: str = SCHEDULE) -> tuple[str, ...]:
    """Flags of a mixture: 3 of 4 images are of the first source, one of `mine`."""
    path = folder / "mix.yaml"
    path.write_text(
        f"sources:\n  sa1b: {{root: {parted}, weight: 3, view: train}}\n"
        f"  mine: {{root: {mine}, weight: 1, masks: 2, evaluation_view: null}}\n{schedule}"
    )
    return "--data.root", "", "--data.mix", str(path)


def test_a_mixture_resumes_exactly_with_other_ranks_and_reports_by_source(
    parted: Path, mine: Path, tmp_path: Path
) -> None:
    flags = mix(tmp_path, parted, mine)
    evaluation = ("--evaluation.view", "held-out")
    whole, out = tmp_path / "whole", tmp_path / "run"
    ended = start(parted, whole, *flags, *evaluation)
    assert ended.codes == [0], ended.outputs
    seen = {"sa1b": 14, "mine": 6}  # 3 in 4 and 1 in 4 of 15 images, 1 in 2 of the 5 after them
    assert f"seen: sa1b {seen['sa1b']} images" in ended.outputs[0]
    assert "mine 6 images (2 epochs)" in ended.outputs[0]

    train_to_end(parted, out, *flags, mishap={"what": "stop", "rank": 0, "step": 1})
    train_to_end(parted, out, *flags, *evaluation, ranks=2, mode="ddp")
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5, abs=0)

    steps = [line for line in lines(out) if "loss" in line]
    for line in steps:
        counts = {name: line[f"count/{name}"] for name in seen}
        assert sum(counts.values()) == line["masks"]
        assert sum(line[f"loss/{name}"] * counts[name] for name in seen) / line["masks"] == pytest.approx(
            line["loss"], rel=1e-5
        )
        assert sum(line[f"iou_last/{name}"] * counts[name] for name in seen) / line["masks"] == pytest.approx(
            line["iou_last"], rel=1e-5
        )
        assert counts["mine"] <= 2 * 3  # masks: 2 of at most 3 images
    assert steps[-1]["epochs/mine"] == 2
    assert len(steps) * BATCH == STEPS * BATCH == sum(seen.values())

    (scores,) = [line["evaluation"] for line in lines(out) if "evaluation" in line]
    (expected,) = [line["evaluation"] for line in lines(whole) if "evaluation" in line]
    assert scores["masks/sa1b"] == scores["masks"] == expected["masks"] > 0
    assert scores["miou_box/sa1b"] == scores["miou_box"] == pytest.approx(expected["miou_box"], abs=1e-3)
    assert not any(name.endswith("/mine") for name in scores)


def test_other_weights_are_refused_with_the_way_out_and_a_source_by_its_name(
    parted: Path, mine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = mix(tmp_path, parted, mine, "")
    train_to_end(parted, out, *flags, mishap={"what": "stop", "rank": 0, "step": 1})
    position = 2 * BATCH
    path = tmp_path / "mix.yaml"
    text = path.read_text()
    path.write_text(text.replace("weight: 3", "weight: 1"))
    refused = start(parted, out, *flags)
    assert refused.codes == [2]
    assert f"from_position: {position} in a file of --data.mix" in refused.outputs[0]
    path.write_text(f"{text}schedule: [{{from_position: {position}, weights: {{sa1b: 1, mine: 1}}}}]\n")
    train_to_end(parted, out, *flags)
    path.write_text(text.replace(f"root: {mine}", f"root: {tmp_path / 'none'}"))
    refused = start(parted, tmp_path / "other", *flags)
    assert refused.codes == [2]
    assert f"error: --data.mix {path}: source mine: --data.root: " in refused.outputs[0]
    assert not (tmp_path / "other").exists()
