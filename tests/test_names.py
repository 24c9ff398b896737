"""The rules that link names of members, sources and shards."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa1b import names
from sa1b.names import MemberName, ShardName


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("./sa_5.jpg", (5, "jpg")),
        ("sa_5.json", (5, "json")),
        ("sa_5.masks", (5, "masks")),
        ("x/y/sa_5.jpg", (5, "jpg")),
        ("sa_0.jpg", (0, "jpg")),
        ("/sa_5.jpg", None),
        ("././sa_5.jpg", None),
        ("../sa_5.jpg", None),
        ("x/../sa_5.jpg", None),
        ("x//sa_5.jpg", None),
        ("sa_5.jpg/", None),
        ("sa_05.jpg", None),
        ("sa_٥.jpg", None),
        ("sa_5.jpg\n", None),
        ("sa_5.jpg\0", None),
        (f"sa_{2**63 - 1}.jpg", (2**63 - 1, "jpg")),
        (f"sa_{2**63}.jpg", None),
        ("", None),
    ],
)
def test_only_plain_relative_names_of_the_usual_form_are_members(path, expected):
    assert names.parse_member_path(path) == expected


@given(st.integers(0, 2**63 - 1), st.sampled_from(["jpg", "json", "masks"]))
def test_a_member_name_comes_back_from_its_parts(image_id, ending):
    assert names.parse_member_name(names.member_name(image_id, ending)) == MemberName(image_id, ending)


@given(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True), st.integers(0, 10**6))
def test_a_shard_name_comes_back_from_its_parts(stem, part):
    name = names.shard_name(f"sa_{stem}", part)
    assert names.parse_shard_name(name) == ShardName(stem, part)
    assert names.shard_order(name) == ShardName(stem, part)


@pytest.mark.parametrize(
    "name",
    [
        "sa1b-20-001.tar",
        "sa1b-20-00001.tar",
        "sa1b-20-٠٠٠١.tar",
        "sa1b--0001.tar\n",
        "sa1b-20.tar",
        "sa1b-20-0001.parquet",
        "sa_000020.tar",
        "sa1b-../20-0001.tar",
    ],
)
def test_a_name_of_another_form_is_no_shard(name):
    assert names.parse_shard_name(name) is None


def test_ten_thousand_shards_of_a_source_sort_by_number():
    expected = [names.shard_name("sa_000020", part) for part in range(10_001)]
    assert expected[:2] == ["sa1b-000020-0000.tar", "sa1b-000020-0001.tar"]
    assert expected[-2:] == ["sa1b-000020-9999.tar", "sa1b-000020-10000.tar"]
    shuffled = random.Random(0).sample(expected, len(expected))
    assert sorted(shuffled, key=names.shard_order) == expected


def test_shards_of_a_source_whose_name_continues_another_are_not_its_own():
    own, other = names.shard_name("a", 1), names.shard_name("a-0001", 0)
    assert names.shard_order(own) < names.shard_order(other)
    assert names.shard_order(other).stem == "a-0001"


@pytest.mark.parametrize("name", ["", "sa_", "-x", ".x", "sa_-x", "a b", "ä", "a\n", "a/b", "sa_20*"])
def test_a_name_unfit_for_file_names_is_no_source_name(name):
    assert not names.is_source_name(name)


@pytest.mark.parametrize("name", ["sa_000020", "pictures", "_x", "a.b-c_d", "sa_x"])
def test_the_usual_names_are_source_names(name):
    assert names.is_source_name(name)


def test_a_stem_of_digits_gets_its_prefix_back():
    assert names.source_name(names.source_stem("sa_000020")) == "sa_000020"
    assert names.source_name(names.source_stem("pictures")) == "pictures"
