"""Each window of steps names the rank that computes longest and the one that waits longest for data."""

import json
import signal
from pathlib import Path

import pytest

from tests.train.command import lines, start

FLAGS = ("--optim.steps", "13", "--logging.window", "3", "--checkpoint.every", "100")


@pytest.mark.parametrize(
    ("mode", "ranks", "place"),
    [
        ("ddp", 2, "forward"),
        ("ddp", 2, "decode"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("fsdp", 2, "decode"), ("fsdp", 3, "decode"))
        ),
        *(pytest.param("ddp", 3, place, marks=pytest.mark.slow) for place in ("forward", "decode")),
    ],
)
def test_a_slow_rank_is_named_whatever_the_mode(
    root: Path, tmp_path: Path, mode: str, ranks: int, place: str
) -> None:
    out, flags = tmp_path / "run", FLAGS
    # A step has fifteen modules, and a rank two images.
    mishap = {
        "what": "slow",
        "at": place,
        "rank": 1,
        "step": 0,
        "seconds": 0.01 if place == "forward" else 0.2,
    }
    ended = start(root, out, *flags, ranks=ranks, mode=mode, mishap=mishap, model="reconstruction")
    assert ended.codes == [0] * ranks, ended.outputs
    windows = [line for line in lines(out) if "ranks" in line]
    assert len(windows) >= 3
    loaders = [line for line in lines(out) if "loader" in line]
    assert len(loaders) == len(windows)
    if place == "forward":
        assert all('"rank": 1' in json.dumps(line) for line in windows), windows
    else:
        assert all(line["loader"]["rank"] == 1 for line in loaders[1:]), loaders


def test_a_window_is_there_once_after_a_kill(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ("--optim.steps", "6", "--logging.window", "1", "--checkpoint.every", "4")
    mishap = {"what": "kill", "step": 5, "once": str(tmp_path / "once")}
    killed = start(root, out, *flags, mishap=mishap, model="reconstruction")
    assert killed.codes == [-signal.SIGKILL]
    start(root, out, *flags, model="reconstruction")
    for kind in ("ranks", "loader"):
        steps = [line["step"] for line in lines(out) if kind in line]
        assert steps == sorted(set(steps))
        assert steps[0] == 2  # the first step of a start is in no window
        assert steps[-1] == 6
