"""Reading only the wanted pairs of a source, and no further than needed."""

import random
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from sa1b.names import member_name
from sa1b.sources.pairing import WantedPairs
from sa1b.sources.tar_stream import Damage, Member

MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 30)]
BLOCK = range(223_750, 223_750 + 11_186)  # as in a tar of SA-1B


@cache
def members_of(ids: Sequence[int]) -> list[Member]:
    names = [member_name(image_id, ending) for image_id in ids for ending in ("jpg", "json")]
    return [Member(f"./{name}", "file", 0, b"") for name in names]


def shuffled(ids: Sequence[int] = BLOCK, seed: int = 0) -> list[Member]:
    return random.Random(seed).sample(members := members_of(tuple(ids)), len(members))


def counted(items: Sequence[Member | Damage], read: list[int]) -> Iterator[Member | Damage]:
    for number, item in enumerate(items, 1):
        read[0] = number
        yield item


def passed(wanted: WantedPairs, items: Sequence[Member | Damage]) -> tuple[list[str], int]:
    """Names of the members that pass, and the number of members read."""
    read = [0]
    names = [item.name for item in wanted.filter(counted(items, read)) if isinstance(item, Member)]
    return sorted(names), read[0]


def ids_of(*ids: int) -> np.ndarray:
    return np.array(sorted(ids), np.uint64)


def test_reading_ends_with_the_last_wanted_member() -> None:
    members = shuffled()
    wanted = WantedPairs(ids_of(223_800, 230_000), is_block=True)
    names, read = passed(wanted, members)
    expected = [f"./{member_name(i, e)}" for i in (223_800, 230_000) for e in ("jpg", "json")]
    assert names == expected
    assert read == 1 + max(i for i, member in enumerate(members) if member.name in expected)
    assert not wanted.is_whole
    assert wanted.found().tolist() == [223_800, 230_000]


@pytest.mark.parametrize("seed", range(3))
def test_an_id_outside_of_the_block_is_excluded_after_a_part_of_the_tar(seed: int) -> None:
    members = shuffled(seed=seed)
    for outside in (BLOCK[0] - 500, BLOCK[-1] + 500, 5):
        wanted = WantedPairs(ids_of(outside), is_block=True)
        names, read = passed(wanted, members)
        assert (names, wanted.is_whole) == ([], False)
        assert 2048 <= read <= 2200
    near = WantedPairs(ids_of(BLOCK[0] - 20), is_block=True)
    assert passed(near, members)[1] < len(members)
    assert not near.is_whole


@pytest.mark.parametrize("seed", [*range(5), *MORE])
def test_no_id_of_a_tar_is_excluded(seed: int) -> None:
    chosen = np.random.default_rng(seed).choice(np.array(BLOCK), 5, replace=False).tolist()
    wanted = WantedPairs(ids_of(*chosen, BLOCK[0], BLOCK[-1], BLOCK[0] - 300), is_block=True)
    passed(wanted, shuffled(seed=seed))
    assert set(wanted.found().tolist()) == {*chosen, BLOCK[0], BLOCK[-1]}


def test_a_tar_in_the_order_of_its_ids_is_read_to_the_wanted_one() -> None:
    members = sorted(shuffled(), key=lambda member: member.name)
    for order in (members, members[::-1], [*members[9000:], *members[:9000]]):
        wanted = WantedPairs(ids_of(BLOCK[40], BLOCK[-40]), is_block=True)
        passed(wanted, order)
        assert len(wanted.found()) == 2


def test_an_id_that_a_tar_lacks_is_absent_after_the_end() -> None:
    lacking = [image_id for image_id in BLOCK if image_id != 230_000]
    wanted = WantedPairs(ids_of(230_000, 5), is_block=True)
    assert passed(wanted, shuffled(lacking))[1] == 2 * len(lacking)
    assert wanted.is_whole
    assert (wanted.first, wanted.last) == (BLOCK[0], BLOCK[-1])
    assert wanted.absent().tolist() == [230_000]


def test_sources_without_blocks_are_read_to_the_end() -> None:
    members = shuffled()
    wanted = WantedPairs(ids_of(5), is_block=False)
    assert passed(wanted, members) == ([], len(members))


def test_damage_is_kept_and_other_members_are_not() -> None:
    damage = Damage("bad_header", "x", 0)
    items = [
        damage,
        Member("notes.txt", "file", 0, b""),
        Member("sa_1.masks", "file", 0, b""),
        *shuffled([1]),
    ]
    found = list(WantedPairs(ids_of(1), is_block=True).filter(items))
    assert found[0] is damage
    assert len(found) == 3
    assert passed(WantedPairs(ids_of(1), is_block=True), [*shuffled([1]), *shuffled([1])])[1] == 2


def test_a_million_wanted_ids() -> None:
    ids = np.arange(1_000_000, dtype=np.uint64)
    wanted = WantedPairs(ids, is_block=True)
    assert len(passed(wanted, shuffled())[0]) == 2 * len(BLOCK)
    assert len(wanted.found()) == len(BLOCK)
