"""`sa1b seen`: the images of a run by the formula are those that its stream gave."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa1b.engine.data_config import DataConfig
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.errors import UsageError
from sa1b.programs.seen.history import read_metrics, seen_images, spans, visits
from sa1b.programs.seen.samples import seen_masks
from sa1b.stream.order import Order
from tests import processes
from tests.processes import REPOSITORY
from tests.train.command import add_views, make_root

CPU = __import__("torch").device("cpu")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return add_views(make_root(tmp_path_factory.mktemp("a"), 16)), make_root(tmp_path_factory.mktemp("b"), 3)


def run_of(folder: Path, config: DataConfig, plan: list[tuple[int, int, int]]) -> Counter[tuple[str, int]]:
    """Write the metrics.jsonl of a run, and count its images. `plan`: of each start, its first step, the step
    before which it ends or is killed, and the steps of it that are repeated by the next start.
    """
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    used: Counter[tuple[str, int]] = Counter()
    masks: Counter[str] = Counter()
    states: dict[int, dict[str, Any]] = {}
    for first, stop, repeated in plan:
        feed = Feed(config, 32, RankInfo(0, 1, 0, CPU), folder, seed=1)
        if first:
            feed.load_state_dict(states[first])
        lines = [line for line in lines if line.get("step", 0) <= first]
        lines.append({"run": {"step": first, "data": feed.receipt()}})
        for step in range(first, stop):
            states[step] = feed.state_dict()
            for batch in feed.step():
                if step < stop - repeated:
                    names = batch.source or (str(config.root),) * len(batch)
                    used.update(zip(names, batch.ids.tolist(), strict=True))
                    pairs = zip(batch.masks.image.tolist(), batch.mask_ids.tolist(), strict=True)
                    masks.update(f"{names[i]} {batch.ids[i]} {mask}" for i, mask in pairs)
            lines.append({"step": step + 1})
        states[stop] = feed.state_dict()
        feed.close()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "masks.json").write_text(json.dumps(masks))
    return used


def counted(run: Path, before: int | None = None) -> Counter[tuple[str, int]]:
    text = (run / "metrics.jsonl").read_bytes()
    found: Counter[tuple[str, int]] = Counter()
    for one in seen_images(spans(str(run), text, before)):
        found.update({(one.source, int(i)): int(n) for i, n in zip(one.ids, one.times, strict=True) if n})
    return found


@given(
    st.integers(1, 300),
    st.integers(0, 4),
    st.sampled_from([1, 2, 8, 400]),
    st.booleans(),
    st.integers(0, 2**63 - 1),
)
def test_the_position_of_a_row_is_the_inverse_of_the_order(
    count: int, epoch: int, block: int, endless: bool, seed: int
) -> None:
    order = Order(count, "digest", seed, block, endless)
    positions = np.arange(epoch * count, (epoch + 1) * count)
    assert [order.position_of(row, epoch) for row in order.rows(positions).tolist()] == positions.tolist()


PLAN = [(0, 5, 2), (3, 4, 0), (4, 9, 0)]  # killed after 5 steps, with a checkpoint of step 3; stopped; ended


@pytest.mark.parametrize("options", [{}, {"view": "train"}, {"block_size": 2, "global_batch": 6}])
def test_the_images_of_a_run_with_resumes_are_those_of_its_stream(
    roots: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    config = DataConfig(
        root=str(roots[0]), **{"global_batch": 5, "masks": 2, "strategy": "coverage", **options}
    )
    used = run_of(tmp_path / "run", config, PLAN)
    assert counted(tmp_path / "run") == used
    one_by_one(tmp_path / "run", used)
    assert sum(used.values()) == 9 * config.global_batch
    assert sum(counted(tmp_path / "run", 2).values()) == 2 * config.global_batch


def test_a_mixture_is_counted_by_source(roots: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(
        f"sources:\n  a: {{root: {roots[0]}, weight: 3}}\n  b: {{root: {roots[1]}, weight: 1}}\n"
        "schedule: [{from_step: 4, weights: {a: 1, b: 1}}]\n"
    )
    config = DataConfig(mix=str(tmp_path / "mix.yaml"), global_batch=4, masks=2)
    used = run_of(tmp_path / "run", config, PLAN)
    assert counted(tmp_path / "run") == used
    one_by_one(tmp_path / "run", used)
    only_in_a = next(image for (name, image), _ in used.items() if name == "a" and not used["b", image])
    done = seen(tmp_path / "run", "--image", only_in_a)
    assert (done.returncode, "in a\n" in done.stdout) == (0, True)


def one_by_one(run: Path, used: Counter[tuple[str, int]]) -> None:
    """Each image alone has the same count, and its masks are those that the stream gave."""
    found = spans(str(run), read_metrics(str(run)), None)
    for image in range(100, 117):
        there = visits(found, image)
        times: Counter[tuple[str, int]] = Counter()
        for _, source, positions in there:
            times[source.name, image] += len(positions)
        assert +times == Counter({key: count for key, count in used.items() if key[1] == image})
    masks = seen_masks([(span, range(span.position, span.end)) for span in found]).to_pylist()
    noted = json.loads((run / "masks.json").read_text())
    assert {f"{one['source']} {one['image_id']} {one['mask_id']}": one["times"] for one in masks} == noted


def seen(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sa1b", "seen", *map(str, words)]
    return processes.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_command_answers_for_all_images_and_for_one(roots: tuple[Path, Path], tmp_path: Path) -> None:
    run, table = tmp_path / "run", tmp_path / "seen.parquet"
    config = DataConfig(root=str(roots[0]), view="train", global_batch=2, masks=2)
    used = run_of(run, config, [(0, 3, 0)])
    done = seen(run, "--out", table)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run}: 3 steps\n{roots[0]} ({roots[0]}): 6 images used, 6 of ")
    rows = pq.read_table(table).to_pylist()
    assert {(one["source"], one["image_id"]): one["times"] for one in rows} == used
    image = rows[0]["image_id"]
    done = seen(run, "--image", image, "--image", 7, "--json")
    assert done.returncode == 1
    first, second = json.loads(done.stdout)["images"]
    assert (first["image_id"], first["times"]) == (image, 1)
    assert second == {"image_id": 7, "source": None, "times": 0}
    assert seen(run, "--image", image).stdout == f"image {image}: seen 1 time in {roots[0]}\n"
    lines = seen(run, "--image", image, "--masks").stdout.splitlines()
    noted = [
        key.split()[2] for key in json.loads((run / "masks.json").read_text()) if key.split()[1] == str(image)
    ]
    assert sorted(lines[1:]) == sorted(f"  mask {mask}: seen 1 time".replace("seen ", "") for mask in noted)
    assert seen(run, "--masks", "--out", tmp_path / "masks.parquet").returncode == 0
    rows_of_masks = pq.read_table(tmp_path / "masks.parquet").to_pylist()
    assert {one["image_id"] for one in rows_of_masks} == {one["image_id"] for one in rows}
    assert "--masks: needs --image or --out" in seen(run, "--masks").stderr
    never = next(one for one in range(100, 116) if one not in {row["image_id"] for row in rows})
    assert seen(run, "--image", never).returncode == 1
    refused = seen(run, "--out", table)
    assert (refused.returncode, "exists" in refused.stderr) == (2, True)


def test_a_line_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    start = {"run": {"step": 0, "data": {"stream": {"position": 0}, "global_batch": 2, "sources": {}}}}
    lines = [json.dumps(start), '{"step": 1, "loss": 1.0}', '{"step": 2, "worst_image": {"id": 7}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    [span] = spans("run", read_metrics(str(tmp_path)), None)
    assert (span.first, span.stop) == (0, 1)


def test_what_cannot_be_answered_is_refused(roots: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_of(run, DataConfig(root=str(roots[0]), global_batch=2, masks=2), [(0, 2, 0)])
    assert "--before-step 3: the run has 2 steps" in seen(run, "--before-step", 3).stderr
    assert "has no metrics.jsonl" in seen(roots[0]).stderr
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace(str(roots[0]), str(roots[1])))
    assert "saved state with other images" in seen(run).stderr
    (run / "metrics.jsonl").write_text(text.replace(str(roots[0]), "missing/shards"))
    assert "missing/shards: no such folder; the run was started with this relative path" in seen(run).stderr
    (run / "metrics.jsonl").write_text('{"run": {"step": 0}}\n{"step": 1}\n')
    assert "has no record of its data" in seen(run).stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b'"global_batch"', b'"batch"'),
        lambda data: data.replace(b'"block_size": 1', b'"block_size": 0'),
        lambda data: data.replace(b'"root"', b'"toor"'),
        lambda data: data.replace(b'"position": 0', b'"position": []'),
        lambda data: data.replace(b'{"run": ', b'{"run": ]'),
        lambda data: data.replace(b'{"step": ', b'{"step": \xff'),
    ],
)
def test_damage_of_the_metrics_is_named(
    roots: tuple[Path, Path], tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    run_of(tmp_path / "run", DataConfig(root=str(roots[1]), global_batch=2), [(0, 2, 0)])
    data = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert spans("run", data, None)
    assert change(data) != data
    with pytest.raises(UsageError, match="metrics.jsonl.*: damaged"):
        spans("run", change(data), None)
