"""Megabytes per second of the tools and of `gzip -dc` on one core, and the time of a query."""

import gzip
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import duckdb

from benchmarks.material import write_source
from benchmarks.peers.task import Pair, pairs
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.sources.discovery import discover
from sa1b.verify.verify import verify

COPIES = 5
QUERY = """
SELECT count(*) FROM (SELECT unnest(area) / (width * height) AS fraction, unnest(stability_score) AS score
FROM '{root}/*.parquet') WHERE fraction < 0.9 AND score >= 0.96
"""


def measure(folder: Path, root: Path, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of: gunzip alone, reshard, verify, verify --deep, one query over all masks.

    Args:
        folder: folder for temporary files.
        root: dataset directory whose images are used, several times under different ids.
    """
    folder.mkdir()
    plain, packed, out = folder / "plain.tar", folder / "sa_000000.tar", folder / "out"
    write_source(plain, renumbered(root))
    packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
    size = plain.stat().st_size

    def reshard() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (found,) = discover([packed]).sources
        ingest(found, out, Options(), Policy())
        write_dataset(out, read_tasks(out))

    parts: dict[str, Callable[[], Any]] = {
        "gzip -dc": lambda: subprocess.run(
            ["gzip", "-dc", str(packed)], stdout=subprocess.DEVNULL, check=True
        ),
        "reshard": reshard,
        "verify": lambda: verify(out, workers=0, quiet=True),
        "verify --deep": lambda: verify(out, deep=True, workers=0, quiet=True),
        "index query": lambda: duckdb.sql(QUERY.format(root=out)).fetchall(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        for _ in range(rounds + 1):
            for name, part in parts.items():
                began = time.perf_counter()
                part()
                seconds[name].append(time.perf_counter() - began)
    finally:
        os.sched_setaffinity(0, cores)
    kept = {name: values[1:] for name, values in seconds.items()}  # the first call loads compiled code
    found: dict[str, Any] = {
        name: {
            "bytes_per_second": median(size / value for value in values),
            "times_gzip": median(g / v for g, v in zip(kept["gzip -dc"], values, strict=True)),
        }
        for name, values in kept.items()
        if name != "index query"
    }
    report = verify(out, workers=0, quiet=True)
    found["index query"] = {
        "seconds": median(kept["index query"]),
        "images": report.images,
        "masks": report.masks,
    }
    return found


def renumbered(root: Path) -> Iterator[Pair]:
    """The images of the dataset several times, each time under new ids."""
    for number, pair in enumerate(pair for _ in range(COPIES) for pair in pairs(root)):
        document = json.loads(pair.text)
        image_id = 1_000_000 + number
        document["image"] |= {"image_id": image_id, "file_name": f"sa_{image_id}.jpg"}
        yield Pair(image_id, pair.jpeg, json.dumps(document).encode())
