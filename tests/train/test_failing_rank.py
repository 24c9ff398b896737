"""A rank that raises prints its reason once and ends at once; the others end too, without tracebacks."""

from pathlib import Path

import pytest

from tests.train.command import output_of, start, torchrun
from tests.train.mishap import MOMENTS

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
    mishap = {"what": "raise", "error": error, "rank": rank, "step": 1, "moment": moment}
    ended = start(root, tmp_path / "run", *WAITS, ranks=2, mode=mode, mishap=mishap)
    assert ended.codes == [1, 1], ended.outputs
    own, other = ended.outputs[rank], ended.outputs[1 - rank]
    reason = "no more" if error == "OSError" else "RuntimeError: no more"
    assert own.count(f"error on rank {rank}: {reason}\n") == 1
    assert own.count("Traceback") == (error == "RuntimeError")
    assert "no more" not in other
    assert other.count(f"rank {1 - rank} ends because another rank ended or does not answer") == 1
    assert "Traceback" not in other


def test_under_torchrun_the_reason_is_in_the_output_once(root: Path, tmp_path: Path) -> None:
    mishap = {"what": "raise", "error": "OSError", "rank": 1, "step": 1}
    process = torchrun(root, tmp_path / "run", *WAITS, ranks=2, mode="ddp", mishap=mishap)
    output = output_of(process, tmp_path / "run")
    assert process.returncode == 1
    assert output.count("no more") == 1
    assert "error on rank 1: no more\n" in output
    assert output.count("[rank0]:") == 0  # torch's prefix of a traceback


def test_a_single_process_finishes_its_checkpoint_before_it_ends(root: Path, tmp_path: Path) -> None:
    mishap = {"what": "raise", "error": "OSError", "step": 1, "moment": "saved"}
    ended = start(root, tmp_path / "run", mishap=mishap)
    assert ended.codes == [1]
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert names == ["step-00000002"]
