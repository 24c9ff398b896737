"""The simulated dataset directory is valid: it can be finished, opened and streamed, also with a view."""

from pathlib import Path

import pytest

import sa1b
from benchmarks import simulated
from benchmarks.simulated import Size


def test_all_of_sa1b_and_a_part_of_it() -> None:
    assert Size.of(1) == Size(1000, 10_923, 11_185_362)
    assert Size.of(0.01).sources == 10
    ids = simulated.image_ids(Size(3, 4, 100))
    assert len(set(ids.tolist())) == 100
    assert ids.tolist() == sorted(ids.tolist())


def test_a_simulated_directory_is_finished_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, root = Size(3, 5, 400), tmp_path / "root"
    monkeypatch.setattr(simulated, "INDEXES", 1)
    made: list[int] = []
    simulated.make(root, size, made.append)
    assert sum(made) == size.images
    simulated.finish(root)()
    dataset = sa1b.open(root)
    assert dataset.table.image_id.tolist() == simulated.image_ids(size).tolist()
    assert len(dataset.shards) == size.shards
    dataset.check_table()
    for position in (0, simulated.resume_position(size)):
        simulated.start(root, str(position))()
    (tmp_path / "ids.txt").write_text("\n".join(map(str, dataset.table.image_id[::7])))
    assert simulated.view_by_ids(root, str(tmp_path / "ids.txt"))() is not None
