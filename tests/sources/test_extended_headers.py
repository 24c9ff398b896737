"""Pax and GNU long-name headers: their content is checked, and none disappears without a record."""

import pytest

from tests.shards.tiny import member
from tests.sources.items import Damage, Member

END = bytes(1024)
PAX = b"19 path=./sa_1.jpg\n"


@pytest.mark.parametrize("kind", [b"g", b"x", b"K", b"L"])
def test_a_member_whose_type_became_that_of_an_extended_header_is_damage_with_its_bytes(read, kind):
    content = b"\xff\xd8\xff\xe0 a JPEG, no header"
    data = member("./sa_1.jpg", content, kind=kind)
    damage, following = read(data + member("./sa_2.jpg", b"2") + END)
    assert isinstance(damage, Damage)
    assert (damage.reason, damage.offset, damage.data) == ("bad_extended_header", 0, data)
    assert isinstance(following, Member)
    assert following.name == "./sa_2.jpg"


def test_a_long_name_is_not_given_to_the_member_after_a_damaged_one(read):
    data = member("././@LongLink", b"./sa_1.jpg\0", kind=b"L") + member("sa_1", b"no header", kind=b"g")
    damage, following = read(data + member("./sa_2.jpg", b"2") + END)
    assert isinstance(damage, Damage)
    assert (damage.reason, damage.offset, damage.data) == ("bad_extended_header", 0, data)
    assert isinstance(following, Member)
    assert following.name == "./sa_2.jpg"


@pytest.mark.parametrize(("kind", "content"), [(b"x", PAX), (b"L", b"./sa_1.jpg\0")])
@pytest.mark.parametrize("rest", [END, b"", b"cut" * 9])
def test_an_extended_header_that_no_member_follows_is_damage(read, kind, content, rest):
    header = member("./PaxHeaders/sa_1.jpg", content, kind=kind)
    damage, *others = read(header + rest)
    assert isinstance(damage, Damage)
    assert (damage.reason, damage.offset, damage.data) == ("dangling_extended_header", 0, header)
    assert "sa_1.jpg" in damage.message
    assert not any(one.name == "./sa_1.jpg" for one in others if isinstance(one, Member))


def test_zeros_between_an_extended_header_and_a_member_are_one_damage_with_it(read):
    data = member("./PaxHeaders/sa_1.jpg", PAX, kind=b"x") + bytes(512)
    damage, found = read(data + member("./sa_2.jpg", b"2") + END)
    assert isinstance(damage, Damage)
    assert (damage.reason, damage.offset, damage.length) == ("zero_blocks", 0, len(data))
    assert isinstance(found, Member)
    assert found.name == "./sa_2.jpg"


def test_two_names_in_a_row_are_of_two_members(read):
    first, second = (member("././@LongLink", name, kind=b"L") for name in (b"./sa_1.jpg\0", b"./sa_2.jpg\0"))
    damage, found = read(first + second + member("short", b"2") + END)
    assert isinstance(damage, Damage)
    assert (damage.reason, damage.offset, damage.data) == ("dangling_extended_header", 0, first)
    assert isinstance(found, Member)
    assert found.name == "./sa_2.jpg"


def test_a_global_header_needs_no_member(read):
    assert read(member("pax_global_header", b"14 comment=ab\n", kind=b"g") + END) == []
