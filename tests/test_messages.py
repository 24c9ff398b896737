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


# Of arguments, see `argument_messages`; of masks, records and pairs, which have a reason beside the message.
OTHER_FORM = ("BadValue", "BadType", "BadSample", "MaskError", "RecordError", "SizeError")
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


def test_a_command_that_needs_a_dataset_directory_has_it() -> None:
    bare = {
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "command"
        and [ast.unparse(word) for word in node.args] in (["'verify'"], ["'index'"])
    }
    assert bare == set(), "pass the words of the command, which are quoted for a shell"


# Files whose plain errors no caller of the package sees, and who catches them.
CAUGHT = {
    "engine/checkpoint/tensors.py": "the readers of a checkpoint, as damage of its file",
    "grounding/alignment.py": "the command line, which names the flag",
    "sam/model.py": "the command line, which names the flag",
    "sam/published.py": "recipes/weights.py, which names the file",
    "sam/recipe.py": "the command line, which names the flag",
    "shards/documents.py": "msgspec, which names the field",
    "shards/predictions.py": "its reader, which names the line",
    "shards/sample_table.py": "the commit of a dataset, which names the sources",
    "verify/verify.py": "nobody: an error of this package in a worker, shown with its traceback",
}
PLAIN = {"ValueError", "TypeError", "RuntimeError"}


def plain_raises(node: ast.AST, caught: bool = False) -> list[ast.Raise]:
    """The errors of Python with a message that a file raises, without those that the same function catches."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not caught:
        return [node] if ast.unparse(node.exc.func) in PLAIN and node.exc.args else []
    found = []
    for name, value in ast.iter_fields(node):
        inner = caught and not isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.Try) and name == "body":
            handled = {one for handler in node.handlers for one in re.findall(r"\w+", _text(handler.type))}
            inner = inner or bool(handled & {"ValueError", "Exception"})
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                found += plain_raises(child, inner)
    return found


def _text(node: ast.expr | None) -> str:
    return "Exception" if node is None else ast.unparse(node)


def test_an_error_that_a_user_may_catch_is_a_sa1b_error() -> None:
    found = {
        f"{name}:{node.lineno}: {ast.unparse(node)[:90]}"
        for name, tree in trees()
        for node in plain_raises(tree)
    }
    assert {one for one in found if one.partition(":")[0] not in CAUGHT} == set(), "raise BadValue or BadType"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f():\n    raise ValueError('x')", 1),
        ("def f():\n    raise ValueError", 0),
        ("def f():\n    raise BadValue('x')", 0),
        ("try:\n    raise TypeError('x')\nexcept (ValueError, TypeError): pass", 0),
        ("try:\n    pass\nexcept ValueError:\n    raise ValueError('x')", 1),
        ("try:\n    raise ValueError('x')\nexcept OSError: pass", 1),
        ("try:\n    def f():\n        raise ValueError('x')\nexcept ValueError: pass", 1),
    ],
)
def test_plain_errors_are_found(text: str, count: int) -> None:
    assert len(plain_raises(ast.parse(text))) == count
