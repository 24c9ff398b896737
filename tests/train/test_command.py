"""The output, files and in_turn of the training command."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sa1b
from sa1b.engine.config import parse
from sa1b.recipes.presets import PRESETS
from tests.train.command import (
    FLAGS,
    IMAGES,
    STEPS,
    add_views,
    assert_same_state,
    in_turn,
    lines,
    losses,
    make_root,
    newest,
    start,
    starts,
    train_to_end,
)
from tests.train.mishap import Mishap

Whole = Callable[..., Path]


def test_the_settings_beside_the_metrics_are_those_of_the_checkpoint_and_of_the_flags(
    root: Path, whole: Whole
) -> None:
    out = whole("ddp", 2)
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((newest(out) / "state.json").read_text())["state"]["config"]
    flags = ["--data.root", str(root), "--out", str(out), *FLAGS, "--parallel.mode", "ddp"]
    given = parse(flags, None, PRESETS)
    assert written == given.document()


@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)])
def test_a_folder_with_files_of_others_is_refused_as_it_is(
    root: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"architectures": ["SamModel"]}')
    ended = start(root, tmp_path / "run", ranks=ranks, mode=mode, model="reconstruction")
    assert ended.codes == [2] * ranks, ended.outputs
    assert "config.json in it is not of a run of this program, and would be replaced" in ended.outputs[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert (tmp_path / "run" / "config.json").read_text() == '{"architectures": ["SamModel"]}'


def test_a_dry_run_prints_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    ended = start(root, tmp_path / "run", "--dry-run", ranks=2, mode="ddp", model="reconstruction")
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert "5 images = 2 ranks x 2 micro-batches of up to 2" in ended.outputs[0]
    assert f"{STEPS} steps = 1.2 epochs of {IMAGES} images" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_dry_run_looks_at_all_that_a_run_needs(root: Path, whole: Whole, tmp_path: Path) -> None:
    second = "reconstruction"
    for model, flags, complaint in (
        (second, ("--init", str(tmp_path / "gone.pth")), "gone.pth: no such file or folder; pass the folder"),
        ("sam", ("--init", str(whole("none", 1)), "--model.width", "64"), "pass --model.width 32"),
        ("sam", ("--evaluation.view", "nosuch", "--evaluation.every", "3"), "'nosuch' in"),
    ):
        ended = start(root, tmp_path / "run", "--dry-run", *flags, model=model)
        assert ended.codes[0] > 0
        assert complaint in ended.outputs[0]
    weights = ("--init", str(whole("none", 1, second)))
    assert start(root, tmp_path / "run", "--dry-run", *weights, model=second).codes == [0]


def test_weights_to_begin_with_may_be_gone_when_a_run_goes_on(
    root: Path, whole: Whole, tmp_path: Path
) -> None:
    begin = tmp_path / "begin"
    shutil.copytree(whole("none", 1, "reconstruction"), begin)
    given = ("--init", str(begin))
    out = train_to_end(root, tmp_path / "run", *given, "--optim.steps", "3", model="reconstruction")
    shutil.rmtree(begin)
    train_to_end(root, out, *given, model="reconstruction")
    assert len(losses(out)) == STEPS


def test_a_usage_error_and_an_unknown_flag_are_printed_by_rank_0_only(root: Path, tmp_path: Path) -> None:
    runs = [("--optim.warmup", "10"), ("--optim.speed", "10")]
    invalid, unknown = in_turn(root, tmp_path / "run", runs, ranks=2, mode="ddp")
    assert invalid.codes == unknown.codes == [2, 2]
    assert invalid.outputs == ["error: --optim.warmup 10: must be less than --optim.steps 4\n", ""]
    assert "--optim.speed" in unknown.outputs[0]
    assert unknown.outputs[1] == ""


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
    mishap = Mishap({"what": "apart", "all": True})
    ended = start(root, Path("run"), ranks=2, mode="ddp", folders=folders, mishap=mishap)
    assert ended.codes == [2, 2]
    assert re.search(
        rf"error: --out run: the folder of rank 0 \(host \S+, {folders[0]}/run\) differs on ranks "
        rf"1 \(host \S+, {folders[1]}/run\); pass an absolute path on a file system that all ranks share",
        ended.outputs[0],
    )
    assert [list((folder / "run").iterdir()) for folder in folders] == [[], []]


def test_a_rank_that_cannot_start_prints_why_although_rank_0_can(root: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "root").symlink_to(root)  # the other machine has no copy
    out = tmp_path / "run"
    ended = start(Path("root"), out, "--data.deadline", "5", ranks=2, mode="ddp", folders=folders)
    assert ended.codes == [1, 2]
    assert re.search(r"^error on rank 1 \(host \S+\): --data.root: root: no dataset there", ended.outputs[1])
    assert "rank 1 (host " in ended.outputs[0]


def test_resume_no_is_refused_where_there_are_checkpoints(root: Path, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole("none", 1, "reconstruction"), out)
    before = losses(out)
    ended = start(root, out, "--resume", "no", model="reconstruction")
    assert ended.codes == [2]
    assert ended.outputs[0].startswith(f"error: --resume no: --out {out} has checkpoints")
    assert losses(out) == before


OTHERS = (
    ("--model.width", "64", "32"),
    ("--seed", "1", "0"),
    ("--data.block-size", "5", "1"),
    ("--optim.freeze", "image_encoder", "(none)"),
)


def test_a_checkpoint_of_another_model_or_order_is_refused_by_the_flag_and_its_value(
    root: Path, whole: Whole, tmp_path: Path
) -> None:
    # A folder for each, because a process keeps the lock of its run.
    outs = [shutil.copytree(whole("none", 1), tmp_path / flag) for flag, _, _ in OTHERS]
    runs = [("--out", str(out), flag, value) for out, (flag, value, _) in zip(outs, OTHERS, strict=True)]
    found = in_turn(root, outs[0], runs)
    for out, (flag, value, saved), ended in zip(outs, OTHERS, found, strict=True):
        assert ended.codes == [2], flag
        remedy = f"drop {flag}" if saved == "(none)" else f"pass {flag} {saved}"
        trained = f"no {flag}" if saved == "(none)" else f"{flag} {saved}"
        assert ended.outputs[0].strip().splitlines()[-1] == (
            f"error: --out {out}: was trained with {trained}, this run has {flag} {value}; {remedy}, or pass "
            f"another --out with --init {out}"
        )


def test_a_resume_that_trains_frozen_parts_is_refused(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    frozen = ("--optim.freeze", "embed", "blocks")
    flags = ("--optim.steps", "2", "--optim.warmup", "1")
    assert start(root, out, *flags, *frozen, model="reconstruction").codes == [0]
    ended = start(root, out, "--optim.freeze", "blocks", model="reconstruction")
    assert ended.codes == [2]
    assert ended.outputs[0].strip().splitlines()[-1] == (
        f"error: --out {out}: was trained with {' '.join(frozen)}, this run has --optim.freeze blocks; pass "
        f"{' '.join(frozen)}, or pass another --out with --init {out}"
    )
    again = start(root, out, *flags, *frozen[:1], *frozen[:0:-1], model="reconstruction")
    assert again.codes == [0]  # another order is no difference


@pytest.mark.parametrize(("steps", "more"), [(STEPS, ""), (STEPS - 1, f" and is at step {STEPS}")])
def test_a_run_that_has_all_its_steps_says_so_and_shows_no_progress(
    root: Path, whole: Whole, tmp_path: Path, steps: int, more: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole("none", 1, "reconstruction"), out)
    ended = start(root, out, "--optim.steps", str(steps), model="reconstruction")
    assert ended.codes == [0]
    said = f"{out} has all {steps} steps{more}: raise --optim.steps to continue training"
    assert ended.outputs[0].strip().splitlines() == [said]
    assert_same_state(out, whole("none", 1, "reconstruction"))
    assert losses(out) == losses(whole("none", 1, "reconstruction"))


def test_the_learning_rate_is_said_before_there_is_a_progress_bar(root: Path, tmp_path: Path) -> None:
    flags = ("--optim.steps", "2", "--optim.warmup", "1")
    ended = start(root, tmp_path / "run", *flags, model="reconstruction")
    assert ended.outputs[0].startswith("learning rate ")
    assert "; 1 step of warm-up, then " in ended.outputs[0].splitlines()[0]


ABSENT = [
    (("--data.root", "nowhere"), "--data.root: nowhere: no dataset there"),
    (("--data.view", "nosuch"), "--data.view: "),
    (("--optim.freeze", "nosuch"), "--optim.freeze nosuch: no such part; choose from image_encoder"),
    (("--optim.freeze", "nosuch", "--dry-run"), "--optim.freeze nosuch: no such part; choose from"),
    (("--evaluate-only", "--evaluation.view", "nosuch"), "--evaluation.view: "),
    (
        ("--model.width", "1000000000"),
        "--model.width 1000000000, --model.depth 2, --model.channels 32, --model.image-size 64: the weights",
    ),
    (
        ("--model.depth", "1000000000"),
        "--model.width 32, --model.depth 1000000000, --model.channels 32, --model.image-size 64: the we",
    ),
    (("--init", "gone.pth"), "--init: gone.pth: no such file or folder"),
    (
        ("--init", "sam_vit_l_0b3195.pth"),
        "--init: sam_vit_l_0b3195.pth: no such file; download sam_vit_l_0b3195.pth from the model checkpoints "
        "of https://github.com/facebookresearch/segment-anything and pass its path, with --preset vit_l",
    ),
]


def test_what_is_not_there_ends_with_2_and_the_name_of_its_flag(root: Path, tmp_path: Path) -> None:
    garbage = tmp_path / "weights.pth"
    garbage.write_bytes(b"nothing of the kind")
    cases = [*ABSENT, (("--init", str(garbage)), f"--init: {garbage}")]
    found = in_turn(root, tmp_path / "run", [flags for flags, _ in cases])
    for (flags, message), ended in zip(cases, found, strict=True):
        assert ended.codes == [2], flags
        assert f"error: {message}" in ended.outputs[0], flags
        assert "Traceback" not in ended.outputs[0], flags
    assert not (tmp_path / "run").exists()


def test_a_damaged_sample_is_said_once_while_training(root: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "root"
    shutil.copytree(root, damaged)
    dataset = sa1b.open(damaged)
    for row in (3, 4):
        with (damaged / dataset.shards[int(dataset.table.shard[row])]).open("r+b") as file:
            file.seek(int(dataset.table.offset[row]) + 200)
            file.write(bytes(50))
    run = tmp_path / "run"
    ended = start(damaged, run, "--optim.steps", "2", model="reconstruction")
    again = start(damaged, run, "--optim.steps", "8", model="reconstruction")
    assert ended.codes == again.codes == [0]
    batch = starts(run)[0]["data"]["global_batch"]
    logged = [json.loads(line) for line in (tmp_path / "run" / "damaged.jsonl").read_text().splitlines()]
    assert {line["image_id"] for line in logged} == {int(dataset.table.image_id[row]) for row in (3, 4)}
    of_starts = [
        [line for line in one.outputs[0].splitlines() if "damaged sample" in line] for one in (ended, again)
    ]
    assert max(map(len, of_starts)) == 1
    said = (of_starts[0] + of_starts[1])[0]
    assert f"rank 0, shard {logged[0]['shard']}, image {logged[0]['image_id']})" in said
    for line in logged:  # also in steps after a resume
        assert line["replay"].endswith(f"replay {run} --step {line['position'] // batch + 1}")
    assert f"`{logged[0]['replay']}` shows its step" in said


def test_one_line_a_step_with_finite_figures_and_shares_of_its_time(whole: Whole) -> None:
    found = lines(whole("ddp", 2))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line in found:
        assert line["images"] == 5
        assert isinstance(line["masks"], int)
        assert 0 < line["masks"] <= 20
        parts = ("data", "compute", "sync", "update", "checkpoint", "other")
        assert sum(line[f"seconds_{part}"] for part in parts) == pytest.approx(line["seconds"])
        assert (line["seconds_checkpoint"] > 0) == (line["step"] % 2 == 0)
        assert 0 <= line["data_wait"] <= 1
        assert line["images_per_s"] == pytest.approx(line["images"] / line["seconds"])


def test_the_first_line_says_what_the_figures_depend_on(whole: Whole) -> None:
    (run,) = starts(whole("ddp", 2))
    assert (run["step"], run["world_size"], run["mode"], run["precision"]) == (0, 2, "ddp", "fp32")
    assert run["torch"] == torch.__version__
    assert run["device"]


def test_a_profile_has_the_operators_of_the_chosen_steps(root: Path, tmp_path: Path) -> None:
    flags = ("--logging.profile", "1", "2", "--optim.steps", "3")
    out = train_to_end(root, tmp_path / "run", *flags, model="reconstruction")
    events = json.loads((out / "trace-0.json").read_text())["traceEvents"]
    optimizer_steps = [event for event in events if re.match("Optimizer.step#", str(event.get("name")))]
    assert len(optimizer_steps) == 2
    assert any(event.get("name") == "aten::addmm" for event in events)
    table = (out / "operations-0.txt").read_text()
    assert table.startswith("the 10 costliest operations in 2 steps of rank 0")
    assert table.count("\n") == 13  # title, header, ten operations, legend
    assert "\naten::" in table


def test_curves_go_on_without_a_gap_or_a_second_point(root: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    for mishap in ({"what": "stop", "step": 2}, None):
        train_to_end(root, out, "--logging.tensorboard", "True", mishap=mishap, model="reconstruction")
    curves = accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    points = curves.Scalars("loss")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert [point.value for point in points] == pytest.approx(losses(out))


def test_a_run_ends_with_its_checkpoint_its_loss_and_a_command_that_runs(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    root, out = make_root(tmp_path / "a folder", 3), tmp_path / "a folder" / "run"
    ended = start(root, out, "--optim.steps", "1", "--optim.warmup", "0", "--data.global-batch", "2")
    assert ended.codes == [0], ended.outputs
    checkpoint, result, following = ended.outputs[0].splitlines()[-3:]
    assert Path(checkpoint.removeprefix("checkpoint: ")) == newest(out)
    assert result == f"result: loss {losses(out)[0]:.4f} in the last step"
    words = following.removeprefix("next: ")
    done = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("a folder/run-annotated/*.jsonl")) == ["annotate.jsonl"]


def test_a_run_that_was_evaluated_ends_with_its_score(root: Path, tmp_path: Path) -> None:
    views = add_views(shutil.copytree(root, tmp_path / "root"))
    flags = ("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.masks", "2")
    first = start(views, tmp_path / "run", *flags, "--optim.steps", "1", "--optim.warmup", "0")
    assert first.codes == [0], first.outputs
    lines = first.outputs[0].splitlines()
    (scored,) = [line for line in lines if line.startswith("step 1: ")]
    assert lines[-2] == f"result: {scored.removeprefix('step 1: ')}"
