"""The graphs of torch.compile for the encoder's blocks: no breaks in any mode, one graph per batch size.

In the quick suite a single process; of several ranks, tests/train/test_warm_up.py counts the graphs there.
"""

from typing import Any

import pytest

from sa1b.engine.settings import ParallelConfig
from tests.engine import checks
from tests.engine.compiling import counted
from tests.engine.launch import launch

KINDS = 2  # kinds of blocks in the model: windowed and global


def run(mode: Any, recompute: bool) -> list[dict[str, Any]]:
    config = ParallelConfig(mode=mode)
    return [counted(config, recompute)] if mode == "none" else launch(counted, 2, config, recompute)


@pytest.fixture(scope="module")
def eager() -> dict[str, Any]:
    return checks.trace(ParallelConfig(), 1)


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [
        ("none", True),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("none", False), ("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True))
        ),
    ],
)
def test_no_graph_breaks_and_each_batch_size_has_its_own(
    mode: str, recompute: bool, eager: dict[str, Any]
) -> None:
    ranks = run(mode, recompute)
    for rank in ranks:
        assert rank["breaks"] == {}
        assert rank["warmed"] == KINDS
        assert rank["graphs"] == KINDS * len(rank["sizes"])
        assert rank["norms"] == pytest.approx(eager["norms"], rel=1e-4)
    assert sum(rank["losses"][0] for rank in ranks) == pytest.approx(eager["losses"][0], rel=1e-5)
