"""The stream from a production object store whose gateway is killed while a loader reads.

`pytest -m ceph`; skipped if the programs are not installed.
"""

import threading
import time
from itertools import islice
from pathlib import Path

import fsspec
import pytest

import sa1b
from tests.shards import tiny
from tests.storage import ceph
from tests.stream.test_stream import SMALL, assert_equal, take

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]
STEPS = 60


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, 60])
def test_no_step_is_lost_while_the_gateway_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny.synthesize(tmp_path / "sa_000001.tar", images=29, first_id=100, long_side=160)
    tiny.ingest_tar(tmp_path / "sa_000001.tar", tmp_path / "root", images_per_shard=7)
    damage_log = tmp_path / "damage_log.jsonl"
    expected = take(sa1b.Stream(tmp_path / "root", global_batch=4, epochs=None, **SMALL), STEPS)
    with ceph.Gateway() as gateway:
        system = fsspec.filesystem("s3", **gateway.options, skip_instance_cache=True)
        system.mkdir("bucket")
        system.put(str(tmp_path / "root"), "bucket/root", recursive=True)
        stream = sa1b.Stream(
            "s3://bucket/root",
            global_batch=4,
            epochs=None,
            storage_options=gateway.options,
            damage_log=damage_log,
            **SMALL,
        )
        found: list[sa1b.Batch] = []

        def train() -> None:
            for batch in islice(sa1b.Loader(stream, threads=2, quiet=True), STEPS):
                time.sleep(0.02)
                found.append(batch)

        trains = threading.Thread(target=train)
        trains.start()
        ceph.wait_for(lambda: len(found) > 10, "the first steps")
        gateway.kill_gateway()
        time.sleep(seconds)
        seen = len(found)
        gateway.start_gateway()  # by the main thread: daemons end with the thread that started them
        trains.join(120)
        assert seen < STEPS
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    assert not damage_log.exists()
