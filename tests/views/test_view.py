"""`sa1b view` chooses the same images and masks whatever the shards; parts, names, and damage."""

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.errors import ManifestError
from sa1b.hashing import Purpose, random_words
from sa1b.stream.plan import ResumeError
from tests.kit import files, put, refused, run
from tests.shards.tiny_source import make_root, pairs, write_source
from tests.views.served import fields, grow, order, served, view

IDS = [*range(100, 120), 2**40 + 7, 11, 5]
MASKS, IMAGES = "stability_score >= 0.96 and area_fraction < 0.3", "masks >= 2 and width >= 60"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views")
    source = write_source(folder / "sa_000001.tar", pairs(IDS))
    make_root(folder / "five", [source], {"images_per_shard": 5})
    make_root(folder / "many", [source], {"images_per_shard": 12, "no_index_runs": True})
    make_root(folder / "small", [source], {"images_per_shard": 9, "image_size": 32, "quality": 80})
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "five", tmp_path / "root")


@pytest.mark.parametrize(
    ("masks_where", "images_where"),
    [
        (MASKS, IMAGES),
        (MASKS, None),
        (None, "masks >= 4"),
        ("bbox_width > 20", "masks >= 2"),
        ("crop_width >= 64 and point_x < 30", "1 <= masks < 3 and not image_id > 112 or image_id == 11"),
        ("width > 10 and mask_id > 0 and runs_count > 50", "masks != 2 and width / height > 1.2"),
        (
            None,
            "jpg_bytes > 1380 and masks_bytes >= 461 and image_width + image_height == 112 and height < 49",
        ),
    ],
)
def test_conditions_choose_what_a_slow_reading_chooses(
    root: Path, masks_where: str | None, images_where: str | None
) -> None:
    words = [] if masks_where is None else ["--masks-where", masks_where]
    words += [] if images_where is None else ["--images-where", images_where]
    found = view(root, *words, "--workers", len(words))
    numbers = {one["image_id"]: one for one in run("query", root, "SELECT * FROM images", "--json").json}
    expected, of_masks = dict[int, list[int]](), 0
    for sample in sa1b.open(root):
        masks = fields(sample.annotations)
        left = [one["mask_id"] for one in masks if masks_where is None or eval(masks_where, {}, one)]
        if images_where is None or eval(images_where, {}, numbers[sample.image_id] | {"masks": len(left)}):
            expected[sample.image_id] = left
            of_masks += len(masks)
    assert served(root, found["view"]) == expected
    assert (found["images"], found["of_images"]) == (len(expected), len(IDS))
    assert 0 < len(expected) < len(IDS) or images_where is None
    assert (found["masks"], found["of_masks"]) == (sum(map(len, expected.values())), of_masks)
    assert found["without_masks"] == [*expected.values()].count([])


def test_ids_from_a_file(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("105\n\n  11\n105\n1099511627783\n")
    assert [*served(root, view(root, "--ids", path)["view"])] == [11, 105, 2**40 + 7]
    assert [*served(root, view(root, "--ids", path, "--images-where", "image_id < 100")["view"])] == [11]
    path.write_text("105\n1\nsa_11.jpg\n2\n3\n4\n6\n7\n")
    before = files(root)
    done = refused("view", root, "--ids", path, names="1, 2, 3, 4, 6 and 1 more")
    assert "--missing skip" in done.err
    assert files(root) == before
    for missing, listed in (("skip", None), ("list", [1, 2, 3, 4, 6, 7])):
        words = ("view", root, "--ids", path, "--missing", missing)
        assert ("\n6\n7\n" in run(*words, code=3).out) == (missing == "list")
        found = run(*words, "--json", code=3).json
        assert (found["images"], found["missing"], found.get("missing_ids")) == (2, 6, listed)
        assert [*served(root, found["view"])] == [11, 105]
    path.write_text("105\nx\n")
    refused("view", root, "--ids", path, names="line 2")


# The same whatever the sharding


def test_another_sharding_or_image_size_is_the_same_view_and_order(made: Path, tmp_path: Path) -> None:
    conditions = ("--masks-where", MASKS, "--images-where", IMAGES)
    held_out = ("--held-out", "30%", "--split", "held-out")
    for number, words in enumerate((("--name", "all"), conditions, ("--subset", "30%"), held_out)):
        found = []
        for name in ("five", "many", "small"):
            one = view(made / name, *words, "--out", tmp_path / f"{number}-{name}.json")
            ids = sorted(order(made / name, one["view"]))
            assert one["ids_sha256"] == hashlib.sha256(np.array(ids, "<u8").tobytes()).hexdigest()
            found.append((one["digest"], order(made / name, one["view"])))
        assert found[0] == found[1] == found[2]


def test_the_same_choice_gives_the_same_bytes_and_other_masks_the_same_order(root: Path) -> None:
    one = view(root, "--masks-where", "area > 100", "--subset", "50%")
    written = files(root / "views")
    assert view(root, "--masks-where", "  area>100 ", "--subset", "50%", "--workers", 2) == one
    assert {*files(root / "views")} == {*written}
    assert view(root, "--masks-where", "area > 100", "--subset", "50%") == one
    assert files(root / "views") == written
    assert not list((root / "views").glob(".*"))
    other = view(root, "--masks-where", "area > 200", "--subset", "50%")
    full = view(root, "--subset", "50%")
    assert one["ids_sha256"] == other["ids_sha256"] == full["ids_sha256"]
    assert len({one["digest"], other["digest"], full["digest"]}) == 3
    assert order(root, one["view"]) == order(root, other["view"]) == order(root, full["view"])
    masks = [served(root, two["view"]) for two in (one, other, full)]
    assert masks[0] != masks[1] != masks[2]
    assert [*masks[0]] == [*masks[1]] == [*masks[2]]
    stream = sa1b.Stream(root, view=one["view"], order="sequential", global_batch=1, image_size=32)
    spawned = pickle.loads(pickle.dumps(stream))  # as in another process
    assert [batch.mask_ids.tolist() for batch in spawned] == [*masks[0].values()]


def test_blocks_are_neighbours_in_shards_whatever_the_images_a_shard(made: Path, tmp_path: Path) -> None:
    blocks = order(made / "five", block_size=4)
    assert sorted(blocks) == sorted(IDS)
    stored = sorted(sa1b.open(made / "five"), key=lambda sample: (sample.shard, sample.offset))
    placed = [sample.image_id for sample in stored]
    for start in range(0, len(IDS) - 3, 4):
        of_block = [placed.index(one) for one in blocks[start : start + 4]]
        assert (np.diff(of_block) % len(IDS) == 1).all()
    assert order(made / "many", block_size=4) == blocks
    state = sa1b.Stream(made / "five", block_size=4, global_batch=8).state_dict()
    some = view(made / "five", "--subset", "60%", "--out", tmp_path / "some.json")["view"]
    assert order(made / "many", some, block_size=4) == order(made / "five", some, block_size=4)
    source = write_source(tmp_path / "sa_000001.tar", pairs(IDS), seed=1)  # its members in another order
    other = make_root(tmp_path / "root", [source], {})
    assert order(other) == order(made / "five")
    assert order(other, block_size=4) != blocks
    with pytest.raises(ResumeError):
        sa1b.Stream(other, block_size=4, global_batch=8).load_state_dict(state)
    with pytest.warns(UserWarning, match="has changed"):
        sa1b.Stream(made / "many", block_size=4, global_batch=8).load_state_dict(state)


# Parts


def test_parts_are_those_of_the_hash_of_the_id(made: Path, tmp_path: Path) -> None:
    words_of = random_words(0, Purpose.SUBSET, np.array(IDS, np.uint64))
    hashes = dict(zip(IDS, (words_of / 2**64).tolist(), strict=True))
    for words, low, high in (
        (("--subset", "10%"), 0, 0.1),
        (("--subset", "0.35"), 0, 0.35),
        (("--subset", "62.5 %"), 0, 0.625),
        (("--subset", "100%"), 0, 1),
        (("--held-out", "40%"), 0, 0.6),
        (("--held-out", "40%", "--split", "held-out"), 0.6, 1),
        (("--held-out", "0.4", "--subset", "20%"), 0, 0.2),
        (("--held-out", "40%", "--subset", "60%"), 0, 0.6),
        (("--held-out", "40%", "--subset", "20%", "--split", "held-out"), 0.6, 1),
    ):
        found = view(made / "five", *words, "--out", tmp_path / "part.json", "--overwrite")
        assert {*served(made / "five", found["view"])} == {i for i in IDS if low <= hashes[i] < high}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--subset", "99%", "--held-out", "2%"), "--held-out 2%"),
        (("--split", "held-out", "--subset", "1%"), "--held-out"),
        *(((f"--subset={part}",), "--subset") for part in ("0%", "101%", "nan")),
        *(((f"--held-out={part}",), "--held-out") for part in ("-1%", "1/0", "%")),
        *(((f"--name={name}",), "--name") for name in ("../x", "a b", "-x", "x" * 65, "x.json")),
        (("--images-where", "width > 100000"), ""),
        (("--missing", "skip"), "--ids"),
        ((), "--subset"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(made: Path, words: Any, names: str) -> None:
    refused("view", made / "five", *words, names=names)
    assert not (made / "five" / "views").exists()


# Names and errors


def test_a_name_belongs_to_one_view_until_it_is_reassigned(root: Path) -> None:
    view(root, "--subset", "60%", "--masks-where", "area > 9", "--name", "half")
    words = ("--subset", "60%", "--masks-where", "area > 100", "--name", "half")
    written, before = files(root), served(root, "half")
    done = refused("view", root, *words, names="half")
    assert "--overwrite" in done.err
    view(root, "--subset", "60%", "--masks-where", "area > 9", "--name", "half")  # the same view
    assert files(root) == written
    for name in written:
        if name.endswith(".parquet"):
            put(root, name, None)
    refused("view", root, *words, names="half")  # before anything is scanned
    view(root, "--subset", "30%", "--name", "half", "--overwrite")
    assert served(root, "half").keys() < before.keys()


def test_unknown_names_list_the_known_and_no_folder_above_is_a_view(root: Path) -> None:
    with pytest.raises(ManifestError, match=r"'good'.*view"):
        sa1b.Stream(root, view="good", global_batch=1)
    view(root, "--masks-where", "area > 1", "--name", "one")
    view(root, "--masks-where", "area > 2", "--name", "two")
    with pytest.raises(ManifestError, match=r"'good' .*(one|two).*(one|two)"):
        sa1b.Stream(root, view="good", global_batch=1)
    for path in ("..", "../tasks", "views/../../root", "../../none/../x"):
        with pytest.raises(ManifestError):
            sa1b.Stream(root, view=str(root / path), global_batch=1)


@pytest.mark.parametrize("grows", [False, True])
def test_a_changed_byte_is_refused_with_the_command_that_makes_the_view_again(
    root: Path, grows: bool
) -> None:
    view(root, "--images-where", "masks != 2", "--subset", "30%", "--name", "few")
    expected = served(root, "few")
    if grows:
        grow(root, [*range(20, 24), *range(300, 303)])
    assert served(root, "few") == expected
    for name, data in files(root / "views").items():
        is_read = name.endswith(".ids" if grows else ".rows")
        places = range(0, len(data), 11 if name.endswith(".json") else 1)
        changed = [data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :] for at in places]
        for damaged in (*changed, data[:-8], b"", None):
            put(root / "views", name, damaged)
            try:
                why, found = "", served(root, "few")
            except ManifestError as error:
                why, found = str(error), {}
            if name.endswith(".json"):
                assert name in why or "'few'" in why
            elif is_read or why:
                assert (name in why, "--subset 30% --name few" in why) == (True, True)
            else:
                assert found == expected
        put(root / "views", name, data)


def test_a_missing_or_damaged_index_is_named_with_its_remedy(root: Path) -> None:
    data = files(root)
    first, second, *_ = sorted(name for name in data if name.endswith(".parquet"))
    for damaged in (data[first][:-9], b"", None, data[second]):
        put(root, first, damaged)
        for workers in (1, 2):
            words = ("--images-where", "masks > 1", "--workers", workers)
            assert "index" in refused("view", root, *words, names=str(root / first)).err
        assert "views" not in {path.name for path in root.iterdir()}


def test_a_missing_root_is_refused(tmp_path: Path) -> None:
    refused("view", tmp_path / "nowhere", "--subset", "50%", names="nowhere")
    refused("view", tmp_path, "--subset", "50%", names=str(tmp_path))
