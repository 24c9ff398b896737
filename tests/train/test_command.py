"""What the command says, writes and refuses."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sa1b.engine.config import parse
from sa1b.engine.presets import PRESETS
from tests.train.command import FLAGS, STEPS, lines, losses, newest, start, starts, train_to_end

Whole = Callable[[str, int], Path]


def test_the_settings_beside_the_metrics_are_those_of_the_checkpoint_and_of_the_flags(
    root: Path, whole: Whole
) -> None:
    out = whole("ddp", 2)
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((newest(out) / "state.json").read_text())["state"]["config"]
    flags = ["--data.root", str(root), "--out", str(out), *FLAGS, "--parallel.mode", "ddp"]
    given = parse(flags, None, PRESETS)
    assert written == given.document()


def test_a_dry_run_prints_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    ended = start(root, tmp_path / "run", "--dry-run", ranks=2, mode="ddp")
    assert ended.codes == [0, 0]
    assert "5 images = 2 ranks x 2 micro-batches of up to 2" in ended.outputs[0]
    assert "6 steps = 1.3 epochs of 23 images" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_dry_run_looks_at_all_that_a_run_needs(root: Path, whole: Whole, tmp_path: Path) -> None:
    for flags, complaint in (
        (("--init", str(tmp_path / "gone.pth")), "gone.pth: no such file or folder; weights are"),
        (("--init", str(whole("none", 1)), "--model.width", "64"), "pass --model.width 32"),
        (("--evaluation.view", "nosuch", "--evaluation.every", "3"), "'nosuch' in"),
    ):
        ended = start(root, tmp_path / "run", "--dry-run", *flags)
        assert ended.codes[0] > 0
        assert complaint in ended.outputs[0]
    assert start(root, tmp_path / "run", "--dry-run", "--init", str(whole("none", 1))).codes == [0]


def test_weights_to_begin_with_may_be_gone_when_a_run_goes_on(
    root: Path, whole: Whole, tmp_path: Path
) -> None:
    begin = tmp_path / "begin"
    shutil.copytree(whole("none", 1), begin)
    out = train_to_end(root, tmp_path / "run", "--init", str(begin), "--optim.steps", "3")
    shutil.rmtree(begin)
    train_to_end(root, out, "--init", str(begin))
    assert len(losses(out)) == STEPS


def test_a_usage_error_is_printed_by_rank_0_only(root: Path, tmp_path: Path) -> None:
    ended = start(root, tmp_path / "run", "--optim.warmup", "10", ranks=2, mode="ddp")
    assert ended.codes == [2, 2]
    assert ended.outputs == ["error: --optim.warmup 10 does not end before the last of --optim.steps 6\n", ""]


def test_an_unknown_flag_is_refused_by_name_by_rank_0_only(root: Path, tmp_path: Path) -> None:
    ended = start(root, tmp_path / "run", "--optim.speed", "10", ranks=2, mode="ddp")
    assert ended.codes == [2, 2]
    assert "--optim.speed" in ended.outputs[0]
    assert ended.outputs[1] == ""


def test_a_rank_with_another_flag_ends_all_ranks_with_its_name(root: Path, tmp_path: Path) -> None:
    rates = [("--optim.lr", "0.001"), ("--optim.lr", "0.5")]
    ended = start(root, tmp_path / "run", ranks=2, mode="ddp", of_rank=rates)
    assert ended.codes == [1, 1]
    for rank, output in enumerate(ended.outputs):
        assert output == f"error on rank {rank}: --optim.lr is 0.5 on rank 1 and 0.001 on rank 0\n"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_folders_that_ranks_do_not_share_are_refused_before_anything_is_written(
    root: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    ended = start(root, Path("run"), ranks=2, mode="ddp", folders=folders)
    assert ended.codes == [2, 2]
    assert re.search(
        rf"error: --out run of rank 0 \(host \S+, {folders[0]}/run\) is another folder on ranks "
        rf"1 \(host \S+, {folders[1]}/run\): .* file system that they share",
        ended.outputs[0],
    )
    assert [list((folder / "run").iterdir()) for folder in folders] == [[], []]


def test_resume_no_is_refused_where_there_are_checkpoints(root: Path, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole("none", 1), out)
    before = losses(out)
    ended = start(root, out, "--resume", "no")
    assert ended.codes == [2]
    assert ended.outputs[0].startswith(f"error: --resume no, but {out} has checkpoints")
    assert losses(out) == before


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--model.width", "64", "is of another model"),
        ("--seed", "1", "the saved state has seed 0, this stream 1"),
    ],
)
def test_a_checkpoint_of_another_model_or_seed_is_refused_where_a_run_goes_on(
    root: Path, whole: Whole, tmp_path: Path, flag: str, value: str, message: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole("none", 1), out)
    ended = start(root, out, flag, value)
    assert ended.codes == [1]
    assert message in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"nothing of the kind", "weights.pth")],
)
def test_weights_that_cannot_be_read_are_refused_in_a_line(
    root: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    weights = tmp_path / "weights.pth"
    if content is not None:
        weights.write_bytes(content)
    ended = start(root, tmp_path / "run", "--init", str(weights))
    assert ended.codes == [1]
    assert message in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]


def test_a_run_starts_from_the_weights_of_another(root: Path, whole: Whole, tmp_path: Path) -> None:
    out = train_to_end(root, tmp_path / "run", "--init", str(whole("none", 1)))
    assert len(losses(out)) == STEPS
    assert losses(out)[0] < losses(whole("none", 1))[0]


def test_one_line_a_step_with_finite_figures_and_shares_of_its_time(whole: Whole) -> None:
    found = lines(whole("ddp", 2))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line in found:
        assert line["images"] == 5
        assert 0 < line["masks"] <= 20
        parts = ("data", "compute", "update", "checkpoint", "other")
        assert sum(line[f"seconds_{part}"] for part in parts) == pytest.approx(line["seconds"])
        assert (line["seconds_checkpoint"] > 0) == (line["step"] % 2 == 0)
        assert 0 <= line["data_wait"] <= 1
        assert line["images_per_s"] == pytest.approx(line["images"] / line["seconds"])


def test_the_first_line_says_what_the_figures_depend_on(whole: Whole) -> None:
    (run,) = starts(whole("ddp", 2))
    assert (run["step"], run["world_size"], run["mode"], run["precision"]) == (0, 2, "ddp", "fp32")
    assert run["torch"] == torch.__version__
    assert run["device"]


def test_a_chrome_trace_has_the_operators_of_the_chosen_steps(root: Path, tmp_path: Path) -> None:
    out = train_to_end(root, tmp_path / "run", "--logging.profile", "1", "2", "--optim.steps", "3")
    events = json.loads((out / "trace-0.json").read_text())["traceEvents"]
    optimizer_steps = [event for event in events if re.match("Optimizer.step#", str(event.get("name")))]
    assert len(optimizer_steps) == 2
    assert any(event.get("name") == "aten::convolution" for event in events)


def test_curves_go_on_without_a_gap_or_a_second_point(root: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    train_to_end(root, out, "--logging.tensorboard", "True", mishap={"what": "stop", "step": 2})
    train_to_end(root, out, "--logging.tensorboard", "True")
    curves = accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    points = curves.Scalars("loss")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert [point.value for point in points] == pytest.approx(losses(out))
