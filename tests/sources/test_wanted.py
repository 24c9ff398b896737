"""Reading only the wanted pairs of a source, and no further than needed: `sa1b fetch`."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import run
from tests.shards import tiny

MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30)]
BLOCK = range(223_750, 223_750 + 2_000)
MEMBER = 512  # bytes of a member without content


@cache
def empty(image_id: int) -> tuple[bytes, bytes]:
    names = (f"./sa_{image_id}.{ending}" for ending in ("jpg", "json"))
    jpeg, text = map(tiny.header, names)
    return jpeg, text


def shuffled(wanted: Sequence[int], seed: int = 0, ids: Sequence[int] = BLOCK) -> list[bytes]:
    """The members of a tar in random order; only those of the wanted images have content."""
    members = [part for image_id in ids if image_id not in wanted for part in empty(image_id)]
    members += [tiny.member(*one) for i in wanted if i in ids for one in tiny.pair_members(i)]
    return random.Random(seed).sample(members, len(members))


@pytest.fixture
def fetched(tmp_path: Path) -> Any:
    """Members and wanted ids -> what `sa1b fetch --json` says."""

    def fetched(members: Sequence[bytes], ids: Sequence[int], name: str = "sa_000020") -> Any:
        tar, root = tmp_path / f"{name}.tar", tmp_path / "root"
        tar.write_bytes(b"".join(members) + bytes(1024))
        (tmp_path / "ids.txt").write_text("\n".join(map(str, ids)))
        words = (tar, "--ids", tmp_path / "ids.txt", "--out", root, "--json")
        return run("fetch", *words, code=None).json

    return fetched


def test_reading_ends_with_the_last_wanted_member(tmp_path: Path, fetched: Any) -> None:
    wanted = (BLOCK[50], BLOCK[900])
    members = shuffled(wanted)
    found = fetched([tiny.member("notes.txt", b"x"), *members, *shuffled((), ids=range(500))], wanted)
    last = max(number for number, member in enumerate(members) if len(member) > MEMBER)
    end = sum(map(len, members[: last + 1])) + 2 * MEMBER
    assert (found["exit_code"], found["stored"], found["missing"]) == (0, 2, [])
    assert end <= found["bytes_read"] < end + (1 << 17)  # of the 500 KB behind it
    assert not (tmp_path / "root" / "quarantine").exists()  # other members are not kept
    task = json.loads((tmp_path / "root" / "tasks" / "sa_000020.json").read_text())
    assert (task["source"]["sha256"], task["counts"]["members"]) == (None, 4)


@pytest.mark.parametrize("seed", range(3))
def test_ids_outside_of_the_block_are_excluded_after_a_part_of_the_tar(fetched: Any, seed: int) -> None:
    outside = [5, BLOCK[0] - 500, BLOCK[-1] + 500]
    found = fetched(shuffled((), seed), outside)
    assert (found["exit_code"], found["stored"], found["missing"]) == (3, 0, outside)
    assert 2048 * MEMBER <= found["bytes_read"] < 2200 * MEMBER + (1 << 16)


@pytest.mark.parametrize("seed", [*range(3), *MORE])
def test_no_id_of_a_tar_is_excluded(fetched: Any, seed: int) -> None:
    chosen = np.random.default_rng(seed).choice(np.array(BLOCK[1:-1]), 5, replace=False).tolist()
    edges = [tiny.member(*one) for i in (BLOCK[0], BLOCK[-1]) for one in tiny.pair_members(i)]
    members = [*shuffled(chosen, seed, BLOCK[1:-1]), *edges]  # the range of the ids is known last
    found = fetched(members, [*chosen, BLOCK[0], BLOCK[-1], BLOCK[0] - 300])
    assert (found["stored"], found["missing"]) == (7, [BLOCK[0] - 300])


@pytest.mark.parametrize("first", [0, 1800])
@pytest.mark.parametrize("step", [1, -1])
def test_a_tar_in_the_order_of_its_ids_is_read_to_the_wanted_one(fetched: Any, first: int, step: int) -> None:
    wanted = (BLOCK[40], BLOCK[-40])
    of_image = [
        b"".join(tiny.member(*one) for one in tiny.pair_members(i)) if i in wanted else b"".join(empty(i))
        for i in BLOCK[::step]
    ]
    assert fetched([*of_image[first:], *of_image[:first]], wanted)["stored"] == 2


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("sa_000020", BLOCK[900]), ("other", 5)],
    ids=["inside of the block", "without blocks"],
)
def test_a_source_that_may_have_the_id_is_read_to_its_end(
    tmp_path: Path, fetched: Any, name: str, lacking: int
) -> None:
    found = fetched(shuffled((), ids=[i for i in BLOCK if i != lacking]), [lacking, 5], name)
    assert (found["stored"], found["missing"]) == (0, sorted({5, lacking}))
    assert found["bytes_read"] == (tmp_path / f"{name}.tar").stat().st_size


def test_damage_before_the_wanted_members_is_kept(tmp_path: Path, fetched: Any) -> None:
    bad = bytearray(tiny.member("./sa_9.jpg", b"x"))
    bad[130] ^= 1
    pair = [tiny.member(*one) for one in tiny.pair_members(1)]
    found = fetched(
        [bytes(bad), tiny.member("sa_1.masks", b"x"), *pair, *pair, tiny.member("rest", bytes(4 << 20))], [1]
    )
    assert found["stored"] == 1
    assert found["bytes_read"] < 2 << 20  # not to its end
    assert [one["reason"] for one in tiny.lines(tmp_path / "root", "sa_000020")] == ["bad_header"]
