"""Writes the figures of results files into README.md and pages of docs/, between two marks.

    python -m benchmarks.readme                                   from the files that the marks name
    python -m benchmarks.readme benchmarks/results/<machine>.json     from those of another machine

The marks are `<!-- figures: FILE -->`, or `<!-- figures: FILE headline -->` for three lines of it, and
`<!-- end of figures -->`. Only this script writes the text between them; a test compares it with the file.
FILE is a result of `pytest benchmarks/test_peers.py`, or a file of single parts, see benchmarks/parts.py.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.parts import lines as parts_lines

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "docs/benchmarks.md")]
_BLOCK = re.compile(
    r"<!-- figures: (?P<path>\S+?)(?P<part> headline)? -->\n.*?<!-- end of figures -->", re.DOTALL
)


def headline(document: dict[str, Any]) -> list[str]:
    """Three figures with their command: the loader beside the best peer, resharding, resuming."""
    question = max(
        (each for each in document["comparison"] if each["ratios"].get("peer")),
        key=lambda each: each["ratios"]["peer"]["median"],
    )
    ratio, best = question["ratios"]["peer"], tables.best_row(question)
    peer = next(
        row["images_per_second"]
        for row in question["rows"]
        if (row["name"], row["workers"]) == (ratio["name"], ratio["workers"])
    )
    reshard, gzip = document["tools"]["reshard"], document["tools"]["gzip -dc"]
    first = next(
        found for each in document["comparison"] if (found := tables.best_row(each)["first_batch_seconds"])
    )
    machine = document["machine"]
    return [
        f"| {machine['processor']}, {machine['cores']} cores, {machine['date']} | measured | compared with |",
        "|---|---|---|",
        f"| images a second with 64 {question['title'].partition(') ')[2]} "
        f"| {best['images_per_second']:.0f} | **{ratio['median']:.0f} times** the best of the other loaders: "
        f"{peer:.1f} with {ratio['name']} |",
        f"| source tar to verified, indexed shards | {reshard['bytes_per_second'] / 1e6:.0f} MB/s | "
        f"`gzip -dc` alone: {gzip['bytes_per_second'] / 1e6:.0f} MB/s |",
        f"| first batch after a resume at 90 % of an epoch | {first['0.9']:.2f} s | "
        f"at the start of an epoch: {first['0']:.2f} s |",
        "",
        "In a clone, `pytest benchmarks` measures your machine in five minutes: ratios depend on it, "
        "19 to 61 on this one, 26 to 106 on one of AMD. "
        "`sa1b bench shards` says what limits it.",
    ]


def comparison(document: dict[str, Any]) -> list[str]:
    """One table, its machine, and the limit of that machine."""
    machine, material = document["machine"], document["material"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, GPU: "
        f"{machine['gpu'] or 'none'}; Python {machine['python']}, {versions}. "
        f"{material['origin'].capitalize()}: {material['masks_per_image']:.0f} masks of "
        f"{material['runs_per_mask']:.0f} runs an image. Ratios are medians of interleaved rounds "
        "(`pytest benchmarks/test_peers.py`).",
        "",
        "| the same tensors from all contenders, 64 masks | here | the best peer | times faster (range) "
        "| than a peer tuned beyond its documentation |",
        "|---|---|---|---|---|",
    ]
    for question in document["comparison"]:
        ratio = question["ratios"].get("peer")
        rows = {(row["name"], row["workers"]): row for row in question["rows"]}
        if ratio is None:
            continue
        best, peer = tables.best_row(question), rows[ratio["name"], ratio["workers"]]
        lines.append(
            f"| {question['title']} | {best['images_per_second']:.0f} images/s, `{best['name']}` | "
            f"{peer['images_per_second']:.1f} images/s, {peer['name']} | "
            f"{ratio['median']:.0f} ({ratio['least']:.0f} to {ratio['most']:.0f}) | "
            f"{_median(question['ratios'].get('tuned'))} |"
        )
    lines += ["", *_memory(document), *_resume(document), *_store(document)]
    return [*lines, "", f"{document['verdict']['text']} {document['verdict']['change']}"]


def _median(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['median']:.0f}" if ratio else "not run"


def _memory(document: dict[str, Any]) -> list[str]:
    """Largest memory of the loaders' processes with two workers: a line for each question."""
    lines = []
    for question in document["comparison"]:
        rows = [row for row in question["rows"] if row["workers"] == 2]
        ours = [row["peak_bytes"] for row in rows if row["kind"] == "ours"]
        peers = [row["peak_bytes"] for row in rows if row["kind"] == "peer"]
        if ours and peers:
            words = f"{min(ours) / 1e6:.0f} MB, peers {min(peers) / 1e6:.0f} to {max(peers) / 1e6:.0f} MB"
            lines.append(f"- Memory with two workers, {question['title']}: {words}.")
    return lines


def _resume(document: dict[str, Any]) -> list[str]:
    """Time of the first batches at 0 and 90 % of an epoch, of the fastest loader."""
    lines = []
    for question in document["comparison"]:
        found = tables.best_row(question)["first_batch_seconds"]
        if found:
            lines.append(
                f"- First batch in a running process: {found['0']:.2f} s at the start of an epoch, "
                f"{found['0.9']:.2f} s at 90 % of it."
            )
    return lines


def _store(document: dict[str, Any]) -> list[str]:
    """The speed with an object store of 20 ms latency, relative to the local speed."""
    return [
        f"- From {row['server']} on the same cores, 20 ms away, {tables.SIZES[row['kind']]} JPEGs: "
        f"{row['of_local']:.2f} of the local images/s, and {row['busy_of_local']:.2f} if only the processor "
        "time of the loader is counted."
        for row in document.get("object_store", [])
        if row["latency_seconds"] == 0.02
    ]


def rewritten(text: str, machine: str | None = None) -> str:
    """A page's text with its blocks generated again.

    Args:
        text: the page; blocks whose file or part is not there yet stay as they are.
        machine: stem of the results files to take instead of those that the marks name.

    Raises:
        ValueError: the page has no marks.
    """
    if not _BLOCK.search(text):
        raise ValueError("the page has no lines <!-- figures: FILE --> and <!-- end of figures -->")

    def made(found: re.Match[str]) -> str:
        path = Path(found["path"])
        if machine is not None:
            parts = "-parts" if path.stem.endswith("-parts") else ""
            path = path.with_name(f"{machine}{parts}.json")
        if not (REPOSITORY / path).exists():
            return found[0]
        document = json.loads((REPOSITORY / path).read_text())
        if found["part"] == " headline":
            lines = headline(document)
        else:
            lines = list(parts_lines(document)) if "parts" in document else comparison(document)
        mark = f"<!-- figures: {path}{found['part'] or ''} -->"
        return "\n".join([mark, *lines, "<!-- end of figures -->"])

    return _BLOCK.sub(made, text)


def main() -> None:
    machine = Path(sys.argv[1]).stem.removesuffix("-parts") if len(sys.argv) > 1 else None
    for page in PAGES:
        if page.exists():
            page.write_text(rewritten(page.read_text(), machine))


if __name__ == "__main__":
    main()
