"""One reader in the workers of torch's DataLoader, however they are started, and in threads meanwhile."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sa1b.storage.errors import DamageError
from sa1b.storage.reader import Range, Reader
from tests.storage.conftest import Store

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
WAYS = ("fork", "forkserver", "spawn")
SLOW = pytest.mark.slow  # a worker that is not forked imports torch


class Reads(IterableDataset[torch.Tensor]):
    """Every worker reads its share of the ranges."""

    def __init__(self, reader: Reader, ranges: list[Range]) -> None:
        self.reader, self.ranges = reader, ranges

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for data in self.reader.read_ranges(self.ranges[first::step]):
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_by_workers(reader: Reader, ranges: list[Range], workers: int, way: str | None) -> list[bytes]:
    """The ranges by the workers of a loader, while two threads of this process read too."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.wait(0.005):
                reader.read_range(ranges[0].name, ranges[0].start, ranges[0].length, ranges[0].crc)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    reader.read_range(ranges[0].name, 0, 10)  # the parent's connections must not be the workers'
    for thread in threads:
        thread.start()
    try:
        loader = DataLoader(
            Reads(reader, ranges), batch_size=None, num_workers=workers, multiprocessing_context=way
        )
        return [bytes(tensor.numpy()) for tensor in loader]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed


@pytest.mark.parametrize(
    ("workers", "way"),
    [
        (0, None),
        (1, "fork"),
        pytest.param(4, "fork", marks=SLOW),
        pytest.param(1, "forkserver", marks=SLOW),
        pytest.param(4, "forkserver", marks=SLOW),
        pytest.param(1, "spawn", marks=SLOW),
        pytest.param(4, "spawn", marks=SLOW),
    ],
)
def test_workers_of_a_data_loader_read(store: Store, workers: int, way: str | None) -> None:
    ranges = store.ranges(40, seed=4)
    before = store.service.ask({})
    with Reader("s3://data", options=store.signed(), deadline=120) as reader:
        assert sorted(read_by_workers(reader, ranges, workers, way)) == sorted(store.slices(ranges))
        assert reader.counters().resets == 0  # no worker has closed the parent's connections
    now = store.service.ask({})
    assert now["signed"] - before["signed"] > len(ranges)
    assert now["authorized"] == before["authorized"]


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=SLOW)])
def test_errors_keep_their_class_on_the_way_out_of_a_worker(store: Store, way: str) -> None:
    with Reader("s3://data", options=store.options(), deadline=120) as reader:
        reads = Reads(reader, [Range("a.bin", 0, 5, 1)])
        loader = DataLoader(reads, batch_size=None, num_workers=1, multiprocessing_context=way)
        with pytest.raises(DamageError, match="s3://data/a.bin"):
            list(loader)
