"""Tables of the pages that are generated from code or results: `python -m tests.docs.generated` writes them.

They are between `<!-- generated: NAME -->` and `<!-- end of generated -->`. A test compares them with their
source.
"""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from sa1b import verbs
from sa1b.recipes.presets import SAM_PRESETS, SamConfig
from sa1b.sam.model import Sam

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RESULTS = DOCS.parent / "benchmarks" / "results" / "intel-xeon-2.30ghz-2-cores.json"
_BLOCK = re.compile(r"<!-- generated: (?P<name>\w+) -->\n.*?<!-- end of generated -->", re.DOTALL)
_SIZES = (
    *("image_size", "patch_size", "width", "depth", "heads", "global_blocks", "window", "channels"),
    "pixel_features",
)
# Presets with a model of timm differ from vit_t in the image encoder alone.
SHOWN = {name: one for name, one in SAM_PRESETS.items() if not one.model.backbone}
# Settings that do not belong to the recipe of a run.
_LEFT_OUT = {"data.root", "data.view", "checkpoint.every"}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(label: str, read: Callable[[SamConfig], str]) -> str:
    return f"| {label} | {' | '.join(read(config) for config in SHOWN.values())} |"


def _head(label: str) -> list[str]:
    names = [f"`{name}`" for name in SHOWN]
    return [f"| {label} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]


def _parameters(config: SamConfig) -> str:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Sam(config.model).parameters())
    return f"{count / 1e6:.1f} M"


def models() -> str:
    """The sizes of each preset's model."""
    rows = [
        _row(f"`{_flag(f'model.{name}')}`", lambda config, name=name: _shown(getattr(config.model, name)))
        for name in _SIZES
    ]
    return "\n".join([*_head("flag"), _row("parameters", _parameters), *rows])


def training() -> str:
    """The settings of training that differ between two presets, or between a preset and the default."""
    rows = []
    for part in ("data", "optim", "recipe", "model"):
        for one in fields(getattr(SAM_PRESETS["vit_b"], part)):
            name = f"{part}.{one.name}"
            values = [getattr(getattr(config, part), one.name) for config in SHOWN.values()]
            if name in _LEFT_OUT or (part == "model" and one.name in _SIZES):
                continue
            used = [_used(config, part, one.name) for config in SHOWN.values()]
            if len({value for value, use in zip(values, used, strict=True) if use}) > 1 or not all(used):
                cells = [_shown(value) if use else "" for value, use in zip(values, used, strict=True)]
                if any(cells):
                    rows.append(f"| `{_flag(name)}` | {' | '.join(cells)} |")
    return "\n".join([*_head("flag"), *rows])


def _used(config: SamConfig, part: str, name: str) -> bool:
    """Whether the schedule of a preset reads a setting."""
    schedule = {"milestones": "step", "min_lr_ratio": "cosine", "timescale": "rsqrt", "cooldown": "rsqrt"}
    return part != "optim" or schedule.get(name, config.optim.schedule) == config.optim.schedule


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_bytes())
    return found


def orders() -> str:
    """Seconds and bytes until the first sample of an epoch is known."""
    seconds, memory = (
        next(one for one in _results()["growth"] if one["title"].startswith(title))
        for title in ("Until the first sample", "Memory of that")
    )
    rows = []
    for name, points in seconds["series"].items():
        (_, time), (_, size) = points[-1], memory["series"][name][-1]
        rows.append(
            [name, f"{1e3 * time:,.1f} ms", f"{size / 1e6:,.1f} MB" if size >= 1e5 else "below 0.1 MB"]
        )
    images = next(iter(seconds["series"].values()))[-1][0]
    return _table([f"{images:,} images", "time", "memory"], rows)


def buffers() -> str:
    """Milliseconds of one core for the masks of an image at 1024 pixels, for each way to use memory."""
    times = _results()["stages"]["original"]
    kinds = {
        "raster": "reused, cleared only where the previous masks were (`read_only=True`)",
        "raster, all cleared": "reused, cleared as a whole",
        "raster, fresh memory": "allocated for each batch",
    }
    return _table(
        ["memory of the masks", "ms"], [[label, f"{times[kind]:.1f}"] for kind, label in kinds.items()]
    )


def commands() -> str:
    """Each command with what it does and an example."""
    entries = ((verb, verbs.entry(verb)) for verb in verbs.in_order())
    rows = [[f"`{verb}`", what, f"`{line.partition(chr(10))[0]}`"] for verb, (_, _, what, line) in entries]
    return _table(["command", "what it does", "example"], rows)


def exit_codes() -> str:
    """The exit codes of each command with their meaning, from the first part of its help."""
    rows = []
    for verb in verbs.in_order():
        codes = codes_of_help(verb)
        rows.append([f"`{verb}`", *(codes.get(code, "") for code in "0123")])
    return _table(["command", "0", "1", "2", "3"], rows)


def codes_of_help(verb: str) -> dict[str, str]:
    """Code -> meaning, from the first part of a command's help."""
    (text,) = re.findall(r"Exit code (.*?)\.(?: |$)", " ".join((verbs.module_of(verb).__doc__ or "").split()))
    return dict(part.split(": ", 1) for part in text.split("; "))


_TABLES = (models, training, orders, buffers, commands, exit_codes)
MADE: dict[str, Callable[[], str]] = {table.__name__: table for table in _TABLES}


def rewritten(text: str) -> str:
    """A page's text with its tables generated again.

    Raises:
        KeyError: there is no table of this name.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated: {name} -->\n\n{MADE[name]()}\n\n<!-- end of generated -->"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
