"""The commands that a report advises repair its findings: the end is a clean directory with the same images."""

import shutil

import pytest

import sa1b
from sa1b.errors import TableError
from tests import kit
from tests.directories import images, reshard
from tests.kit import files, put, refused, run
from tests.shards import tiny
from tests.shards.tiny_source import pairs, write_source
from tests.verify.checking import commands_in

JSON, TASK, OTHER_TASK = "dataset.json", "tasks/sa_000001.json", "tasks/sa_000002.json"
LAST, UNLISTED, ALL, TABLES = "sa1b-000002-0000", "tasks/sa_000009.json", ["index"], ["index", "--tables"]


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root with a space")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A directory of other images, from sources with the same names."""
    folder = tmp_path_factory.mktemp("other")
    for number in (1, 2):
        write_source(folder / f"sa_00000{number}.tar", pairs(range(900 * number, 900 * number + 7)))
    reshard(folder / "root", *sorted(folder.iterdir()))
    return folder / "root"


def table(root):
    return next(name for name in files(root) if name.startswith("samples-"))


def renamed_shard(root, other):
    put(root, JSON, files(root)[JSON].replace(LAST.encode(), b"sa1b-000003-0000"))


def no_dataset_and_task(root, other):
    put(root, JSON, None)
    put(root, TASK, None)


def foreign_table(root, other):
    put(root, table(root), files(other)[table(other)])


@pytest.mark.parametrize("flags", [[], ["--tables"]], ids=["index", "index --tables"])
@pytest.mark.parametrize(
    ("damage", "file", "command"),
    [
        (renamed_shard, JSON, TABLES),
        (no_dataset_and_task, JSON, ALL),
        (no_dataset_and_task, TASK, ALL),
        (foreign_table, "samples", TABLES),
    ],
)
def test_the_printed_command_makes_it_again(root, other, damage, file, command, flags):
    before, written = images(root), files(root)
    damage(root, other)
    found = run("verify", root, "--json", code=1).json["findings"]
    remedies = [one["remedy"] for one in found if one["file"].startswith(file)]
    advised = [command[0], str(root), *command[1:]]
    assert remedies
    assert all(advised in commands_in(remedy) for remedy in remedies)
    if command == ALL and flags:
        refused("index", root, *flags, names="sa_000001")
        return
    run("index", root, *flags)
    unlike = {name for name, data in files(root).items() if written[name] != data}
    assert unlike <= ({JSON, TASK} if command == ALL else set())
    assert images(root) == before
    assert run("verify", root, "--deep", "--json").json["findings"] == []


# Sources are read again


def write_folder(folder):
    for name, data in tiny.pairs(range(4)):
        put(folder, name, data)
    for name, data in tiny.pairs([10, 11]):
        put(folder, f"old/{name}", data)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"ignore": ("old",), "max_pixels": 9000}, 4),
        ({"images_only": True, "max_pixels": 9000, "keep_json": True}, 6),
    ],
    ids=["pairs", "images"],
)
def test_the_advice_for_a_folder_reads_it_as_before(tmp_path, options, count):
    folder, root = tmp_path / "pairs", tmp_path / "root"
    write_folder(folder)
    reshard(root, folder, **options)
    written = files(root)
    assert len(images(root)) == count
    next(root.glob("*.tar")).unlink()
    found = run("verify", root, "--json", code=1).json["findings"]
    (words,) = commands_in(found[0]["remedy"])
    again = [word.replace("PATH/TO/pairs", str(folder)) for word in words]
    run(*again)
    assert files(root) == written
    for name, data in tiny.pairs([5]):
        put(folder, name, data)
    run(*again, "--replace")
    report = run("verify", root, "--json").json
    assert (report["images"], report["findings"]) == (count + 1, [])


def test_a_redo_reads_a_finished_source_again_and_must_be_given_it(root, tars):
    written = files(root)
    put(root, OTHER_TASK, written[TASK])
    words = ["--out", root, "--images-per-shard", 5, "--redo", "sa_000002", "--json"]
    refused("reshard", tars[0], *words, names="--redo sa_000002")
    done = run("reshard", *tars, *words, code=3).json
    assert (list(done["done"]), list(done["skipped"])) == (["sa_000002"], ["sa_000001"])
    assert files(root) == written


def test_a_broken_task_file_of_no_source_is_moved_away(root):
    put(root, UNLISTED, b"{")
    (found,) = run("verify", root, "--json", code=1).json["findings"]
    assert found["file"] == UNLISTED
    assert str(root / UNLISTED) in found["remedy"]
    put(root, UNLISTED, None)
    assert run("verify", root, "--json").json["findings"] == []


# Errors of other commands


@pytest.mark.parametrize(
    "words",
    [
        ["export", "ROOT", "--to", "sa1b", "--out", "NEW"],
        ["gallery", "ROOT", "--out", "NEW.html"],
        ["view", "ROOT", "--masks-where", "area > 5", "--name", "large"],
        ["locate", "ROOT", "--ids", "IDS"],
        ["layer", "verify", "ROOT", "round2"],
    ],
    ids=lambda words: words[0],
)
def test_programs_that_read_the_whole_table_verify_it_first(whole, root, tmp_path, words):
    """A shard that is not in dataset.json."""
    kit.flip(root, table(root), 128 + 19 * 8 + 3 * 4, 1)
    places = {"ROOT": root, "NEW": tmp_path / "new", "NEW.html": tmp_path / "a.html"}
    places |= {"IDS": whole.parent / "most.txt"}
    done = refused(*(places.get(word, word) for word in words), names=table(root))
    (again,) = commands_in(done.err)
    run(*again)
    assert run("verify", root, "--json").json["findings"] == []


def test_commands_in_the_errors_of_a_sample_run_as_printed(root):
    sample = sa1b.open(root)[0]
    kit.flip(root, sample.shard, sample.offset + 50)
    with pytest.raises(Exception, match=sample.shard) as caught:
        sa1b.open(root)[0]
    (words,) = commands_in(str(caught.value))
    assert sample.shard in run(*words, code=1).out
    kit.flip(root, table(root), 200)
    with pytest.raises(TableError) as caught:
        sa1b.open(root).check_table()
    (words,) = commands_in(str(caught.value))
    run(*words, "--tables")
    sa1b.open(root).check_table()
