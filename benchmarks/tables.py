"""The results as text: one table for each question, for a terminal and for README.md."""

from typing import Any

SIZES = {"original": "original-size", "1024": "1024-px"}  # JPEGs, by kind of root
STAGES = (
    "read",
    "image",
    "masks",
    "raster",
    "rest",
)  # stages of an image; other measurements are listed separately


def all_tables(document: dict[str, Any]) -> list[str]:
    """All measurements, in the order of the page."""
    found = [heading(document)]
    raster = {kind: own["raster"] for kind, own in document.get("stages", {}).items()}
    found += [comparison(question, raster) for question in document.get("comparison", [])]
    if "stages" in document:
        found.append(stages(document["stages"]))
    if "tools" in document:
        found.append(tools(document["tools"]))
    if "object_store" in document:
        found.append(object_store(document["object_store"]))
    found += [curve(each) for each in document.get("growth", [])]
    found.append(device(document.get("gpu"), document["machine"]["gpu"]))
    found += document.get("not_run", [])
    if "verdict" in document:
        verdict = document["verdict"]
        found.append(f"VERDICT: {verdict['text']} {verdict['change']}")
    return found


def heading(document: dict[str, Any]) -> str:
    machine, material = document["machine"], document["material"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"\n{machine['processor']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}, "
        f"Python {machine['python']}, {machine['date']}; {versions}\n"
        f"{material['origin']}: {material['masks_per_image']:.0f} masks an image, "
        f"{material['runs_per_mask']:.0f} runs a mask, area fraction p50 "
        f"{material['area_fraction_median']:.2%} mean {material['area_fraction_mean']:.2%}, "
        f"JPEG {megabytes(material['jpeg_bytes'])} MB, at 1024 px "
        f"{megabytes(material['jpeg_bytes_1024'])} MB, annotation {material['annotation_bytes'] / 1e3:.0f} kB"
    )


def comparison(question: dict[str, Any], raster: dict[str, float]) -> str:
    """`raster`: milliseconds of one core for the masks of an image to pixels, by size of JPEG."""
    head = [
        "", "workers", "images/s", "range", "per core", "x slower", "range", "CPU ms", "MB read",
        "MB to device", "peak MB", "new process s", "0 %", "50 %", "90 %",
    ]  # fmt: skip
    lines = []
    for row in question["rows"]:
        limit = row["kind"] == "limit"
        slower = row.get("slower")
        resume, cold = row["first_batch_seconds"], row["first_batch_cold_seconds"]
        per_core = row["images_per_cpu_second"]
        lines.append(
            [
                row["name"],
                str(row["workers"]),
                f"{row['images_per_second']:.1f}",
                "-".join(f"{value:.1f}" for value in row["images_per_second_range"]),
                f"{per_core:.1f}" if per_core else "",
                f"{slower['median']:.1f}" if slower else "",
                f"{slower['least']:.1f}-{slower['most']:.1f}" if slower else "",
                f"{1e3 * row['cpu_seconds']:.1f}",
                megabytes(row["bytes_read"]),
                "" if limit else megabytes(row["bytes_to_device"]),
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{cold:.2f}" if cold else "",
                *(f"{resume[start]:.2f}" if start in resume else "" for start in ("0", "0.5", "0.9")),
            ]
        )
    notes = [headline(question)] + [f"{name}: {why}" for name, why in question["missing"].items()]
    if any(row["name"] == "litData" for row in question["rows"]):
        notes.append("MB read: what is read from mapped files does not show (litData).")
    if question["key"].startswith("runs") and (cost := raster.get(question["jpegs"])):
        fastest = best_row(question)
        drawn = 1 / (1 / fastest["images_per_second"] + cost / 1e3 / max(1, fastest["workers"]))
        notes.append(
            f"With the masks drawn here at 1024 x 1024 ({cost:.1f} ms of one core) {drawn:.1f} images/s."
        )
    return "\n".join([f"\n{question['title']}", grid(head, lines), *(note for note in notes if note)])


def best_row(question: dict[str, Any]) -> dict[str, Any]:
    """The row of the fastest contender of this package."""
    wanted = (question["best"], question["best_workers"])
    return next(row for row in question["rows"] if (row["name"], row["workers"]) == wanted)


def headline(question: dict[str, Any]) -> str:
    parts = []
    for kind, words in (("peer", "the best peer"), ("tuned", "a peer tuned beyond its documentation")):
        ratio = question["ratios"].get(kind)
        if ratio:
            parts.append(
                f"{ratio['median']:.1f} times (from {ratio['least']:.1f} to {ratio['most']:.1f}) "
                f"{words}, {ratio['name']} with {ratio['workers']} workers; "
                f"{ratio['cpu']:.1f} times fewer processor seconds"
            )
    if not parts:
        return ""
    return f"{question['best']} with {question['best_workers']}: " + "; ".join(parts)


def stages(times: dict[str, dict[str, float]]) -> str:
    others = [name for name in next(iter(times.values())) if name not in STAGES]
    lines = [
        [
            kind,
            *(f"{own[name]:.2f}" for name in STAGES),
            f"{sum(own[name] for name in STAGES):.2f}",
            *(f"{own[name]:.2f}" for name in others),
        ]
        for kind, own in times.items()
    ]
    return "\nWhere our own time goes: milliseconds of one core and image, masks at 1024\n" + grid(
        ["JPEGs", *STAGES, "sum", *others], lines
    )


def device(found: dict[str, Any] | None, name: str | None) -> str:
    rows = {
        "masks of an image to pixels": ("raster_milliseconds", "{:.2f} ms"),
        "zeros into as many bytes": ("zero_milliseconds", "{:.2f} ms"),
        "the copy alone, pinned": ("copy", "{:.0f} images/s"),
        "Loader to the device, masks as pixels": ("batches", "{:.0f} batches/s"),
        "training ViT-B": ("model", "{:.1f} images/s"),
        "its steps wait for data": ("data_wait", "{:.1%}"),
    }
    lines = [[row, words.format(found[key]) if found else "not run"] for row, (key, words) in rows.items()]
    return f"\nOn a GPU: {name or 'not run, there is none here'}\n" + grid(["", ""], lines)


def tools(rates: dict[str, Any]) -> str:
    lines = [
        [name, f"{rate['bytes_per_second'] / 1e6:.0f}", f"{rate['times_gzip']:.2f}"]
        for name, rate in rates.items()
        if name != "index query"
    ]
    query = rates["index query"]
    return (
        "\nTools, one core\n" + grid(["", "MB/s", "of gzip -dc"], lines) + "\n"
        f"A question to the index about {query['masks']:,} masks of {query['images']:,} images: "
        f"{1e3 * query['seconds']:.0f} ms"
    )


def object_store(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"{row['kind']}, {1e3 * row['latency_seconds']:.0f} ms",
            f"{row['local']:.1f}",
            f"{row['s3']:.1f}",
            f"{row['s3_far_ahead']:.1f}",
            f"{row['of_local']:.2f}",
            "-".join(f"{value:.2f}" for value in row["of_local_range"]),
            f"{row['busy_of_local']:.2f}",
            f"{row['webdataset']:.1f}" if "webdataset" in row else "",
        ]
        for row in rows
    ]
    head = [
        "JPEGs, latency",
        "local",
        "prefetch=2",
        "prefetch=16",
        "of local",
        "range",
        "by own CPU",
        "webdataset over curl, no masks",
    ]
    title = "sa1b.Loader from an S3 server on this machine: images/s, 2 threads, masks as runs"
    title += f"\n({rows[0]['server']})"
    return f"\n{title}\n{grid(head, lines)}"


def curve(each: dict[str, Any]) -> str:
    places = sorted({x for points in each["series"].values() for x, _ in points})
    lines = []
    for name, points in each["series"].items():
        known = dict(map(tuple, points))
        lines.append([name, *(number(known[x]) if x in known else "" for x in places)])
    return f"\n{each['title']} ({each['unit']})\n" + grid([each["axis"], *map(number, places)], lines)


def grid(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *lines]
    )


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.1f}"


def number(value: float) -> str:
    """Integers below 100,000 unchanged; other numbers with three digits, and a letter for large ones."""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:,.0f}"
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
