"""Compares the output that a page shows with what the block before it printed."""

import re
import sys

from tests.docs.blocks import Block

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_MEASURED = re.compile(r"\d[\d.,]*(?= (?:MB/s|images/s|s)\b)")
_BAR = re.compile(r"\w+: +\d+%\|")
_RULE = re.compile("[\u2500-\u257f]+")  # of a table
_OMITTED = "..."


def difference(shown: Block, printed: str) -> str | None:
    """How the output of a block differs from the `text` block that follows it; None if it does not.

    Progress bars, empty lines, seconds and rates are not compared. `...` in the shown output stands for any
    text, and on a line of its own for any lines. If the numbers vary, neither they, nor white space, the number
    of equal lines in succession and further text in a line are compared.
    """
    if shown.not_compared is not None:
        return None
    # In an activated environment, messages name its interpreter without the folder.
    printed = re.sub(rf"(?:{re.escape(sys.executable)}|\bpython3?) -m sa1b\b(?!\.)", "sa1b", printed)
    expected, found = _lines(shown.code), _lines(printed)
    rest = " *"
    if shown.numbers_vary is not None:
        expected, found, rest = _without_numbers(expected), _without_numbers(found), ".*"
    pattern = "".join(
        r"(?:.*\n)*?"
        if line.strip() == _OMITTED
        else re.escape(line).replace(r"\.\.\.", ".*").replace(r"\[.*\]", ".*") + rest + r"\n"
        for line in expected
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        return None
    return "\n".join(["the page shows", *expected, "the block printed", *found])


def _lines(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip() and not _BAR.match(line)]
    return [_MEASURED.sub("0", line) for line in lines]


def _without_numbers(lines: list[str]) -> list[str]:
    lines = [" ".join(_NUMBER.sub("0", _RULE.sub("-", line)).split()) for line in lines]
    lines = [re.sub(r"\b0 (\w+?)s?\b", r"0 \1", line) for line in lines]  # one step, two steps
    return [line for line, before in zip(lines, [None, *lines], strict=False) if line != before]
