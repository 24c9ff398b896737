"""Conditions on masks and images, such as `stability_score >= 0.96 and area_fraction < 0.9`.

The text is parsed, never run. Values are float64, exact for integers up to 2**53. The rules are those of SQL,
and a condition without a chained comparison has the same meaning in `sa1b query`: a missing value (NaN) and
the result of a division by zero are NULL; a comparison with NULL is neither true nor false, nor is its `not`;
a mask passes if its condition is true.
"""

import ast
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.shards.annotation import Annotations

MAX_TEXT = 2000  # characters
MAX_DEPTH = 50
MAX_LITERAL = 1 << 53


class PredicateError(UsageError):
    """A condition that cannot be used; the message names the error and its column."""


# Field -> its column in the index, and its position in a column with several numbers per mask. Coordinates
# are in pixels of the source image; bbox is SA-1B's [x, y, xmax - xmin, ymax - ymin].
MASK_FIELDS = {
    "area": ("area", None),
    "area_fraction": ("area", None),  # area / (width * height)
    "bbox_x": ("bbox", 0),
    "bbox_y": ("bbox", 1),
    "bbox_width": ("bbox", 2),
    "bbox_height": ("bbox", 3),
    "predicted_iou": ("predicted_iou", None),
    "stability_score": ("stability_score", None),
    "point_x": ("point_coords", 0),
    "point_y": ("point_coords", 1),
    "crop_x": ("crop_box", 0),
    "crop_y": ("crop_box", 1),
    "crop_width": ("crop_box", 2),
    "crop_height": ("crop_box", 3),
    "runs_count": ("runs_count", None),
    "mask_id": ("mask_id", None),
    "width": ("width", None),  # width and height of the image
    "height": ("height", None),
}
# Of masks from files in COCO's format; of others "", -1 and 0.
ORIGIN_FIELDS = {name: (name, None) for name in ("category", "category_id", "iscrowd")}
_TEXTS = ("category",)
# `masks` is the number of masks that pass the mask condition. width and height are those of the source image,
# image_width and image_height those of the stored image.
IMAGE_FIELDS = (
    "masks",
    "width",
    "height",
    "image_width",
    "image_height",
    "image_id",
    "jpg_bytes",
    "masks_bytes",
)
_EXAMPLES = {
    "mask": "stability_score >= 0.96 and area_fraction < 0.9",
    "image": "masks >= 5 and width >= 1500",
}


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed condition; `text` is its normal form, which does not depend on spaces."""

    text: str
    fields: frozenset[str]
    tree: ast.expr = field(compare=False, repr=False)

    def __call__(self, values: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Whether each of n entries passes, bool [n], from the numbers or texts [n] of each field."""
        numbers = {
            name: np.asarray(values[name], np.str_ if name in _TEXTS else np.float64) for name in self.fields
        }
        with np.errstate(all="ignore"):
            return np.asarray(_holds(self.tree, numbers), np.bool_)

    def masks(self, annotations: Annotations) -> npt.NDArray[np.bool_]:
        """Whether each of an image's N masks passes a condition on masks, bool [N]."""
        # 100 masks and two comparisons take 0.02 ms.
        count = len(annotations)

        def column(name: str) -> npt.NDArray[Any]:
            values = annotations.column(name)
            return np.full(count, values) if values.ndim == 0 else values

        return self(mask_values(self.fields, column))


def mask_values(
    fields: frozenset[str], column: Callable[[str], npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Field -> numbers or texts [n] of n masks, from columns; width and height once for each mask."""
    values = {}
    for name in fields:
        source, entry = (MASK_FIELDS | ORIGIN_FIELDS)[name]
        if name in _TEXTS:
            values[name] = column(source)
            continue
        numbers = np.asarray(column(source), np.float64)
        if name == "area_fraction":
            with np.errstate(all="ignore"):
                numbers = numbers / (np.asarray(column("width"), np.float64) * column("height"))
        values[name] = numbers if entry is None else numbers[:, entry]
    return values


def mask_predicate(text: str) -> Predicate:
    """Parse a condition on masks; fields: `MASK_FIELDS` and `ORIGIN_FIELDS`. Errors: PredicateError."""
    return _parse(text, (*MASK_FIELDS, *ORIGIN_FIELDS), "mask")


def image_predicate(text: str) -> Predicate:
    """Parse a condition on images; fields: `IMAGE_FIELDS`. Errors: PredicateError."""
    return _parse(text, IMAGE_FIELDS, "image")


def _unequal(value: Any, other: Any) -> Any:
    return (value < other) | (value > other)  # false for NaN; numpy's != would be true


def _divide(value: Any, other: Any) -> Any:
    return np.where(other == 0, np.nan, np.true_divide(value, other))


# Comparison -> its function and that of its negation, both false for NaN.
_COMPARISONS: dict[type[ast.cmpop], tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    ast.Lt: (np.less, np.greater_equal),
    ast.LtE: (np.less_equal, np.greater),
    ast.Gt: (np.greater, np.less_equal),
    ast.GtE: (np.greater_equal, np.less),
    ast.Eq: (np.equal, _unequal),
    ast.NotEq: (_unequal, np.equal),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: _divide,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: np.negative, ast.UAdd: np.positive}
_INSTEAD = {"BitAnd": "write `and`", "BitOr": "write `or`"}
_TEXT = re.compile("""'[^']*'|"[^"]*\"""")
_EQUALS = re.compile(f"{_TEXT.pattern}|[<>!:]?=+")
_SUPPORTED = "use comparisons, `and`, `or`, `not`, `+ - * /`, numbers and fields"


def _holds(node: ast.expr, columns: Mapping[str, npt.NDArray[Any]], *, negated: bool = False) -> Any:
    """Where a condition is true or, with `negated`, where it is false; neither where a NULL decides."""
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            return _holds(operand, columns, negated=not negated)
        case ast.BoolOp(op, parts):
            results = [_holds(part, columns, negated=negated) for part in parts]
            return reduce(np.logical_and if isinstance(op, ast.And) != negated else np.logical_or, results)
        case ast.Compare(left, operators, others):
            values = [_value(part, columns) for part in (left, *others)]
            results = [
                _COMPARISONS[type(operator)][negated](first, second)
                for operator, first, second in zip(operators, values[:-1], values[1:], strict=True)
            ]
            return reduce(np.logical_or if negated else np.logical_and, results)
    raise AssertionError(ast.dump(node))


def _value(node: ast.expr, columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    match node:
        case ast.BinOp(left, operation, right):
            return _ARITHMETIC[type(operation)](_value(left, columns), _value(right, columns))
        case ast.UnaryOp(sign, operand):
            return _SIGNS[type(sign)](_value(operand, columns))
        case ast.Name(name):
            return columns[name]
        case ast.Constant(int() | float() as number):
            return np.float64(number)
        case ast.Constant(str() as text):
            return np.str_(text)
    raise AssertionError(ast.dump(node))


def _parse(text: str, known: tuple[str, ...], kind: str) -> Predicate:
    text = text.strip()
    if not text:
        raise PredicateError(f"{kind} condition: empty; write for example `{_EXAMPLES[kind]}`")
    if len(text) > MAX_TEXT:
        raise PredicateError(f"{kind} condition: longer than {MAX_TEXT:,} characters; simplify it")
    without_texts = _TEXT.sub(lambda match: "x" * len(match[0]) if match[0].isprintable() else match[0], text)
    for place, character in enumerate(without_texts, 1):
        if not " " <= character <= "~":
            raise PredicateError(
                f"{kind} condition: {character!r} at column {place} is not printable ASCII; remove it"
            )
    text = _EQUALS.sub(lambda match: "==" if match[0] == "=" else match[0], text)  # as SQL writes it
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise PredicateError(
            f"{kind} condition: {error.msg} at column {error.offset or len(text) + 1} of `{text}`; "
            f"write for example `{_EXAMPLES[kind]}`"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise PredicateError(
            f"{kind} condition: cannot be parsed ({error or 'nested too deeply'}); simplify it"
        ) from None
    check = _Check(text, known, kind)
    if not check.visit(tree, 0):
        raise check.refused(tree, "is a number", f"a condition compares, as in `{_EXAMPLES[kind]}`")
    if not check.found:
        raise PredicateError(f"{kind} condition: `{text}` names no field; {check.listing()}")
    return Predicate(ast.unparse(tree), frozenset(check.found), tree)


class _Check:
    """Refuses unsupported syntax in a parsed text and collects the fields."""

    def __init__(self, text: str, known: tuple[str, ...], kind: str) -> None:
        self.text, self.known, self.kind = text, known, kind
        self.found: set[str] = set()

    def visit(self, node: ast.expr, depth: int) -> bool:
        """Whether the node is a condition; else it is a number."""
        if depth > MAX_DEPTH:
            raise self.refused(node, f"is nested more than {MAX_DEPTH} deep", "simplify it")
        match node:
            case ast.BoolOp(op, parts):
                word = "and" if isinstance(op, ast.And) else "or"
                for part in parts:
                    self._need(part, depth, True, f"`{word}` joins")
                return True
            case ast.Compare(left, operators, others):
                for operator in operators:
                    if type(operator) not in _COMPARISONS:
                        raise self.refused(node, f"uses {_spelled(operator)}, which is not supported")
                if any(getattr(part, "id", None) in _TEXTS for part in (left, *others)):
                    self._texts(node)
                    return True
                for part in (left, *others):
                    self._need(part, depth, False, "a comparison takes")
                return True
            case ast.BinOp(left, operation, right):
                if type(operation) not in _ARITHMETIC:
                    instead = _INSTEAD.get(type(operation).__name__, _SUPPORTED)
                    raise self.refused(node, f"uses {_spelled(operation)}, which is not supported", instead)
                for part in (left, right):
                    self._need(part, depth, False, "arithmetic takes")
                return False
            case ast.UnaryOp(ast.Not(), operand):
                self._need(operand, depth, True, "`not` takes")
                return True
            case ast.UnaryOp(sign, operand):
                if type(sign) not in _SIGNS:
                    raise self.refused(node, f"uses {_spelled(sign)}, which is not supported", "write `not`")
                self._need(operand, depth, False, "a sign takes")
                return False
            case ast.Name(name):
                if name not in self.known:
                    raise self._unknown(node, name)
                if name in _TEXTS:
                    raise self.refused(node, "is a text", f"compare it, as in `{name} == 'dog'`")
                self.found.add(name)
                return False
            case ast.Constant(bool()):
                pass
            case ast.Constant(int() | float() as number):
                if not abs(number) <= MAX_LITERAL:
                    raise self.refused(node, "is larger than 2**53", "write a smaller number")
                return False
        raise self.refused(node, f"is {_NOUNS.get(type(node).__name__, type(node).__name__)}")

    def _need(self, node: ast.expr, depth: int, condition: bool, subject: str) -> None:
        if self.visit(node, depth + 1) != condition:
            expected, actual = ("conditions", "a number") if condition else ("numbers", "a condition")
            raise self.refused(node, f"is {actual}", f"{subject} {expected}")

    def _texts(self, node: ast.Compare) -> None:
        """Check a comparison of texts: fields and constants, with == and !=."""
        if {*map(type, node.ops)} - {ast.Eq, ast.NotEq}:
            raise self.refused(node, "orders texts", "compare them with == or !=")
        for part in (node.left, *node.comparators):
            is_text = isinstance(getattr(part, "value", None), str)
            if not is_text and getattr(part, "id", None) not in _TEXTS:
                raise self.refused(
                    part, "is not a text", "compare a text with a text, as in `category == 'dog'`"
                )
            written = ast.get_source_segment(self.text, part) or ""
            if isinstance(part, ast.Constant) and ("\\" in written or not _TEXT.fullmatch(written)):
                raise self.refused(
                    part,
                    "is no text in one pair of quotes without a backslash",
                    "compare category_id instead",
                )
            if isinstance(part, ast.Name):
                if part.id not in self.known:
                    raise self._unknown(part, part.id)
                self.found.add(part.id)

    def refused(self, node: ast.expr, why: str, instead: str = _SUPPORTED) -> PredicateError:
        token = ast.get_source_segment(self.text, node) or ""
        shown = token if len(token) <= 40 else token[:37] + "..."
        return PredicateError(
            f"{self.kind} condition: `{shown}` at column {self._column(node)} {why}; {instead}"
        )

    def _unknown(self, node: ast.expr, name: str) -> PredicateError:
        near = difflib.get_close_matches(name, self.known, 1)
        guess = f"did you mean {near[0]}? " if near else ""
        return PredicateError(
            f"{self.kind} condition: unknown field `{name}` at column {self._column(node)}; "
            f"{guess}{self.listing()}"
        )

    def _column(self, node: ast.expr) -> int:
        return len(self.text.encode()[: node.col_offset].decode()) + 1

    def listing(self) -> str:
        return f"fields of {self.kind}s: {', '.join(self.known)}"


_NOUNS = {
    "Call": "a function call",
    "Attribute": "an attribute",
    "Subscript": "a subscript",
    "Constant": "not a number",
    "Lambda": "a lambda",
    "IfExp": "an if expression",
    "NamedExpr": "an assignment",
    "JoinedStr": "a string",
    "Tuple": "a tuple",
    "List": "a list",
}
_SPELLED = {
    "Pow": "`**`", "Mod": "`%`", "FloorDiv": "`//`", "MatMult": "`@`", "LShift": "`<<`", "RShift": "`>>`",
    "BitAnd": "`&`", "BitOr": "`|`", "BitXor": "`^`", "Invert": "`~`", "In": "`in`", "NotIn": "`not in`",
    "Is": "`is`", "IsNot": "`is not`",
}  # fmt: skip


def _spelled(operator: ast.AST) -> str:
    return _SPELLED.get(type(operator).__name__, type(operator).__name__)
