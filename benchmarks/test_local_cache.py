"""An epoch from the local cache of an S3 store compared with an epoch from a local folder.

`pytest benchmarks/test_local_cache.py -s` prints the ratios by processor time and by the clock. Both sides
run in turns in one process, from files in the page cache. The first epoch fills the cache and is not
measured; the measured ones make no request to the store.
"""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import sa1b
from benchmarks import material
from tests.storage.service import Service

IMAGES, ROUNDS, THREADS = 24, 40, 2  # short rounds in turns: the load of a machine changes within seconds
READS = 5  # passes over all images when only the bytes are read


def test_an_epoch_from_the_cache(
    tmp_path: Path, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))
    images = material.make(tmp_path, IMAGES)
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    found = figures["local cache"] = {}
    with Service("range_server", tmp_path / "store") as server:
        options = {"anon": True, "endpoint_url": server.url}
        for kind, root in images.roots.items():
            (tmp_path / "store" / "bucket" / kind).symlink_to(root)
            cached = sa1b.open(
                f"s3://bucket/{kind}",
                storage_options=options,
                cache=tmp_path / "cache",
                cache_bytes=1 << 40,
            )
            sides = {"local": sa1b.open(root), "cached": cached}
            for dataset in sides.values():  # fills the cache, and the page cache
                _epoch(dataset)
                _reads(dataset, 1)
            before = server.ask({})["GET"]
            rounds = []
            for number in range(ROUNDS):  # the first side of a round alternates
                turns = [*sides.items()][:: 1 if number % 2 else -1]
                rounds.append({name: (*_epoch(one), _reads(one, READS)) for name, one in turns})
            assert server.ask({})["GET"] == before
            found[kind] = {
                f"{what} of local": median(
                    (each["cached"][i] / each["local"][i]) ** (1 if i == 0 else -1) for each in rounds
                )
                for i, what in enumerate(("images/s", "busy", "busy of reading"))
            } | {
                f"{name}, {what}": median(each[name][i] for each in rounds)
                for name in sides
                for i, what in enumerate(("images/s", "busy s an image", "busy s a read"))
            }
            row = found[kind]
            print(
                f"\n{kind}: {row['busy of local']:.3f} of local by processor time, "
                f"{row['images/s of local']:.3f} by the clock; a read takes "
                f"{1e6 * row['cached, busy s a read']:.0f} us, {1e6 * row['local, busy s a read']:.0f} us "
                f"of a folder",
                end="",
            )


def _epoch(dataset: sa1b.Dataset) -> tuple[float, float]:
    """Images a second, and processor seconds an image of this process."""
    stream = sa1b.Stream(dataset, global_batch=2, masks=64, damage_log=os.devnull)
    loader = sa1b.Loader(stream, threads=THREADS, quiet=True)
    began, busy = time.perf_counter(), time.process_time()
    images = sum(len(batch.ids) for batch in loader)
    return images / (time.perf_counter() - began), (time.process_time() - busy) / images


def _reads(dataset: sa1b.Dataset, count: int) -> float:
    """Processor seconds of reading and verifying the bytes of an image, without decoding."""
    began = time.process_time()
    for _ in range(count):
        for row in range(len(dataset)):
            dataset.submit([row])[0].begun.result()
    return (time.process_time() - began) / (count * len(dataset))
