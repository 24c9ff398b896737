"""Fine-tuning with low-rank changes: the same in all modes, exact after a resume, merged when it is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sa1b
from sa1b.recipes.conversion import convert
from sa1b.sam.low_rank import is_low_rank, merged
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import read_weights, write_weights
from tests.train.command import assert_same_state, losses, newest, start, tensors, train_to_end

SIZES = ModelConfig(
    image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, pixel_features=8
)
RANK = ("--model.lora-rank", "4", "--optim.epsilon", "1e-4")
Runs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a run that adapts weights, and these weights."""
    path = tmp_path_factory.mktemp("weights") / "sam.safetensors"
    torch.manual_seed(5)
    write_weights(path, Sam(SIZES).state_dict())
    return (*RANK, "--init", str(path))


@pytest.fixture(scope="module")
def run(root: Path, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made: dict[tuple[str, int], Path] = {}

    def of(mode: str, ranks: int) -> Path:
        if (mode, ranks) not in made:
            out = tmp_path_factory.mktemp("runs") / mode
            made[mode, ranks] = train_to_end(root, out, *flags, ranks=ranks, mode=mode)
        return made[mode, ranks]

    return of


def test_only_the_changes_are_trained_and_have_a_state(flags: tuple[str, ...], run: Runs) -> None:
    saved, before = tensors(newest(run("none", 1))), read_weights(Path(flags[-1]))
    for name, tensor in before.items():
        assert torch.equal(saved[f"model.{name}"], tensor), name
    changes = {name.removeprefix("model.") for name in saved if name.startswith("model.")} - before.keys()
    assert changes
    assert all(is_low_rank(name) for name in changes)
    states = {name.rpartition(".")[0].removeprefix("optimizer.") for name in saved if "optimizer." in name}
    assert states == changes
    assert all(saved[f"model.{name}"].any() for name in changes)


def test_what_is_loaded_and_converted_has_the_changes_in_its_weights(run: Runs, tmp_path: Path) -> None:
    out = run("none", 1)
    saved = tensors(newest(out))
    expected = merged({name[6:]: one for name, one in saved.items() if name.startswith("model.")})
    convert(out, tmp_path / "sam.safetensors")
    for found in (sa1b.load_model(out).state_dict(), read_weights(tmp_path / "sam.safetensors")):
        assert found.keys() == expected.keys() == Sam(SIZES).state_dict().keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_a_run_on_several_ranks_has_the_losses_of_one_and_resumes_bit_for_bit(
    root: Path, flags: tuple[str, ...], run: Runs, tmp_path: Path, mode: str, ranks: int
) -> None:
    assert losses(run(mode, ranks)) == pytest.approx(losses(run("none", 1)), rel=1e-5, abs=0)
    out, mishap = tmp_path / "run", {"what": "stop", "rank": ranks - 1, "step": 2}
    train_to_end(root, out, *flags, ranks=ranks, mode=mode, mishap=mishap)
    train_to_end(root, out, *flags, ranks=ranks, mode=mode)
    assert_same_state(out, run(mode, ranks))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("none", 1), ("ddp", 2)),
        pytest.param(("fsdp", 2), ("none", 1), marks=pytest.mark.slow),
        pytest.param(("ddp", 2), ("fsdp", 3), marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_mode(
    root: Path,
    flags: tuple[str, ...],
    run: Runs,
    tmp_path: Path,
    first: tuple[str, int],
    second: tuple[str, int],
) -> None:
    out = tmp_path / "run"
    for (mode, ranks), mishap in ((first, {"what": "stop", "step": 2}), (second, None)):
        train_to_end(root, out, *flags, mode=mode, ranks=ranks, mishap=mishap)
    assert losses(out) == pytest.approx(losses(run("none", 1)), rel=1e-5, abs=0)


def test_another_rank_and_weights_that_are_not_given_are_refused(
    root: Path, flags: tuple[str, ...], run: Runs
) -> None:
    ended = start(root, run("none", 1), "--init", flags[-1])
    assert ended.codes == [2]
    assert "was trained with --model.lora-rank 4, this run has --model.lora-rank 0" in ended.outputs[0]
    ended = start(root, run("none", 1), *RANK)
    assert ended.codes == [2]
    assert (
        "--model.lora-rank 4: changes weights that are trained already; pass them as --init"
        in (ended.outputs[0])
    )
