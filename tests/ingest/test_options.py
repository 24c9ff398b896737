"""The options of a new dataset directory: the first run fixes them, for every run that starts beside it."""

from pathlib import Path

import numpy as np
import pytest

from sa1b.errors import UsageError
from sa1b.ingest.fetch import fetch
from sa1b.ingest.finish import drop_source
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.names import OPTIONS
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from tests.shards import tiny

QUIET = IngestRun(quiet=True)


def run(tar: Path, root: Path, options: Options) -> int:
    return reshard([tar], root, options, Policy(), QUIET).exit_code()


def test_a_run_with_other_options_beside_the_first_one_is_refused_by_flag(
    tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    said: list[str] = []

    def meanwhile(*_: object, **named: object) -> None:
        """The second run starts when the first one has begun and no source is finished."""
        monkeypatch.undo()
        assert not read_tasks(root)
        with pytest.raises(UsageError) as error:
            run(tar, root, Options(keep_json=True))
        said.append(str(error.value))
        raise SystemExit  # killed

    monkeypatch.setattr("sa1b.ingest.reshard.work_through", meanwhile)
    (root / "tasks").mkdir(parents=True)
    (root / "tasks" / "sa_000009.claim").touch()  # of a third run
    with pytest.raises(SystemExit):
        run(tar, root, Options())
    assert "has no --keep-json, this run has --keep-json" in said[0]
    assert f"remove {root / OPTIONS}" in said[0]
    (root / "tasks" / "sa_000009.claim").unlink()
    assert run(tar, root, Options()) == 0
    assert {task.options for task in read_tasks(root).values()} == {Options()}


def test_finished_sources_decide_in_directories_without_recorded_options(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run(tar, root, Options()) == 0
    (root / OPTIONS).unlink()
    tiny.make_tar(tmp_path / "sa_000002.tar", range(20, 30))
    with pytest.raises(UsageError, match=r"was made with no --keep-json, this run has --keep-json"):
        run(tmp_path / "sa_000002.tar", root, Options(keep_json=True))
    assert run(tmp_path / "sa_000002.tar", root, Options()) == 0
    assert not (root / OPTIONS).exists()


def test_after_the_last_source_was_dropped_other_options_may_be_chosen(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run(tar, root, Options()) == 0
    assert (root / OPTIONS).exists()
    drop_source(root, "sa_000001")
    assert run(tar, root, Options(keep_json=True)) == 0


def test_after_a_run_that_finished_nothing_other_options_may_be_chosen(tar: Path, tmp_path: Path) -> None:
    bad, root = tmp_path / "bad" / "x.tar", tmp_path / "root"
    bad.parent.mkdir()
    bad.write_bytes(b"no tar" * 100)
    assert run(bad.parent, root, Options()) == 1
    assert run(tar, root, Options(keep_json=True)) == 0


def test_damaged_options_are_named(tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / OPTIONS).write_bytes(b"\0\0")
    with pytest.raises(UsageError, match=r"\.options\.json: damaged; remove it"):
        run(tar, root, Options())


@pytest.mark.parametrize("text", ['{"mine": 1}', "mine", "[]", ""])
def test_a_document_of_another_program_is_not_overwritten(tar: Path, tmp_path: Path, text: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "dataset.json").write_text(text)
    with pytest.raises(UsageError, match="dataset.json: another program wrote it, or it is damaged"):
        reshard([tar], root, Options(), Policy(), QUIET)
    with pytest.raises(UsageError, match="dataset.json: another program wrote it"):
        fetch(np.array([100], np.uint64), [tar], root, Options(), Policy(), QUIET)
    assert [(path.name, path.read_text()) for path in root.iterdir()] == [("dataset.json", text)]
