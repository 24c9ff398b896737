"""Figures of the single parts, from all benchmarks except the comparison, and their table.

`pytest benchmarks/test_masks.py --record` writes the figures of that benchmark into
benchmarks/results/<machine>-parts.json; those of other benchmarks stay in the file. `make figures` runs all.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import material
from sa1b.storage.atomic import json_bytes, write_whole

RESULTS = Path(__file__).parent / "results"


def record(results: Path, figures: dict[str, dict[str, Any]]) -> Path:
    """Add measurements to the file of this machine, each part with its date, load and versions.

    Args:
        results: folder of the file; created if it is missing.
        figures: measurements by part, such as "order".
    """
    machine = material.machine()
    path = results / f"{material.name_of(machine)}-parts.json"
    document = json.loads(path.read_bytes()) if path.exists() else {"parts": {}}
    document["machine"] = machine
    for name, values in figures.items():
        document["parts"][name] = {
            "date": machine["date"],
            "load": os.getloadavg()[0],
            "versions": machine["versions"],
            "figures": values,
        }
    results.mkdir(exist_ok=True)
    write_whole(path, json_bytes(document))
    return path


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The table of a results file, with the machine; parts without a measurement have no row."""
    machine = document["machine"]
    dates = sorted({part["date"] for part in document["parts"].values()})
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {machine['processor']}, "
        f"{machine['cores']} cores, Python {machine['python']}, {versions}. One thread unless the row says "
        "otherwise. Synthetic images of 2250 x 1500 pixels with about 100 masks."
    )
    yield ""
    yield "| what | measured | compared with | command |"
    yield "|---|---|---|---|"
    for part, make, name in ROWS:
        if part in document["parts"]:
            for what, measured, compared in make(document["parts"][part]["figures"]):
                yield f"| {what} | {measured} | {compared} | `{_command(name)}` |"


def _command(name: str) -> str:
    return "make demo" if name == "test_demo" else f"pytest benchmarks/{name}.py"


SCORES = {  # of benchmarks/test_time_to_score.py, and their prompts
    "miou_1_click": "1 click",
    "miou_3_clicks": "3 clicks",
    "miou_5_clicks": "5 clicks",
    "miou_box": "box",
}
Row = tuple[str, str, str]  # columns: quantity, measured value, compared with


def _reshard(what: str) -> Callable[[dict[str, float]], Iterator[Row]]:
    def rows(found: dict[str, float]) -> Iterator[Row]:
        speed, gzip = found["bytes_per_second, wall"], found["gzip_bytes_per_second, wall"]
        processor = found["bytes_per_second, processor"] / found["gzip_bytes_per_second, processor"]
        yield (
            what,
            f"{speed / 1e6:.0f} MB/s",
            f"`gzip -dc` of the same tar: {gzip / 1e6:.0f} MB/s; ratio {speed / gzip:.2f} by elapsed time, "
            f"{processor:.2f} by processor time",
        )

    return rows


def _scale(found: dict[str, Any]) -> Iterator[Row]:
    steps = ("finish", "add one source", "open", "stream, first batch at 90 %")
    most = max(found[step]["peak_mb"] for step in steps)
    yield (
        f"{found['images'] / 1e6:.1f} million images simulated: {' / '.join(steps)}",
        " / ".join(f"{found[step]['seconds']:.2g} s" for step in steps),
        f"at most {most:,.0f} MB of memory",
    )


def _times(what: str, name: str, beside: str) -> Callable[[dict[str, dict[str, float]]], Iterator[Row]]:
    def rows(found: dict[str, dict[str, float]]) -> Iterator[Row]:
        if one := found.get(name):
            times = one["times_faster"]
            longer = f"{times:,.0f}" if times >= 10 else f"{times:.1f}"
            yield what, f"{1e3 * one['seconds']:.3g} ms", f"{beside}: {longer} times as long"

    return rows


def _record(found: dict[str, int]) -> Iterator[Row]:
    own, plain = found["COCO strings, level 3, bytes"], found["uint32, level 3, bytes"]
    yield (
        "masks in the record of an image",
        f"{own / 1e3:.0f} kB",
        f"zstandard-compressed uint32 runs: {plain / 1e3:.0f} kB",
    )


def _stream(found: dict[str, float]) -> Iterator[Row]:
    def rate(name: str) -> str:
        return f"{found[f'{name}, images/s']:.0f} images/s"

    alone = "the JPEG decoder alone: "
    yield (
        "stream, original size to 1024 pixels, 64 masks as runs",
        rate("stream, original"),
        alone + rate("decoder, original"),
    )
    for size in (1024, 256):
        yield f"the same with masks as {size} x {size} pixels", rate(f"stream, original, dense {size}"), ""
    yield "stream from shards of 1024 pixels", rate("stream, 1024"), alone + rate("decoder, 1024")
    one, two = found["loader, 1 threads, images/s"], found["loader, 2 threads, images/s"]
    yield "loader with two threads on two cores", f"{two:.0f} images/s", f"{two / one:.1f} times one thread"


def _order(found: dict[str, float]) -> Iterator[Row]:
    each = [value for name, value in found.items() if name.startswith("a position, block size")]
    yield "a position of the order, 11.2 million samples", f"{min(each):.0f} to {max(each):.0f} ns", ""


def _range_reads(found: dict[str, Any]) -> Iterator[Row]:
    for size, label in ((16_384, "16 kB"), (65_536, "64 kB"), (330_000, "330 kB"), (2_000_000, "2 MB")):
        plain, tls = (found["requests"][f"{size} bytes, {name}"] for name in ("plain", "TLS"))
        yield (
            f"processor time of a range of {label} from {found['server']}, plain / TLS",
            f"{plain['signed']:.2f} / {tls['signed']:.2f} ms",
            f"s3fs: {plain['s3fs']:.2f} / {tls['s3fs']:.2f} ms, {plain['times_less']:.1f} / "
            f"{tls['times_less']:.1f} times longer",
        )


def _far_loader(found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    for kind, row in found.items():
        size = {"original": "original size", "1024": "1024 pixels"}[kind]
        yield (
            f"loader from {row['server']}, {1e3 * row['latency_seconds']:.0f} ms away, JPEGs of {size}",
            f"{row['busy_of_local']:.2f} of the local speed by its processor time",
            f"s3fs: {row['busy_of_local_by_s3fs']:.2f}",
        )


def _local_cache(found: dict[str, dict[str, float]]) -> Iterator[Row]:
    for kind, row in found.items():
        size = {"original": "original size", "1024": "1024 pixels"}[kind]
        yield (
            f"loader with two threads, from the local cache of a store, JPEGs of {size}",
            f"{row['busy of local']:.2f} of local by its processor time, {row['images/s of local']:.2f} by "
            "the clock",
            f"processor time of a read: {1e6 * row['cached, busy s a read']:.0f} us, from a folder "
            f"{1e6 * row['local, busy s a read']:.0f} us",
        )


def _time_to_score(found: dict[str, Any]) -> Iterator[Row]:
    def last(kind: str) -> list[dict[str, Any]]:
        return [run[-1] for run in found["runs"][kind]]

    def images(kind: str) -> float:
        return fmean(each["images"] for each in last(kind))

    for score, prompt in SCORES.items():
        own, files = ([each["scores"][score] for each in last(kind)] for kind in ("shards", "files"))
        yield (
            f"mean IoU, {prompt}, after {found['seconds']:,.0f} s of training on all cores, "
            f"{images('shards'):,.0f} images",
            f"{fmean(own):.3f} ({min(own):.3f} to {max(own):.3f}, {len(own)} seeds)",
            f"extracted files: {fmean(files):.3f} ({min(files):.3f} to {max(files):.3f}), "
            f"{images('files'):,.0f} images",
        )


def _recompute(found: dict[str, dict[str, float]]) -> Iterator[Row]:
    def text(one: dict[str, float]) -> str:
        return f"{one['seconds']:.1f} s, {one['activations'] / 1e9:.2f} GB"

    for value in ("every:2", "all"):
        yield (
            f"`--model.checkpoint-blocks {value}`: encoder of ViT-B, 2 images of 512; activations",
            text(found[value]),
            f"none: {text(found['none'])}",
        )


def _demo(found: dict[str, float]) -> Iterator[Row]:
    yield "`make demo` after the installation, training included", f"{found['seconds']:.0f} s", ""


_REFERENCE = "pycocotools and OpenCV"
ROWS: list[tuple[str, Callable[[dict[str, Any]], Iterator[Row]], str]] = [
    ("reshard", _reshard("source tar to verified shards, two cores"), "test_reshard"),
    ("reshard index_runs=False", _reshard("the same with `--no-index-runs`"), "test_reshard"),
    ("scale", _scale, "test_scale"),
    *(
        (
            f"64 masks to {size}x{size}",
            _times(f"64 masks to {size} x {size} pixels", f"test_raster_{size}[frame]", _REFERENCE),
            "test_masks",
        )
        for size in (1024, 256)
    ),
    (
        "strings to runs",
        _times("COCO strings of 100 masks to runs", "test_strings_decode[bytes]", "`pycocotools.mask.area`"),
        "test_masks",
    ),
    ("iou 100 x 100", _times("IoU of 100 x 100 masks", "test_iou", "pycocotools"), "test_masks"),
    ("mask record", _record, "test_record"),
    ("stream", _stream, "test_stream"),
    ("order", _order, "test_order"),
    ("range reads", _range_reads, "test_range_reads"),
    ("loader at 20 ms", _far_loader, "test_range_reads"),
    ("local cache", _local_cache, "test_local_cache"),
    ("time to score", _time_to_score, "test_time_to_score"),
    ("recompute", _recompute, "test_recompute"),
    ("demo", _demo, "test_demo"),
]  # fmt: skip
