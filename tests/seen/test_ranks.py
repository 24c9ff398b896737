"""A step is rebuilt as each rank of a real run had it: samples, and prompts of all iterations, to the bit."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sa1b.programs.seen.history import read_metrics, seen_images, spans
from sa1b.programs.seen.prompts import Prompts
from sa1b.programs.seen.replayed import rebuilt
from tests.cli.verb import runner
from tests.train.command import STEPS, lines, make_root, newest, starts, train_to_end

KEEP = (
    *("--optim.warmup", "1", "--checkpoint.every", "1", "--checkpoint.keep-every", "1"),
    *("--recipe.clicks", "2", "--recipe.unprompted", "2"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"))


def trained(
    root: Path, folder: Path, parts: list[tuple[str, int, int]], *flags: str
) -> dict[int, dict[int, Any]]:
    """Train in these modes, each with so many ranks up to a step: step -> position -> digest and prompts."""
    (folder / "notes").mkdir(parents=True)
    mishap = {"what": "record", "into": str(folder / "notes"), "digests": True}
    for mode, ranks, steps in parts:
        own = (*KEEP, *flags, "--optim.steps", str(steps))
        train_to_end(root, folder / "run", *own, ranks=ranks, mode=mode, mishap=mishap)
    noted = [
        json.loads(line)
        for path in (folder / "notes").glob("*.digests")
        for line in path.read_text().splitlines()
    ]
    found: dict[int, dict[int, Any]] = {}
    for step, position, digest, prompts in noted:
        of_step = found.setdefault(step, {})
        assert of_step.get(position, (digest, prompts)) == (
            digest,
            prompts,
        )  # stages of a pipeline have the same
        of_step[position] = digest, prompts
    return found


def check(run: Path, step: int, expected: dict[int, Any], *, exact: bool) -> dict[int, float]:
    """Compare a rebuilt step with what the ranks had; the loss of each image by its id. Without the weights that
    the step began with, only the prompts of the first iteration are compared.
    """
    found = spans(str(run), read_metrics(str(run)), None)
    (span,) = (one for one in found if one.first < step <= one.stop)
    prompts = Prompts(str(run), span, step, str(run) if exact else None)
    samples = rebuilt(str(run), span, step, prompts).samples
    assert {one["position"]: one["sha256"] for one in samples} == {at: one[0] for at, one in expected.items()}
    for sample in samples:
        of_run = expected[sample["position"]][1]
        own = [mask["prompts"] for mask in sample["masks"]]
        if of_run is not None:  # None: in a pipeline
            assert own == (of_run if exact else [one[:1] for one in of_run])
    return {one["image_id"]: one["loss"] for one in samples if "loss" in one}


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_steps_of_two_ranks_and_of_one_are_rebuilt(root: Path, tmp_path: Path) -> None:
    expected = trained(root, tmp_path, [("ddp", 2, 2), ("none", 1, STEPS)])
    assert sorted(expected) == [*range(1, STEPS + 1)]
    figures = {line["step"]: line for line in lines(tmp_path / "run")}
    for step, of_step in expected.items():
        losses = check(tmp_path / "run", step, of_step, exact=step > 1)
        if step > 1:  # metrics.jsonl names the image with the highest loss
            worst = figures[step]["worst_image"]
            assert losses[worst["id"]] == max(losses.values()) == pytest.approx(worst["loss"], rel=1e-6)


def test_a_run_is_continued_without_its_worst_images_by_the_printed_command(
    root: Path, tmp_path: Path
) -> None:
    run, page, out = tmp_path / "run", tmp_path / "page", tmp_path / "without.json"
    train_to_end(root, run, "--optim.steps", "3", "--checkpoint.keep-every", "1")
    done = runner("replay")(run, "--worst", 2, "--weights", run, "--out", page, "--out-view", out)
    assert (done.returncode, done.stderr) == (0, "")
    printed = re.search(
        r"a new run: .*train --data.root (\S+) (--data.view) (\S+) ...$", done.stdout, re.MULTILINE
    )
    assert printed is not None
    assert printed[1] == str(root)
    train_to_end(root, tmp_path / "next", printed[2], printed[3], "--init", str(run))
    (before,), (after,) = starts(run), starts(tmp_path / "next")
    assert after["data"]["stream"]["ids_sha256"] != before["data"]["stream"]["ids_sha256"]
    found = spans(str(tmp_path / "next"), read_metrics(str(tmp_path / "next")), None)
    worst = {line["worst_image"]["id"] for line in lines(run) if "loss" in line}
    (images,) = seen_images(found)
    assert len(images.ids) == 23 - 2
    assert worst - set(images.ids.tolist())
    shown = (page / "index.html").read_text()
    assert shown.count("<section>") == 2
    assert shown.count("<figure>") == shown.count(" loss ") - 2 + shown.count("no pixel in the targets")
    # The weights of another run: its number of steps says nothing, but those of --init are recognised.
    note = runner("replay")(tmp_path / "next", "--step", 3, "--weights", run).stdout.splitlines()[0]
    assert "weights of an unknown step; only the prompts of the first iteration" in note
    note = runner("replay")(tmp_path / "next", "--step", 1, "--weights", newest(run)).stdout.splitlines()[0]
    assert note.endswith("the weights that the step began with: all prompts are those of the run")
    refused = runner("replay")(run, "--step", 1, "--weights", tmp_path)
    assert (refused.returncode, "without weights" in refused.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_of_all_modes_with_changed_ranks_are_rebuilt(
    root: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    modes = ["ddp", "fsdp", "zero1", "none"]
    rng.shuffle(modes)
    parts = [(mode, 1 if mode == "none" else rng.choice((2, 3)), 4 * (i + 1)) for i, mode in enumerate(modes)]
    expected = trained(root, tmp_path, parts, "--data.strategy", rng.choice(("uniform", "coverage")))
    for step in rng.sample(range(1, 17), 13):
        check(tmp_path / "run", step, expected[step], exact=step > 1)


@pytest.mark.slow
def test_steps_of_a_pipeline_are_rebuilt(root: Path, tmp_path: Path) -> None:
    flags = ("--data.micro-batch", "1", "--model.drop-path", "0")
    expected = trained(root, tmp_path, [("pipeline", 2, 2)], *flags)
    for step, of_step in expected.items():
        check(tmp_path / "run", step, of_step, exact=False)
