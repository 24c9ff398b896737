"""`sa1b reshard` into Google Cloud Storage and Azure Blob Storage, by emulators on this machine.

Skipped where gcsfs, adlfs or the emulators are not installed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sa1b.storage.bucket import BucketStore
from tests import processes
from tests.ingest.bucket_runs import contents
from tests.ingest.test_bucket import REPOSITORY, TARS, alone, killed_at, left, tars
from tests.storage import azurite, gcs

__all__ = ["alone", "tars"]
Server = gcs.Server | azurite.Server
NAMES = [f"sa_00000{number}" for number in range(TARS)]


def start(tars: Path, root: str, scratch: Path, cloud: Server, *flags: object) -> processes.Process:
    line = [sys.executable, "-m", "sa1b", "reshard", tars, "--out", root, "--scratch", scratch, *flags]
    return processes.Process(
        [*line, "--json", "--images-per-shard", 8],
        cwd=REPOSITORY,
        env={**os.environ, **cloud.environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(process: processes.Process) -> list[str]:
    """The sources that a run converted."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors + out
    found: list[str] = json.loads(out)["done"]
    return found


def test_two_commands_at_the_same_time_share_the_work(
    tars: Path, tmp_path: Path, cloud: Server, cloud_bucket: BucketStore, alone: dict[str, bytes]
) -> None:
    arguments = (tars, cloud_bucket.root, cloud_bucket.scratch, cloud)
    done = [ended(process) for process in [start(*arguments, "--workers", 2), start(*arguments)]]
    assert sorted(name for one in done for name in one) == NAMES
    assert contents(cloud_bucket) == alone
    assert left(tmp_path) == []
    assert ended(start(*arguments)) == []


@pytest.mark.parametrize("kills", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_a_command_that_is_killed_at_any_time_is_resumed(
    tars: Path, tmp_path: Path, cloud: Server, cloud_bucket: BucketStore, alone: dict[str, bytes], kills: int
) -> None:
    arguments = (tars, cloud_bucket.root, cloud_bucket.scratch, cloud)
    for number in range(kills):
        process = start(*arguments, "--workers", 2)
        time.sleep(0.5 + 3.5 * number / kills)
        process.send_signal(signal.SIGKILL, session=True)
        process.communicate(timeout=60)
    ended(start(*arguments))
    assert contents(cloud_bucket) == alone
    assert left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_runs_killed_at_requests_are_resumed(tmp_path: Path, cloud_bucket: BucketStore, every: bool) -> None:
    points = None if every else [9, 21, 34, 47, 58]
    result = killed_at(tmp_path, cloud_bucket.root, cloud_bucket.options, points)
    assert result["wrong"] == []
    assert result["killed"] >= (60 if every else 5)


@pytest.mark.parametrize("fault", ["missing", "denied"])
def test_a_store_that_cannot_be_written_is_named_before_anything_is_converted(
    tars: Path, tmp_path: Path, cloud: Server, fault: str
) -> None:
    root, environment = f"{cloud.protocol}://never-made/shards", cloud.environment
    if fault == "denied" and isinstance(cloud, gcs.Server):
        root = cloud.denied
    elif fault == "denied":
        environment = {"AZURE_STORAGE_CONNECTION_STRING": str(wrong_key(cloud))}
    done = subprocess.run(
        [sys.executable, "-m", "sa1b", "reshard", tars, "--out", root, "--scratch", tmp_path / "scratch"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    said = "create the bucket first" if fault == "missing" else "access denied"
    assert root in done.stderr
    assert said in done.stderr
    assert left(tmp_path) == []


def wrong_key(cloud: Server) -> str:
    assert isinstance(cloud, azurite.Server)
    return str(cloud.options_with(azurite.WRONG_KEY)["connection_string"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--out", "az://c/shards", "--endpoint", "http://127.0.0.1:1"],
            "set AZURE_STORAGE_CONNECTION_STRING",
        ),
        (["--out", "hf://datasets/o/n"], "--out hf://datasets/o/n: hf can only be read; pass a folder"),
        (["--out", "memory://b/s", "--endpoint", "http://127.0.0.1:1"], "only for s3://, gs:// and hf://"),
    ],
)
def test_flags_that_a_store_cannot_obey_are_refused(tars: Path, flags: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sa1b", "reshard", tars, *flags],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    assert said in done.stderr
