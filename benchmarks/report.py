"""The results as one self-contained HTML page: verdict, bars, growth curves, scaling of training, tables.

python benchmarks/report.py benchmarks/results/<machine>.json
"""

import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import material, tables
from sa1b.programs.scaling.page import charts
from sa1b.programs.scaling.result import Scaling

FRAME = Path(__file__).with_name("report.html")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 250, 62, 14, 12, 46
_KINDS = {"ours": "sa1b", "peer": "others", "tuned": "others, tuned further", "limit": "limits"}


def write(document: dict[str, Any], path: Path) -> None:
    """The page of one machine's results, with the scaling of training if `<machine>-parts.json` has it.

    Args:
        document: results of the comparison.
        path: path of the page, in the folder of the results.
    """
    found = path.with_name(f"{material.name_of(document['machine'])}-parts.json")
    parts = json.loads(found.read_bytes())["parts"] if found.exists() else {}
    path.write_text(page(document, parts.get("scaling", {}).get("figures")))


def page(document: dict[str, Any], scaling: dict[str, Any] | None = None) -> str:
    """The page of one machine's results.

    Args:
        document: results of the comparison.
        scaling: results of `sa1b bench scaling --json`.
    """
    machine = document["machine"]
    parts = {
        "TITLE": f"{machine['processor']}, {machine['cores']} cores",
        "VERDICT": _verdict(document),
        "FACTS": _facts(document),
        "COMPARISON": "".join(_question(each) for each in document["comparison"]),
        "STAGES": _stages(document["stages"]),
        "CURVES": "".join(_curve(each) for each in document["growth"]),
        "SCALING": "" if scaling is None else charts(Scaling.of_document(scaling)),
        "TABLES": "".join(
            f"<details><summary>{escape(text.strip().splitlines()[0])}</summary><pre>"
            f"{escape(text.strip().partition(chr(10))[2])}</pre></details>"
            for text in tables.all_tables(document)[1:]
            if "\n" in text.strip()
        ),
    }
    text = FRAME.read_text()
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", escape(part) if name == "TITLE" else part)
    return text


def _verdict(document: dict[str, Any]) -> str:
    verdict = document["verdict"]
    not_run = "" if document["machine"]["gpu"] else " Copy to a GPU and a model: not run, no GPU here."
    return f"<b>{escape(verdict['text'])}</b> {escape(verdict['change'])}{not_run}"


def _facts(document: dict[str, Any]) -> str:
    machine, material = document["machine"], document["material"]
    facts = {
        "date": machine["date"],
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "load at the start": f"{document['load']:.1f}",
        "GPU": machine["gpu"] or "none: not run",
        "Python": machine["python"],
        **machine["versions"],
        "images": material["origin"],
        "masks an image": f"{material['masks_per_image']:.0f}",
        "runs a mask": f"{material['runs_per_mask']:.0f}",
        "area fraction": f"p50 {material['area_fraction_median']:.2%}, "
        f"mean {material['area_fraction_mean']:.2%}",
        "JPEG": f"{tables.megabytes(material['jpeg_bytes'])} MB; at 1024 px "
        f"{tables.megabytes(material['jpeg_bytes_1024'])} MB",
    }
    if document.get("storage"):
        facts["disk"] = f"{document['storage']['disk'] / 1e6:,.0f} MB/s"
        facts["page cache"] = f"{document['storage']['page cache'] / 1e6:,.0f} MB/s"
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items()
    )


def _question(question: dict[str, Any]) -> str:
    """Bars of images per second. Limits of one process beyond the axis are truncated and marked."""
    rows = [row for row in question["rows"] if row["name"] != "reading alone"]
    contenders = [row["images_per_second"] for row in rows if row["kind"] != "limit"]
    widest = 1.25 * max(contenders)
    bars = []
    for row in sorted(rows, key=lambda row: (list(_KINDS).index(row["kind"]), -row["images_per_second"])):
        rate, (low, high) = row["images_per_second"], row["images_per_second_range"]
        start, stop = (min(100.0, 100 * value / widest) for value in (low, high))
        slower = row.get("slower")
        said = f"{rate:.1f} images/s" + (f", {slower['median']:.1f} x slower" if slower else "")
        detail = (
            f"from {low:.1f} to {high:.1f} images/s; {1e3 * row['cpu_seconds']:.1f} ms of processor each; "
            f"{row['peak_bytes'] / 1e6:.0f} MB"
        )
        if row["first_batch_cold_seconds"]:
            detail += f"; first batch of a new process after {row['first_batch_cold_seconds']:.1f} s"
        bars.append(
            f'<div class="row" title="{escape(detail)}"><span class="name">{escape(row["name"])} '
            f"<small>{_with(row)}</small></span>"
            f'<span class="track"><span class="fill {row["kind"]}{" cut" * (rate > widest)}" '
            f'style="width:{min(100, 100 * rate / widest):.2f}%"></span>'
            f'<i style="left:{start:.2f}%;width:{stop - start:.2f}%"></i></span>'
            f'<span class="value">{escape(said)}</span></div>'
        )
    missing = "".join(f"<p>{escape(name)}: {escape(why)}</p>" for name, why in question["missing"].items())
    return (
        f'<section class="card"><h3>{escape(question["title"])}</h3>'
        f"<p>{escape(tables.headline(question))}</p>{''.join(bars)}{missing}</section>"
    )


def _with(row: dict[str, Any]) -> str:
    count = row["workers"]
    unit = "thread" if row["name"].startswith("sa1b.Loader") else "worker"
    return f"{count} {unit}{'s' * (count != 1)}" if count else "one process"


def _stages(times: dict[str, dict[str, float]]) -> str:
    """One bar for each size of JPEG, cut into stages."""
    names = tables.STAGES
    longest = max(sum(own[name] for name in names) for own in times.values())
    bars = "".join(
        f'<div class="row"><span class="name">{escape(kind)}</span><span class="track stages">'
        + "".join(
            f'<span class="stage s{i}" style="width:{100 * own[name] / longest:.2f}%" '
            f'title="{escape(name)}: {own[name]:.2f} ms"></span>'
            for i, name in enumerate(names)
        )
        + f'</span><span class="value">{sum(own[name] for name in names):.1f} ms</span></div>'
        for kind, own in times.items()
    )
    key = "".join(
        f'<span><b class="stage s{i}"></b>{escape(name)} '
        + ", ".join(f"{own[name]:.2f}" for own in times.values())
        + "</span>"
        for i, name in enumerate(names)
    )
    return f'{bars}<p class="key">{key}</p>'


def _curve(curve: dict[str, Any]) -> str:
    """Lines over a logarithmic axis in both directions where the values span a decade."""
    points = [point for line in curve["series"].values() for point in line]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x_of, x_ticks = _axis([x for x, _ in points], _LEFT, right, own=True)
    y_of, y_ticks = _axis([y for _, y in points], bottom, _TOP)
    grid = "".join(
        f'<path class="grid" d="M{_LEFT} {y_of(tick):.1f}H{right}"/>'
        f'<text x="{_LEFT - 6}" y="{y_of(tick):.1f}" dy=".35em" text-anchor="end">'
        f"{tables.number(tick)}</text>"
        for tick in y_ticks
    )
    along = "".join(
        f'<path class="tick" d="M{x_of(tick):.1f} {bottom}v4"/>'
        f'<text x="{x_of(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tables.number(tick)}</text>'
        for tick in x_ticks
    )
    lines, key = [], []
    for i, (name, line) in enumerate(curve["series"].items()):
        path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in line)
        dots = "".join(
            f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5">'
            f"<title>{escape(name)}: {tables.number(y)} at {tables.number(x)}</title></circle>"
            for x, y in line
        )
        lines.append(f'<g class="line l{i}"><path d="M{path}"/>{dots}</g>')
        key.append(f'<span><b class="l{i}"></b>{escape(name)}</span>')
    return (
        f'<figure class="card"><figcaption>{escape(curve["title"])}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(curve["title"])}">'
        f'{grid}<path class="tick" d="M{_LEFT} {bottom}H{right}"/>{along}{"".join(lines)}'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{escape(curve['axis'])}</text>"
        f'<text transform="translate(13 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f'{escape(curve["unit"])}</text></svg><p class="key">{"".join(key)}</p></figure>'
    )


def _axis(values: list[float], start: float, stop: float, *, own: bool = False) -> tuple[Any, list[float]]:
    """The position of a value between start and stop, and the labelled values: `own` or round values."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= 10:
        low, high = (low, high) if own else (10.0 ** math.floor(math.log10(low)), high)
        span = math.log(high / low) * (1.0 if own else 1.05)

        def place(value: float) -> float:
            return start + math.log(value / low) / span * (stop - start)

        decades = [
            10.0**n for n in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high)) + 1)
        ]
        return place, sorted(set(values)) if own else decades
    if not own:
        low, high = 0.0, 1.1 * high
    width = high - low or 1.0

    def linear(value: float) -> float:
        return start + (value - low) / width * (stop - start)

    step = 10.0 ** math.floor(math.log10(width / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if width / (step * factor) <= 6)
    return linear, sorted(set(values)) if own else [n * step for n in range(int(high / step) + 1)]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    write(json.loads(source.read_text()), source.with_name("report.html"))
