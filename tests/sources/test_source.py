"""One source read once: digests, changes while it is read, and checklists."""

import hashlib
import json
import shutil

import pytest

import sa1b
from sa1b.sources.discovery import discover
from sa1b.sources.source import SourceReader
from tests.kit import refused
from tests.shards import tiny
from tests.shards.tiny import make_tar, pairs
from tests.sources.archives import extract
from tests.sources.meanwhile import SHARD, reshard_while

IDS = range(100, 106)


def test_digests_are_of_the_file_as_stored_and_a_checklist_is_what_md5sum_writes(tmp_path):
    lines, digests = "", {}
    for number, form in enumerate(("{} {}\r\n", "{}  x/{}\n\n", "{} *{}\n", "{}\t{}\n")):
        name = f"sa_00002{number}"
        make_tar(tmp_path / "in" / f"{name}.tar", [number], gzip=number > 1)
        stored = (tmp_path / "in" / f"{name}.tar").read_bytes()
        digests[name] = hashlib.md5(stored).hexdigest(), hashlib.sha256(stored).hexdigest()
        lines += form.format(digests[name][0].upper() if number else digests[name][0], f"{name}.tar")
    extract(pairs([9]), images=tmp_path / "in" / "sa_000029")  # of which a checklist says nothing
    (tmp_path / "md5.txt").write_text(f"{lines}{'0' * 32}  sa_000029\n", newline="")
    root = tmp_path / "root"
    made = sa1b.reshard(tmp_path / "in", root, md5=tmp_path / "md5.txt", workers=1, quiet=True)
    assert (made.failed, made.done) == ({}, [*digests, "sa_000029"])
    for name, expected in digests.items():
        source = json.loads((root / "tasks" / f"{name}.json").read_text())["source"]
        assert (source["md5"], source["sha256"]) == expected


@pytest.mark.parametrize(
    "line", [b"sa_000020.tar", b"0" * 31 + b"  sa_000020.tar", b"\xff\xfe\x00", b"g" * 32 + b" x", b"0" * 32]
)
def test_a_checklist_line_of_another_form_is_named(tmp_path, line):
    path = tmp_path / "md5.txt"
    path.write_bytes(b"0" * 32 + b"  sa_000019.tar\n" + line)
    make_tar(tmp_path / "sa_000020.tar", IDS)
    words = tmp_path / "sa_000020.tar", "--out", tmp_path / "root", "--md5"
    refused("reshard", *words, path, names="md5.txt, line 2")
    refused("reshard", *words, tmp_path / "none.txt", names="none.txt")


def test_a_source_whose_shards_would_replace_those_of_another_run_is_refused(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    shutil.copy(tmp_path / "sa_000020.tar", tmp_path / "000020.tar")
    done = refused("reshard", tmp_path / "000020.tar", "--out", tmp_path / "root", names="'sa_000020'")
    assert f"--rename {tmp_path / '000020.tar'}=" in done.err


# Changes while it is read


@pytest.mark.parametrize("change", ["overwritten", "replaced", "appended", "removed", "touched", "read"])
def test_a_tar_that_changes_while_it_is_read_is_noticed_though_its_time_is_restored(tmp_path, change):
    path = tmp_path / "sa_000020.tar"
    make_tar(path, IDS)
    done = reshard_while(change, path, "write", SHARD, path, "--out", tmp_path / "root")
    check_whole_or_named(done, path, tmp_path / "root", change)


@pytest.mark.parametrize("change", ["overwritten", "replaced", "added", "removed", "read"])
def test_a_folder_that_changes_while_it_is_read_is_noticed_though_times_are_restored(tmp_path, change):
    path = tmp_path / "sa_000020"
    extract(pairs(IDS), images=path)
    done = reshard_while(change, path / "sa_100.jpg", "write", SHARD, path, "--out", tmp_path / "root")
    check_whole_or_named(done, path, tmp_path / "root", change)


@pytest.mark.parametrize("change", ["appended", "removed"])
def test_a_tar_that_changes_before_it_is_read_is_noticed(tmp_path, change):
    path = tmp_path / "sa_000020.tar"
    make_tar(path, IDS)
    done = reshard_while(change, path, "os.link", "*", path, "--out", tmp_path / "root")
    check_whole_or_named(done, path, tmp_path / "root", change)


def check_whole_or_named(done, path, root, change):
    """A source that was only read by others is whole; of another one the name is said and no shard is left."""
    assert (done.code == 0) == (change == "read"), done.out + done.err
    assert change == "read" or str(path) in done.out + done.err
    assert "Traceback" not in done.err
    assert len(list(root.glob("*.tar"))) == (change == "read")


def test_the_second_pass_for_links_counts_no_bytes_twice_but_shows_that_work_goes_on(tmp_path):
    path = tmp_path / "sa_000020.tar"
    link = tiny.header("./sa_500.jpg", kind=b"1", link="./sa_100.jpg")
    path.write_bytes(tiny.tar_bytes(pairs(IDS), end=link + bytes(1024)))
    seen = []
    reader = SourceReader(discover([path]).sources[0], progress=seen.append)
    assert [item.name for item in reader.items()][-1] == "./sa_500.jpg"
    reader.close()
    assert sum(seen) == path.stat().st_size
    assert seen[-1] == 0
