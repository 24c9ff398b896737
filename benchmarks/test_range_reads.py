"""What reading from an S3 store costs the processor: one request, and the loader at 20 ms beside a folder.

`pytest benchmarks/test_range_reads.py --record` writes the figures into benchmarks/results. It takes some
minutes. Ratios are medians of rounds in which both sides run in turns.
"""

from pathlib import Path
from typing import Any

from benchmarks import material, object_store, range_reads

IMAGES, ROUNDS, LATENCY = 24, 5, 0.02


def test_a_request(tmp_path: Path, figures: dict[str, Any]) -> None:
    found = figures["range reads"] = range_reads.measure(tmp_path)
    for name, row in found["requests"].items():
        print(
            f"\n{name}: {row['signed']:.3f} ms, {row['s3fs']:.3f} ms by s3fs ({row['times_less']:.1f} x)",
            end="",
        )


def test_the_loader_at_20_ms(tmp_path: Path, figures: dict[str, Any]) -> None:
    images = material.make(tmp_path, IMAGES)
    latencies = {kind: [LATENCY] for kind in images.roots}
    rows = object_store.measure(tmp_path / "store", images, latencies, ROUNDS)
    figures["loader at 20 ms"] = {row["kind"]: row for row in rows}
    for row in rows:
        print(
            f"\n{row['kind']}: {row['busy_of_local']:.2f} of local by processor time "
            f"({row['busy_of_local_by_s3fs']:.2f} by s3fs), {row['of_local']:.2f} by the clock",
            end="",
        )
