"""`sa1b replay --worst`: the worst steps of a run with their images, and views without these images."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.engine.data_config import DataConfig
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.programs.seen.worst import worst_steps
from sa1b.views.view import open_view
from tests.cli.verb import runner
from tests.seen.test_replay import CPU
from tests.train.command import add_views, make_root

LOSSES = [3.0, 2.0, 1.0, 1.0, 2.6, None, 1.1, 0.9]
NORMS = [1.0, 1.0, 7.0, 1.0, 1.0, None, 1.0, 9.0]
replay = runner("replay")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return add_views(make_root(tmp_path_factory.mktemp("a"), 16)), make_root(tmp_path_factory.mktemp("b"), 3)


def run_of(folder: Path, config: DataConfig) -> list[dict[str, Any]]:
    """Write the metrics.jsonl of a run with these losses; the worst image of each step is its last one."""
    folder.mkdir()
    feed = Feed(config, 48, RankInfo(0, 1, 0, CPU), folder, seed=5)
    lines: list[dict[str, Any]] = [{"run": {"step": 0, "data": feed.receipt()}}]
    for step, (loss, norm) in enumerate(zip(LOSSES, NORMS, strict=True), 1):
        (batch,) = feed.step()
        worst = {"id": int(batch.ids[-1]), "position": int(batch.positions[-1]), "loss": loss}
        lines.append({"step": step, "loss": loss, "worst_image": worst, "grad_norm": norm})
        lines.append({"step": step, "evaluation": {"miou": 0.1}, "seconds": 1.0})
    feed.close()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("by", "expected"), [("loss", [6, 1, 5]), ("grad_norm", [6, 8, 3]), ("rise", [6, 5, 1])]
)
def test_steps_that_are_not_finite_come_first(by: Any, expected: list[int]) -> None:
    lines = zip(range(1, 9), LOSSES, NORMS, strict=True)
    text = "".join(
        f'{{"step": {s}, "other": 1, "loss": {json.dumps(loss)}, "grad_norm": {json.dumps(n)}}}\n'
        for s, loss, n in lines
    )
    found = worst_steps("run", (text + '{"step": 9, "lo').encode(), 3, by)
    assert [one.step for one in found.steps] == expected
    assert (found.of, found.steps[0].loss) == (8, None)
    assert "not finite" in found.table()
    assert "not recorded" in found.table()


@pytest.mark.parametrize("options", [{}, {"view": "train"}, {"block_size": 2}], ids=["all", "view", "blocks"])
def test_a_view_lacks_the_worst_images_and_no_other(
    roots: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run, out = tmp_path / "run", tmp_path / "without.json"
    lines = run_of(run, DataConfig(root=str(roots[0]), global_batch=4, masks=2, **options))
    done = replay(run, "--worst", 3, "--out-view", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    bad = {line["worst_image"]["id"] for line in lines if line["step"] in (6, 1, 5)}
    assert [(one["step"], one["image_id"]) for one in document["steps"]] == [
        (step, lines[step - 1]["worst_image"]["id"]) for step in (6, 1, 5)
    ]
    dataset = sa1b.open(roots[0])
    before = open_view(roots[0], dataset.table, options.get("view")).image_ids(dataset.table)
    after = open_view(roots[0], dataset.table, document["views"][0]["opens"]).image_ids(dataset.table)
    assert set(after.tolist()) == set(before.tolist()) - bad
    assert len(after) == len(before) - len(bad) == document["views"][0]["images"]
    # The command that the document of the view prints selects the same view again.
    flags = json.loads(out.read_text())["chosen_by"]
    again = runner("view")(
        roots[0], *(f"--{name}={value}" for name, value in flags.items()), "--out", tmp_path / "again"
    )
    assert again.returncode == 0
    assert np.array_equal(
        open_view(roots[0], dataset.table, tmp_path / "again").image_ids(dataset.table), after
    )
    refused = replay(run, "--worst", 3, "--out-view", out)
    assert (refused.returncode, f"--out-view {out}: exists" in refused.stderr) == (2, True)


def test_of_a_mixture_each_source_has_a_view_of_its_own(roots: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(
        f"sources:\n  a: {{root: {roots[0]}, weight: 3, view: train}}\n  b/c: {{root: {roots[1]}, weight: 1}}\n"
    )
    lines = run_of(tmp_path / "run", DataConfig(mix=str(tmp_path / "mix.yaml"), global_batch=5, masks=2))
    done = replay(tmp_path / "run", "--worst", 8, "--out-view", tmp_path / "w.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    left_out = set()
    for one in json.loads(done.stdout)["views"]:
        table, view = sa1b.open(one["root"]).table, "train" if one["root"] == str(roots[0]) else None
        before, after = (
            open_view(one["root"], table, name).image_ids(table).tolist() for name in (view, one["opens"])
        )
        assert set(after) < set(before)
        left_out |= {(one["root"], image) for image in set(before) - set(after)}
    assert {image for _, image in left_out} == {line["worst_image"]["id"] for line in lines}
    assert sorted(path.name for path in tmp_path.glob("w*.json")) == ["w-1.json", "w-a.json"]
    printed = replay(tmp_path / "run", "--worst", 8, "--out-view", tmp_path / "again.json").stdout
    settings = "\n".join(re.findall(r"in the file of --data.mix: (.*)$", printed, re.MULTILINE)).splitlines()
    views = {line.partition(": ")[0]: line.partition(": {view: ")[2].rstrip("}") for line in settings}
    (tmp_path / "new.yaml").write_text(
        f"sources:\n  a: {{root: {roots[0]}, weight: 3, view: {views['a']}}}\n"
        f"  b/c: {{root: {roots[1]}, weight: 1, view: {views['b/c']}}}\n"
    )
    feed = Feed(
        DataConfig(mix=str(tmp_path / "new.yaml"), global_batch=5, masks=2),
        48,
        RankInfo(0, 1, 0, CPU),
        tmp_path,
        5,
    )
    counts = {name: source["images"] for name, source in feed.receipt()["sources"].items()}
    assert counts == {one["source"]: one["images"] for one in json.loads(done.stdout)["views"]}


def test_what_cannot_be_done_is_refused(roots: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_of(run, DataConfig(root=str(roots[0]), global_batch=4, masks=2))
    for words, message in (
        ((), "pass either --step or --worst"),
        (("--step", 1, "--worst", 1), "pass either --step or --worst"),
        (("--step", 1, "--out-view", "v.json"), "--out-view: needs --worst"),
        (("--worst", 1, "--out-view", "v"), "--out-view v: must end with .json"),
        (("--worst", 0), "--worst 0: must be at least 1"),
    ):
        done = replay(run, *words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace("worst_image", "other"))
    for flag in ("--out-view", "--out"):
        words = ("--worst", 1, flag, tmp_path / "v.json")
        assert f"{flag}: metrics.jsonl has no worst images" in replay(run, *words).stderr
    assert not (tmp_path / "v.json").exists()
    (run / "metrics.jsonl").write_text(text.splitlines()[0])
    assert "has no step" in replay(run, "--worst", 1).stderr
