"""`sa1b index` while readers have the directory open, after faults, and beside files that are not of the dataset."""

import os
import shutil

import pytest

from tests.directories import IDS, images
from tests.kit import files, run, run_when
from tests.steps import steps
from tests.verify.opened import no_memory
from tests.verify.test_index_command import JSON, OTHER, SHARD, TASK, lose, other_index, root

__all__ = ["root"]


def test_only_what_is_listed_or_added_is_indexed(root):
    shutil.copy(root / SHARD, root / "sa1b-000009-0000.tar")
    before = files(root)
    run("index", root)
    assert files(root) == before


@pytest.mark.parametrize("flags", [[], ["--tables"]])
def test_a_claim_without_a_heartbeat_is_no_hindrance(root, flags):
    before, claim = files(root), root / "tasks" / "sa_000002.claim"
    claim.write_text('{"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs"}')
    os.utime(claim, (0, 0))
    assert run("index", root, *flags, "--json").json["complete"]
    assert {name: data for name, data in files(root).items() if ".claim" not in name} == before


@pytest.mark.parametrize("case", ["indexes are lost", "an index has other bytes", "a task file is lost"])
def test_readers_see_all_images_at_every_change(root, case):
    """Of the documents the old ones stay until the last change, which is that of dataset.json."""
    if case == "an index has other bytes":
        other_index(root)
    else:
        lose(root, "*.parquet" if "indexes" in case else TASK)
    before, document = images(root), files(root)[JSON]
    with steps(root, "index", root) as changes:
        for _ in changes:
            assert images(root) == before
            assert files(root)[JSON] == document
    assert changes.code == 0
    assert images(root) == before
    assert (files(root)[JSON] == document) == ("indexes" in case)
    assert run("verify", root, "--deep", "--json").json["findings"] == []


def test_a_rebuild_without_memory_ends_with_a_message_and_goes_on(root):
    written = files(root)
    lose(root, "*.parquet")
    done = run_when(["index", root], "read", root / OTHER, no_memory)
    assert done.code == 2
    assert f"{root / OTHER}: " in done.err
    assert "--workers" in done.err
    again = run("index", root, "--json").json
    assert (again["resumed"], again["images"]) == (4, len(IDS))
    assert files(root) == written
