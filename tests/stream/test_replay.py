"""The same damage causes the same damage log and the same substitutes for every way of reading."""

import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import sa1b
from sa1b.shards.manifest import table_name
from sa1b.shards.sample_table import open_table
from tests.stream.recorded import RECIPE, digest, make_root

IMAGES, STEPS, BATCH = 23, 6, 6  # into the second epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("replay"), IMAGES)


def damaged(whole: Path, root: Path, seed: int) -> set[int]:
    """Make `root` a copy of `whole` with two samples that a seed draws damaged; their ids."""
    if not root.exists():
        shutil.copytree(whole, root)
    draw = random.Random(seed)
    table = open_table(whole / table_name(whole))
    rows = draw.sample(range(IMAGES), 2)
    for row in rows:
        shard = root / sa1b.open(whole).shards[int(table.shard[row])]
        at = draw.choice([int(table.offset[row]), table.masks_offset(row)]) + draw.randrange(50)
        data = bytearray(shard.read_bytes())
        data[at] ^= draw.randrange(1, 256)
        shard.write_bytes(data)
    return {int(table.image_id[row]) for row in rows}


def read(loader: Any, count: int) -> list[sa1b.Batch]:
    return list(islice(loader, count))


def stream_of(root: Path, damage_log: Path, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(
        root, **{"global_batch": BATCH, "epochs": None, "damage_log": damage_log, **RECIPE, **options}
    )


def lines_of(damage_log: Path, *, without: str = "") -> list[str]:
    """The lines about positions that were taken, sorted; readers ahead may have gone further."""
    found = [json.loads(line) for line in damage_log.read_text().splitlines()]
    taken = [line for line in found if line["position"] < STEPS * BATCH]
    return sorted(json.dumps({key: line[key] for key in line if key != without}) for line in taken)


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_replayed_gives_the_same_damage_log_byte_for_byte(
    whole: Path, tmp_path: Path, seed: int
) -> None:
    ids = damaged(whole, tmp_path / "root", seed)
    first = read(stream_of(tmp_path / "root", tmp_path / "first"), STEPS)
    shutil.rmtree(tmp_path / "root")
    assert damaged(whole, tmp_path / "root", seed) == ids
    again = read(stream_of(tmp_path / "root", tmp_path / "again"), STEPS)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    assert [digest(batch) for batch in first] == [digest(batch) for batch in again]
    assert {json.loads(line)["image_id"] for line in lines_of(tmp_path / "first")} == ids


def test_another_seed_gives_another_damage_log(whole: Path, tmp_path: Path) -> None:
    logs = []
    for seed in range(2):
        damaged(whole, tmp_path / str(seed), seed)
        read(stream_of(tmp_path / str(seed), tmp_path / f"damage_log {seed}"), STEPS)
        logs.append((tmp_path / f"damage_log {seed}").read_bytes())
    assert logs[0] != logs[1]


def test_worker_processes_and_threads_write_the_same_lines_and_take_the_same_substitutes(
    whole: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    damaged(whole, root, 5)
    expected = [digest(batch) for batch in read(stream_of(root, tmp_path / "alone"), STEPS)]
    workers = DataLoader(stream_of(root, tmp_path / "workers"), batch_size=None, num_workers=2)
    assert [digest(batch) for batch in read(workers, STEPS)] == expected
    threads = sa1b.Loader(stream_of(root, tmp_path / "threads"), threads=3, quiet=True)
    assert [digest(batch) for batch in read(threads, STEPS)] == expected
    alone = lines_of(tmp_path / "alone")
    assert len(alone) >= 3
    assert lines_of(tmp_path / "workers") == alone
    assert lines_of(tmp_path / "threads") == alone


@pytest.mark.parametrize(("world_size", "micro"), [(2, 2), (3, 1), (6, 1)])
def test_another_world_size_takes_the_same_substitutes(
    whole: Path, tmp_path: Path, world_size: int, micro: int
) -> None:
    root = tmp_path / "root"
    damaged(whole, root, 6)
    alone = [batch.ids.tolist() for batch in read(stream_of(root, tmp_path / "alone"), STEPS)]
    pieces = -(-BATCH // world_size // micro)
    ranks = [
        read(
            stream_of(root, tmp_path / "ranks", rank=rank, world_size=world_size, micro_batch=micro),
            STEPS * pieces,
        )
        for rank in range(world_size)
    ]
    for step, ids in enumerate(alone):
        parts = [batch for rank in ranks for batch in rank[step * pieces : (step + 1) * pieces]]
        assert [i for batch in parts for i in batch.ids.tolist()] == ids
    assert lines_of(tmp_path / "ranks", without="rank") == lines_of(tmp_path / "alone", without="rank")


def test_a_resumed_stream_takes_the_same_substitutes(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    damaged(whole, root, 7)
    batches = read(stream_of(root, tmp_path / "damage_log"), STEPS)
    for stopped in range(STEPS - 1):
        again = stream_of(root, tmp_path / f"damage_log {stopped}")
        again.load_state_dict(again.state_dict(batches[stopped]))
        assert digest(read(again, 1)[0]) == digest(batches[stopped + 1])
