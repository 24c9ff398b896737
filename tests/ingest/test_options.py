"""The options of a new dataset directory: the first run fixes them, for every run that starts beside it."""

import json
from pathlib import Path

import pytest

import sa1b
from sa1b.errors import UsageError
from tests.kit import files, put, refused, run
from tests.shards import tiny

OPTIONS = ".options.json"


def reshard(root: Path, *sources: Path, **options: object) -> int:
    return sa1b.reshard(sources, root, quiet=True, **options).exit_code


def test_a_run_with_other_options_beside_the_first_one_is_refused_by_flag(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    reshard(tmp_path / "first", tar)
    put(root, OPTIONS, (tmp_path / "first" / OPTIONS).read_bytes())  # it has begun, and no source is finished
    put(root, "tasks/sa_000009.claim", b"")  # of a third run
    done = refused("reshard", tar, "--out", root, "--keep-json", names="this run has --keep-json")
    assert f"remove {root / OPTIONS}" in done.err
    (root / "tasks" / "sa_000009.claim").unlink()
    assert reshard(root, tar) == 0
    assert json.loads((root / "dataset.json").read_text())["options"]["keep_json"] is False


def test_finished_sources_decide_in_directories_without_recorded_options(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert reshard(root, tar) == 0
    (root / OPTIONS).unlink()
    other = tmp_path / "sa_000002.tar"
    tiny.make_tar(other, range(20, 30))
    before = files(root)
    for flags, names in (
        (["--keep-json"], "made with no --keep-json, this run has --keep-json"),
        (["--images-per-shard", 10], "made with --images-per-shard 1024, this run has --images-per-shard 10"),
    ):
        refused("reshard", other, "--out", root, *flags, names=names)
    assert files(root) == before
    assert reshard(root, other) == 0
    assert not (root / OPTIONS).exists()


@pytest.mark.parametrize("before", ["the last source was dropped", "nothing was finished"])
def test_other_options_may_be_chosen_after(tar: Path, tmp_path: Path, before: str) -> None:
    root = tmp_path / "root"
    if before == "nothing was finished":
        put(tmp_path, "bad/x.tar", b"no tar" * 100)
        assert reshard(root, tmp_path / "bad") == 1
    else:
        assert reshard(root, tar) == 0
        assert (root / OPTIONS).exists()
        run("reshard", "--out", root, "--drop", "sa_000001")
    assert reshard(root, tar, keep_json=True) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [(OPTIONS, "\0\0"), *(("dataset.json", text) for text in ('{"mine": 1}', "mine", "[]", ""))],
)
def test_a_document_that_is_damaged_or_of_another_program_is_not_overwritten(
    tar: Path, tmp_path: Path, name: str, text: str
) -> None:
    root = tmp_path / "root"
    put(root, name, text.encode())
    put(tmp_path, "ids.txt", b"100")
    with pytest.raises(UsageError, match=name):
        reshard(root, tar)
    refused("fetch", tar, "--ids", tmp_path / "ids.txt", "--out", root, names=name)
    assert [(path.name, path.read_text()) for path in root.iterdir() if path.is_file()] == [(name, text)]
