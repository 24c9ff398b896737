"""verify and index on a bucket: the report of a folder, faults on the way, and copies in the scratch folder."""

import errno
import shutil
import signal

import pytest

from tests.directories import bucket
from tests.kit import fail, refused, run, run_when
from tests.stream.leftovers import wait_for_end
from tests.verify import opened
from tests.verify.checking import content
from tests.verify.opened import standing

LAST = "sa1b-000002-0000.tar"


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root")


def test_a_clean_bucket_has_the_report_of_the_folder_and_leaves_no_copy(root, tmp_path):
    before, where, scratch = content(root), bucket(root), tmp_path / "scratch"
    words = ["verify", where, "--scratch", scratch, "--json"]
    for flags in (["--deep"], ["--warnings"]):
        here, there = run("verify", root, *flags, "--json").json, run(*words, *flags).json
        assert there["root"] == where
        assert {**there, "root": "", "seconds": 0} == {**here, "root": "", "seconds": 0}
    run_when(words, "read", root / "*.tar", opened.note, tmp_path / "told")
    names = (tmp_path / "told").read_text().splitlines()
    assert len(names) <= 10  # of each shard, its first bytes and all of them
    assert content(root) == before
    assert content(scratch) == {}


def test_damage_in_transit_is_no_damage(root, tmp_path):
    """The first copy of each shard has a flipped bit."""
    scratch = tmp_path / "scratch"
    words = ["verify", bucket(root), "--scratch", scratch, "--json"]
    done = run_when(words, "read", scratch / "*.tar", opened.flip, tmp_path / "told")
    assert (done.code, done.json["findings"], done.json["shards"]) == (0, [], 5)
    assert len(list((tmp_path / "told").iterdir())) == 5


def test_an_object_that_is_not_read_is_not_checked_and_no_damage(root):
    done = run_when(["verify", bucket(root), "--json"], "read", root / LAST, fail, errno.EACCES)
    assert (done.code, done.json["findings"], list(done.json["unchecked"])) == (2, [], [LAST])
    assert f"{bucket(root)}/{LAST}" in done.json["unchecked"][LAST]


@pytest.mark.parametrize("verb", ["verify", "index"])
def test_copies_of_killed_processes_are_removed(root, tmp_path, verb):
    scratch = tmp_path / "scratch"
    words = [verb, bucket(root), "--scratch", scratch]
    with standing(tmp_path / "told", scratch / "*.tar", *words) as process:
        assert content(scratch)
        process.send_signal(signal.SIGKILL, session=True)
        process.wait(opened.SECONDS)
    wait_for_end(process.pid, opened.SECONDS)
    run(*words)
    assert content(scratch) == {}


def test_too_little_space_is_refused_before_a_shard_is_fetched(root, tmp_path, monkeypatch):
    largest = max(path.stat().st_size for path in root.glob("*.tar"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("", (), {"free": largest}))
    scratch = tmp_path / "scratch"
    refused("verify", bucket(root), "--scratch", scratch, names="--scratch")
    assert content(scratch) == {}
