"""The order in which source tars are read for images whose tar is not known."""

import random
from itertools import pairwise

import numpy as np

from sa1b.ingest.tar_search import Search, Searched, homes_of

Blocks = dict[str, range]


def blocks_of_sa1b(tars: int = 1000, seed: int = 0) -> Blocks:
    """Contiguous blocks of nearly the usual size, and gaps between some of them."""
    draw = random.Random(seed)
    blocks, first = {}, 10
    for number in range(tars):
        size = 11_186 - draw.choice((0, 0, 0, 1, 2, 5, 40))
        blocks[f"sa_{number:06d}"] = range(first, first + size)
        first += size + draw.choice((0, 0, 1, 3))
    return blocks


def search_all(search: Search, blocks: Blocks, wanted: list[int]) -> tuple[set[int], list[str]]:
    """Read sources as the search says, in memory; the images found and the sources read."""
    missing = np.array(sorted(wanted), np.uint64)
    found: set[int] = set()
    read: list[str] = []
    while names := search.next_sources(missing):
        assert not set(names) & set(read)
        for name in names:
            block = blocks[name]
            own = np.array([i for i in missing.tolist() if i in block], np.uint64)
            inside = missing[(missing >= block[0]) & (missing <= block[-1])] if len(block) else missing[:0]
            span = (block[0], block[-1]) if len(block) else (None, None)
            search.record(name, Searched(*span, own, np.setdiff1d(inside, own)))
            found |= set(own.tolist())
            read.append(name)
        missing = np.setdiff1d(missing, np.array(sorted(found), np.uint64))
    return found, read


def test_images_are_found_with_few_other_tars() -> None:
    blocks = blocks_of_sa1b()
    draw = random.Random(1)
    homes = draw.sample(list(blocks), 30)
    wanted = [draw.choice(blocks[name]) for name in homes]
    wanted += [image_id for name in homes[:10] for image_id in (blocks[name][0], blocks[name][-1])]
    found, read = search_all(Search(blocks), blocks, wanted)
    assert found == set(wanted)
    assert set(homes) <= set(read)
    assert len(read) <= 2 * len(homes)


def test_images_that_exist_nowhere_end_the_search() -> None:
    blocks = blocks_of_sa1b()
    gaps = [blocks[a][-1] + 1 for a, b in pairwise(blocks) if blocks[b][0] > blocks[a][-1] + 1]
    end = blocks["sa_000999"][-1]
    for nowhere in (gaps[0], gaps[-1], 3, end + 1, end + 10**12):
        found, read = search_all(Search(blocks), blocks, [nowhere])
        assert not found
        assert len(read) <= 4


def test_every_image_of_few_tars_under_other_numbers() -> None:
    blocks = {
        "sa_000000": range(4),
        "sa_000001": range(10, 14),
        "sa_000002": range(20, 24),
        "x": range(90, 92),
    }
    wanted = [image_id for block in blocks.values() for image_id in block]
    assert search_all(Search(blocks), blocks, [*wanted, 15, 99])[0] == set(wanted)
    shuffled = {"sa_000000": range(20, 24), "sa_000001": range(4), "sa_000002": range(10, 14)}
    assert search_all(Search(shuffled, everywhere=True), shuffled, [21, 1, 12])[0] == {21, 1, 12}


def test_the_rest_is_read_only_on_request() -> None:
    strange = {"sa_000010": range(5), "sa_000011": range(10**6, 10**6 + 5), "sa_000012": range(5, 9)}
    assert search_all(Search(strange), strange, [7])[1] == ["sa_000010", "sa_000011"]
    assert search_all(Search(strange, everywhere=True), strange, [7])[0] == {7}


def test_the_images_of_a_failed_source_are_not_searched_elsewhere() -> None:
    blocks = blocks_of_sa1b(50)
    search = Search(blocks)
    missing = np.array([blocks["sa_000020"][100]], np.uint64)
    (name,) = search.next_sources(missing)
    search.record(name, None)
    assert search.next_sources(missing) == []


def test_an_earlier_run_saves_work() -> None:
    blocks = blocks_of_sa1b(50)
    inside, other = blocks["sa_000020"][100], blocks["sa_000020"][200]
    span = blocks["sa_000020"][0], blocks["sa_000020"][-1]
    search = Search(blocks)
    search.learn({"sa_000020": Searched(*span, absent=np.array([inside], np.uint64))})
    assert search.next_sources(np.array([inside], np.uint64)) == []
    assert search.next_sources(np.array([other], np.uint64)) == ["sa_000020"]
    complete = Search(blocks)
    complete.learn({"sa_000020": Searched(*span, has_all=True)})
    assert complete.next_sources(np.array([other], np.uint64)) == []


def test_known_homes_are_read_first_and_alone() -> None:
    blocks = blocks_of_sa1b(50)
    ids = np.array([5_000_000, 5_000_001], np.uint64)  # by their numbers, these are in none of the tars
    homes = homes_of(list(blocks), ids, np.array(["sa_000003", "other"], object))
    search = Search(blocks, homes)
    assert search.next_sources(ids[:1]) == ["sa_000003"]
