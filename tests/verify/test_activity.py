"""A check while other commands work on the directory, of directories that are not complete, and what it leaves alone."""

import errno
import json
import shutil
from hashlib import sha256

import pytest

from tests.directories import IDS, images, reshard
from tests.kit import ended, fail, files, kill, put, refused, run, run_when
from tests.shards.tiny_source import pairs, write_source
from tests.steps import steps
from tests.verify import opened
from tests.verify.checking import commands_in, content
from tests.verify.opened import standing

SHARD, LAST = "sa1b-000001-0001.tar", "sa1b-000002-0000.tar"
NEW = [500, 501, 502]
CHANGES = {
    "added": "reshard NEW --out ROOT --images-per-shard 5 --workers 1",
    "replaced": "reshard OTHER --out ROOT --images-per-shard 5 --workers 1 --replace",
    "read again": "reshard TAR --out ROOT --images-per-shard 5 --workers 1 --redo sa_000002",
    "dropped": "reshard --out ROOT --drop sa_000002",
}


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """Sources that are not in the directory: a third one, and another one with the name of the second."""
    folder = tmp_path_factory.mktemp("more")
    new = write_source(folder / "sa_000003.tar", pairs(NEW, seed=3))
    return new, write_source(folder / "other" / "sa_000002.tar", pairs(range(600, 609), seed=4))


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root")


def change(name, root, tars, more):
    places = {"NEW": more[0], "OTHER": more[1], "TAR": tars[1], "ROOT": root}
    return [str(places.get(word, word)) for word in CHANGES[name].split()]


@pytest.mark.parametrize(
    ("name", "file", "at"),
    [
        *((name, "sa1b-000001-0000.tar", 1) for name in CHANGES),
        ("replaced", "tasks/sa_000002.json", 1),
        ("replaced", "dataset.json", 2),  # it is compared with what was read of it
        ("replaced", LAST, 1),
        ("dropped", LAST, 1),
        ("added", "dataset.json", 3),
    ],
)
def test_what_another_command_changes_during_the_check_is_no_damage(
    root, tars, more, tmp_path, name, file, at
):
    with standing(tmp_path / "told", root / file, "verify", root, at=at) as process:
        assert run(*change(name, root, tars, more), code=None).code in (0, 3)
    done = ended(process)
    assert (done.code, done.json["findings"], done.json["unchecked"]) == (0, [], {}), done.err
    # What another command wrote is no leftover of an interrupted one.
    assert not any("interrupted" in note for note in done.json["notes"])
    assert run("verify", root, "--json").json["findings"] == []


@pytest.mark.parametrize("name", ["added", "replaced"])
def test_what_another_command_is_writing_is_no_damage_and_not_locked(root, tars, more, name):
    with steps(root, *change(name, root, tars, more)) as changes:
        for count, _ in enumerate(changes):
            if count % 3 == 0:
                before = content(root)
                report = run("verify", root, "--deep", "--json").json
                assert (report["findings"], content(root)) == ([], before)
    assert changes.code in (0, 3)  # 3: an image of the first source was refused
    assert not any("sa_0" in note for note in run("verify", root, "--json").json["notes"])


def test_claims_count_where_their_age_cannot_be_measured(root, tmp_path):
    """A directory that cannot be written to, such as a snapshot taken while reshard was running."""
    put(root, "tasks/sa_000002.claim", b"{}")
    put(root, "tasks/sa_000002.json", None)
    done = run_when(["verify", root, "--json"], "write", root / "*", fail, errno.EROFS)
    assert (done.code, done.json["findings"]) == (0, [])
    assert done.json["notes"][0].startswith("source sa_000002 is being worked on")


# Directories that are not complete


def test_a_directory_with_a_source_that_failed_is_clean_and_says_so(root, tmp_path):
    (tmp_path / "sa_000007.tar").write_bytes(b"\x1f\x8b no gzip behind it")
    reshard(root, tmp_path / "sa_000007.tar")
    report = run("verify", root, "--json").json
    assert report["findings"] == []
    assert "sa_000007" in "\n".join(report["notes"])


@pytest.mark.parametrize("case", ["a new one", "with images of another", "without its task file"])
def test_a_source_that_dataset_json_does_not_list_is_added_by_the_printed_command(root, tmp_path, case):
    other, is_twin, is_lost = tmp_path / "other", "another" in case, "without" in case
    reshard(other, write_source(tmp_path / "sa_000009.tar", pairs(IDS[:3] if is_twin else NEW)))
    for path in (*other.glob("sa1b-*"), *(() if is_lost else other.glob("tasks/*"))):
        shutil.copy(path, root / path.relative_to(other))
    before, report = images(root), run("verify", root, "--json").json
    assert report["unlisted_images"] == (3 if is_lost else 0)
    (note,) = report["notes"]
    (words,) = commands_in(note)
    run(*words, code=None)
    assert images(root).items() >= before.items()
    assert sorted(images(root)) == (IDS if is_twin else [*IDS, *NEW])
    notes = [note for note in run("verify", root, "--json").json["notes"] if "sa_000009" in note]
    assert [commands_in(note) for note in notes] == ([[]] if is_twin else [])


def test_leftovers_of_failed_and_interrupted_runs_are_notes(root):
    put(root, "tasks/sa_000009.failed", b'{"error": "SourceError", "message": "cut"}')
    for name in ("tasks/sa_000010.samples", "samples-0123456789abcdef.bin", ".partial/node7-4711/owner"):
        put(root, name, b"")
    report = run("verify", root, "--json").json
    assert report["findings"] == []
    for name in ("sa_000009", "sa_000010.samples", "samples-0123456789abcdef.bin", "node7-4711"):
        assert name in "\n".join(report["notes"])


def test_an_interrupted_rebuild_is_a_note_only_if_something_is_damaged(root):
    put(root, ".index-progress.jsonl", b"")
    assert run("verify", root, "--json").json["notes"] == []  # repaired by other means since
    next(root.glob("*.parquet")).unlink()
    (note,) = run("verify", root, "--json", code=1).json["notes"]
    assert commands_in(note) == [["index", str(root)]]


def test_directories_that_are_none_are_refused(root):
    for name in ("sa_000001", "sa_000002"):
        run("reshard", "--out", root, "--drop", name)
    for place in (root, "memory://nothing/there"):
        refused("verify", place, names=str(place))


def test_sources_that_an_earlier_version_wrote_without_rows_are_clean(root):
    document = json.loads(files(root)["dataset.json"])
    for name in document["sources"]:
        task = json.loads(files(root)[f"tasks/{name}.json"])
        del task["samples"]
        document["sources"][name] = written(root, name, task)
        put(root, f"tasks/{name}.samples", None)
    put(root, "dataset.json", f"{json.dumps(document, indent=1)}\n".encode())
    report = run("verify", root, "--deep", "--json").json
    assert (report["findings"], report["notes"], report["images"]) == ([], [], len(IDS))
    assert sorted(images(root)) == IDS


def written(root, name, task):
    """Write a task file; its digest, without what differs between copies of a source."""
    put(root, f"tasks/{name}.json", f"{json.dumps(task, indent=1)}\n".encode())
    source = {key: value for key, value in task["source"].items() if key not in ("mtime_ns", "md5")}
    sealed = {key: value for key, value in task.items() if key != "format"} | {"source": source}
    return sha256(f"{json.dumps(sealed, indent=1)}\n".encode()).hexdigest()


# What could not be checked is no damage


@pytest.mark.parametrize("fault", [opened.no_memory, opened.no_thread])
def test_a_shard_that_a_process_without_memory_or_threads_leaves_is_not_damaged(root, fault):
    done = run_when(["verify", root, "--json"], "read", root / "sa1b-000001-0001.*", fault)
    assert (done.code, done.json["findings"], list(done.json["unchecked"])) == (2, [], [SHARD])
    assert done.json["shards"] == 4


@pytest.mark.parametrize("pattern", ["sa1b-*.parquet", "sa1b-000001-0001.parquet"], ids=["all", "one"])
def test_shards_whose_processes_are_killed_are_not_checked_and_not_damaged(root, pattern):
    """As the kernel kills for lack of memory: the others are checked, and the check ends."""
    lost = sorted(path.with_suffix(".tar").name for path in root.glob(pattern))
    words = ["verify", root, "--workers", 2]
    done = run_when([*words, "--json"], "read", root / pattern, kill)
    assert (done.code, done.json["findings"], done.json["shards"]) == (2, [], 5 - len(lost))
    assert sorted(done.json["unchecked"]) == lost
    text = run_when(words, "read", root / pattern, kill)
    assert (text.code, text.out.splitlines()[-1]) == (2, f"NOT CHECKED: {root}")
    assert not commands_in(text.out)


def test_the_text_and_the_json_of_thousands_of_findings_are_short(root):
    put(root, "quarantine/sa_000001/refused.jsonl", b"no entry\n" * 1500)
    done = run("verify", root, code=1)
    assert len(done.out.splitlines()) < 60
    assert "1,500" in done.out
    report = run("verify", root, "--json", code=1).json
    assert 1500 <= sum(report["counts"]["quarantine/sa_000001/refused.jsonl"].values()) < 1510
    assert len(report["findings"]) < 1100


def test_the_work_before_the_first_shard_reads_no_index(root, tmp_path):
    run("layer", "drop", root, "round2")
    run_when(["verify", root, "--json"], "read", root / "*.*", opened.note, tmp_path / "told")
    names = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    order = list(dict.fromkeys(name for name in names if name.endswith((".tar", ".parquet"))))
    shards = sorted(root.glob("*.tar"))
    assert order == [str(path.with_suffix(one)) for path in shards for one in (".parquet", ".tar")]
