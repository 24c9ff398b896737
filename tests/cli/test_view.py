import errno
import json
import shutil

import pytest

from sa1b import Dataset
from sa1b.errors import ManifestError, UsageError
from sa1b.views.selection import Selection, select
from sa1b.views.view import open_view
from tests.cli.verb import called, runner
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

run = runner("view")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    source = write_source(folder / "sa_000001.tar", pairs(range(40)))
    return make_root(folder / "root", [source], ROOTS["plain"])


def test_the_example(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root", ignore=shutil.ignore_patterns("views"))
    done = run(
        root,
        "--masks-where", "stability_score >= 0.96 and area_fraction < 0.9",
        "--images-where", "masks >= 2 and width >= 64",
        "--held-out", "20%", "--name", "good", "--workers", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (root / "views").glob("*.json")
    document = json.loads(path.read_text())
    assert f"images  {document['images']} of 40" in done.stdout
    assert f"digest  {path.stem}" in done.stdout
    assert document["digest"] == path.stem != document["ids_sha256"]
    assert f"Written: {path}" in done.stdout
    assert document["names"] == ["good"]
    assert "name    good" in done.stdout
    assert "Open it with view='good'" in done.stdout


def test_json(root):
    shown = [run(root, "--subset", "50%", *split, "--json") for split in ([], ["--held-out", "50%"])]
    documents = [json.loads(done.stdout) for done in shown]
    assert documents[0] == documents[1]
    assert [done.stderr for done in shown] == ["", ""]
    held_out = json.loads(run(root, "--held-out", "50%", "--split", "held-out", "--json").stdout)
    assert held_out["images"] + documents[0]["images"] == documents[0]["of_images"] == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--masks-where", "stability > 1"], "did you mean stability_score?"),
        (["--images-where", "__import__('os')"], "is a function call"),
        (["--subset", "60%", "--held-out", "41%"], "--subset 60% and --held-out 41% overlap"),
        (["--missing", "skip"], "--missing skip: needs --ids"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (
            [],
            "the view would have all images; pass --masks-where, --images-where, --subset, --held-out or --ids",
        ),
        (["--ids", "nothere.txt"], "--ids nothere.txt: no such file; pass a file of image ids"),
        (["--ids", "."], "--ids .: is a folder; pass a file of image ids"),
        (
            ["--images-where", "masks > 1000"],
            "no image is left; relax the conditions, or take a larger part",
        ),
    ],
)
def test_refusals_are_one_line(root, arguments, message):
    done = called("view")(root, *arguments, "--json")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_view_of_all_images_has_a_name(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root", ignore=shutil.ignore_patterns("views"))
    assert json.loads(run(root, "--name", "all", "--json").stdout)["images"] == 40


def test_missing_ids_are_code_3_and_the_view_is_written_elsewhere(root, tmp_path):
    (tmp_path / "ids.csv").write_text("file_name\nsa_3.jpg\nsa_99.jpg\nsa_98.jpg\n")
    before = sorted(path.name for path in root.rglob("*"))
    command = (root, "--ids", tmp_path / "ids.csv", "--out", tmp_path / "few.json", "--missing")
    for missing, shown in (("skip", ""), ("list", "\n98\n99\n")):
        done = run(*command, missing)
        assert done.returncode == 3, done.stderr
        assert "missing 2 ids" in done.stdout
        assert shown in done.stdout
        assert f"Written: {tmp_path / 'few.json'}" in done.stdout
    assert json.loads(run(*command, "list", "--json").stdout)["missing_ids"] == [98, 99]
    refused = run(*command, "refuse")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "98, 99: not in" in refused.stderr
    assert sorted(path.name for path in root.rglob("*")) == before


def test_a_file_as_out_and_a_short_digest_are_named(root, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    done = run(root, "--subset", "50%", "--out", tmp_path / "file")
    assert (done.returncode, "--out" in done.stderr, "is a file" in done.stderr) == (2, True, True)
    made = json.loads(run(root, "--subset", "50%", "--out", tmp_path / "views", "--json").stdout)
    assert made["view"] == made["path"]
    known = Dataset(root).table
    assert len(open_view(root, known, made["view"])) == made["images"]
    run(root, "--subset", "50%")
    with pytest.raises(ManifestError, match="shortened to 6 characters, not fewer"):
        open_view(root, known, made["digest"][:4])


def test_a_dataset_directory_that_cannot_be_written_points_to_out(root, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(root / "views"))

    monkeypatch.setattr("sa1b.views.selection.write_view", denied)
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied\); use --out PATH"):
        select(root, Selection(subset="50%"))
