"""A run whose --out is in a real object store: an outage of a minute, and kills at the requests of a save.

`pytest -m ceph`; skipped where the programs are not installed. test_bucket.py and
tests/engine/test_bucket_checkpoints.py have the same with smaller servers.
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.settings import CheckpointConfig
from sa1b.storage import cache
from sa1b.storage.bucket import BucketStore
from tests.engine.small_run import SmallRun
from tests.ingest.bucket_runs import Killer, contents, forked
from tests.processes import REPOSITORY, Process
from tests.storage import ceph
from tests.storage.conftest import gateway, make_bucket
from tests.train.command import FLAGS, assert_same_state, losses

__all__ = ["gateway"]
pytestmark = [
    pytest.mark.ceph,
    pytest.mark.slow,
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]
Whole = Callable[[str, int], Path]
OUTAGE = 60.0  # seconds


@pytest.fixture
def store(gateway: ceph.Gateway, tmp_path: Path) -> Iterator[BucketStore]:
    found = BucketStore(
        f"s3://{secrets.token_hex(8)}/run", scratch=tmp_path / "scratch", options=gateway.options
    )
    make_bucket(found)
    yield found
    found.close()


def copy_of(store: BucketStore, folder: Path) -> Path:
    """The objects of a run as files."""
    for name, data in contents(store).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_gateway_that_is_dead_for_a_minute_during_a_save_loses_no_step(
    root: Path, whole: Whole, gateway: ceph.Gateway, store: BucketStore, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ceph.KEY,
        "AWS_SECRET_ACCESS_KEY": ceph.SECRET,
        "AWS_ENDPOINT_URL": store.options["endpoint_url"],
    }
    # One thread, as the undisturbed run has.
    rank = [sys.executable, "-m", "tests.train.rank", "sam", "null"]
    command = [*rank, "--data.root", root, "--out", store.root, *FLAGS]
    with (tmp_path / "log").open("w") as log:
        process = Process(
            [*command, "--scratch", tmp_path / "run"], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
    while not store.sizes("checkpoints/step-00000002"):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    gateway.kill_gateway()
    time.sleep(OUTAGE)
    assert process.poll() is None, (tmp_path / "log").read_text()
    gateway.start_gateway()
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert "retrying for up to" in (tmp_path / "log").read_text()
    out = copy_of(store, tmp_path / "copy")
    assert losses(out) == losses(whole("none", 1))  # one line for each step
    assert_same_state(out, whole("none", 1))
    assert store.uploads() == []
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


class WideRun(SmallRun):
    """A file of more than two parts."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 160_000, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()


def save(store: BucketStore, folder: Path, at: int | None) -> int:
    torch.set_num_threads(1)
    cache.PART = cache.PIECE = 5 << 20  # the least that S3 accepts
    killer = Killer(at)
    killer.install()
    wide = WideRun()
    checkpoints = Checkpoints(RemoteRun(store, folder), CheckpointConfig(keep_last=1))
    for step in (1, 2):
        wide.become(step)
        checkpoints.save(step, wide.model, wide.optimizer, {"steps": step})
    checkpoints.close()
    return killer.steps


def resume(store: BucketStore, folder: Path) -> list[object]:
    torch.set_num_threads(1)
    wide = WideRun()
    checkpoints = Checkpoints(RemoteRun(store, folder), CheckpointConfig())
    state = checkpoints.resume(wide.model, wide.optimizer)
    checkpoints.close()
    names = sorted({name.rpartition("/")[0] for name in contents(store)})
    return [state, sorted(wide.steps()) if state else None, names, len(store.uploads())]


def test_a_run_that_is_killed_at_a_request_of_an_upload_in_parts_is_resumed(
    store: BucketStore, tmp_path: Path
) -> None:
    def at_url(number: int) -> BucketStore:
        return BucketStore(f"{store.root}/{number}", scratch=store.scratch, options=store.options)

    status, steps = forked(lambda: save(at_url(0), tmp_path / "0", None))
    assert status == 0, steps
    found, unfinished = set(), 0
    for at in range(1, int(steps) + 1, 4):
        status, text = forked(lambda at=at: save(at_url(at), tmp_path / "a", at))
        assert os.WTERMSIG(status) == signal.SIGKILL, text
        status, text = forked(lambda at=at: len(at_url(at).uploads()))
        unfinished += int(text)
        status, text = forked(lambda at=at: resume(at_url(at), tmp_path / "a"))
        assert status == 0, text
        found.add(text)
    complete = {f'[{{"steps": {step}}}, [{step}.0], ["checkpoints/step-{step:08d}"], 0]' for step in (1, 2)}
    both = '[{"steps": 2}, [2.0], ["checkpoints/step-00000001", "checkpoints/step-00000002"], 0]'
    assert complete <= found <= {*complete, both, "[null, null, [], 0]"}
    assert unfinished > 0
