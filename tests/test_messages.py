"""The form of every expected error, read from the source: "what failed: why; what to do".

A message begins with the file, flag, image or argument, then says why after a colon, and what to do after a
semicolon. A range needs no third part: "must be at least 1" says what to do. Messages that pass on another
error's text, and nothing else, are that error's.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sa1b"
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})

# Words that must be replaced by standard terms.
COINED = re.compile(
    r"\b(held against|behind|told apart|mend(ed|s)?|doubtful|aside|publish(ed|es)?|ledger|under way|"
    r"pictures?|slots?|rounds|tally|borne|vouched|papered|greets|heard|let go|everybody|nobody|whoever|"
    r"someone|somebody|is told|knows|the tool says|goes on|afresh|anew|in doubt)\b"
)


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(PACKAGE)), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


@cache
def family() -> set[str]:
    """Names of the classes of expected errors."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Sa1bError"}
    while more := {name for name, of in bases.items() if of & found and name not in OTHER_FORM} - found:
        found |= more
    return found


def template(node: ast.expr) -> str:
    """The text of a message, with {} for each inserted value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "{}"


# Of arguments, see `argument_messages`; of masks and pairs, which have a reason beside the message.
OTHER_FORM = ("BadValue", "BadType", "BadSample", "MaskError", "SizeError")
PUBLIC = ("arguments.py", "masks/", "sam/", "shards/sample.py", "stream/", "synthetic/")


@cache
def argument_messages() -> dict[str, str]:
    """Location and template of every error that public functions raise for wrong arguments."""
    built_in = ("BadValue", "BadType", "ValueError", "TypeError", "IndexError", "FileExistsError")
    return {
        f"{name}:{node.lineno}": template(node.args[0])
        for name, tree in trees()
        if name.startswith(PUBLIC)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in built_in and node.args
    }


@cache
def messages() -> list[tuple[str, str, str]]:
    """Subpackage, location and template of every expected error that the package raises."""
    classes = family()
    return [
        (name.split("/")[0], f"{name}:{node.lineno}", template(node.args[0]))
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in classes and node.args
    ]


def of_room(room: str) -> list[tuple[str, str]]:
    return [(place, text) for one, place, text in messages() if one == room]


@pytest.mark.parametrize("room", ROOMS)
def test_a_message_says_what_failed_why_and_what_to_do(room: str) -> None:
    strange = {}
    for place, text in of_room(room):
        subject, colon, rest = text.partition(": ")
        passed_on = "{}" in (text, rest)
        way_out = "; " in rest or re.search(r"\bmust\b", rest)
        if not passed_on and not (colon and re.search(r"\{\}|--[a-z]|\(", subject) and way_out):
            strange[place] = text
    assert strange == {}


@pytest.mark.parametrize("room", ROOMS)
def test_messages_use_standard_terms(room: str) -> None:
    assert {place: text for place, text in of_room(room) if COINED.search(text)} == {}


def test_errors_for_wrong_arguments_say_what_is_accepted_or_what_to_do() -> None:
    """They are "argument must be ..." or "argument: why; what to do"."""
    found = argument_messages()
    assert len(found) > 50
    strange = {place: text for place, text in found.items() if not re.search(r"\bmust\b|: .+; ", text)}
    assert strange == {}
    assert {place: text for place, text in found.items() if COINED.search(text)} == {}


# Where functions raise what Python's do, or where this package catches it.
BUILT_IN = re.compile(
    r"(?!(engine|grounding|masks|programs|verify|views)/|sam/[^p])"
    r"(?!\S*(order|buffers|/cache|_columns|documents|predictions|_table|published)\.py)\S+ raise (Value|Type)Error\("
)


def test_an_error_that_a_user_may_catch_is_a_sa1b_error() -> None:
    found = [(name, node) for name, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    raised = [f"{name}:{node.lineno}: {ast.unparse(node)}" for name, node in found]
    assert len(raised) > 500
    assert [one for one in raised if BUILT_IN.match(one)] == []
