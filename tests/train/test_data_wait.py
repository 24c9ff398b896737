"""A run that waits for data names the stage of its loader that limits."""

from pathlib import Path

from tests.train.command import lines, start

STEPS = {"read": [1, 7], "decode": [7, 13]}


def test_slow_storage_and_slow_decoding_are_named_with_the_remedy(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    mishap = {"what": "slow", "rank": 0, "seconds": 1000.0, "parts": STEPS}
    flags = ("--optim.steps", "14", "--logging.window", "2", "--checkpoint.every", "100")
    ended = start(root, out, *flags, mishap=mishap)
    assert ended.codes == [0], ended.outputs
    windows = [line["loader"] for line in lines(out) if "loader" in line]
    assert len(windows) == 6
    # Batches that are prepared in advance are those of later windows.
    for number, stage in enumerate(STEPS):
        of_stage = [window for window in windows[3 * number : 3 * number + 3] if window["limiting"] == stage]
        assert any(window["data_wait"] > 0.05 and window["busy"][stage] > 0.5 for window in of_stage), windows
    said = [line for line in ended.outputs[0].splitlines() if line.startswith("data wait ")]
    assert any(" %: read limits; raise --data.prefetch" in line for line in said), said
    assert any(" %: decode limits; " in line and "or reshard to 64 px: " in line for line in said), said
