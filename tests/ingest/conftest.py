"""Ingest of a bad pair among good ones, with the checks that always hold; a small disk."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import disks
from tests.directories import short_commands, tars, whole
from tests.ingest.bad_pairs import BAD, GOOD, Outcome, typed
from tests.shards import tiny
from tests.shards.tiny import pair, pair_members, pairs
from tests.storage.conftest import azurite_server, ceph_bucket, cloud, cloud_bucket, gateway, gcs_server
from tests.storage.service import Service

__all__ = [
    "azurite_server",
    "ceph_bucket",
    "cloud",
    "cloud_bucket",
    "gateway",
    "gcs_server",
    "short_commands",
    "tars",
    "whole",
]


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    tiny.make_tar(tmp_path / "sa_000001.tar", range(10))
    return tmp_path / "sa_000001.tar"


@pytest.fixture
def host(downloads: Path) -> Iterator[Service]:
    with Service("range_server", downloads.parent) as service:
        yield service


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    with disks.small_disk(tmp_path / "small", 1 << 20) as disk:
        yield disk


@pytest.fixture
def ingest(tmp_path):
    """Members -> Outcome, with the checks that always hold."""

    def ingest(members, *, gzip=False, **options):
        path = tiny.write_tar(tmp_path / "sa_000020.tar", members, gzip)
        task = tiny.ingest_tar(path, tmp_path / "root", **options)
        outcome = Outcome(tmp_path / "root", task).check(members)
        assert not list((tmp_path / "root").rglob("*.spill"))
        for line in outcome.refused:  # the offset points to the member
            if line["name"] is not None:
                stored = path.read_bytes()[line["offset"] : line["offset"] + 100]
                assert stored.startswith(line["name"].encode()[:90])
        return outcome

    return ingest


@pytest.fixture
def bad_pair(ingest):
    """A jpg and a json of image BAD, among good pairs -> Outcome."""

    def bad_pair(jpeg=None, text=None, **options):
        members = [*pairs(GOOD), *pair_members(BAD, jpeg, text)]
        random.Random(1).shuffle(members)
        return ingest(members, **options)

    return bad_pair


@pytest.fixture
def refused(bad_pair):
    """The one reason and message for which the bad pair is refused, both halves of it."""

    def refused(jpeg=None, text=None, **options):
        outcome = bad_pair(jpeg, text, **options)
        assert BAD not in outcome.samples
        assert sorted(line["name"] for line in outcome.refused) == [f"./sa_{BAD}.jpg", f"./sa_{BAD}.json"]
        ((reason, message),) = {(line["reason"], line["message"]) for line in outcome.refused}
        assert outcome.task.counts["refused"] == {reason: 1}
        assert outcome.warnings == []
        return reason, message

    return refused


@pytest.fixture
def kept(bad_pair):
    """The reasons for which the odd pair is listed; it is kept exactly, types and all."""

    def kept(jpeg=None, text=None, **options):
        outcome = bad_pair(jpeg, text, **options)
        stored_jpeg, stored = outcome.samples[BAD]
        usual = pair(BAD)
        assert stored_jpeg == (usual[0] if jpeg is None else jpeg)
        assert typed(stored) == typed(json.loads(usual[1] if text is None else text))
        assert outcome.refused == []
        assert {line["image_id"] for line in outcome.warnings} <= {BAD}
        return {line["reason"]: line["message"] for line in outcome.warnings}

    return kept
