"""Mixtures of two datasets, 3 to 1, by this package and by the mixtures of other loaders.

`pytest benchmarks/test_mix.py -s` prints a table. Items are one number, so that only the mixing takes time.
Of this package the formula is measured, from a position to the row of a dataset, without reading. Columns:

    deviation   largest difference between a source's items in any prefix of an epoch and its share, in items
    resume      seconds from a saved state at 90 % of the items to the first item, in a new loader
    same items  whether a loader with 2 ranks continues a state of 1 rank with the items that are left
    us an item  of the mixture, and of the first dataset alone

The other loaders are measured if they are installed; see benchmarks/peers.
"""

import importlib
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa1b.stream.order import Mixture, Order, Phase
from sa1b.stream.plan import Plan

COUNTS, WEIGHTS = (30_000, 10_000), (3, 1)
ITEMS = sum(COUNTS)
BATCH = 256


def ours(start: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, int]]:
    """Source and row of each item, from a position on."""
    mixture = Mixture(COUNTS, (Phase(0, WEIGHTS),))
    orders = [Order(count, str(count), 0) for count in COUNTS]
    plan = Plan(mixture, BATCH, BATCH // ranks, rank, ranks)
    for piece in plan.micro_batches(start):
        source, local, _ = mixture.locate(np.arange(piece.start, piece.stop))
        rows = np.empty_like(local)
        for one, order in enumerate(orders):
            here = source == one
            rows[here] = order.rows(local[here])
        yield from zip(source.tolist(), rows.tolist(), strict=True)


def ours_alone() -> Iterator[int]:
    order = Order(COUNTS[0], "alone", 0)
    for start in range(0, ITEMS, BATCH):
        yield from order.rows(np.arange(start, start + BATCH)).tolist()


def continues(state: int) -> bool:
    """Whether two ranks continue with the same items."""
    expected = set(islice(ours(state), BATCH))
    return expected == {item for rank in (0, 1) for item in islice(ours(state, rank, 2), BATCH // 2)}


def webdatasets(folder: Path) -> list[Any]:
    import webdataset

    for source, count in enumerate(COUNTS):
        with tarfile.open(folder / f"{source}.tar", "w") as tar:
            for number in range(count):
                data = json.dumps([source, number]).encode()
                member = tarfile.TarInfo(f"{number}.json")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return [
        webdataset.WebDataset(str(folder / f"{source}.tar"), shardshuffle=False).shuffle(1000).decode()
        for source in range(len(COUNTS))
    ]


def mosaic(folder: Path) -> Any:
    from benchmarks.peers import torchvision_stand_in

    torchvision_stand_in.install()
    streaming = importlib.import_module("streaming")
    for source, count in enumerate(COUNTS):
        columns = {"source": "int", "number": "int"}
        with streaming.MDSWriter(out=str(folder / str(source)), columns=columns) as writer:
            for number in range(count):
                writer.write({"source": source, "number": number})
    return streaming


def lit(folder: Path) -> Any:
    import litdata

    for source, count in enumerate(COUNTS):
        inputs = [(source, number) for number in range(count)]
        litdata.optimize(
            fn=tuple, inputs=inputs, output_dir=str(folder / str(source)), chunk_bytes="1MB", num_workers=1,
            verbose=False,
        )  # fmt: skip
    return litdata


def seconds_of(items: Iterator[Any], count: int = ITEMS) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    found = list(islice(items, count))
    return time.perf_counter() - began, found


def deviation(sources: list[int]) -> float:
    seen = np.cumsum(np.array(sources) == 0)
    share = np.arange(1, len(sources) + 1) * WEIGHTS[0] / sum(WEIGHTS)
    return float(np.abs(seen - share).max())


Row = tuple[str, float, float, str, float, float]


def row_of(name: str, sources: list[int], resume: float, same: str, mixed: float, alone: float) -> Row:
    """The row of another loader: `mixed` seconds for these items, `alone` for those of the first dataset."""
    return name, deviation(sources), resume, same, mixed * ITEMS / len(sources), alone * ITEMS / COUNTS[0]


def row_of_ours() -> Row:
    seconds_of(ours(), BATCH)  # compiles
    mixed, items = seconds_of(ours())
    resume, _ = seconds_of(ours(9 * ITEMS // 10 // BATCH * BATCH), 1)
    alone, _ = seconds_of(ours_alone())
    same = "yes" if continues(9 * ITEMS // 10 // BATCH * BATCH) else "no"
    return "sa1b.Mix (formula)", deviation([source for source, _ in items]), resume, same, mixed, alone


def row_of_webdataset(folder: Path) -> Row:
    import webdataset

    sets = webdatasets(folder)
    probabilities = [weight / sum(WEIGHTS) for weight in WEIGHTS]

    def mix() -> Iterator[Any]:
        return iter(webdataset.RandomMix(sets, probs=probabilities, longest=True))

    mixed, items = seconds_of(mix())
    alone, _ = seconds_of(iter(sets[0]), COUNTS[0])
    # It has no state: a resumed run reads and drops what was used.
    resume, _ = seconds_of(islice(mix(), 9 * len(items) // 10, None), 1)
    return row_of(
        "webdataset RandomMix", [item["json"][0] for item in items], resume, "no state", mixed, alone
    )


def row_of_mosaic(folder: Path) -> Row:
    streaming = mosaic(folder)

    def mix() -> Any:
        streams = [
            streaming.Stream(local=str(folder / str(source)), proportion=weight / sum(WEIGHTS))
            for source, weight in enumerate(WEIGHTS)
        ]
        return streaming.StreamingDataset(streams=streams, epoch_size=ITEMS, shuffle=True, batch_size=BATCH)

    dataset = mix()
    mixed, items = seconds_of(iter(dataset))
    state = dataset.state_dict(9 * ITEMS // 10 // BATCH * BATCH, True) | {"epoch": 0}
    del dataset
    streaming.base.util.clean_stale_shared_memory()
    began = time.perf_counter()
    resumed = mix()
    resumed.load_state_dict(state)
    next(iter(resumed))
    resume = time.perf_counter() - began
    del resumed
    streaming.base.util.clean_stale_shared_memory()
    single = streaming.StreamingDataset(local=str(folder / "0"), shuffle=True, batch_size=BATCH)
    alone, _ = seconds_of(iter(single), COUNTS[0])
    return row_of("Streaming", [item["source"] for item in items], resume, "not measured", mixed, alone)


def row_of_lit(folder: Path) -> Row:
    litdata = lit(folder)

    def mix() -> Any:
        sets = [litdata.StreamingDataset(str(folder / str(source)), shuffle=True) for source in range(2)]
        probabilities = [weight / sum(WEIGHTS) for weight in WEIGHTS]
        return litdata.CombinedStreamingDataset(sets, weights=probabilities, iterate_over_all=False, seed=1)

    dataset = mix()
    mixed, items = seconds_of(iter(dataset))
    loader = litdata.StreamingDataLoader(mix(), batch_size=BATCH, num_workers=0)
    used = 9 * len(items) // 10 // BATCH
    for _ in islice(loader, used):
        pass
    state = loader.state_dict()
    again = litdata.StreamingDataLoader(mix(), batch_size=BATCH, num_workers=0)
    again.load_state_dict(state)
    began = time.perf_counter()
    next(iter(again))
    resume = time.perf_counter() - began
    alone, _ = seconds_of(iter(litdata.StreamingDataset(str(folder / "0"), shuffle=True)), COUNTS[0])
    return row_of("litData Combined", [int(item[0]) for item in items], resume, "not measured", mixed, alone)


def test_a_mixture_is_exact_at_every_prefix_and_resumes_at_once(tmp_path: Path) -> None:
    rows = [row_of_ours()]
    peers: list[tuple[str, Callable[[Path], Row]]] = [
        ("webdataset", row_of_webdataset), ("streaming", row_of_mosaic), ("litdata", row_of_lit)
    ]  # fmt: skip
    for package, measure in peers:
        folder = tmp_path / package
        folder.mkdir()
        if importlib.util.find_spec(package) is None:
            print(f"\n{package}: not installed, see benchmarks/peers/requirements.txt")
        else:
            rows.append(measure(folder))
    print(f"\n{'':22}{'deviation':>10}{'resume s':>10}{'same items':>14}{'us an item':>12}{'alone':>8}")
    for name, found, resume, same, mixed, alone in rows:
        figures = f"{1e6 * mixed / ITEMS:12.2f}{1e6 * alone / ITEMS:8.2f}"
        print(f"{name:22}{found:10.1f}{resume:10.4f}{same:>14}{figures}")
    assert rows[0][1] < 1
    assert rows[0][3] == "yes"
    if len(rows) < 4:
        pytest.skip("the table lacks loaders that are not installed")
