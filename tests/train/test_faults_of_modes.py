"""Faults in every mode: a full disk, a read-only folder, a loss that is not finite, few samples, failed writes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.disks import small_disk
from tests.processes import REPOSITORY
from tests.train.command import (
    FIRST_ID,
    IMAGES,
    Ended,
    figures,
    lines,
    losses,
    make_root,
    newest,
    start,
    train_to_end,
)
from tests.train.matrix import MODES
from tests.train.mishap import Mishap

ONE_IMAGE = ("--data.micro-batch", "1")  # of two samples that are left, three ranks have one, one and none
Whole = Callable[..., Path]
MODEL = "reconstruction"


def run(
    root: Path, out: Path, mode: str, *flags: str, mishap: dict[str, Any] | None = None, most: bool = False
) -> Ended:
    """A run on the fewest or, with SAM, the most ranks of the mode; a mishap without a rank is that of the last one."""
    kind, own, of_ranks = MODES[mode]
    ranks = max(of_ranks) if most else min(of_ranks)
    flags = (*ONE_IMAGE, *own, *of_ranks[ranks], *flags)
    mishap = mishap and type(mishap)({"rank": ranks - 1, **mishap})
    return start(root, out, *flags, ranks=ranks, mode=kind, mishap=mishap, model="sam" if most else MODEL)


def in_modes(quick: str | None) -> pytest.MarkDecorator:
    """All modes, one of them quick; None: another file has a quick test of the same."""
    modes = [pytest.param(mode, marks=() if mode == quick else pytest.mark.slow) for mode in MODES]
    return pytest.mark.parametrize("mode", modes)


def assert_resumes(root: Path, out: Path, mode: str, whole: Whole) -> None:
    ended = run(root, out, mode)
    assert set(ended.codes) == {0}, ended.outputs
    assert losses(out) == pytest.approx(losses(whole("none", 1, MODEL)), rel=1e-4)


def assert_refused(ended: Ended, reason: str) -> None:
    assert set(ended.codes) == {1}, ended.outputs
    assert "Traceback" not in "".join(ended.outputs)
    assert reason in ended.outputs[0]


@in_modes(None)  # test_full_disk.py
def test_a_full_disk(root: Path, tmp_path: Path, whole: Whole, mode: str) -> None:
    with small_disk(tmp_path / "disk", 48 << 20) as disk:
        out = disk / "run"
        mishap = {"what": "fill", "step": 3, "disk": str(disk)}
        ended = run(
            root, out, mode, "--checkpoint.tolerate", "0", "--checkpoint.no-asynchronous", mishap=mishap
        )
        assert_refused(ended, "No space left on device")
        assert newest(out).name == "step-00000002"
        (disk / "filler").unlink()
        assert_resumes(root, out, mode, whole)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[list[str]]:
    """Folders of the run that a mishap makes read-only."""
    folders = [str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints")]
    (tmp_path / "try").mkdir()
    if subprocess.run(["chattr", "+i", tmp_path / "try"], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no attribute that makes a folder read-only for its owner")
    yield folders
    subprocess.run(["chattr", "-i", tmp_path / "try", *folders], check=True)


@in_modes("none")
def test_a_folder_that_becomes_read_only(
    root: Path, tmp_path: Path, read_only: list[str], whole: Whole, mode: str
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "command", "step": 3, "command": ["chattr", "+i", *read_only]}
    ended = run(root, out, mode, "--checkpoint.tolerate", "0", "--checkpoint.no-asynchronous", mishap=mishap)
    assert_refused(ended, "Operation not permitted")
    ended = run(root, out, mode)
    assert 0 not in ended.codes, ended.outputs
    assert "Operation not permitted" in ended.outputs[0]
    assert "Traceback" not in "".join(ended.outputs)
    subprocess.run(["chattr", "-i", *read_only], check=True)
    assert newest(out).name == "step-00000002"
    assert_resumes(root, out, mode, whole)


@pytest.fixture(scope="module")
def spoilt(root: Path, shared: Callable[..., Path]) -> Path:
    def make(folder: Path) -> None:
        mishap = Mishap({"what": "nan", "step": 2, "times": 1})
        train_to_end(root, folder / "run", mishap=mishap, model=MODEL)

    return shared(f"spoilt-{MODEL}", make) / "run"


@in_modes(None)  # test_not_finite.py
def test_a_loss_that_is_not_finite_on_one_rank(root: Path, tmp_path: Path, spoilt: Path, mode: str) -> None:
    out = tmp_path / "run"
    ended = run(root, out, mode, mishap=Mishap({"what": "nan", "step": 2, "times": 1}))
    assert set(ended.codes) == {0}, ended.outputs
    found, expected = (figures(one, "loss") for one in (out, spoilt))
    assert found[2] == expected[2] == [3, None]
    del found[2], expected[2]
    assert found == [pytest.approx(one, rel=1e-4) for one in expected]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the views "most" and "two", of two images."""
    root = make_root(tmp_path_factory.mktemp("two"), IMAGES)
    for name, ids in (
        ("most", range(FIRST_ID, FIRST_ID + IMAGES - 2)),
        ("two", range(FIRST_ID + IMAGES - 2, FIRST_ID + IMAGES)),
    ):
        (root.parent / name).write_text("\n".join(map(str, ids)))
        view = [sys.executable, "-m", "sa1b", "view", root, "--ids", root.parent / name, "--name", name]
        processes.run(view, cwd=REPOSITORY, check=True, capture_output=True)
    return root


@in_modes("ddp")
def test_two_samples_for_three_ranks_and_more(two: Path, tmp_path: Path, mode: str) -> None:
    """In a step, of which micro-batches of one image leave two, and in an evaluation of two images."""
    flags: tuple[str, ...] = ("--data.view", "most", "--optim.steps", "3", "--model.depth", "3")
    flags += ("--checkpoint.every", "3", "--evaluation.view", "two", "--evaluation.every", "3")
    one = train_to_end(two, tmp_path / "one", *flags)
    ended = run(two, tmp_path / "run", mode, *flags, most=True)
    assert set(ended.codes) == {0}, ended.outputs
    assert losses(tmp_path / "run") == pytest.approx(losses(one), rel=1e-4)
    mine, other = (
        [line["evaluation"] for line in lines(out) if "evaluation" in line] for out in (tmp_path / "run", one)
    )
    for scores, expected in zip(mine, other, strict=True):
        assert scores["masks"] == expected["masks"] > 0
        assert scores["miou_1_click"] == pytest.approx(expected["miou_1_click"], rel=2e-3)


@in_modes(None)  # engine/test_checkpoint_ranks.py
@pytest.mark.parametrize("error", ["OSError", pytest.param("KeyError", marks=pytest.mark.slow)])
def test_an_exception_in_the_write_of_a_checkpoint(
    root: Path, tmp_path: Path, whole: Whole, mode: str, error: str
) -> None:
    out = tmp_path / "run"
    mishap = Mishap({"what": "raise", "at": "write", "error": error})
    ended = run(root, out, mode, "--checkpoint.tolerate", "1", mishap=mishap)
    assert_refused(ended, "no more")
    assert ended.outputs[0].count("checkpoint failed") >= 1
    assert_resumes(root, out, mode, whole)
