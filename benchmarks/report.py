"""The results as one self-contained HTML page: verdict, bars, growth curves, tables.

python benchmarks/report.py benchmarks/results/<machine>.json
"""

import json
import re
import sys
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks import tables

FRAME = Path(__file__).with_name("report.html")
# Colours that matplotlib writes, and what stands in their place in the page, light or dark.
_INK, _LINES = "#010203", [f"#01020{number}" for number in range(4, 9)]
_COLOURS = {_INK: "currentColor"} | {line: f"var(--c{number})" for number, line in enumerate(_LINES)}
_STYLE: dict[str, Any] = dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none")
_STYLE |= dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
)
_STYLE |= {"axes.prop_cycle": cycler(color=_LINES), "legend.framealpha": 0, "legend.fontsize": "small"}
_KINDS = {"ours": "sa1b", "peer": "others", "tuned": "others, tuned further", "limit": "limits"}


def page(document: dict[str, Any]) -> str:
    """The page of one machine's results."""
    machine = document["machine"]
    parts = {
        "TITLE": f"{machine['processor']}, {machine['cores']} cores",
        "VERDICT": _verdict(document),
        "FACTS": _facts(document),
        "COMPARISON": "".join(_question(each) for each in document["comparison"]),
        "STAGES": _stages(document["stages"]),
        "CURVES": "".join(_curve(each) for each in document["growth"]),
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


@rc_context(_STYLE)
def _curve(curve: dict[str, Any]) -> str:
    """Lines over a logarithmic axis in both directions where the values span a decade."""
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    for name, line in curve["series"].items():
        axes.plot(*zip(*line, strict=True), "o-", label=name)
    points = zip(*(point for line in curve["series"].values() for point in line), strict=True)
    for values, scale in zip(points, (axes.set_xscale, axes.set_yscale), strict=True):
        if min(values) > 0 and max(values) >= 10 * min(values):
            scale("log")
        elif scale == axes.set_xscale:  # numbers of workers or pixels
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel=curve["axis"], ylabel=curve["unit"])
    figure.legend(loc="outside upper left")  # above the lines
    file = StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    picture = re.sub("<!--.*?-->", "", file.getvalue(), flags=re.DOTALL)
    for colour, shown in _COLOURS.items():
        picture = picture.replace(colour, shown)
    title = f"<figcaption>{escape(curve['title'])}</figcaption>"
    return f'<figure class="card">{title}{picture[picture.index("<svg") :]}</figure>'


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_name("report.html").write_text(page(json.loads(source.read_text())))
