"""The commands that a report advises repair its findings."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from sa1b import Dataset
from sa1b.console import command
from sa1b.errors import ManifestError, ShardError, TableError, UsageError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.query.sql import open_query, write_query_view
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.verify.rebuild import rebuild_root, rebuild_tables
from sa1b.views.view import open_view
from tests import processes
from tests.shards import tiny
from tests.shards.tiny_source import add_layer
from tests.verify.checking import check_here, content, flip

REPOSITORY = Path(__file__).parents[2]


def rename_shard(root):
    text = (root / "dataset.json").read_text()
    (root / "dataset.json").write_text(text.replace("sa1b-000002-0000", "sa1b-000003-0000"))


def test_a_changed_shard_name_in_dataset_json_is_made_right_from_the_task_files(root):
    written = content(root)
    for rebuild in (rebuild_tables, lambda root: rebuild_root(root, quiet=True)):
        rename_shard(root)
        assert {one.remedy for one in check_here(root).findings} == {f"`{command('index')} {root} --tables`"}
        rebuild(root)
        assert content(root) == written


def test_advice_says_that_nothing_records_how_a_source_was_read(root):
    write_dataset(root, {"sa_000001": manifest.read_tasks(root)["sa_000001"]})
    (root / "tasks" / "sa_000002.json").write_text("{")
    (finding,) = check_here(root).findings
    assert "its conversion (--image-ids, --images-only, --ignore), which nothing records" in finding.remedy
    (root / "tasks" / "sa_000001.json").write_text("{")
    assert [finding.remedy.count("nothing records") for finding in check_here(root).findings] == [0, 1]


def test_a_redo_reads_a_finished_source_again_and_must_be_given_it(root, sources):
    written = content(root)
    path = root / "tasks" / "sa_000002.json"
    shutil.copy(root / "tasks" / "sa_000001.json", path)  # of another source
    run = IngestRun(workers=1, quiet=True, redo=("sa_000002",))
    with pytest.raises(UsageError, match="--redo sa_000002: no SOURCE has this name"):
        reshard(sources[:1], root, Options(images_per_shard=5), Policy(), run)
    summary = reshard(sources, root, Options(images_per_shard=5), Policy(), run)
    assert (summary.done, summary.skipped) == (["sa_000002"], ["sa_000001"])
    assert content(root) == written


def test_the_advice_for_a_folder_reads_it_as_before(tmp_path):
    folder, root = tmp_path / "pairs", tmp_path / "root"
    (folder / "old").mkdir(parents=True)
    for name, data in [
        *tiny.pairs(range(4)),
        *((f"old/{name}", data) for name, data in tiny.pairs([10, 11])),
    ]:
        (folder / name).write_bytes(data)
    run = IngestRun(workers=1, quiet=True, ignore=("old",))
    assert not reshard([folder], root, Options(), Policy(max_pixels=9000), run).failed
    written = content(root)
    next(root.glob("*.tar")).unlink()
    (advised,) = re.findall("`([^`]+)`", check_here(root).findings[0].remedy)
    assert advised.endswith("--redo pairs --max-pixels 9000 --ignore old")
    typed(advised.replace("PATH/TO/pairs", str(folder)), in_a_shell=False)
    assert content(root) == written
    for name, data in tiny.pairs([5]):
        (folder / name).write_bytes(data)
    typed(f"{advised.replace('PATH/TO/pairs', str(folder))} --replace", in_a_shell=False)
    assert (check_here(root).images, check_here(root).findings) == (5, [])


def typed(advised, *, in_a_shell, code=0):
    """Run a command as it is, or the words that a shell makes of it by this interpreter, which is faster."""
    program = shlex.split(command("index"))[:-1]
    words = shlex.split(advised)
    assert words[: len(program)] == program
    if in_a_shell:
        line = ["sh", "-c", advised]
    else:
        line = [sys.executable, "-m", "sa1b", *words[len(program) :]]
    done = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr


def test_a_view_that_a_query_with_layers_selected_is_made_again(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root with a space")
    add_layer(root)
    with open_query(root, "SELECT image_id FROM images WHERE image_id > 100", layers=["round2"]) as query:
        view = write_query_view(query, name="it-1").view
    rows = root / "views" / f"{view.digest}.rows"
    written = rows.read_bytes()
    rows.unlink()
    (remedy,) = check_here(root).found.remedies()
    (advised,) = re.findall("`([^`]+)`", remedy)
    typed(advised, in_a_shell=False)
    assert rows.read_bytes() == written
    rows.unlink()
    with pytest.raises(ManifestError, match=re.escape(f"rebuild it: `{advised}`")):
        open_view(root, Dataset(root).table, "it-1")


def test_commands_in_the_errors_of_a_sample_run_as_printed(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root with a space")
    sample = Dataset(root)[0]
    flip(root / sample.shard, sample.offset + 50)
    with pytest.raises(ShardError, match="lists all damage") as caught:
        Dataset(root)[0]
    (advised,) = re.findall("`([^`]+)`", str(caught.value))
    typed(advised, in_a_shell=True, code=1)
    flip(root / manifest.table_name(root), 200)
    with pytest.raises(TableError, match="do not match their digest") as caught:
        Dataset(root).check_table()
    (advised,) = re.findall("`([^`]+)`", str(caught.value))
    typed(f"{advised} --tables", in_a_shell=False)
    Dataset(root).check_table()
