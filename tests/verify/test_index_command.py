"""`sa1b index` makes again what can be derived, with equal bytes, and forgets no image."""

import hashlib
import itertools
import json
import os
import re
import shutil
import sys

import pytest

from tests.directories import IDS, SOURCES, bucket, images, reshard
from tests.kit import files, flip, put, refused, run
from tests.shards.tiny_source import pairs, write_source
from tests.steps import steps

pytestmark = pytest.mark.usefixtures("short_commands")

SHARD, INDEX, OTHER = "sa1b-000001-0001.tar", "sa1b-000001-0001.parquet", "sa1b-000002-0000.tar"
TASK, ROWS, JSON = "tasks/sa_000001.json", "tasks/sa_000001.samples", "dataset.json"
UNLISTED = "sa1b-000003-0000"
LOSSES = {
    "an index": [INDEX],
    "a damaged index": [],
    "a shard": [SHARD],
    "unlisted shards": [],
    "a task file": [TASK],
    "a broken task file": [],
    "rows": [ROWS],
    "the sample table": ["samples-*.bin"],
    "dataset.json": [JSON],
    "a broken dataset.json": [],
}

PAIRS = [pair for pair in itertools.combinations(LOSSES, 2) if pair != ("an index", "a damaged index")]


@pytest.fixture(scope="module")
def third(tmp_path_factory):
    """A directory of a third source, three images in a shard."""
    folder = tmp_path_factory.mktemp("third")
    reshard(folder / "root", write_source(folder / "sa_000003.tar", pairs(range(500, 503), seed=5)))
    return folder / "root"


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root")


def lose(root, *patterns):
    for path in [path for pattern in patterns for path in root.glob(pattern)]:
        path.unlink()


def damage(root, what, third):
    lose(root, *LOSSES[what])
    if what == "a damaged index":
        flip(root, INDEX)
    elif what == "unlisted shards":
        for ending in (".tar", ".parquet"):
            shutil.copy(third / f"{UNLISTED}{ending}", root)
    elif what.startswith("a broken"):
        put(root, JSON if "dataset" in what else TASK, b"{")


def check_made(root, written, done, *, third):
    """All that a complete run must have done; `written` are the files before the damage."""
    now, ids = files(root), [*IDS, 500, 501, 502] if third else IDS
    assert f"Complete: {root}/dataset.json" in done.out
    assert sorted(images(root)) == ids
    unlike = {name for name in written if now.get(name) != written[name]}
    task = {TASK, JSON} if "no task file of sa_000001" in done.out else set()
    grown = {JSON, *(name for name in written if name.startswith("samples-"))} if third else set()
    assert unlike == task | grown
    assert len([name for name in now if name.startswith("samples-")]) == 1
    report = run("verify", root, "--deep", "--json").json
    assert report["findings"] == []
    assert report["unlisted_images"] == 0


@pytest.mark.parametrize(
    ("losses", "place"),
    [
        *(((one,), place) for one in LOSSES for place in ("folder", "bucket")),
        *((pair, "folder") for pair in PAIRS),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_what_is_lost_or_damaged_is_made_again_and_no_image_is_forgotten(root, third, losses, place):
    written, before = files(root), images(root)
    for loss in losses:
        damage(root, loss, third)
    damaged = files(root)
    where = bucket(root) if place == "bucket" else root
    if "a shard" in losses:
        done = run("index", where, "--json", code=1)
        assert list(done.json["failed"]) == [SHARD]
        assert f"{where}/{SHARD}: not there; restore it from a copy, or run `sa1b reshard`" in done.json[
            "failed"
        ][SHARD].replace(f"{sys.executable} -m ", "")
        assert (done.json["complete"], done.json["shards"]) == (
            False,
            5 if "unlisted shards" in losses else 4,
        )
        now = files(root)
        assert now.keys() >= damaged.keys()
        assert {name for name in damaged if now[name] != damaged[name]} <= {INDEX}
        put(root, SHARD, written[SHARD])
    done = run("index", where)
    check_made(where, written, done, third="unlisted shards" in losses)
    assert before.items() <= images(root).items()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_index_runs": True},
        {"keep_json": True},
        {"image_size": 32, "quality": 80},
        {"annotations_only": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("left", ["the task files", "dataset.json", "the shards"])
def test_all_is_made_again_of_what_is_left(tars, tmp_path, options, left):
    reshard(tmp_path / "root", *tars, **options)
    root, written = tmp_path / "root", files(tmp_path / "root")
    # That indexes are without masks is known of the other files, or of an index.
    kept = {"the task files": ["tasks/*.json"], "dataset.json": [JSON]}.get(
        left, ["*.parquet"] if "no_index_runs" in options else []
    )
    for name in written:
        if not any((root / name).match(one) for one in ("*.tar", "quarantine/*/*", *kept)):
            put(root, name, None)
    done = run("index", root, "--workers", 2)
    now = files(root)
    unlike = {name for name in written if now.get(name) != written[name]}
    without = left != "the task files"
    assert unlike == ({TASK, "tasks/sa_000002.json", JSON} if without else set())
    assert ("rebuilt from the shards" in done.out) == without
    assert ("cannot be detected" in done.out) == (left == "the shards")
    old, new = json.loads(written[JSON]), json.loads(now[JSON])
    assert all(old[key] == new[key] for key in ("options", "shards", "samples"))
    assert run("verify", root, "--deep", "--json").json["findings"] == []
    again = reshard(root, *tars, **options)  # the source of a task file that was made again is read once more
    assert sorted(again.done) == (list(SOURCES) if without else [])
    assert files(root) == written


def test_images_that_only_the_sample_table_shows_are_not_forgotten(root, tmp_path):
    lose(root, "tasks/sa_000001.*", JSON, "sa1b-000001-*")
    (table,) = root.glob("samples-*.bin")
    before = files(root)
    for flags in ([], ["--tables"]):
        done = refused(
            "index", root, *flags, names=f"{table}: lists 16 images that no shard of the directory contains"
        )
        assert "restore their shards from a copy, or convert their source" in done.err
        assert files(root).items() >= before.items()
    run("reshard", "--out", root, "--finish", code=None)
    assert table.exists()
    lose(root, JSON)
    table.rename(tmp_path / table.name)  # as the message says
    run("index", root)
    assert sorted(images(root)) == SOURCES["sa_000002"]


def test_a_gap_in_the_shards_of_a_source_without_task_file_is_refused(root):
    lose(root, "tasks/*.json", "samples-*.bin", JSON, SHARD)
    before = files(root)
    refused("index", root, names=SHARD)
    assert files(root) == before


def test_shards_of_runs_with_different_options_are_refused(root, tmp_path, tars):
    reshard(tmp_path / "other", tars[1], images_per_shard=2)
    for path in (tmp_path / "other").glob("sa1b-*"):
        shutil.copy(path, root)
    lose(root, "tasks/*.json", "samples-*.bin", JSON)
    refused("index", root, names="differ in images in full shards")


@pytest.mark.parametrize("how", ["of the dataset", "damaged", "of a user", "with other options"])
def test_a_shard_that_cannot_be_added_is_named(root, third, tmp_path, how):
    written = files(root)
    data = {"of the dataset": written[OTHER], "of a user": b"mine"}.get(how, files(third)[f"{UNLISTED}.tar"])
    if how == "damaged":
        data = data[:2000] + b"damage" + data[2006:]
    if how == "with other options":
        reshard(tmp_path / "other", third.parent / "sa_000003.tar", keep_json=True)
        data = files(tmp_path / "other")[f"{UNLISTED}.tar"]
    put(root, f"{UNLISTED}.tar", data)
    done = run("index", root)
    assert re.search(
        f"note: {UNLISTED}.tar,? (which no task file lists, is not added|has the name but not)", done.out
    )
    assert files(root)[f"{UNLISTED}.tar"] == data
    assert {name: data for name, data in files(root).items() if UNLISTED not in name} == written


@pytest.mark.parametrize("change", ["cut", "empty", "name", "content"])
def test_a_damaged_shard_gets_no_index(root, change):
    data = files(root)[SHARD]
    changed = {"cut": data[:3000], "empty": b"", "name": data.replace(b"sa_10", b"sa_20", 1)}
    put(root, SHARD, changed.get(change, data[:1212] + bytes([data[1212] ^ 1]) + data[1213:]))
    before = files(root)
    put(root, "sa1b-000001-0000.parquet", None)
    for words in ([root], [root / SHARD]):
        failed = run("index", *words, "--json", code=1).json["failed"]
        assert list(failed) == [SHARD]
        assert f"{root}/{SHARD}" in failed[SHARD]
        assert ("has changed since it was written" if change == "content" else "offset") in failed[SHARD]
        assert files(root) == before  # and the index of the intact shard is there again


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_single_shards(root, place):
    written, where = files(root), bucket(root) if place == "bucket" else root
    flip(root, INDEX)
    lose(root, "sa1b-000002-0000.parquet", JSON)
    done = run("index", f"{where}/{SHARD}", f"{where}/{OTHER}", "--json").json
    assert (done["shards"], done["images"], done["notes"]) == (2, 8, [])
    assert files(root) == {name: data for name, data in written.items() if name != JSON}


def test_a_shard_alone_in_a_folder(whole, tmp_path):
    shutil.copy(whole / SHARD, tmp_path)
    run("index", tmp_path / SHARD)
    assert files(tmp_path) == {name: files(whole)[name] for name in (SHARD, INDEX)}


TABLES = {
    "dataset.json": [JSON],
    "the sample table": ["samples-*.bin"],
    "rows": [ROWS],
    "all": [JSON, "*.bin", "tasks/*.samples"],
}


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize("what", [*TABLES, "damaged"])
def test_tables_without_reading_a_shard(root, what, place):
    written = files(root)
    lose(root, *TABLES.get(what, []))
    for name in written:
        if what == "damaged" and re.match("samples-|tasks/.*samples|dataset.json", name):
            flip(root, name, 200)
        elif name.endswith(".tar"):
            put(root, name, b"")
    run("index", bucket(root) if place == "bucket" else root, "--tables")
    assert files(root) == {name: b"" if name.endswith(".tar") else data for name, data in written.items()}


@pytest.mark.parametrize(
    ("gone", "names"),
    [
        ([TASK], "no intact task file of sa_000001; omit --tables"),
        ([ROWS, INDEX], "without --tables, rebuilds it"),
        (["*", "tasks/*"], "no dataset there"),
    ],
)
def test_tables_that_need_a_shard_are_refused(root, gone, names):
    for pattern in gone:
        lose(
            root,
            *(
                [pattern]
                if "*" not in pattern
                else [path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file()]
            ),
        )
    before = files(root)
    refused("index", root, "--tables", names=names)
    assert files(root) == before


def test_a_task_file_that_dataset_json_does_not_list_is_not_taken_over(root):
    put(root, TASK, files(root)[TASK].replace(b'"area": 1', b'"area": 2'))
    before = files(root)
    for flags in ([], ["--tables"]):
        refused("index", root, *flags, names="sa_000001.json: not the one that dataset.json lists")
        assert files(root) == before


def test_an_index_of_other_versions_is_said_and_recorded(root):
    """As if other versions of the libraries had written it."""
    right = json.loads(files(root)[TASK])["shards"][1]["index_sha256"].encode()
    task = re.sub(rb'"pyarrow": "[^"]*"', b'"pyarrow": "1.0"', files(root)[TASK].replace(right, b"0" * 64))
    document = json.loads(files(root)[JSON].replace(right, b"0" * 64))
    put(root, TASK, task)
    sealed = json.loads(task)  # without what differs between copies of a source
    del sealed["format"]
    sealed["source"] = {
        key: value for key, value in sealed["source"].items() if key not in ("mtime_ns", "md5")
    }
    document["sources"]["sa_000001"] = hashlib.sha256(
        f"{json.dumps(sealed, indent=1)}\n".encode()
    ).hexdigest()
    put(root, JSON, f"{json.dumps(document, indent=1)}\n".encode())
    (note,) = run("index", root, "--json").json["notes"]
    assert note.startswith(f"{INDEX}: its bytes differ")
    assert "pyarrow 1.0, now" in note
    assert run("verify", root, "--deep", "--json").json["findings"] == []


def test_sources_that_failed_or_are_pending_stay_recorded(root, tmp_path):
    (tmp_path / "sa_000007.tar").write_bytes(b"\x1f\x8b no gzip behind it")
    reshard(root, tmp_path / "sa_000007.tar")
    assert "sa_000007" in json.loads(files(root)[JSON])["failed"]
    before = files(root)
    for flags in ([], ["--tables"]):
        run("index", root, *flags)
        assert files(root) == before


# Other commands at the same time, and interruptions


def test_a_directory_that_another_command_changes_is_refused(root, tars):
    for words, names in (
        (
            ["reshard", tars[0], "--out", root, "--images-per-shard", 5, "--redo", "sa_000001"],
            "at work on sa_000001",
        ),
        (["index", root], "being indexed by another process"),
    ):
        with steps(root, *words) as changes:
            standing = iter(changes)
            next(standing)
            before = files(root)
            for flags in ([root], [root, "--tables"], [root / SHARD]):
                refused("index", *flags, names=names)
                assert files(root) == before
        run("index", root)  # the claim of a killed command is no hindrance


@pytest.mark.parametrize("change", ["", "index", "lost index", "time of a shard", "shard", "record"])
def test_a_killed_run_goes_on_and_what_changed_since_is_done_again(root, change):
    written = files(root)
    lose(root, "*.parquet")
    with steps(root, "index", root) as changes:
        for count, _ in enumerate(changes, 1):
            if count == 5:
                changes.kill()
                break
    shard, record = root / "sa1b-000001-0000.tar", root / ".index-progress.jsonl"
    recorded = (
        record.read_bytes().count(b"\n") - 1
    )  # a line for each shard, as far as the killed command came
    if change == "index":
        flip(root, "sa1b-000001-0000.parquet")
    elif change == "lost index":
        lose(root, "sa1b-000001-0000.parquet")
    elif change == "time of a shard":
        shard.touch()
    elif change == "shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif change == "record":  # a crash cut it
        record.write_bytes(record.read_bytes()[:-20])
    done = run("index", root, "--json", code=1 if change == "shard" else 0).json
    assert done["resumed"] == (recorded if change == "" else max(0, recorded - 1))
    if change == "shard":
        assert list(done["failed"]) == [shard.name]
    else:
        assert files(root) == written
        assert not record.exists()


def other_index(root):
    """As if another version had written an index: task file and dataset.json have another digest."""
    right, wrong = json.loads(files(root)[TASK])["shards"][1]["index_sha256"].encode(), b"0" * 64
    put(root, TASK, files(root)[TASK].replace(right, wrong))
    task, document = json.loads(files(root)[TASK]), json.loads(files(root)[JSON].replace(right, wrong))
    del task["format"], task["source"]["mtime_ns"], task["source"]["md5"]
    sealed = f"{json.dumps(task, indent=1)}\n".encode()
    document["sources"]["sa_000001"] = hashlib.sha256(sealed).hexdigest()
    put(root, JSON, f"{json.dumps(document, indent=1)}\n".encode())


@pytest.mark.parametrize("case", ["a lost task file", "another index", "another index of a shard"])
def test_a_run_that_was_killed_before_its_last_change_is_ended_by_the_same_command(root, case):
    before, where = images(root), root / SHARD if "of a shard" in case else root
    lose(root, TASK) if "lost" in case else other_index(root)
    with steps(root, "index", where) as changes:
        for name in changes:
            if name == JSON:
                changes.kill()
                break
    assert name == JSON
    claim = json.loads((root / ".index.claim").read_bytes())
    claim["pid"], machine = os.getpid(), claim["process"].partition("-")[0]  # it is of another process by now
    (root / ".index.claim").write_text(json.dumps({**claim, "process": f"{machine}-{os.getpid()}"}))
    run("index", where)
    report = run("verify", root, "--deep", "--json").json
    assert (report["findings"], images(root)) == ([], before)
    assert not [*root.glob(".index*"), *root.rglob(".*.partial")]


def test_what_cannot_be_done_is_refused(root, tmp_path):
    for words, names in (
        ([], "ROOT"),
        ([root, root], "ROOT"),
        ([tmp_path / "nothing"], "no dataset there"),
        ([root / JSON], "dataset.json: a file; pass its folder"),
        ([root / "sa1b-000009-0000.tar"], "no such file"),
        ([root, "--workers", 0], "--workers"),
        ([root / SHARD, "--tables"], "--tables"),
    ):
        refused("index", *words, names=names)
