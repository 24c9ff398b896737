"""README.md beside converted weights: the settings, data and scores of their run, and the licence."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sa1b.engine.checkpoint.folder import step_of
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.storage.protocols import protocol_of
from sa1b.version import __version__

MARK = "Written by `sa1b convert`."  # which a folder must have for --overwrite
_SETTINGS = ("preset", "seed", "model", "recipe", "optim", "distill")
_DATA = (
    "view", "layers", "global_batch", "masks", "strategy", "flip", "min_pixels", "block_size", "target_size",
)  # fmt: skip
_LICENCE = """
The weights have the licence under which they are published, within those of the training data and of the
weights that training started from. SA-1B is released under the SA-1B Dataset Research License: for research
only, without redistribution of its images and without identification of the people in them, see
<https://ai.meta.com/datasets/segment-anything/>. If SA-1B is among the training data, read that licence
before you publish or use these weights. No image of the training data is in this folder.
"""


def card(where: str, facts: Mapping[str, str], snippet: str) -> str:
    """The text of README.md.

    Args:
        where: checkpoint or file that was converted; the files of its run are read if they are there.
        facts: name -> value, for the table at the top.
        snippet: code that loads the weights.
    """
    absolute = where if protocol_of(where) else str(Path(where).absolute())
    run, _, checkpoint = absolute.rpartition("/checkpoints/")
    step = step_of(checkpoint) or 0
    config = _document(run, "config.json") if run else None
    lines = (
        [json.loads(line) for line in _text(run, "metrics.jsonl").splitlines() if line.endswith("}")]
        if run
        else []
    )
    parts = ["---", "tags: [image-segmentation, segment-anything]", "---"]
    parts += [
        f"# Segment Anything ({facts['model']})",
        "",
        f"{MARK} sa1b {__version__}.",
        "",
        "| | |",
        "|---|---|",
    ]
    parts += [f"| {name} | {value} |" for name, value in facts.items()]
    parts += ["", "## Use", "", snippet.strip(), "", "## Training", ""]
    if config is None:
        parts += [f"Unknown: converted from the file `{where.rpartition('/')[2]}`."]
    else:
        parts += [f"{step:,} steps. Settings, as in the run's config.json:", "", "```json"]
        shown = {name: config[name] for name in _SETTINGS if name in config}
        shown["data"] = {name: config["data"][name] for name in _DATA if name in config["data"]}
        parts += [json.dumps(shown, indent=1), "```"]
        starts = [line["run"] for line in lines if "run" in line and line["run"]["step"] < step]
        if starts:
            parts += [
                "",
                "Data, as recorded at the last start before this step:",
                "",
                *_data(starts[-1]["data"]),
            ]
    scores = [line for line in lines if "evaluation" in line and line["step"] <= step]
    parts += ["", "## Scores", ""]
    if scores:
        view = config["evaluation"]["view"] if config else None
        parts += [
            f"After step {scores[-1]['step']:,}, on the held-out view `{view}`:",
            "",
            "| | |",
            "|---|---|",
        ]
        parts += [f"| {name} | {value:.4g} |" for name, value in scores[-1]["evaluation"].items()]
    else:
        parts += ["No evaluation is recorded."]
    return "\n".join([*parts, "", "## Licence", _LICENCE])


def _data(receipt: dict[str, Any]) -> list[str]:
    lines = []
    for name, source in receipt["sources"].items():
        folder = str(source["root"]).rstrip("/").rpartition("/")[2]
        lines += [
            f"- `{name if name != source['root'] else folder}`: directory `{folder}`, view `{source['view']}`"
        ]
    return lines + [f"- {name}: `{digest}`" for name, digest in _digests(receipt["stream"])]


def _digests(state: Any, path: str = "") -> list[tuple[str, str]]:
    """The digests in the state of a stream or of a mixture, with their places."""
    if not isinstance(state, dict):
        return []
    found = [(f"{path}{name}", value) for name, value in state.items() if name.endswith("_sha256") and value]
    return found + [pair for name, value in state.items() for pair in _digests(value, f"{path}{name}.")]


def _document(run: str, name: str) -> dict[str, Any] | None:
    text = _text(run, name)
    document: dict[str, Any] | None = json.loads(text) if text else None
    return document


def _text(run: str, name: str) -> str:
    with contextlib.suppress(MissingError, FileNotFoundError):
        return open_store(run).read(name).decode()
    return ""
