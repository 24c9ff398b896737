"""`sa1b reshard` into a production object store on this machine, with and without faults.

`pytest -m ceph`; skipped where the programs are not installed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.ingest.summary import ReshardSummary
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.storage.bucket import BucketStore
from sa1b.storage.errors import DeniedError, StorageError
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from tests import processes
from tests.ingest.bucket_runs import contents
from tests.ingest.test_bucket import REPOSITORY, TARS, alone, killed_at, left, tars
from tests.ingest.test_several_runs import ended
from tests.storage import ceph
from tests.storage.conftest import HASTY
from tests.storage.fault_proxy import WRITES
from tests.storage.service import Service

__all__ = ["alone", "tars"]
pytestmark = [
    pytest.mark.ceph,
    pytest.mark.slow,  # tests/ingest/test_bucket.py has the same on a bucket without a server
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]


def convert(tars: Sequence[Path], store: BucketStore, **run: Any) -> ReshardSummary:
    return reshard(tars, store, Options(images_per_shard=8), Policy(), IngestRun(quiet=True, **run))


def start(tars: Path, store: BucketStore, *flags: object, endpoint: str = "") -> processes.Process:
    """A command that writes to a bucket, with its settings in environment variables and flags."""
    line = [sys.executable, "tools/reshard.py", tars, "--out", store.root, "--scratch", store.scratch, *flags]
    line += ["--json", "--images-per-shard", 8, *(["--endpoint", endpoint] if endpoint else [])]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ceph.KEY,
        "AWS_SECRET_ACCESS_KEY": ceph.SECRET,
        "AWS_ENDPOINT_URL": store.options["endpoint_url"],
    }
    return processes.Process(
        line,
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_the_bytes_are_those_of_a_local_run(
    tars: Path, tmp_path: Path, ceph_bucket: BucketStore, alone: dict[str, bytes]
) -> None:
    found = ended(start(tars, ceph_bucket, "--workers", 2))
    assert found["done"] == [f"sa_00000{number}" for number in range(TARS)]
    assert contents(ceph_bucket) == alone
    assert left(tmp_path) == []
    assert ended(start(tars, ceph_bucket))["done"] == []
    endpoint = ceph_bucket.options["endpoint_url"]
    assert ended(start(tars, ceph_bucket, "--redo", "sa_000001", endpoint=endpoint))["done"] == ["sa_000001"]
    assert contents(ceph_bucket) == alone


def test_two_commands_at_the_same_time_share_the_work(
    tars: Path, tmp_path: Path, ceph_bucket: BucketStore, alone: dict[str, bytes]
) -> None:
    found = [ended(process) for process in [start(tars, ceph_bucket) for _ in range(2)]]
    done = [name for one in found for name in json.loads(json.dumps(one["done"]))]
    assert sorted(done) == [f"sa_00000{number}" for number in range(TARS)]
    assert contents(ceph_bucket) == alone
    assert left(tmp_path) == []


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_command_that_is_killed_at_any_time_is_resumed(
    tars: Path, tmp_path: Path, ceph_bucket: BucketStore, alone: dict[str, bytes], kills: int
) -> None:
    for number in range(kills):
        process = start(tars, ceph_bucket, "--workers", 2)
        time.sleep(0.5 + 3.5 * number / kills)
        process.send_signal(signal.SIGKILL, session=True)
        process.communicate(timeout=60)
    assert ended(start(tars, ceph_bucket))["complete"]
    assert contents(ceph_bucket) == alone
    assert left(tmp_path) == []


@pytest.mark.slow  # quick ones: the kills above, and uploads of killed processes in storage/test_ceph_writes.py
def test_a_run_killed_while_it_uploads_a_shard_in_parts_leaves_nothing(
    tmp_path: Path, ceph_bucket: BucketStore
) -> None:
    points = [45, 47, 52, 57, 59]  # within the upload of the first shard
    result = killed_at(tmp_path, ceph_bucket.root, ceph_bucket.options, points, large=True)
    assert result["wrong"] == []
    assert result["killed"] == len(points)
    assert result["uploads"] > 0  # some runs left one, which the next run removed


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_runs_killed_at_every_request_are_resumed(
    tmp_path: Path, ceph_bucket: BucketStore, large: bool
) -> None:
    result = killed_at(tmp_path, ceph_bucket.root, ceph_bucket.options, None, large=large)
    assert result["wrong"] == []
    assert result["killed"] >= 100


def test_a_gateway_that_restarts_is_waited_for(
    tars: Path, tmp_path: Path, gateway: ceph.Gateway, ceph_bucket: BucketStore, alone: dict[str, bytes]
) -> None:
    process = start(tars, ceph_bucket)
    ceph.wait_for(lambda: bool(ceph_bucket.names("tasks", ".json")), "the first source")
    gateway.kill_gateway()
    time.sleep(3)
    assert process.poll() is None
    gateway.start_gateway()
    found = ended(process)
    assert (found["complete"], found["retried"]) == (True, {})
    assert contents(ceph_bucket) == alone


def test_a_gateway_that_stays_away_is_named_and_the_next_run_resumes(
    tars: Path, tmp_path: Path, gateway: ceph.Gateway, ceph_bucket: BucketStore, alone: dict[str, bytes]
) -> None:
    hasty = BucketStore(
        ceph_bucket.root,
        scratch=ceph_bucket.scratch,
        options=ceph_bucket.options,
        retry_policy=RetryPolicy(deadline=2, attempt_timeout=1),
    )

    def kill() -> None:
        ceph.wait_for(lambda: bool(ceph_bucket.names("tasks", ".json")), "the first source")
        gateway.kill_gateway()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        summary = convert([tars], hasty)
    finally:
        killer.join()
        gateway.start_gateway()
    assert (summary.exit_code(), summary.complete) == (1, False)
    assert f"{ceph_bucket.root}/" in summary.store_error
    assert "unavailable" in summary.store_error
    assert ceph_bucket.names("tasks", ".failed") == []
    assert left(tmp_path) == []
    again = convert([tars], ceph_bucket)
    assert (again.exit_code(), again.complete) == (0, True)
    assert contents(ceph_bucket) == alone


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_faults_of_reads_and_writes_change_no_byte(
    tars: Path,
    tmp_path: Path,
    gateway: ceph.Gateway,
    ceph_bucket: BucketStore,
    alone: dict[str, bytes],
    seed: int,
) -> None:
    faults = (*WRITES, "reset", "reset_body", "stall", "stall_body", "busy")
    with Service("fault_proxy", gateway.port, seed, 0.1, *faults) as proxy:
        options = {**ceph_bucket.options, "endpoint_url": proxy.url}
        store = BucketStore(
            ceph_bucket.root, scratch=ceph_bucket.scratch, options=options, retry_policy=HASTY
        )
        summary = convert([tars], store, workers=2)
        fired = proxy.ask({"do": "log"})["faults"]
    assert (summary.failed, summary.store_error, summary.exit_code()) == ({}, "", 0)
    assert len(fired) > 5
    assert contents(ceph_bucket) == alone
    assert left(tmp_path) == []


def test_denied_access_and_a_missing_bucket_are_named_before_anything_is_converted(
    tars: Path, tmp_path: Path, ceph_bucket: BucketStore
) -> None:
    wrong = {**ceph_bucket.options, "secret": "wrong"}
    with pytest.raises(DeniedError, match="shards/.*denied.*AWS_ACCESS_KEY_ID"):
        convert([tars], BucketStore(ceph_bucket.root, scratch=tmp_path / "scratch", options=wrong))
    missing = BucketStore("s3://never/shards", scratch=tmp_path / "scratch", options=ceph_bucket.options)
    with pytest.raises(StorageError, match=r"s3://never/shards/.*create the bucket first"):
        convert([tars], missing)
    assert contents(ceph_bucket) == {}
    assert left(tmp_path) == []


def test_a_bucket_that_can_only_be_read_is_named_before_anything_is_converted(
    tars: Path, tmp_path: Path, ceph_bucket: BucketStore
) -> None:
    convert([tars / "sa_000000.tar"], ceph_bucket)
    before = contents(ceph_bucket)
    name = ceph_bucket.root.split("/")[2]
    allowed = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    with Reader(f"s3://{name}", options=ceph_bucket.options) as reader:
        reader.request(
            "", lambda system: system._call_s3("put_bucket_policy", Bucket=name, Policy=policy)
        ).result()
    anonymous = {"anon": True, "endpoint_url": ceph_bucket.options["endpoint_url"]}
    reader_only = BucketStore(ceph_bucket.root, scratch=tmp_path / "scratch", options=anonymous)
    assert sorted(read_tasks(reader_only)) == ["sa_000000"]
    with pytest.raises(DeniedError, match=r"shards/.*denied.*Writing needs permission"):
        convert([tars], reader_only)
    assert contents(ceph_bucket) == before
    assert left(tmp_path) == []
