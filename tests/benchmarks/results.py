"""A results document in the form that the benchmarks write, with round numbers."""

from typing import Any


def row(name: str, kind: str, workers: int, rate: float, slower: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "workers": workers,
        "images_per_second": rate,
        "images_per_second_range": [rate * 0.9, rate * 1.1],
        "images_per_cpu_second": rate / 2,
        "cpu_seconds": 2 / rate,
        "bytes_read": 1e6,
        "bytes_to_device": 3e6,
        "peak_bytes": 5e8,
        "first_batch_cold_seconds": 2.0,
        "first_batch_seconds": {"0": 0.1, "0.5": 0.1, "0.9": 0.1},
    }
    return (
        found if slower is None else found | {"slower": {"median": slower, "least": slower, "most": slower}}
    )


def document() -> dict[str, Any]:
    stages = {
        "read": 0.5,
        "image": 8.0,
        "masks": 0.5,
        "raster": 1.0,
        "rest": 0.0,
        "raster, all cleared": 4.0,
        "raster, fresh memory": 9.0,
    }
    return {
        "machine": {
            "processor": "A <processor>",
            "cores": 2,
            "memory_bytes": 1 << 34,
            "gpu": None,
            "system": "Linux 6",
            "python": "3.11",
            "versions": {"torch": "2.13.0"},
            "date": "2026-01-02",
        },
        "load": 0.5,
        "material": {
            "origin": "24 synthetic images",
            "images": 24,
            "sizes": ["2250x1500"],
            "masks_per_image": 100.0,
            "runs_per_mask": 300.0,
            "area_fraction_median": 0.002,
            "area_fraction_mean": 0.009,
            "jpeg_bytes": 1e6,
            "jpeg_bytes_1024": 3e5,
            "bytes_per_image": {"original": 1e6, "1024": 3e5},
            "annotation_bytes": 6e4,
        },
        "comparison": [
            {
                "key": "a-original",
                "jpegs": "original",
                "title": "(a) masks at 1024 x 1024",
                "rows": [
                    row("sa1b.Loader", "ours", 2, 200.0),
                    row("extracted files", "peer", 2, 10.0, 20.0),
                    row("JPEG decoding alone", "limit", 0, 1000.0),
                ],
                "best": "sa1b.Loader",
                "best_workers": 2,
                "ratios": {
                    "peer": {
                        "median": 20.0,
                        "least": 19.0,
                        "most": 21.0,
                        "name": "extracted files",
                        "workers": 2,
                        "cpu": 20.0,
                    }
                },
                "missing": {"litData": "not run: litdata not installed"},
            }
        ],
        "stages": {"original": stages, "1024": stages | {"image": 2.0}},
        "storage": {"disk": 1e9, "page cache": 5e9},
        "object_store": [
            {
                "server": "a small server; not run: Ceph",
                "kind": "original",
                "latency_seconds": 0.02,
                "local": 100.0,
                "s3": 50.0,
                "s3_far_ahead": 90.0,
                "of_local": 0.9,
                "of_local_range": [0.8, 1.0],
                "busy_of_local": 0.95,
            }
        ],
        "growth": [
            {
                "title": "Seconds",
                "axis": "images",
                "unit": "seconds",
                "series": {"sa1b": [[1e4, 0.01], [1e7, 0.01]], "a list": [[1e4, 0.01], [1e7, 10.0]]},
            }
        ],
    }
