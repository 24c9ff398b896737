"""The picture of the package, from the layers in pyproject.toml and the first line of each room.

    python -m tests.house

writes docs/images/house.svg, which tests/test_size.py compares. Each row imports only from rows below it.
"""

import ast
import textwrap
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

from tests.size import PACKAGE, REPOSITORY

PICTURE = REPOSITORY / "docs" / "images" / "house.svg"
_WIDTH, _EDGE, _GAP, _LINE = 760, 12, 8, 16
_STYLE = (
    "rect.page { fill: #ffffff; } rect.room { fill: #eef2f8; stroke: #b9c4d4; } "
    "text { fill: #1b1f24; font: 12px system-ui, sans-serif; } text.name { font-weight: 600; font-size: 13px; } "
    "@media (prefers-color-scheme: dark) { rect.page { fill: #14181e; } "
    "rect.room { fill: #222a35; stroke: #435066; } text { fill: #e3e8ef; } }"
)


def rows() -> list[list[tuple[str, str]]]:
    """Rooms with what each is, row by row from the top; the modules beside the rooms are one row."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    found, single = [], []
    for layer in layers:
        names = [name.strip("() ").removeprefix("sa1b.") for name in layer.split("|")]
        folders = [name for name in names if (PACKAGE / name / "__init__.py").exists()]
        single += [
            f"{name}.py"
            for name in names
            if (PACKAGE / f"{name}.py").exists() and name not in ("train", "__main__")
        ]
        if names == ["train"]:
            found.append([("train.py", _what(PACKAGE / "train.py"))])
        elif folders:
            found.append([(f"{name}/", _what(PACKAGE / name / "__init__.py")) for name in folders])
    return [*found, [("beside the rooms", ", ".join(sorted(single)))]]


def _what(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = text.split("\n\n")[0].replace("\n", " ")
    if path == PACKAGE / "programs" / "__init__.py":
        programs = sorted(folder.parent.name for folder in PACKAGE.glob("programs/*/__init__.py"))
        return f"{first} {', '.join(programs)}"
    return first.replace("`", "")


def svg() -> str:
    """The picture; light or dark as the reader's system asks for."""
    parts, top = [], _EDGE
    for row in rows():
        width = (_WIDTH - 2 * _EDGE - _GAP * (len(row) - 1)) / len(row)
        texts = [textwrap.wrap(what, int((width - 20) / 6.1)) for _, what in row]
        height = 30 + _LINE * max(map(len, texts))
        for number, ((name, _), lines) in enumerate(zip(row, texts, strict=True)):
            left = _EDGE + number * (width + _GAP)
            parts.append(
                f'<rect class="room" x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="6"/>'
            )
            parts.append(f'<text class="name" x="{left + 10:.0f}" y="{top + 19}">{escape(name)}</text>')
            parts += [
                f'<text x="{left + 10:.0f}" y="{top + 19 + _LINE * (i + 1)}">{escape(line)}</text>'
                for i, line in enumerate(lines)
            ]
        top += height + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + _EDGE}" role="img" '
        f'aria-label="The rooms of the package, each above those that it imports"><style>{_STYLE}</style>'
        f'<rect class="page" width="{_WIDTH}" height="{top + _EDGE}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
