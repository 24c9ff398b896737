"""The failure guide and the page on reliability name messages and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY

DOCS = REPOSITORY / "docs"
_PLACEHOLDER = re.compile(r"[:;] |<[^>]*>|\.\.\.|\(|\)|'[^']*'|\b\d[\d,]*|sa_\d+|sa1b reshard|<pid>|\bx\b")


@cache
def _texts() -> str:
    """All string constants of the package; values in f-strings are line breaks."""
    found = []
    for path in [*REPOSITORY.glob("sa1b/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "\n" for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n\n".join(found)


def _messages() -> list[str]:
    text = (DOCS / "failures.md").read_text(encoding="utf-8")
    tables = text.split("## Opening a dataset")[1]
    rows = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| ")]
    return [message for row in rows for message in re.findall(r"`([^`]{20,})`", row)]


def _is_known(message: str, texts: str) -> bool:
    """Whether the package contains three consecutive words of a message, or its longest constant part."""
    parts = [part.strip(" .:;,/").split() for part in _PLACEHOLDER.split(message)]
    size = min(3, max(map(len, parts)))
    windows = {" ".join(words[i : i + size]) for words in parts for i in range(len(words) - size + 1)}
    return any(window in texts for window in windows)


def test_every_message_of_the_failure_guide_is_one_of_the_package() -> None:
    texts, messages = _texts(), _messages()
    assert len(messages) > 30
    unknown = {message for message in messages if not _is_known(message, texts)}
    # Messages of the operating system.
    assert {message for message in unknown if "No space left on device" not in message} == set()


def test_a_message_that_is_not_there_is_found() -> None:
    assert not _is_known("<folder>: the flux capacitor is empty", _texts())


@pytest.mark.parametrize("page", ["reliability.md", "failures.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    folder = Path()
    for name in re.findall(r"`((?:tests/[\w/]*)?(?:test_\w+\.py)?)`", (DOCS / page).read_text("utf-8")):
        if name.startswith("tests/"):
            path = REPOSITORY / name
            folder = path.parent if path.suffix else path
        elif name:
            path = folder / name
        else:
            continue
        assert path.exists(), name
