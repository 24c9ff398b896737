"""A stopped run resumes exactly; and the same run in all modes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import (
    BATCH,
    STEPS,
    assert_same_state,
    checkpoint_steps,
    ids_of_steps,
    losses,
    output_of,
    recorded,
    torchrun,
    train_to_end,
)

Whole = Callable[[str, int], Path]
SAME = [
    pytest.param(
        "none", 1, marks=pytest.mark.slow
    ),  # quick: test_second_model.py, and distillation and grounding
    pytest.param("fsdp", 2, marks=pytest.mark.slow),  # quick ones: test_ema.py, and engine/test_parallel.py
    pytest.param("ddp", 2, marks=pytest.mark.slow),  # see test_killed.py
    pytest.param("ddp", 3, marks=pytest.mark.slow),
    pytest.param("ddp", 4, marks=pytest.mark.slow),
    pytest.param("fsdp", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("ddp", 3), ("fsdp", 2), ("fsdp", 3))),
    ],
)
def test_losses_are_those_of_a_single_process_with_uneven_slices_and_accumulation(
    whole: Whole, mode: str, ranks: int
) -> None:
    assert losses(whole(mode, ranks)) == pytest.approx(losses(whole("none", 1)), rel=1e-5, abs=0)


def test_micro_batches_do_not_change_the_losses(root: Path, whole: Whole, tmp_path: Path) -> None:
    at_once = train_to_end(root, tmp_path / "run", "--data.micro-batch", str(BATCH))
    assert losses(at_once) == pytest.approx(losses(whole("none", 1)), rel=1e-5, abs=0)


@pytest.mark.parametrize(("mode", "ranks"), SAME)
def test_a_stopped_run_goes_on_bit_for_bit(
    root: Path, whole: Whole, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "stop", "rank": ranks - 1, "step": 2}
    train_to_end(root, out, ranks=ranks, mode=mode, mishap=mishap)
    assert checkpoint_steps(out)[-1] == 3
    train_to_end(root, out, ranks=ranks, mode=mode)
    assert losses(out) == losses(whole(mode, ranks))
    assert_same_state(out, whole(mode, ranks))


@pytest.mark.slow  # test_second_model.py has a quick one
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_world_sizes_2_1_3_train_on_the_same_samples_each_once(
    root: Path, whole: Whole, tmp_path: Path, mode: str
) -> None:
    out = tmp_path / "run"
    seen: dict[int, list[list[int]]] = {}
    for ranks, stop in ((2, 0), (1, 2), (3, None)):
        into = tmp_path / f"seen by {ranks}"
        into.mkdir()
        what = {"what": "record"} if stop is None else {"what": "stop", "step": stop}
        train_to_end(
            root,
            out,
            *("--parallel.timeout", "77", "--data.deadline", "30"),
            ranks=ranks,
            mode=mode,
            mishap={**what, "into": str(into)},
        )
        assert (into / "0.timeouts").read_text() == "77.0\n"  # after the first step, also of a resumed run
        for step, parts in recorded(into, ranks).items():
            assert step not in seen
            assert len(parts) == ranks
            seen[step] = parts
    ids = [[image_id for part in seen[step] for image_id in part] for step in range(STEPS)]
    assert ids == ids_of_steps(root, STEPS)
    assert losses(out) == pytest.approx(losses(whole(mode, 2)), rel=1e-5, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_under_torchrun_too_a_stopped_run_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    for folder, mishap in (
        (undisturbed, None),
        (out, {"what": "stop", "rank": ranks - 1, "step": 2}),
        (out, None),
    ):
        process = torchrun(root, folder, ranks=ranks, mode=mode, mishap=mishap)
        output = output_of(process, folder)
        assert process.returncode == 0, output
    assert losses(out) == losses(undisturbed)
    assert_same_state(out, undisturbed)
