"""A run that waits for data names the stage of its loader that limits."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.storage.service import Service
from tests.train.command import Ended, lines, losses, start


@pytest.mark.parametrize(
    ("place", "stage", "remedy"),
    [("read", "read", "; raise --data.prefetch"), ("decode", "decode", r"; .*or reshard to \d+ px: ")],
)
def test_slow_storage_and_slow_decoding_are_named_once_with_the_remedy(
    root: Path, tmp_path: Path, place: str, stage: str, remedy: str
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "slow", "at": place, "step": 0, "seconds": 0.3}
    flags = ("--optim.steps", "10", "--logging.window", "2", "--checkpoint.every", "100")
    ended = start(root, out, *flags, mishap=mishap, model="reconstruction")
    assert ended.codes == [0], ended.outputs
    windows = [line["loader"] for line in lines(out) if "loader" in line]
    assert len(windows) >= 4
    assert all(window["data_wait"] > 0.2 and window["limiting"] == stage for window in windows[1:]), windows
    said = [line for line in ended.outputs[0].splitlines() if line.startswith("data wait ")]
    assert len(said) == 1
    assert re.search(rf" %: {stage} limits{remedy}", said[0]), said


@pytest.fixture
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stalled(root: Path, out: Path, *flags: str, then: Callable[[Service], Any] = lambda proxy: None) -> Ended:
    """A run whose server stops sending within each body after the first step; `then` acts after that."""
    with (
        Service("range_server", root.parents[1]) as server,
        Service("fault_proxy", server.port, 0, 0.0, "stall_body") as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"s3://{root.parent.name}/{root.name}"
        more = ("--data.root", url, "--data.endpoint", proxy.url, *flags)
        run = pool.submit(start, root, out, *more, model="reconstruction")
        while not run.done() and not ((out / "metrics.jsonl").exists() and lines(out)):
            time.sleep(0.01)
        proxy.ask({"do": "rate", "rate": 1.0})
        while not run.done() and not proxy.ask({"do": "log"})["faults"]:
            time.sleep(0.01)
        assert proxy.ask({"do": "log"})["faults"]
        then(proxy)
        return run.result()


@pytest.mark.slow  # quick: the same of a stream, in tests/stream/test_remote.py
@pytest.mark.usefixtures("_store")
def test_a_server_that_stops_within_a_body_ends_the_run_at_the_deadline(root: Path, tmp_path: Path) -> None:
    ended = stalled(root, tmp_path / "run", "--optim.steps", "100000", "--data.deadline", "5")
    assert ended.codes == [1], ended.outputs
    url = f"s3://{root.parent.name}/{root.name}/sa1b-000001-"
    said = rf"error: {url}000\d.tar, bytes [\d,]+ to [\d,]+: unavailable: 1 attempts in 5 s; last: no complete response"
    assert re.search(said, ended.outputs[0]), ended.outputs
    assert "Traceback" not in ended.outputs[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_store")
def test_a_run_continues_when_the_server_goes_on(root: Path, tmp_path: Path) -> None:
    """The attempt that waits within a body ends after 15 s."""
    steps = 200
    ended = stalled(
        root,
        tmp_path / "run",
        "--optim.steps",
        str(steps),
        then=lambda proxy: proxy.ask({"do": "rate", "rate": 0.0}),
    )
    assert ended.codes == [0], ended.outputs
    assert len(losses(tmp_path / "run")) == steps
