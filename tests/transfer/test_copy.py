"""`sa1b copy`: the same bytes, checked, resumed, and never into another dataset."""

import json
import shutil
import signal
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import sa1b
from tests.datasets import add_layer, add_view
from tests.kit import fault, files, flip, interrupt, kill, no_space, put, refused, run, started, stop, stopped
from tests.shards.tiny_source import pairs, write_source

SHARD, INDEX = "sa1b-000001-0001.tar", "sa1b-000001-0001.parquet"
FIRST, SECOND = "sa_000001", "sa_000002"


@pytest.fixture
def copy(tmp_path):
    """`sa1b copy --json` as a function; no command leaves a file in the scratch folder of a URL."""
    scratch = tmp_path / "scratch"

    def copied(root, dest, *flags, code=0):
        of_url = ("--scratch", scratch) if "://" in f"{root}{dest}" else ()
        found = run("copy", root, dest, "--json", *of_url, *flags, code=code).json
        assert [path for path in scratch.rglob("*") if path.is_file()] == []
        return found

    return copied


@pytest.fixture
def clean(tmp_path):
    """`sa1b verify` of a directory or, of a bucket in memory, of its files in a folder; there must be no finding."""

    def verified(root, *flags):
        folder = tmp_path / "verified"
        for name, data in files(root).items() if "memory://" in str(root) else ():
            put(folder, name, data)
        found = run("verify", folder if folder.exists() else root, "--json", *flags).json
        shutil.rmtree(folder, ignore_errors=True)
        assert found["findings"] == []
        return found

    return verified


def images(root, **options):
    samples = sa1b.open(root, **options)
    return [(one.image_id, one.jpeg, one.annotations.mask_id.tolist()) for one in samples]


def reshard(root, *sources, **options):
    return sa1b.reshard(sources, root, quiet=True, **{"workers": 1, "images_per_shard": 5, **options})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_copy_and_its_copy_have_the_same_bytes(root, place, copy, clean, tmp_path, workers):
    made = copy(root, place, "--workers", workers)
    assert (made["sources"], made["shards"], made["skipped"], made["layers"]) == (2, 5, [], ["round2"])
    assert files(place) == files(root)
    assert clean(place, "--deep")["notes"] == clean(root)["notes"]
    again = copy(root, place)
    nothing = {"skipped": [FIRST, SECOND], "bytes_copied": 0, "views": [], "layers": []}
    assert again.items() >= nothing.items()
    assert files(place) == files(root)
    assert run("copy", root, place).out.splitlines()[-1] == f"Complete: {place}/dataset.json"
    copy(place, tmp_path / "back", "--workers", workers)
    assert files(tmp_path / "back") == files(root)


@pytest.mark.parametrize("change", ["lost", "cut", "other bytes"])
def test_what_is_wrong_in_a_copy_is_copied_again(root, place, copy, change):
    data = files(root)[SHARD]
    if change == "lost":
        copy(root, place)
        put(place, SHARD, None)
        assert copy(root, place)["skipped"] == [SECOND]
    else:
        put(place, SHARD, data[:600] if change == "cut" else data[:512] + bytes(len(data) - 512))
        copy(root, place)
    assert files(place) == files(root)


@pytest.mark.parametrize("what", [interrupt, no_space])
@pytest.mark.parametrize("part", [0.05, 0.3, 0.55, 0.8])
def test_a_copy_that_ends_early_is_resumed_without_copying_twice(root, place, copy, tmp_path, what, part):
    with fault(place, 0, what) as whole:
        copy(root, place)
    if "://" in place:
        MemoryFileSystem.store.clear()
    else:
        shutil.rmtree(place)
    with fault(place, 1 + int(part * whole.seen), what) as one:
        done = run("copy", root, place, "--workers", 2, code=None)
    assert one.seen >= one.at
    # A store is tried again; whether Ctrl-C comes before the end of the command is up to the system.
    assert done.code in ((130, 0) if what is interrupt else (0,) if "://" in place else (1, 2)), done.err
    assert [thread for thread in threading.enumerate() if thread.name.startswith("copy")] == []
    before, original = files(place), files(root)
    finished = {name[6:-5] for name in before if name.startswith("tasks/") and name.endswith(".json")}
    assert {name for name in before if name.endswith(".claim")} == set()
    resumed = copy(root, place)
    assert set(resumed["skipped"]) == finished
    kept = [name for name in before if name.startswith("sa1b-") and f"sa_{name[5:11]}" not in finished]
    assert resumed["bytes_kept"] == sum(len(original[name]) for name in kept)
    assert files(place) == original


@pytest.mark.parametrize("part", [0.2, 0.8])
def test_a_killed_copy_is_resumed(root, copy, tmp_path, part):
    with fault(tmp_path / "whole", 0, kill) as whole:
        copy(root, tmp_path / "whole")
    dest = tmp_path / "out"
    killed = started("copy", root, dest, base=dest, at=1 + int(part * whole.seen), what=kill)
    assert killed.wait(60) == -signal.SIGKILL
    copy(root, dest)
    assert files(dest) == files(root)


def test_a_source_that_another_process_copies_is_left_to_it(root, copy, tmp_path):
    dest = tmp_path / "out"
    with started("copy", root, dest, base=dest, at=3, what=stop) as first:
        while not stopped(first):
            time.sleep(0.01)
        other = copy(root, dest, code=1)
        assert "is writing this source" in other["failed"][FIRST]
        assert json.loads(files(dest)["dataset.json"])["pending"] == [FIRST]
        first.send_signal(signal.SIGCONT)
        assert first.wait(60) == 0
    copy(root, dest)
    assert files(dest) == files(root)


@pytest.mark.parametrize("of", ["folder", "bucket"])
@pytest.mark.parametrize("how", ["flipped", "missing", "short"])
@pytest.mark.parametrize(
    ("name", "remedy"), [(SHARD, "reshard` again with the source, --out {} and --redo"), (INDEX, "index {}")]
)
def test_a_damaged_source_is_left_out_with_its_remedy(
    root, bucket, place, copy, clean, of, how, name, remedy
):
    given, sound = root if of == "folder" else bucket, files(root)
    if how == "flipped":
        flip(given, name)
    else:
        put(given, name, None if how == "missing" else sound[name][:-100])
    why = copy(given, place, code=1)["failed"][FIRST]
    assert why.startswith(f"{given}/{name}: ")
    assert remedy.format(given) in why
    document = json.loads(files(place)["dataset.json"])
    assert (list(document["sources"]), document["failed"]) == ([SECOND], {FIRST: why})
    clean(place)
    assert f"FAILED {FIRST}: {why}" in run("copy", given, place, code=1).out
    put(given, name, sound[name])
    again = copy(given, place)
    assert again["skipped"] == [SECOND]
    assert again["bytes_kept"] > 0
    assert files(place) == sound


def test_damage_in_transit_is_read_again(root, bucket, copy, tmp_path, monkeypatch):
    damaged, cat_file = set(), MemoryFileSystem.cat_file

    def flipped(system, path, *arguments, **more):
        data = cat_file(system, path, *arguments, **more)
        if "/sa1b-" not in path or path in damaged:
            return data
        damaged.add(path)
        return b"\xff" + data[1:]

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", flipped)
        copy(bucket, tmp_path / "back")
    assert len(damaged) == 10
    assert files(tmp_path / "back") == files(root)


@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.parametrize("change", ["replace", "drop", "add"])
def test_a_source_that_changes_during_its_copy_is_copied_by_the_next(
    root, place, copy, clean, tmp_path, at, change
):
    """The first copy is the old version, the new one, or says what failed; it is no mixture."""
    number = 3 if change == "add" else 1
    tar = write_source(tmp_path / f"sa_00000{number}.tar", pairs(range(900, 912), seed=9))

    def changed(_):
        if change == "drop":
            reshard(root, drop=[FIRST])
        else:
            reshard(root, tar, replace=True)

    with fault(place, at, changed) as one:
        done = run("copy", root, place, code=None)
    assert one.seen >= at
    if done.code == 0:
        clean(place)
    if f"tasks/{FIRST}.json" in files(place) and change != "add":  # the advice of the copy
        reshard(place, drop=[FIRST])
    copy(root, place)
    assert images(place) == images(root)
    clean(place)


def test_added_failed_and_repaired_sources_are_those_of_the_original(root, place, copy, tmp_path):
    copy(root, place)
    (bad := tmp_path / "sa_000008.tar").write_bytes(b"\x1f\x8b no gzip stream")
    reshard(root, write_source(tmp_path / "sa_000003.tar", pairs(range(900, 905))), bad)
    assert {"tasks/sa_000008.failed", "quarantine/sa_000008/refused.jsonl"} <= files(root).keys()
    made = copy(root, place)
    assert (made["skipped"], made["missing"], made["failed"]) == ([FIRST, SECOND], ["sa_000008"], {})
    assert files(place) == files(root)
    put(place, "quarantine/sa_000008/refused.jsonl", b"")
    assert "1 source failed or pending (sa_000008)" in run("copy", root, place).out
    assert files(place) == files(root)
    reshard(root, write_source(bad, pairs(range(802, 805))))
    assert copy(root, place)["missing"] == []
    assert files(place) == files(root)


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("sa_000007", {}, "has no sa_000007"),
        (FIRST, {}, "another sa1b-000001-0000.tar"),
        (FIRST, {"keep_json": True}, "with --keep-json"),
    ],
)
def test_another_dataset_is_refused(root, place, copy, tmp_path, name, options, names):
    tar = write_source(tmp_path / "other" / f"{name}.tar", pairs(range(700, 704)))
    reshard(tmp_path / "other root", tar, **options)
    copy(tmp_path / "other root", place)
    before = files(place)
    refused("copy", root, place, names=names)
    assert files(place) == before


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("copy {root} {root}", "DEST"),
        ("copy {root} {root}/", "DEST"),
        ("copy {root} {root}/inner", "DEST"),
        ("copy {root} {mine}/notes.txt", "is a file"),
        ("copy {root} {mine}", "contains 'notes.txt'"),
        ("copy {mine} {out}", "no dataset there"),
        ("copy {root} {out} --workers 0", "--workers 0"),
        ("copy {root} {out} --shards * --view two", "--shards: cannot be combined with --view"),
        ("copy {root} {out} --shards sa1b-9*", "--shards sa1b-9*: no shard of "),
        ("copy {root} {out} --view absent", "absent"),
        ("copy {root} {out} --scratch x", "--scratch x"),
        ("copy {root} http://127.0.0.1:1/out", "http can only be read"),
        ("view {root} --out s3://bucket/out", "--out s3:/bucket/out: must be a path"),
        ("gallery {root} --out s3://bucket/out", "--out s3:/bucket/out: must be a path"),
        ("export {root} --to sa1b --out s3://bucket/out", "--out s3:/bucket/out: must be a path"),
    ],
)
def test_arguments_that_are_refused(root, tmp_path, words, names):
    put(tmp_path / "mine", "notes.txt", b"mine")
    before = files(tmp_path)
    places = {name: tmp_path / name for name in ("root", "mine", "out")}
    refused(*(word.format(**places) for word in words.split()), names=names)
    assert files(tmp_path) == before


@pytest.mark.parametrize("task", ["lost", "changed"])
def test_a_wrong_task_file_is_refused(root, place, task):
    text = files(root)[name := f"tasks/{FIRST}.json"]
    put(root, name, None if task == "lost" else text.replace(b'"members": ', b'"members": 1'))
    refused("copy", root, place, names=f"{FIRST}.json: not {'there' if task == 'lost' else 'the one'}")
    assert files(place) == {}


def test_too_little_space_is_refused(root, place, monkeypatch):
    largest = max(len(data) for name, data in files(root).items() if name.endswith(".tar"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": largest - 1}))
    refused("copy", root, place, names="MB free")
    assert files(place) == {}


def test_layers_are_copied_and_never_replaced(root, place, copy, tmp_path):
    copy(root, place)
    assert images(place, layers=["round2"]) == images(root, layers=["round2"])
    ids = [one.image_id for one in sa1b.open(root)]
    add_layer(root, tmp_path / "round3", "round3", ids[:2])
    flip(root, "layers/round3/masks.bin", 30)
    run("layer", "drop", root, "round2")
    add_layer(root, tmp_path / "round2", "round2", ids[:1])
    (root / "layers" / "unfinished").mkdir()
    before = files(place)
    failed = copy(root, place, code=1)["failed_layers"]
    assert "has a layer of this name" in failed.pop("round2")
    assert "layers/round3/masks.bin" in failed.pop("round3")
    assert failed == {}
    assert files(place) == before
    assert "FAILED layer round2: " in run("copy", root, place, code=1).out


def test_a_web_server_whose_listings_have_no_sizes_is_copied(root, copy, clean, tmp_path, monkeypatch):
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    copy(root, tmp_path / "part", "--shards", "sa1b-000002-*")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            copy(f"http://127.0.0.1:{server.server_port}/root", tmp_path / "out")
            clean(f"http://127.0.0.1:{server.server_port}/part")
        finally:
            server.shutdown()
    assert files(tmp_path / "out") == files(root)


def folder_of_bucket(root, path):
    """A bucket in fsspec's file system of this machine, which all processes see; it creates no folders."""
    for folder in {Path(name).parent for name in files(root)}:
        (path / folder).mkdir(parents=True, exist_ok=True)
    return f"local://{path}"


def test_a_bucket_that_all_processes_see_is_verified_there(root, copy, clean, tmp_path):
    copy(root, url := folder_of_bucket(root, tmp_path / "bucket"))
    clean(url, "--deep", "--workers", 2, "--scratch", tmp_path / "scratch")
    assert files(tmp_path / "bucket") == files(root)


class TestParts:
    """--shards and --view."""

    def test_the_shards_that_match_are_a_dataset_to_which_the_others_are_added(
        self, root, place, copy, clean
    ):
        made = copy(root, place, "--shards", "sa1b-000001-*1*", "--shards", "sa1b-000002-0000")
        assert made["partial"] == [FIRST]
        assert [name for name in files(place) if name.endswith(".tar")] == [SHARD, "sa1b-000002-0000.tar"]
        assert clean(place, "--deep")["shards"] == 2
        task, whole = (json.loads(files(one)[f"tasks/{FIRST}.json"]) for one in (place, root))
        part = [one.annotations for one in sa1b.open(place) if one.shard.startswith(SHARD[:-4])]
        sizes = [len(one.jpeg) for one in sa1b.open(place) if one.shard.startswith(SHARD[:-4])]
        assert (task["source"]["sha256"], task["shards"]) == (None, [whole["shards"][1]])
        counts = {"images": len(part), "masks": sum(map(len, part)), "jpg_bytes": sum(sizes)}
        assert task["counts"].items() >= counts.items()
        largest = {"masks": max(map(len, part)), "jpg_bytes": max(sizes)}
        largest["rle_bytes"] = max(len(one.rle) for one in part)
        largest["runs"] = max(len(one.runs().runs) for one in part)
        assert task["largest"].items() >= largest.items()
        assert [one for one in images(root) if one in images(place)] == images(place)
        assert len(sa1b.Stream(place, global_batch=2, image_size=32, masks=2)) > 0
        assert copy(root, place, "--shards", SHARD)["skipped"] == [FIRST, SECOND]
        copy(root, place, "--shards", "sa1b-000001-0000.tar")
        assert clean(place, "--deep")["shards"] == 3
        copy(root, place)
        assert files(place) == files(root)

    @pytest.mark.parametrize("of", ["folder", "bucket"])
    def test_reshard_does_not_take_a_part_for_a_finished_source(
        self, root, copy, clean, sources, tmp_path, of
    ):
        dest = tmp_path / "out"
        copy(root, to := dest if of == "folder" else folder_of_bucket(root, dest), "--shards", SHARD)
        assert reshard(to, *sources).done == [FIRST, SECOND]
        assert images(to) == images(root)
        clean(dest, "--deep")

    def test_reshard_refuses_a_bucket_in_the_memory_of_one_process(self, root, bucket, sources):
        before = files(bucket)
        refused("reshard", sources[0], "--out", bucket, "--redo", FIRST, names=f"--out {bucket}")
        assert files(bucket) == before

    @pytest.mark.parametrize(("name", "whole"), [("two", False), ("most", True), ("of layer", False)])
    def test_the_shards_of_a_view_are_copied_with_it(self, root, place, copy, clean, name, whole):
        if name == "of layer":
            last = [one.image_id for one in sa1b.open(root) if "000001-0002" in one.shard]
            add_view(root, last[:2], name := "layered", "--layers", "round2")
        made = copy(root, place, "--view", name)
        assert (made["sources"], made["shards"]) == ((2, 5) if whole else (1, 1))
        assert made["partial"] == ([] if whole else [FIRST])
        assert made["layers"] == (["round2"] if name == "layered" else [])
        clean(place, "--deep")
        streams = [
            sa1b.Stream(one, view=name, global_batch=1, order="sequential", image_size=32, masks=1)
            for one in (root, place)
        ]
        expected = [batch.ids.tolist() for batch in streams[0]]
        shutil.rmtree(root)  # the copy needs nothing of the original
        assert [batch.ids.tolist() for batch in streams[1]] == expected
