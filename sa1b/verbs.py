"""The verbs of `sa1b`, found by their files: `verb_<name>.py` in a room or a program; `_` is a space.

A module has `main`, whose typed arguments are the flags, `TOUR` (see `entry`) and a docstring for its help.
"""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_TOUR = re.compile(r"^TOUR = (\(.*?\))$", re.MULTILINE | re.DOTALL)


@cache
def paths() -> dict[str, Path]:
    """Verb -> the file of its module, in the order of the tour; `train` is in the file of the loop."""
    files = (*_PACKAGE.glob("*/verb_*.py"), *_PACKAGE.glob("programs/*/verb_*.py"))
    named = {path.stem.removeprefix("verb_").replace("_", " "): path for path in files}
    return named | {"train": _PACKAGE / "train.py"}


def module_of(verb: str) -> ModuleType:
    """The module of a verb; imports of it that are slow happen after its command line is parsed."""
    relative = paths()[verb].relative_to(_PACKAGE.parent).with_suffix("")
    return import_module(".".join(relative.parts))


def in_order() -> list[str]:
    return sorted(paths(), key=lambda verb: entry(verb)[0])


def tour() -> str:
    """The groups with their verbs, what each does, and an example of each."""
    text, last = "", None
    for verb in in_order():
        _, group, summary, example = entry(verb)
        if group != last:
            text, last = f"{text}{chr(10) if text else ''}{group}\n", group
        if " " in verb or not example:
            text += f"{'':16}{summary}: {example}\n"
        else:
            text += f"  {verb:12}{summary:30}{example}\n"
    return text


@cache
def entry(verb: str) -> tuple[int, str, str, str]:
    """The `TOUR` of a verb: place in the list, group, what it does, and an example, which may be empty."""
    match = _TOUR.search(paths()[verb].read_text(encoding="utf-8"))
    assert match is not None, f"{paths()[verb]}: TOUR is missing"
    place, group, summary, example = ast.literal_eval(match[1])
    return place, group, summary, example
