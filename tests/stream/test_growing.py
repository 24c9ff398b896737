"""A directory that grows while readers have it open: each reader keeps the opened version."""

import multiprocessing
import pickle
import sys
from itertools import islice
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import TableError
from tests import processes
from tests.shards import tiny
from tests.stream.recorded import digest

REPOSITORY = Path(__file__).parents[2]
ARGUMENTS = {"global_batch": 2, "image_size": 32, "masks": 2, "seed": 1, "epochs": None}


def reshard(source: Path, root: Path, *flags: str) -> None:
    line = [sys.executable, "tools/reshard.py", str(source), "--out", str(root), *flags]
    processes.run(line, cwd=REPOSITORY, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny.make_tar(tmp_path / "sa_000001.tar", range(100, 120))
    tiny.make_tar(tmp_path / "sa_000002.tar", range(200, 230))
    tiny.ingest_tar(tmp_path / "sa_000001.tar", tmp_path / "root")
    return tmp_path / "root"


def test_a_stream_goes_on_while_another_process_adds_a_source(root: Path) -> None:
    expected = [digest(batch) for batch in islice(sa1b.Stream(root, **ARGUMENTS), 30)]
    stream = sa1b.Stream(root, **ARGUMENTS)
    reading = iter(stream)
    found = [digest(next(reading)) for _ in range(5)]
    reshard(root.parent / "sa_000002.tar", root)
    found += [digest(next(reading)) for _ in range(25)]
    assert found == expected
    stream.dataset.check_table()  # of the version that is open, whose file has no name any more
    assert len(stream.dataset) == 20
    assert len(sa1b.open(root)) == 50


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_start_after_a_source_was_added_read_the_version_of_their_stream(
    root: Path, start: str
) -> None:
    stream = sa1b.Stream(root, **ARGUMENTS)
    expected = [digest(batch) for batch in islice(sa1b.Stream(root, **ARGUMENTS), 12)]
    reshard(root.parent / "sa_000002.tar", root)
    context = multiprocessing.get_context(start)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert [digest(batch) for batch in islice(loader, 12)] == expected


def test_a_version_that_is_gone_is_an_error_and_never_another_version(root: Path) -> None:
    dataset = sa1b.open(root)
    pickled = pickle.dumps(dataset)
    assert len(pickle.loads(pickled)) == 20
    reshard(root.parent / "sa_000002.tar", root)
    assert len(pickle.loads(pickled)) == 20
    del dataset
    with pytest.raises(TableError, match="replaced since the dataset was opened; open it again"):
        pickle.loads(pickled)
