"""Conditions have the meaning of the same text in Python; unsupported syntax is refused by name."""

import math
import operator
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.errors import UsageError
from sa1b.programs.query.sql import connected
from sa1b.shards import annotation
from sa1b.views.predicate import IMAGE_FIELDS, MASK_FIELDS, PredicateError, image_predicate, mask_predicate
from tests.shards import tiny

examples = settings(max_examples=300, deadline=None, derandomize=True)
SOME_FIELDS = ("area", "bbox_width", "stability_score", "predicted_iou")
VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 96.0, math.nan]),
    st.floats(-100, 100),
    st.integers(-9, 9).map(float),
)

PLAIN = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 96.0, math.nan])


@pytest.fixture(scope="module")
def duck():
    """DuckDB with the settings of `sa1b query`."""
    with connected() as connection:
        yield connection


# A slow oracle: the condition as a tree of Python functions beside its text.


# Numbers are NaN and conditions are None where SQL has NULL.


def division(one, other):
    return one / other if other else math.nan


COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": division}


def field(name):
    return name, lambda row: row[name]


def literal(value):
    return repr(value), lambda row: float(value)


def binary(one, sign, other):
    return f"({one[0]} {sign} {other[0]})", lambda row: ARITHMETIC[sign](one[1](row), other[1](row))


def negative(one):
    return f"-({one[0]})", lambda row: -one[1](row)


def compared(sign, one, other):
    return None if math.isnan(one) or math.isnan(other) else COMPARISONS[sign](one, other)


def both(one, other=True):
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def inverse(one):
    return None if one is None else not one


def chain(first, rest):
    text = first[0] + "".join(f" {sign} {other[0]}" for sign, other in rest)

    def holds(row):
        values = [first[1](row), *(other[1](row) for _, other in rest)]
        found = [compared(sign, values[i], values[i + 1]) for i, (sign, _) in enumerate(rest)]
        return both(*found) if len(found) < 3 else both(both(*found[:2]), found[2])

    return f"({text})", holds


def joined(one, word, other):
    def holds(row):
        if word == "and":
            return both(one[1](row), other[1](row))
        return inverse(both(inverse(one[1](row)), inverse(other[1](row))))

    return f"({one[0]} {word} {other[0]})", holds


def negated(one):
    return f"(not {one[0]})", lambda row: inverse(one[1](row))


def numbers(literals):
    return st.recursive(
        st.one_of(st.sampled_from(SOME_FIELDS).map(field), literals.map(literal)),
        lambda inner: st.one_of(
            st.builds(binary, inner, st.sampled_from("+-*/"), inner), st.builds(negative, inner)
        ),
        max_leaves=4,
    )


def conditions(literals, links):
    """Conditions whose comparisons have at most `links` operators."""
    terms = numbers(literals)
    rest = st.lists(st.tuples(st.sampled_from(list(COMPARISONS)), terms), min_size=1, max_size=links)
    return st.recursive(
        st.builds(chain, terms, rest),
        lambda inner: st.one_of(
            st.builds(joined, inner, st.sampled_from(["and", "or"]), inner), st.builds(negated, inner)
        ),
        max_leaves=5,
    )


@examples
@given(
    conditions(st.one_of(st.integers(0, 99), st.floats(0, 99, allow_subnormal=False)), 3),
    st.lists(st.tuples(*[VALUES] * len(SOME_FIELDS)), min_size=1, max_size=6),
)
def test_conditions_hold_where_the_oracle_says(condition, table):
    text, holds = condition
    text = f"{text} and area == area or area != area"  # names a field, changes nothing but for NaN
    rows = [dict(zip(SOME_FIELDS, row, strict=True)) for row in table]
    expected = [holds(row) is True and not math.isnan(row["area"]) for row in rows]
    predicate = mask_predicate(text)
    columns = {name: np.array([row[name] for row in rows]) for name in SOME_FIELDS}
    found = predicate(columns)
    assert found.dtype == np.bool_
    assert found.tolist() == expected
    assert mask_predicate(predicate.text)(columns).tolist() == expected


def test_nothing_passes_a_comparison_with_nan_not_even_unequal():
    scores = {"stability_score": np.array([math.nan, 0.5])}
    for sign in ("<", "<=", ">", ">=", "==", "!="):
        assert not mask_predicate(f"stability_score {sign} 0.7")(scores)[0]
        assert not mask_predicate(f"0.7 {sign} stability_score + 1")(scores)[0]
    assert mask_predicate("stability_score != 0.7")(scores).tolist() == [False, True]
    assert mask_predicate("not stability_score < 0.7")(scores).tolist() == [False, False]
    assert mask_predicate("not stability_score > 0.7")(scores).tolist() == [False, True]
    assert mask_predicate("not (stability_score > 0.7 and 1 > 2)")(scores).tolist() == [True, True]
    assert not mask_predicate("1 / (stability_score - 0.5) > 0 or stability_score / 0 > 0")(scores).any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    conditions(st.integers(0, 20).map(lambda value: value / 2), 1),
    st.lists(st.tuples(*[PLAIN] * len(SOME_FIELDS)), min_size=1, max_size=4),
)
def test_a_condition_has_the_same_meaning_in_sql(duck, condition, table):
    """With literals that DuckDB's decimals and float64 hold exactly, also after arithmetic."""
    text, _ = condition
    rows = ", ".join(
        f"({', '.join('NULL' if math.isnan(v) else f'{v}::DOUBLE' for v in row)})" for row in table
    )
    sql = (
        f"SELECT coalesce({text} and area == area, false) FROM (VALUES {rows}) rows({', '.join(SOME_FIELDS)})"
    )
    columns = {name: np.array([row[i] for row in table]) for i, name in enumerate(SOME_FIELDS)}
    found = mask_predicate(f"{text} and area == area")(columns).tolist()
    assert [(one,) for one in found] == duck.execute(sql).fetchall()


def test_one_spelling_for_texts_that_differ_in_spaces():
    one = mask_predicate("  area>3   and( 1<area_fraction )")
    assert one.text == "area > 3 and 1 < area_fraction"
    assert one == mask_predicate(one.text)
    assert one.fields == {"area", "area_fraction"}


def test_a_predicate_travels_to_another_process():
    one = pickle.loads(pickle.dumps(mask_predicate("area > 3")))
    assert one({"area": np.array([3, 4])}).tolist() == [False, True]


def test_every_mask_field_of_an_annotation():
    read = annotation.parse_annotation(tiny.encode(tiny.document(7, masks=5)), 7).annotations
    expected = {
        "area": read.area,
        "area_fraction": read.area / (read.width * read.height),
        **{f"bbox_{name}": read.bbox[:, i] for i, name in enumerate(("x", "y", "width", "height"))},
        **{f"crop_{name}": read.crop_box[:, i] for i, name in enumerate(("x", "y", "width", "height"))},
        "point_x": read.point_coords[:, 0],
        "point_y": read.point_coords[:, 1],
        "predicted_iou": read.predicted_iou,
        "stability_score": read.stability_score,
        "runs_count": read.runs_count,
        "mask_id": read.mask_id,
        "width": np.full(5, read.width),
        "height": np.full(5, read.height),
    }
    assert set(expected) == set(MASK_FIELDS)
    for name, values in expected.items():
        border = float(np.median(values))
        found = mask_predicate(f"{name} >= {border!r}").masks(read)
        np.testing.assert_array_equal(found, values >= border)


def test_an_image_without_masks():
    read = annotation.parse_annotation(tiny.encode({**tiny.document(7), "annotations": []}), 7).annotations
    assert mask_predicate("area_fraction > 0.5 and bbox_width > 3").masks(read).shape == (0,)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stability >= 1", "`stability` at column 1; did you mean stability_score? fields of masks: area, area_fr"),
        ("area > 1 and xyz < 2", "unknown field `xyz` at column 14; fields of masks"),
        ("masks > 2", "unknown field `masks`"),
        ("abs(area) > 1", "`abs(area)` at column 1 is a function call"),
        ("area.real > 1", "`area.real` at column 1 is an attribute"),
        ("area > bbox[0]", "`bbox[0]` at column 8 is a subscript"),
        ("area > 'big'", "`'big'` at column 8 is not a number"),
        ('area > f"{area}"', "at column 8 is a string"),
        ("area > b'1'", "is not a number"),
        ("area > True", "`True` at column 8 is not a number"),
        ("area > None", "`None` at column 8 is not a number"),
        ("area > ...", "is not a number"),
        ("area > 1j", "is not a number"),
        ("area > 1e999", "`1e999` at column 8 is larger than 2**53"),
        ("area > 9007199254740993", "at column 8 is larger than 2**53"),
        ("area ** 9 > 1", "`area ** 9` at column 1 uses `**`, which is not supported"),
        ("area % 2 == 1", "uses `%`"),
        ("area // 2 == 1", "uses `//`"),
        ("area << 2 == 1", "uses `<<`"),
        ("area @ 2 == 1", "uses `@`"),
        ("(area > 1) & (area < 2)", "uses `&`, which is not supported; write `and`"),
        ("(area > 1) | (area < 2)", "uses `|`, which is not supported; write `or`"),
        ("~(area > 1)", "uses `~`, which is not supported; write `not`"),
        ("area in (1, 2)", "uses `in`"),
        ("area is 1", "uses `is`"),
        ("area > (1, 2)", "is a tuple"),
        ("area > [1]", "is a list"),
        ("(lambda: 1)() > area", "is a function call"),
        ("area > (lambda: 1)", "is a lambda"),
        ("area > (1 if area else 2)", "is an if expression"),
        ("(a := 1) < area", "is an assignment"),
        ("[a for a in area] > 1", "at column 1 is"),
        ("area > {1: 2}", "at column 8 is"),
        ("area", "`area` at column 1 is a number; a condition compares"),
        ("area + 1", "is a number; a condition compares"),
        ("area and area > 1", "`area` at column 1 is a number; `and` joins conditions"),
        ("not area", "`area` at column 5 is a number; `not` takes conditions"),
        ("(area > 1) + 1 > 0", "`area > 1` at column 2 is a condition; arithmetic takes numbers"),
        ("(area > 1) == (area > 2)", "is a condition; a comparison takes numbers"),
        ("-(area > 1) < 0", "is a condition; a sign takes numbers"),
        ("1 < 2", "names no field; fields of masks"),
        ("", "mask condition: empty"),
        ("   ", "mask condition: empty"),
        ("area >", "invalid syntax at column 7"),
        ("area > 1 area < 2", "invalid syntax"),
        ("area > 1; import os", "invalid syntax"),
        ("category", "is a text"),
        ("category > 'a'", "orders texts"),
        ("category == 1", "`1` at column 13 is not a text"),
        ("category == 'ö' and stabilty > 1", "unknown field `stabilty` at column 21"),
        ("category == 'a\x1b'", "'\\x1b' at column 15 is not printable ASCII"),
        ("category = 'o''neil'", "`'o''neil'` at column 13 is no text in one pair of quotes"),
        ("category = 'a\\tb'", "is no text in one pair of quotes without a backslash; compare category_id"),
        ("(area > 1", "'(' was never closed at column 1"),
        ("area > 1\nand area < 2", "at column 9 is not printable ASCII"),
        ("area > \x001", "is not printable ASCII"),
        ("ärea > 1", "'ä' at column 1 is not printable ASCII"),
        ("area > " + "1" * 3000, "longer than 2,000 characters"),
        ("area > " + "(" * 500 + "1" + ")" * 500, "too many nested parentheses"),
        ("area > " + "-" * 900 + "1", "nested more than 50 deep"),
        ("not " * 490 + "area > 1", "nested more than 50 deep"),
        ("area > " + "+".join(["1"] * 900), "nested more than 50 deep"),
    ],
)  # fmt: skip
def test_what_is_not_on_the_list_is_refused(text, names):
    with pytest.raises(PredicateError, match=re.escape(names)) as refused:
        mask_predicate(text)
    assert isinstance(refused.value, UsageError)
    assert "\n" not in str(refused.value)


def test_images_have_fields_of_their_own():
    predicate = image_predicate("5 <= masks < 9 and width / height > 1.2 or image_id == 3")
    columns = {
        "masks": np.array([4, 5, 8, 9, 0]),
        "width": np.array([2, 2, 1, 2, 1]),
        "height": np.ones(5),
        "image_id": np.array([1, 2, 4, 5, 3], np.uint64),
    }
    assert predicate(columns).tolist() == [False, True, False, False, True]
    for name in IMAGE_FIELDS:
        assert image_predicate(f"{name} > 0").fields == {name}
    with pytest.raises(PredicateError, match="unknown field `area`.*fields of images: masks, width"):
        image_predicate("area > 2")


def test_texts_are_compared_also_as_sql_writes_it() -> None:
    values = {"category": np.array(["dog", "cat", ""]), "area": np.array([1, 2, 3])}
    for text in ("category = 'dog'", 'category=="dog"', "not (category != 'dog')"):
        assert mask_predicate(text)(values).tolist() == [True, False, False]
    assert mask_predicate("category = 'a = b' or area = 3")(values).tolist() == [False, False, True]
    for name in ("größe 犬 🐕", "o'neil", 'a "b"'):
        values["category"] = np.array([name, "cat", ""])
        found = mask_predicate(f"category = {name!r} and area > 0")
        assert found(values).tolist() == mask_predicate(found.text)(values).tolist() == [True, False, False]
    assert mask_predicate("category = 'dog'").text == "category == 'dog'"
