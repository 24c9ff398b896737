"""`sa1b replay`: the samples of a step are those that each rank of the run got, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sa1b.engine.data_config import DataConfig
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.programs.seen.history import read_metrics, spans
from sa1b.programs.seen.prompts import Prompts
from sa1b.programs.seen.replayed import digest, rebuilt
from sa1b.programs.seen.samples import Samples
from tests.cli.verb import runner
from tests.train.command import add_views, make_root

CPU = torch.device("cpu")
# Of each start: its first step, the one after its last, ranks and micro-batch. The first was killed after step 6.
STARTS = [(0, 6, 3, 2), (4, 9, 1, 5), (9, 12, 2, 1)]
replay = runner("replay")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return add_views(make_root(tmp_path_factory.mktemp("a"), 16)), make_root(tmp_path_factory.mktemp("b"), 3)


def trained(folder: Path, **options: Any) -> dict[int, dict[int, str]]:
    """Write the metrics.jsonl of a run with these starts; step -> position -> digest of what its ranks got."""
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    found: dict[int, dict[int, str]] = {}
    states: dict[int, Any] = {}
    for first, stop, ranks, micro in STARTS:
        config = DataConfig(micro_batch=micro, **options)
        for rank in range(ranks):
            feed = Feed(config, 48, RankInfo(rank, ranks, 0, CPU), folder, seed=5)
            if first:
                feed.load_state_dict(states[first])
            if rank == 0:
                lines = [line for line in lines if line.get("step", 0) <= first]
                lines.append({"run": {"step": first, "data": feed.receipt()}})
            for step in range(first + 1, stop + 1):
                of_step = found.setdefault(step, {}) if rank else {}
                for batch in feed.step():
                    of_step |= {int(batch.positions[i]): digest(batch, i) for i in range(len(batch))}
                found[step] = of_step
                states[step] = feed.state_dict()
            feed.close()
        lines += [{"step": step} for step in range(first + 1, stop + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"view": "train", "strategy": "coverage", "flip": 0.5},
        {"block_size": 2, "strategy": "area", "min_pixels": 2, "global_batch": 6},
        {"mix": True, "flip": 0.5},
        {"text": "phrases.parquet"},
    ],
    ids=["view", "blocks", "mixture", "text"],
)
def test_each_step_is_rebuilt_to_the_bit(
    roots: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    own = {"root": str(roots[0]), "global_batch": 5, "masks": 3, **options}
    if "text" in own:
        own["text"] = str(roots[0].parent / own["text"])
    if own.pop("mix", False):
        path = tmp_path / "mix.yaml"
        path.write_text(
            f"sources:\n  a: {{root: {own.pop('root')}, weight: 3}}\n  b: {{root: {roots[1]}, weight: 1, masks: 1, seed: 2}}\n"
            "schedule: [{from_step: 7, weights: {a: 1, b: 2}}]\n"
        )
        own["mix"] = str(path)
    run = tmp_path / "run"
    expected = trained(run, **own)
    found = spans(str(run), read_metrics(str(run)), None)
    assert [(one.first, one.stop) for one in found] == [(0, 4), (4, 9), (9, 12)]
    for span in found:
        for step in range(span.first + 1, span.stop + 1):
            replayed = rebuilt(str(run), span, step, Prompts(str(run), span, step, None))
            samples = replayed.samples
            assert replayed.changes == []
            assert {one["position"]: one["sha256"] for one in samples} == expected[step]
    assert any(one["mirrored"] for one in samples) == (own.get("flip", 0) > 0)


def test_the_command_prints_and_draws_a_step_and_names_what_has_changed(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    run, page = tmp_path / "run", tmp_path / "page"
    expected = trained(run, root=str(roots[0]), global_batch=5, masks=3)
    done = replay(run, "--step", 8, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {one["position"]: one["sha256"] for one in document["samples"]} == expected[8]
    assert document["changes"] == []
    done = replay(run, "--step", 8, "--out", page)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{run}, step 8: 5 images" in done.stdout
    assert len([*page.glob("*.png")]) == 5
    assert Image.open(page / f"{min(expected[8])}.png").size[0] == 48
    assert (page / "index.html").read_text().count("<section>") == 5
    assert replay(run, "--step", 8, "--out", page).returncode == 2
    refused = replay(run, "--step", 13)
    assert (refused.returncode, "--step 13: the run has no such step" in refused.stderr) == (2, True)

    metrics = run / "metrics.jsonl"
    text = metrics.read_text()
    starts = [json.loads(line) for line in text.splitlines()]
    for line in starts:
        if "run" in line:
            line["run"]["data"]["stream"]["bytes_sha256"] = "0" * 64
            line["run"]["data"]["stream"]["options"]["transform"] = None
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in starts))
    assert "warning: " in replay(run, "--step", 8).stdout
    metrics.write_text(text.replace('"transform": null', '"transform": "mine:crop"'))
    assert "the run had a transform of its own code" in replay(run, "--step", 8).stderr


def test_an_error_leaves_no_stream_open(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, closed = tmp_path / "run", list[Samples]()
    trained(run, root=str(roots[0]), global_batch=5, masks=3)
    [span, *_] = spans(str(run), read_metrics(str(run)), None)
    close = Samples.close
    monkeypatch.setattr(Samples, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr(Prompts, "of", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rebuilt(str(run), span, 1, Prompts(str(run), span, 1, None))
    assert len(closed) == 1
