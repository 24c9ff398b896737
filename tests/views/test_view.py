"""Views: selection, independence of the sharding, nested parts, names, and damage."""

import hashlib
import shutil

import numpy as np
import pytest

from sa1b import Dataset
from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.shards.documents import Options
from sa1b.storage.reader import Reader
from sa1b.stream.order import Order
from sa1b.views.predicate import mask_predicate
from sa1b.views.selection import Selection, fraction, select
from sa1b.views.view import open_view, whole, write_view
from sa1b.views.view_document import read_documents
from tests.shards.tiny_source import make_root, pairs, write_source
from tests.verify.checking import edit_view

IDS = [*range(100, 160), 2**40 + 7, 11, 5]
MASKS, IMAGES = "stability_score >= 0.96 and area_fraction < 0.3", "masks >= 2 and width >= 60"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    source = write_source(folder / "sa_000001.tar", pairs(IDS))
    for name, options in (
        ("five", Options(images_per_shard=5)),
        ("many", Options(images_per_shard=23, index_runs=False)),
        ("small", Options(images_per_shard=9, image_size=32, quality=80)),
    ):
        make_root(folder / name, [source], options)
    return folder


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made / "five", tmp_path / "root")


def chosen_ids(root, *, name=None, workers=1, **flags):
    chosen = select(root, Selection(**flags), name=name, workers=workers, quiet=True)
    table = Dataset(root).table
    return set(table.image_id[chosen.view.table_rows(np.arange(len(chosen.view)))].tolist()), chosen


# Choosing


@pytest.mark.parametrize("workers", [1, 3])
def test_conditions_choose_what_a_slow_reading_chooses(root, workers):
    expected, masks, of_masks, without = set(), 0, 0, 0
    for sample in Dataset(root):
        numbers = sample.annotations
        left = sum(
            score >= 0.96 and area / (numbers.width * numbers.height) < 0.3
            for score, area in zip(numbers.stability_score, numbers.area, strict=True)
        )
        if left >= 2:
            expected.add(sample.image_id)
            masks, of_masks, without = masks + left, of_masks + len(numbers), without + (left == 0)
    found, chosen = chosen_ids(root, workers=workers, masks_where=MASKS, images_where=IMAGES)
    assert found == expected
    assert 0 < len(expected) < len(IDS)
    assert (chosen.masks, chosen.of_masks, chosen.without_masks) == (masks, of_masks, without)
    assert chosen.of_images == len(IDS)


def test_the_mask_condition_travels_with_the_view(root):
    select(root, Selection(masks_where=MASKS), name="good", quiet=True)
    dataset = Dataset(root)
    view = open_view(root, dataset.table, "good")
    for index, sample in enumerate(dataset):
        assert view.table_rows(np.array([index])).tolist() == [index]
        expected = (sample.annotations.stability_score >= 0.96) & (sample.annotations.area < 0.3 * 48 * 64)
        np.testing.assert_array_equal(view.masks_where.masks(sample.annotations), expected)


def test_without_a_mask_condition_all_masks_count(root):
    by_number = {sample.image_id for sample in Dataset(root) if len(sample.annotations) >= 4}
    found, chosen = chosen_ids(root, images_where="masks >= 4")
    assert found == by_number
    assert chosen.masks == chosen.of_masks


@pytest.mark.parametrize(
    "condition",
    ["bbox_width > 20", "crop_width >= 64 and point_x < 30", "width > 10 and mask_id > 0", "runs_count > 5"],
)
def test_every_kind_of_column(root, condition):
    predicate = mask_predicate(condition)
    expected = {s.image_id for s in Dataset(root) if predicate.masks(s.annotations).sum() >= 2}
    assert chosen_ids(root, masks_where=condition, images_where="masks >= 2")[0] == expected


def test_ids_from_a_file(root, tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("105\n\n  11\n105\n1099511627783\n")
    assert chosen_ids(root, ids=path)[0] == {105, 11, 2**40 + 7}
    found, chosen = chosen_ids(root, ids=path, images_where="image_id < 100")
    assert found == {11}
    assert chosen.view.count == 1
    path.write_text("105\nx\n")
    with pytest.raises(UsageError, match="line 2: .* is not an image id"):
        chosen_ids(root, ids=path)


def test_ids_that_the_dataset_lacks_are_refused_skipped_or_listed(root, tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("105\n1\nsa_11.jpg\n2\n3\n4\n6\n7\n")
    with pytest.raises(UsageError, match="1, 2, 3, 4, 6 and 1 more: not in .*--missing skip"):
        select(root, Selection(ids=path), quiet=True)
    assert not (root / "views").exists()
    skipped = select(root, Selection(ids=path, missing="skip"), quiet=True)
    rows = skipped.view.table_rows(np.arange(2))
    assert Dataset(root).table.image_id[rows].tolist() == [11, 105]
    assert skipped.document()["missing"] == 6
    assert "missing 6 ids" in skipped.table()
    listed = select(root, Selection(ids=path, missing="list"), quiet=True)
    assert listed.document()["missing_ids"] == [1, 2, 3, 4, 6, 7]
    assert "\n6\n7\n" in listed.table()


# The same whatever the sharding


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"masks_where": MASKS, "images_where": IMAGES},
        {"subset": "30%"},
        {"held_out": "30%", "split": "held-out"},
    ],
)
def test_another_sharding_or_image_size_is_the_same_view_and_order(made, tmp_path, flags):
    found = []
    for name in ("five", "many", "small"):
        root = shutil.copytree(made / name, tmp_path / name)
        ids, chosen = chosen_ids(root, **flags)
        table = Dataset(root).table
        rows = Order(len(chosen.view), chosen.view.ids_digest, 3).rows(np.arange(10))
        order = table.image_id[chosen.view.table_rows(rows)].tolist()
        found.append((ids, chosen.view.ids_digest, chosen.view.digest, order))
        digest = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in sorted(ids))).hexdigest()
        assert chosen.view.ids_digest == digest
        assert chosen.view.bytes_digest == table.digest
    assert found[0] == found[1] == found[2]


def test_the_same_choice_gives_the_same_bytes(root):
    written = []
    for _ in range(2):
        view = select(root, Selection(masks_where=MASKS, subset="50%"), quiet=True).view
        written.append(
            [(root / "views" / f"{view.digest}{end}").read_bytes() for end in (".json", ".ids", ".rows")]
        )
    assert written[0] == written[1]
    assert not list((root / "views").glob(".*"))


def test_other_masks_of_the_same_images_keep_the_order_and_have_other_files(root):
    one = select(root, Selection(masks_where="area > 1"), quiet=True).view
    other = select(root, Selection(masks_where="area > 2"), quiet=True).view
    full = whole(Dataset(root).table)
    assert one.ids_digest == other.ids_digest == full.ids_digest == full.digest
    assert len({one.digest, other.digest, full.digest}) == 3


def test_by_place_sorts_by_shard_and_offset_whatever_the_images_a_shard(made, tmp_path):
    table = Dataset(made / "five").table
    placed = whole(table).by_location(table)
    places = list(zip(table.shard[placed.rows].tolist(), table.offset[placed.rows].tolist(), strict=True))
    assert places == sorted(places)
    assert sorted(placed.rows.tolist()) == list(range(len(IDS)))
    other = Dataset(made / "many").table
    assert placed.ids_digest == whole(other).by_location(other).ids_digest
    source = write_source(tmp_path / "sa_000001.tar", pairs(IDS), seed=1)  # its members in another order
    other = Dataset(make_root(tmp_path / "root", [source], Options())).table
    assert whole(other).digest == whole(table).digest
    assert whole(other).by_location(other).ids_digest != placed.ids_digest


# Parts


def test_subsets_lie_within_larger_ones_and_never_meet_the_held_out(made):
    many = np.arange(1, 200_001, dtype=np.uint64)
    from sa1b.views.selection import _by_hash, _range

    def part(**flags):
        return _by_hash(many, *_range(Selection(**flags)))

    small, middle, large = (part(subset=text) for text in ("1%", "2%", "0.1"))
    assert (small <= middle).all()
    assert (middle <= large).all()
    for found, share in ((small, 0.01), (middle, 0.02), (large, 0.1)):
        assert abs(found.mean() - share) < 5 * (share / len(many)) ** 0.5
    train, held_out = part(held_out="2%"), part(held_out="2%", split="held-out")
    assert (train ^ held_out).all()
    assert abs(held_out.mean() - 0.02) < 0.002
    assert (part(held_out="1%", split="held-out") <= held_out).all()
    assert (part(subset="98%", held_out="2%") == train).all()
    assert (part(subset="10%", held_out="2%", split="held-out") == held_out).all()
    assert part(subset="100%").all()


def test_parts_that_cannot_be_are_refused(root):
    for flags, message in (
        ({"subset": "99%", "held_out": "2%"}, "--subset 99% and --held-out 2% overlap"),
        ({"split": "held-out"}, "--split held-out: no images are held out; pass --held-out"),
        ({"subset": "0%"}, "--subset '0%': must be a part"),
        ({"subset": "101%"}, "--subset"),
        ({"subset": "nan"}, "--subset"),
        ({"held_out": "-1%"}, "--held-out"),
        ({"held_out": "1/0"}, "--held-out"),
        ({"held_out": "%"}, "--held-out"),
    ):
        with pytest.raises(UsageError, match=message):
            select(root, Selection(**flags), quiet=True)
    assert fraction("2.5 %", "--subset") == fraction("0.025", "--subset")


# Names and errors


def test_views_are_found_by_name_key_and_beginning(root):
    table = Dataset(root).table
    view = select(root, Selection(subset="50%"), name="half", quiet=True).view
    select(root, Selection(subset="50%"), name="fifty", quiet=True)
    masks = select(root, Selection(masks_where="area > 1"), name="big", quiet=True).view
    for which in ("half", "fifty", view.digest, view.digest[:8]):
        found = open_view(root, table, which)
        assert (found.digest, found.ids_digest, len(found)) == (view.digest, view.ids_digest, view.count)
        np.testing.assert_array_equal(found.rows, view.rows)
    assert open_view(root, table, masks.digest[:6]).masks_where.text == "area > 1"
    assert open_view(root, table).rows is None
    assert open_view(root, table, table.ids_digest).rows is None
    assert len(open_view(root, table)) == len(IDS)


def test_unknown_and_ambiguous_names_list_the_known(root):
    table = Dataset(root).table
    with pytest.raises(ManifestError, match=r"no view 'good' in .*it has none; `.*sa1b view` makes them"):
        open_view(root, table, "good")
    select(root, Selection(subset="50%", masks_where="area > 1"), name="one", quiet=True)
    view = select(root, Selection(subset="50%", masks_where="area > 2"), name="two", quiet=True).view
    with pytest.raises(
        ManifestError, match=r"'good' is no view of .*Known: .*(one|two) \(.*; .*(one|two) \("
    ):
        open_view(root, table, "good")
    with pytest.raises(ManifestError, match="is no view"):  # the digest of the images alone is no identity
        open_view(root, table, view.ids_digest)
    with pytest.raises(ManifestError, match="is no view"):
        open_view(root, table, view.digest[:5])
    for path in (root / "views").glob("*.json"):  # as if copied by hand
        edit_view(path, lambda document: document.update(names=["same"]))
    with pytest.raises(ManifestError, match="stands for more than one view"):
        open_view(root, table, "same")


def test_a_name_belongs_to_one_view(root):
    select(root, Selection(subset="50%"), name="half", quiet=True)
    with pytest.raises(
        UsageError,
        match="--name 'half': belongs to view .*--subset 50% --name half from 63 images; .*--overwrite",
    ):
        select(root, Selection(subset="60%"), name="half", quiet=True)
    for name in ("../x", "", "a b", "-x", "deadbeef", "x" * 65, "x.json"):
        with pytest.raises(UsageError, match="--name"):
            select(root, Selection(), name=name, quiet=True)


def test_a_name_is_reassigned_with_overwrite(root):
    before = select(root, Selection(subset="50%"), name="half", quiet=True).view
    select(root, Selection(subset="50%"), name="fifty", quiet=True)
    after = select(root, Selection(subset="60%"), name="half", overwrite=True, quiet=True).view
    table = Dataset(root).table
    assert open_view(root, table, "half").digest == after.digest != before.digest
    assert (
        open_view(root, table, "fifty").digest
        == open_view(root, table, before.digest).digest
        == before.digest
    )


def test_a_name_that_is_taken_is_refused_before_anything_is_scanned(root, monkeypatch):
    select(root, Selection(images_where="masks >= 2"), name="some", quiet=True)
    select(root, Selection(images_where="masks >= 2"), name="some", quiet=True)  # the same view: no clash

    def scanned(*_):
        raise AssertionError("scanned")

    monkeypatch.setattr("sa1b.views.selection.scan", scanned)
    with pytest.raises(UsageError, match=r"--name 'some': belongs to view"):
        select(root, Selection(images_where="masks >= 3"), name="some", quiet=True)


def test_an_empty_view_is_refused(root):
    with pytest.raises(UsageError, match="no image is left"):
        select(root, Selection(images_where="width > 100000"), quiet=True)
    assert not (root / "views").exists()


def test_damage_is_named_with_the_command_that_makes_it_again(root):
    table = Dataset(root).table
    view = select(root, Selection(images_where="masks != 2", subset="50%"), name="half", quiet=True).view
    rows, text = (root / "views" / f"{view.digest}{end}" for end in (".rows", ".json"))
    whole_rows, whole_text = rows.read_bytes(), text.read_bytes()
    command = "sa1b view .* --images-where 'masks != 2' --subset 50% --name half"
    rows.write_bytes(whole_rows[:-1] + bytes([whole_rows[-1] ^ 1]))
    with pytest.raises(ManifestError, match=f"not the .* row numbers of its view.*{command}"):
        open_view(root, table, "half")
    assert len(open_view(root, table, "half", check=False)) == view.count
    for data in (whole_rows[:-4], b""):
        rows.write_bytes(data)
        with pytest.raises(ManifestError, match=command):
            open_view(root, table, "half", check=False)
    rows.unlink()
    with pytest.raises(ManifestError, match="missing"):
        open_view(root, table, "half")
    for damaged in (
        b"{",
        b"[]",
        whole_text.replace(b"rows_sha256", b"x"),
        whole_text.replace(view.digest.encode(), b"0"),
    ):
        text.write_bytes(damaged)
        with pytest.raises(ManifestError, match=f"{view.digest}.json: damaged.*sa1b view"):
            open_view(root, table, "half")
    text.write_bytes(whole_text.replace(b"sa1b-view-2", b"sa1b-view-9"))
    with pytest.raises(ManifestError, match="format 'sa1b-view-9'"):
        read_documents(Reader(root))


def test_a_damaged_or_foreign_index_is_named(root):
    index = sorted(root.glob("*.parquet"))[1]
    data = index.read_bytes()
    for damaged in (data[:-9], b""):
        index.write_bytes(damaged)
        with pytest.raises(ShardError, match=f"{index}: .*sa1b index"):
            select(root, Selection(images_where="masks > 1"), workers=2, quiet=True)
    index.unlink()
    with pytest.raises(ShardError, match=str(index)):
        select(root, Selection(images_where="masks > 1"), quiet=True)


def test_an_index_of_another_shard_is_named(root):
    first, second = sorted(root.glob("*.parquet"))[:2]
    shutil.copy(second, first)
    with pytest.raises(ShardError, match=f"{first}: image .* is in .* and not in this index"):
        select(root, Selection(images_where="masks > 1"), quiet=True)


@pytest.mark.parametrize("path", ["..", "../tasks", "views/../../root", "../../none/../x"])
def test_a_path_with_folders_above_it_is_that_of_no_view(root, path):
    with pytest.raises(ManifestError):
        open_view(root, Dataset(root).table, str(root / path))


def test_a_view_is_written_to_a_folder_above_another(root, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    view = select(root, Selection(subset="50%"), out=tmp_path / "a" / "b" / "..", quiet=True).view
    assert (tmp_path / "a" / f"{view.digest}.json").exists()


def test_a_missing_root_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no dataset there"):
        select(tmp_path / "nowhere", Selection(subset="50%"), quiet=True)
    with pytest.raises(ManifestError):
        select(tmp_path, Selection(subset="50%"), quiet=True)


def test_rows_are_mapped_not_copied(root):
    table = Dataset(root).table
    view = write_view(root, table, np.array([2, 3, 5], np.uint32))
    assert not view.rows.flags.owndata
    assert view.table_rows(np.array([2, 0, 0])).tolist() == [5, 2, 2]
