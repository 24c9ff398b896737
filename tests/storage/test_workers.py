"""One reader in the workers of torch's DataLoader."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sa1b.storage.errors import DamageError
from sa1b.storage.reader import Range, Reader
from tests.storage.conftest import Store

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Reads(IterableDataset[torch.Tensor]):
    """Every worker reads its share of the ranges."""

    def __init__(self, reader: Reader, ranges: list[Range]) -> None:
        self.reader, self.ranges = reader, ranges

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for data in self.reader.read_ranges(self.ranges[first::step]):
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(("workers", "way"), [(0, None), (2, "fork"), (2, "spawn")])
def test_workers_of_a_data_loader_read(store: Store, workers: int, way: str | None) -> None:
    ranges = store.ranges(20, seed=4)
    with Reader("s3://data", options=store.options(), deadline=120) as reader:
        reader.read_range("a.bin", 0, 10)  # the parent's connections must not be the workers'
        loader = DataLoader(
            Reads(reader, ranges), batch_size=None, num_workers=workers, multiprocessing_context=way
        )
        found = [bytes(tensor.numpy()) for tensor in loader]
        del loader
        assert sorted(found) == sorted(store.slices(ranges))


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_errors_keep_their_class_on_the_way_out_of_a_worker(store: Store, way: str) -> None:
    with Reader("s3://data", options=store.options(), deadline=120) as reader:
        reads = Reads(reader, [Range("a.bin", 0, 5, 1)])
        loader = DataLoader(reads, batch_size=None, num_workers=1, multiprocessing_context=way)
        with pytest.raises(DamageError, match="s3://data/a.bin"):
            list(loader)
