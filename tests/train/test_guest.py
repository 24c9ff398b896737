"""The training loop inside another program, such as a worker of Ray: its thread, its process group, its signals."""

from pathlib import Path

from tests.engine.launch import launch
from tests.train import guest
from tests.train.command import STEPS, assert_same_state, losses


def test_a_run_in_a_thread_uses_the_group_of_the_process_and_leaves_it(root: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    runs = [(whole, STEPS), (resumed, 3), (resumed, STEPS)]
    for found in launch(guest.train_in_a_thread, 2, root, runs):
        assert found == {"codes": [0, 0, 0], "group": True, "sum": 2.0, "handlers": True, "threads": []}
    assert losses(resumed) == losses(whole)
    assert_same_state(resumed, whole)
