"""A hook of mkdocs: on the site, docs/commands.md goes on with a section for each command.

The sections are made from the texts of `--help`, so that none of them is stored twice.
"""

import io
import re
from contextlib import redirect_stdout, suppress
from typing import Any
from unittest.mock import patch

from sa1b import console, train, verbs
from sa1b.engine import config
from sa1b.recipes.presets import PRESETS


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page of the site; of the page of commands, with their sections after it."""
    if page.file.src_uri != "commands.md":
        return markdown
    return "\n\n".join([markdown, *(section(verb) for verb in verbs.in_order())])


def section(verb: str) -> str:
    """The Markdown of one command: what it does, then a table of its arguments for each group."""
    usage, *boxes = help_of(verb).split("╭─ ")
    text = usage.partition("\n\n")[2].strip()
    return "\n\n".join([f"## sa1b {verb}", f"```text\n{text}\n```", *map(_table, boxes)])


def help_of(verb: str) -> str:
    """What `sa1b VERB --help` prints in a wide terminal, but not so wide that boxes are beside each other."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with patch.dict("os.environ", COLUMNS="129"), redirect_stdout(out), suppress(SystemExit):
        if verb == "train":
            config.parse(["--help"], train.__doc__, PRESETS, "sa1b train")
        else:
            module = verbs.module_of(verb)
            console.parse(module.main, ["--help"], f"sa1b {verb}", module.__doc__)
    out.seek(0)
    return out.read()


def _table(box: str) -> str:
    title, *lines = box.splitlines()
    rows: list[list[str]] = []
    for line in lines:
        row = line.removeprefix("│ ").rstrip("│ ")
        if row.startswith("──"):  # a description of the group is before the rule
            rows.clear()
        elif row.startswith(" ") and rows:
            rows[-1].append(row.strip())
        elif line.startswith("│"):
            rows.append(re.split(" {2,}", row, maxsplit=1))
    cells = [f"| `{name.replace('{None}|', '')}` | {_cell(' '.join(text))} |" for name, *text in rows]
    return "\n".join([f"| {title.rstrip('─╮ ')} | |", "|---|---|", *cells])


def _cell(text: str) -> str:
    parts = text.replace("(default: None)", "").strip().split("`")
    # Code spans, the parts of odd numbers, stay as they are.
    return "`".join(part if i % 2 else re.sub(r"([|*<\[])", r"\\\1", part) for i, part in enumerate(parts))
