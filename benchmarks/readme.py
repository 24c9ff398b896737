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
        "| the same tensors from everybody, 64 masks | here | the best peer | times faster (range) |",
        "|---|---|---|---|",
    ]
    for question in document["comparison"]:
        ratio = question["ratios"].get("peer")
        rows = {(row["name"], row["workers"]): row for row in question["rows"]}
        best = rows[question["best"], question["best_workers"]]
        if ratio is None:
            continue
        peer = rows[ratio["name"], ratio["workers"]]
        lines.append(
            f"| {question['title']} | {best['images_per_second']:.0f} images/s, `{best['name']}` | "
            f"{peer['images_per_second']:.1f} images/s, {peer['name']} | "
            f"{ratio['median']:.0f} ({ratio['least']:.0f} to {ratio['most']:.0f}) |"
        )
    lines += ["", f"{document['verdict']['text']} {document['verdict']['change']}"]
    return "\n".join([*lines, "<!-- end of figures -->"])


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
