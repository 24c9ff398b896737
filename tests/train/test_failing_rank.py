"""A rank that raises prints its reason once and ends at once; the others end too, without tracebacks."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.command import output_of, start, torchrun
from tests.train.mishap import AGENT, MOMENTS, PLACES, Mishap

# Longer than a test waits: a rank that waits for another one until the timeout counts as hanging.
WAITS = ("--parallel.timeout", "1000", "--parallel.timeout-first", "1000", "--data.deadline", "100")

SLOW = [
    ("ddp", "begun", "RuntimeError", 0),
    ("fsdp", "agreed", "OSError", 1),
    *(("ddp", "saved", "OSError", rank) for rank in (0, 1)),
    *(("fsdp", moment, "RuntimeError", rank) for moment in MOMENTS for rank in (0, 1)),
]


@pytest.mark.parametrize(
    ("mode", "moment", "error", "rank"),
    [
        ("ddp", "begun", "RuntimeError", 1),
        ("fsdp", "agreed", "OSError", 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_it_prints_its_reason_and_the_others_end(
    root: Path, tmp_path: Path, mode: str, moment: str, error: str, rank: int
) -> None:
    mishap = Mishap({"what": "raise", "error": error, "rank": rank, "step": 1, "moment": moment})
    given: dict[str, Any] = {"ranks": 2, "mode": mode, "mishap": mishap, "model": "reconstruction"}
    ended = start(root, tmp_path / "run", *WAITS, **given)
    assert ended.codes == [1, 1], ended.outputs
    own, other = ended.outputs[rank], ended.outputs[1 - rank]
    reason = "no more" if error == "OSError" else "RuntimeError: no more"
    assert own.count(f"error on rank {rank}: {reason}\n") == 1
    assert own.count("Traceback") == (error == "RuntimeError")
    assert "no more" not in other
    assert other.count(f"rank {1 - rank} ends because another rank ended or does not answer") == 1
    assert "Traceback" not in other


MODES = {
    "none": ("none", 1, ()),
    "ddp": ("ddp", 2, ()),
    "fsdp": ("fsdp", 2, ()),
    "grad_op": ("fsdp", 2, ("--parallel.shard", "grad_op")),
    "hybrid": ("fsdp", 4, ("--parallel.replicas", "2")),
}
QUICK = [
    ("grad_op", "in an evaluation"),
    ("fsdp", "compute"),
    ("ddp", "end of a save"),
    ("ddp", "writing thread"),
]
PLACED = [
    (mode, place)
    for mode in MODES
    for place in PLACES
    if place not in ("write", "upload")  # all ranks have the error: test_faults_of_modes.py, test_bucket.py
]


@pytest.mark.parametrize(
    ("mode", "place"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in PLACED]
)
def test_wherever_a_rank_raises_it_prints_its_reason_and_all_ranks_end(
    parted: Path, tmp_path: Path, mode: str, place: str
) -> None:
    kind, ranks, flags = MODES[mode]
    if "evaluation" in place:
        flags += ("--data.view", "train", "--evaluation.view", "held-out", "--evaluation.every", "1")
    last = ranks - 1
    mishap = Mishap({"what": "raise", "at": place, "rank": last, "error": "KeyError"})
    flags += ("--optim.ema", "0.5")
    model = "sam" if "evaluation" in place else "reconstruction"
    ended = start(
        parted, tmp_path / "run", *WAITS, *flags, ranks=ranks, mode=kind, mishap=mishap, model=model
    )
    assert ended.codes[last] == 1, ended.outputs
    where = f"error on rank {last}" if ranks > 1 else "error"
    assert ended.outputs[last].count(f"{where}: KeyError: 'no more'\n") == 1, ended.outputs
    for code, output in zip(ended.codes[:last], ended.outputs[:last], strict=True):
        assert "no more" not in output
        assert "Traceback" not in output
        if place != "closing":  # there the others may have finished already
            assert code == 1
            assert output.count("ends because another rank ended or does not answer") == 1


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_under_torchrun_the_reason_is_in_the_output_once(root: Path, tmp_path: Path, forked: bool) -> None:
    mishap = {"what": "raise", "error": "OSError", "rank": 1, "step": 1}
    agent = AGENT if forked else None
    process = torchrun(root, tmp_path / "run", *WAITS, ranks=2, mode="ddp", mishap=mishap, agent=agent)
    output = output_of(process, tmp_path / "run")
    assert process.returncode == 1
    assert output.count("error on rank 1: no more\n") == 1
    assert output.count("OSError: no more") == 1  # in torchrun's summary
    assert output.count("[rank0]:") == 0  # torch's prefix of a traceback
    if not forked:
        assert "To enable traceback see" in output  # of the other rank, which has no reason of its own


def test_a_single_process_finishes_its_checkpoint_before_it_ends(root: Path, tmp_path: Path) -> None:
    mishap = Mishap({"what": "raise", "error": "OSError", "step": 1, "moment": "saved"})
    ended = start(root, tmp_path / "run", mishap=mishap, model="reconstruction")
    assert ended.codes == [1]
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert names == ["step-00000002"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_test_notices_ranks_that_end_before_they_hang(root: Path, tmp_path: Path, ranks: int) -> None:
    ended = start(root, tmp_path / "run", "--no-such-flag", ranks=ranks, stuck=0, until=lambda: False)
    assert 2 in ended.codes
