"""Writes the figures of a machine's results into README.md, between two marks.

    python -m benchmarks.readme benchmarks/results/<machine>.json

The marks are `<!-- figures: <results file> -->` and `<!-- end of figures -->`; what lies between them is made
here alone, and a test holds it against the file.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import tables

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
_BLOCK = re.compile(r"<!-- figures: (?P<path>\S+) -->\n.*?<!-- end of figures -->", re.DOTALL)


def block(document: dict[str, Any], path: str) -> str:
    """The marked lines: one table, what it was measured on, and what limits that machine."""
    machine, material = document["machine"], document["material"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"<!-- figures: {path} -->",
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, GPU: "
        f"{machine['gpu'] or 'none, not run'}; Python {machine['python']}, {versions}. "
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
    lines += ["", f"{document['verdict']['text']} {document['verdict']['change']}"]
    return "\n".join([*lines, "<!-- end of figures -->"])


def _median(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['median']:.0f}" if ratio else "not run"


def _memory(document: dict[str, Any]) -> list[str]:
    """What the processes of the loaders take at their highest, two workers: a line for each question."""
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
    """The first batches at 0 and 90 % of an epoch, of the quickest loader."""
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
    """What an object store with 20 ms of latency leaves of the local speed."""
    return [
        f"- From {row['server']} on the same cores, 20 ms away, {tables.SIZES[row['kind']]} JPEGs: "
        f"{row['of_local']:.2f} of the local images/s, {row['busy_of_local']:.2f} by the loader's own "
        "processor time."
        for row in document.get("object_store", [])
        if row["latency_seconds"] == 0.02
    ]


def rewritten(text: str, path: str | None = None) -> str:
    """README's text with its block made anew, from the file it names or from another one.

    Raises:
        ValueError: the marks are not there.
    """
    found = _BLOCK.search(text)
    if found is None:
        raise ValueError("README.md has no lines <!-- figures: FILE --> and <!-- end of figures -->")
    path = path or found["path"]
    made = block(json.loads((REPOSITORY / path).read_text()), path)
    return text[: found.start()] + made + text[found.end() :]


def main() -> None:
    path = Path(sys.argv[1]).resolve().relative_to(REPOSITORY) if len(sys.argv) > 1 else None
    README.write_text(rewritten(README.read_text(), str(path) if path else None))


if __name__ == "__main__":
    main()
