"""The fenced blocks of a page of documentation, and the comments that control their tests.

See `tests/docs/test_pages.py` for the rules.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LANGUAGES = ("bash", "python", "sql")

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<comment>not run|dry run|exit code|numbers vary|not compared): (?P<value>.+?) -->\s*?\n\s*)?"
    r"^(?P<indent> *)(?P<fence>```+) *(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_MATERIALS = re.compile(r"<!-- with: (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: the first word after the fence; empty if there is none.
        code: the text between the fences, without their indentation.
        line: number of the first line of `code` in the page, from 1.
        not_run: reason why the block is not run; None if it is run.
        dry_run: reason why `sa1b train` of a `bash` block has the flag --dry-run; None if it trains.
        exit_code: the code with which a `bash` block ends.
        numbers_vary: why the numbers of a `text` block are not compared; None where they are.
        not_compared: why a `text` block is not compared at all; None for a block that is.
        follows: nothing but white space and comments of this test is between the previous block and this one.
    """

    language: str
    code: str
    line: int
    not_run: str | None = None
    dry_run: str | None = None
    exit_code: int = 0
    numbers_vary: str | None = None
    not_compared: str | None = None
    follows: bool = False


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(text):
        value = {match["comment"]: match["value"]}
        found.append(
            Block(
                match["language"],
                textwrap.dedent(match["code"]),
                text.count("\n", 0, match.start("code")) + 1,
                value.get("not run"),
                value.get("dry run"),
                int(value.get("exit code", 0)),
                value.get("numbers vary"),
                value.get("not compared"),
                bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


def materials_of(text: str) -> list[str]:
    """The names in a page's `<!-- with: ... -->` comments."""
    return [name.strip() for names in _MATERIALS.findall(text) for name in names.split(",")]


def without_blocks(text: str) -> str:
    """The page's prose, with the same number of lines; the lines of fenced blocks are empty."""
    return _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
