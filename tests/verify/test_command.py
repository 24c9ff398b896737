"""`sa1b verify`: each kind of damage is named with its file, its images and the command that repairs it."""

import gzip
import json
import re
import shlex
import shutil
from fnmatch import fnmatch

import pytest

from tests.directories import bucket, reshard
from tests.kit import files, flip, put, refused, run
from tests.verify import checking

FIRST, SHARD, LAST = "sa1b-000001-0000.tar", "sa1b-000001-0001.tar", "sa1b-000002-0000.tar"
INDEX, LAST_INDEX, TABLE = "sa1b-000001-0001.parquet", "sa1b-000002-0000.parquet", "samples-*.bin"
TASK, ROWS, OTHER_TASK = "tasks/sa_000001.json", "tasks/sa_000001.samples", "tasks/sa_000002.json"
REFUSED, WARNINGS = "quarantine/sa_000001/refused.jsonl", "quarantine/sa_000001/warnings.jsonl"
BYTES, JSON, LAYER = "quarantine/sa_000001/000001-sa_250.jpg", "dataset.json", "layers/round2"
IN_SHARD = (103, 200, 105, 205, 106)  # in the order of the tar
# Commands that repair
REDO = "reshard PATH/TO/sa_000001.tar --out ROOT --redo sa_000001 --images-per-shard 5"
ONE, TABLES, ALL = f"index ROOT/{SHARD}", "index ROOT --tables", "index ROOT"
VIEW, MASKS = "view ROOT --ids IDS --name most", "layer add ROOT PATH/TO/MASKS --name round2"


def column(name, row):
    """Where the sample table of 19 images has a value."""
    sizes = {"image_id": 8, "shard": 4, "offset": 8, "jpg_bytes": 4, "masks_bytes": 4, "jpg_crc32c": 4}
    before = list(sizes)[: list(sizes).index(name)]
    return 128 + sum(-(-19 * sizes[one] // 8) * 8 for one in before) + row * sizes[name]


def damage(root, how, name, *more):
    """Change a file: the first one whose name matches."""
    found = files(root)
    name = next((one for one in found if fnmatch(one, name)), name)
    if how == "flip":
        flip(root, name, *more)
    elif how == "edit":
        assert more[0] in found[name]
        put(root, name, found[name].replace(*more, 1))
    else:
        cut = {"lose": lambda: None, "write": lambda: more[0], "cut": lambda: found[name][: more[0]]}
        copied = {"copy": lambda: found[more[0]], "gzip": lambda: gzip.compress(found[name])}
        put(root, name, {**cut, **copied}[how]())


DAMAGES = {  # what is done -> what is found (kind, file, images), and the commands that repair it
    "a header of a shard": (
        ("flip", SHARD, 20),
        [("bad_header", SHARD, 103), ("tar_sha256", SHARD), ("jpg_missing", SHARD, 103)],
        [REDO],
    ),
    "a JPEG": (("flip", SHARD, 700), [("jpg_damaged", SHARD, 103), ("tar_sha256", SHARD)], [REDO]),
    "a record": (("flip", SHARD, 2700), [("masks_damaged", SHARD, 103), ("tar_sha256", SHARD)], [REDO]),
    "padding": (("flip", SHARD, 3071), [("padding", SHARD, 103), ("tar_sha256", SHARD)], [REDO]),
    "the end of a shard": (
        ("flip", SHARD, -5),
        [("zero_blocks", SHARD), ("bad_header", SHARD), ("tar_sha256", SHARD)],
        [REDO],
    ),
    "a cut shard": (
        ("cut", SHARD, 3000),
        [
            ("member_truncated", SHARD, 103),
            ("tar_bytes", SHARD),
            ("masks_missing", SHARD, 103),
            *(("pair_missing", SHARD, one) for one in IN_SHARD[1:]),
        ],
        [REDO],
    ),
    "an empty shard": (
        ("cut", SHARD, 0),
        [
            ("no_end_marker", SHARD, 103),
            ("tar_bytes", SHARD),
            *(("pair_missing", SHARD, one) for one in IN_SHARD),
        ],
        [REDO],
    ),
    "a compressed shard": (("gzip", SHARD), [("tar_compressed", SHARD)], [REDO]),
    "a lost shard": (("lose", SHARD), [("tar_missing", SHARD)], [REDO]),
    "a lost index": (("lose", INDEX), [("index_missing", INDEX)], [ONE]),
    "a byte of an index": (
        ("flip", INDEX, 500),
        [("index_sha256", INDEX), ("index_unreadable", INDEX)],
        [ONE],
    ),
    "an empty index": (("cut", INDEX, 0), [("index_bytes", INDEX), ("index_unreadable", INDEX)], [ONE]),
    "the index of another shard": (
        ("copy", INDEX, "sa1b-000001-0000.parquet"),
        [
            ("index_bytes", INDEX),
            *(("index_row_missing", INDEX, one) for one in IN_SHARD),
            *(("index_row_extra", INDEX, one) for one in (100, 102, 201, 202, 206)),
        ],
        [ONE],
    ),
    "the sample table": (("lose", TABLE), [("table_missing", TABLE)], [TABLES]),
    "a shard in the sample table": (
        ("flip", TABLE, column("shard", 3)),
        [("table_digest", TABLE), ("table_shard", TABLE, 103), ("table_row_missing", TABLE, 103)],
        [TABLES],
    ),
    "an offset in the sample table": (
        ("flip", TABLE, column("offset", 3)),
        [("table_digest", TABLE), ("table_row", TABLE, 103)],
        [TABLES],
    ),
    "an id in the sample table": (
        ("flip", TABLE, column("image_id", 3) + 1),
        [
            ("table_digest", TABLE),
            ("table_ids_digest", TABLE),
            ("table_order", TABLE, 104),
            ("table_row_extra", TABLE, 103 ^ 0x4000),
            ("table_row_missing", TABLE, 103),
        ],
        [TABLES],
    ),
    "an unused byte of the sample table": (("flip", TABLE, 100), [("table_header", TABLE)], [TABLES]),
    "a cut sample table": (("cut", TABLE, 8), [("table_unreadable", TABLE)], [TABLES]),
    "an empty sample table": (("cut", TABLE, 0), [("table_unreadable", TABLE)], [TABLES]),
    "dataset.json": (("lose", JSON), [("dataset_missing", JSON)], [TABLES]),
    "dataset.json, empty": (("cut", JSON, 0), [("dataset_unreadable", JSON)], [TABLES]),
    "dataset.json, broken": (("write", JSON, b"{"), [("dataset_unreadable", JSON)], [TABLES]),
    "dataset.json, a list": (("write", JSON, b"[]"), [("dataset_unreadable", JSON)], [TABLES]),
    "dataset.json, no text": (("write", JSON, b"\xff\xfe"), [("dataset_unreadable", JSON)], [TABLES]),
    "dataset.json, another version": (
        ("edit", JSON, b"sa1b-shards-", b"sa1b-shards-9"),
        [("dataset_unreadable", JSON)],
        [TABLES],
    ),
    "dataset.json, a total": (
        ("edit", JSON, b'"images": 19', b'"images": 18'),
        [("dataset_differs", JSON)],
        [TABLES],
    ),
    "dataset.json, a space": (
        ("edit", JSON, b'"images": 19', b'"images":  19'),
        [("dataset_form", JSON)],
        [TABLES],
    ),
    "a lost task file": (("lose", TASK), [("task_missing", TASK)], [REDO, ALL]),
    "an empty task file": (("cut", TASK, 0), [("task_unreadable", TASK)], [REDO, ALL]),
    "a broken task file": (("write", TASK, b"{"), [("task_unreadable", TASK)], [REDO, ALL]),
    "a task file without text": (("write", TASK, b"\xff\xfe"), [("task_unreadable", TASK)], [REDO, ALL]),
    "a number in a task file": (
        ("edit", TASK, b'"members": ', b'"members": 1'),
        [("task_differs", TASK)],
        [REDO],
    ),
    "a space in a task file": (
        ("edit", TASK, b'"kind": "tar"', b'"kind":  "tar"'),
        [("task_damaged", TASK)],
        [REDO],
    ),
    "a task file of another source": (("copy", TASK, OTHER_TASK), [("task_unreadable", TASK)], [REDO, ALL]),
    "a shard outside the directory": (
        ("edit", TASK, SHARD.encode(), b"../../etc/passwd"),
        [("task_unreadable", TASK)],
        [REDO, ALL],
    ),
    "lost rows": (("lose", ROWS), [("samples_missing", ROWS)], [TABLES]),
    "a byte of rows": (("flip", ROWS, 300), [("samples_damaged", ROWS)], [TABLES]),
    "empty rows": (("cut", ROWS, 0), [("samples_damaged", ROWS)], [TABLES]),
    "a broken view": (("write", "views/*.json", b"{"), [("view_unreadable", "views/*.json")], []),
    "a view, changed": (
        ("edit", "views/*.json", b'"most"', b'"more"'),
        [("view_unreadable", "views/*.json")],
        [],
    ),
    "the rows of a view": (("lose", "views/*.rows"), [("view_data_missing", "views/*.rows")], [VIEW]),
    "a byte of a view": (("flip", "views/*.ids", 5), [("view_data_damaged", "views/*.ids")], [VIEW]),
    "a layer": (("flip", f"{LAYER}/masks.bin", 30), [("layer_damaged", LAYER)], [f"{MASKS} --overwrite"]),
    "a file of a layer": (("lose", f"{LAYER}/index.parquet"), [("layer_damaged", LAYER)], [f"{MASKS} --overwrite"]),
    "the list of refused members": (
        ("lose", REFUSED),
        [("quarantine_counts", REFUSED), ("quarantine_counts", REFUSED)],
        [REDO],
    ),
    "the list of warnings": (("lose", WARNINGS), [("quarantine_counts", WARNINGS)] * 3, [REDO]),
    "a text in the list of refused members": (
        ("edit", REFUSED, b'"message": "', b'"message": "x'),
        [("quarantine_digest", REFUSED)],
        [REDO],
    ),
    "a line that is none": (
        ("edit", REFUSED, b"\n", b"\n{\n"),
        [("quarantine_line", REFUSED)],
        [REDO],
    ),
    "a refused member": (("lose", BYTES), [("quarantine_file_missing", BYTES)], [REDO]),
    "a cut refused member": (("cut", BYTES, 1), [("quarantine_file_bytes", BYTES)], [REDO]),
    "a byte of a refused member": (("flip", BYTES, 1), [("quarantine_file_digest", BYTES)], [REDO]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named_and_the_printed_command_repairs_it(whole, tars, tmp_path, monkeypatch, case):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of a bucket's layers
    how, expected, commands = DAMAGES[case]
    root = shutil.copytree(whole, tmp_path / "root with a space")
    written = files(root)
    damage(root, *how)
    report = run("verify", root, "--json", code=1).json
    found = [
        (one["kind"], general(one["file"]), *([one["image_id"]] if one["image_id"] else []))
        for one in report["findings"]
    ]
    assert sorted(found) == sorted(expected)
    assert report["exit_code"] == 1
    assert sum(count for kinds in report["counts"].values() for count in kinds.values()) == len(found)
    of_shard = {general(one["file"]) for one in report["findings"] if one["shard"]}
    assert of_shard == {SHARD, INDEX, TABLE} & {file for _, file, *image in found if image or file != TABLE}
    remedies = list(dict.fromkeys(one["remedy"] for one in report["findings"]))
    advised = [words for remedy in remedies for words in commands_in(remedy)]
    ids = {"IDS": whole.parent / "most.txt", "ROOT": root}
    assert advised == [typed(words, **ids) for words in commands] or not commands
    text = run("verify", root, code=1).out
    assert text.endswith(f"DAMAGED: {root}\n")
    for one in report["findings"]:
        assert all(
            part in text
            for part in (f"{one['file']}", f"{one['kind']}: ", one["message"], f"  - {one['remedy']}")
        )
    there = run("verify", bucket(root), "--json", code=1).json["findings"]
    for one in (*report["findings"], *there):
        del one["message"]
    assert there == json.loads(json.dumps(report["findings"]).replace(str(root), bucket(root)))
    for words in advised if commands else ():
        repaired = shutil.copytree(root, tmp_path / "repaired")
        again = typed(
            words,
            **{
                str(root): repaired,
                "PATH/TO/sa_000001.tar": tars[0],
                "PATH/TO/MASKS": whole.parent / "masks",
            },
        )
        run(
            *again,
            *(["--existing", "replace"] if words[0] == "layer" else []),
            code=3 if words[0] == "reshard" else 0,
        )
        assert run("verify", repaired, "--deep", "--json").json["notes"] == []
        now = files(repaired)
        unlike = {name for name in written if now.get(name) != written[name]}
        assert now.keys() == written.keys()
        if words[0] == "layer":
            unlike.discard(f"{LAYER}/layer.json")  # its date has seconds: equal within one
        assert unlike == ({JSON, TASK} if words[0] == "index" and TASK in how else set())
        shutil.rmtree(repaired)


NOTES = {  # what is no damage of the dataset -> what a note says of it
    "a file of a user": (("write", "notes.txt", b"mine"), ""),
    "a file of a user with the name of a shard": (("write", "sa1b-000007-0000.tar", b"mine"), "sa1b-000007-0000.tar; move"),
    "a shard that nothing lists": (("copy", "sa1b-000007-0000.tar", FIRST), "sa1b-000007-0000.tar"),
    "an unfinished layer": (("lose", f"{LAYER}/layer.json"), "layer round2 is unfinished"),
    "refused members of no source": (("copy", "quarantine/sa_000077/refused.jsonl", REFUSED), "not in the dataset: sa_000077"),
    "a refused member that is not listed": (("write", "quarantine/sa_000001/000009-sa_1.jpg", b"x"), "000009-sa_1.jpg"),
    "a file of no view": (("write", "views/notes.txt", b"x"), "notes.txt"),
    "a dropped source": (("drop", "sa_000001"), "15 of its images are not in the dataset, as after --drop"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTES)
def test_what_is_no_damage_is_a_note(whole, tmp_path, case):
    how, says = NOTES[case]
    root = shutil.copytree(whole, tmp_path / "root")
    run("reshard", "--out", root, "--drop", how[1]) if how[0] == "drop" else damage(root, *how)
    report = run("verify", root, "--json").json
    assert (report["findings"], report["exit_code"]) == ([], 0)
    assert [note for note in report["notes"] if says and says in note] == report["notes"][:1]
    text = run("verify", root).out
    assert all(f"note: {note}" in text for note in report["notes"])
    assert f"Clean: {root}" in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_index_runs": True},
        {"keep_json": True},
        {"image_size": 32, "quality": 80},
        {"annotations_only": True},
    ],
)
def test_what_reshard_wrote_is_clean(tars, tmp_path, options):
    reshard(tmp_path / "root", *tars, **options)
    for flags in ([], ["--deep"]):
        report = run("verify", tmp_path / "root", "--json", *flags).json
        assert report["findings"] == []
        assert (report["shards"], report["images"], report["masks"]) == (5, 19, 64)
        assert [note[:16] for note in report["notes"]] == ["annotations only"] * (
            "annotations_only" in options
        )


def test_exchanged_shards_are_given_their_names_again(whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "root")
    written = files(root)
    put(root, FIRST, written[SHARD])
    put(root, SHARD, written[FIRST])
    report = run("verify", root, "--json", code=1).json
    assert {one["file"] for one in report["findings"] if one["kind"] == "tar_of_another"} == {FIRST, SHARD}
    (remedy,) = {one["remedy"] for one in report["findings"]}
    (words,) = commands_in(remedy)
    assert words == typed(f"index ROOT/{FIRST} ROOT/{SHARD}", ROOT=root)
    run(*words)
    assert files(root) == written


def test_without_any_task_file_all_is_made_again_from_the_shards(whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "root")
    written = files(root)
    shutil.rmtree(root / "tasks")
    (found,) = run("verify", root, "--json", code=1).json["findings"]
    assert (found["kind"], found["file"]) == ("tasks_missing", "tasks")
    assert typed(ALL, ROOT=root) in commands_in(found["remedy"])
    run("index", root)
    unlike = {name for name, data in files(root).items() if written[name] != data}
    assert unlike == {JSON, TASK, OTHER_TASK}
    assert run("verify", root, "--deep", "--json").json["findings"] == []


@pytest.mark.parametrize("name", ["", "nothing"])
def test_a_folder_that_is_no_dataset_is_refused(tmp_path, name):
    refused("verify", tmp_path / name, names="no dataset there")
    refused("verify", tmp_path / name, "--warnings", names="no dataset there")


def general(name):
    return re.sub("[0-9a-f]{16,}", "*", name)


def commands_in(remedy):
    """The words of each command in an advice, without the program; it is safe to paste."""
    assert not any(re.search(r"[<>|&;]|\brm\b", one) for one in re.findall("`([^`]+)`", remedy))
    return checking.commands_in(remedy)


def typed(words, **places):
    words = shlex.split(words) if isinstance(words, str) else words
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    return words


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_the_index_of_a_layer_is_verified_in_the_bucket_not_in_a_cache(whole, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, index = shutil.copytree(whole, tmp_path / "root"), "layers/round2/index.parquet"
    url = bucket(root)
    assert run("verify", url, "--json").json["findings"] == []  # the cache has the index now
    put(root, index, None) if damage == "gone" else flip(root, index)
    assert f"{url}/{index}: " in run("verify", url, code=1).out
    assert f"{url}/{index}: " in run("layer", "verify", url, "round2", code=1).out
