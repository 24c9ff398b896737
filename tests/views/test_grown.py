"""Views of directories that grow, are read-only or are at a URL keep their images and order."""

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sa1b import Dataset, Stream
from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.shards.documents import Options
from sa1b.storage.atomic import lock
from sa1b.stream.plan import ResumeError
from sa1b.views.selection import Selection, select
from sa1b.views.view import open_view
from tests.shards.tiny_source import make_root, pairs, write_source

IDS = [*range(100, 160), 2**40 + 7, 11, 5]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    source = write_source(folder / "sa_000001.tar", pairs(IDS))
    return make_root(folder / "root", [source], Options(images_per_shard=5))


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "root")


def ids_of(root, view):
    """Image ids of a view, in the order of the view."""
    return Dataset(root).table.image_id[view.table_rows(np.arange(len(view)))].tolist()


def add_source(root, tmp_path, ids=range(500, 520)):
    source = write_source(tmp_path / "sa_000002.tar", pairs(ids))
    return make_root(root, [source], Options(images_per_shard=5))


def trained(root, view, state=None, steps=6):
    """The image ids of some training steps, and the state after these steps."""
    sizes = {"global_batch": 8, "image_size": 32, "masks": 2}
    stream = Stream(root, epochs=None, view=view, seed=3, rank=0, world_size=1, **sizes)
    if state is not None:
        stream.load_state_dict(state)
    batches = list(islice(stream, steps))
    return [batch.ids.tolist() for batch in batches], stream.state_dict(batches[-1])


@pytest.mark.filterwarnings("ignore:.*has changed since the state was saved")
def test_a_view_of_a_directory_that_grew_keeps_its_images_its_sequence_and_its_state(root, tmp_path):
    view = select(root, Selection(subset="60%", masks_where="area > 9"), name="most", quiet=True).view
    before = ids_of(root, view)
    first, state = trained(root, "most")
    rest, _ = trained(root, "most", state)
    # New ids are lower and higher than the old ids, so that all row numbers change.
    add_source(root, tmp_path, [*range(20, 40), *range(110_000, 110_010)])
    table = Dataset(root).table
    assert len(table) == len(IDS) + 30
    for which in ("most", view.digest, view.digest[:6], root / "views" / f"{view.digest}.json"):
        now = open_view(root, table, which)
        assert (now.digest, now.ids_digest, len(now)) == (view.digest, view.ids_digest, len(view))
        assert ids_of(root, now) == before
        assert now.masks_where == view.masks_where
    assert trained(root, "most")[0] == first
    assert trained(root, "most", state)[0] == rest


def test_all_images_of_a_directory_that_grew_are_another_sequence_and_the_message_says_the_way_out(
    root, tmp_path
):
    _, state = trained(root, None)
    view = select(root, Selection(), name="all", quiet=True).view
    add_source(root, tmp_path)
    with pytest.raises(ResumeError, match=r"if sources were added to .*sa1b view .* --ids FILE --name NAME"):
        trained(root, None, state)
    with pytest.warns(UserWarning, match="has changed since the state was saved"):
        trained(root, "all", state)
    assert open_view(root, Dataset(root).table, view.digest).count == len(IDS)
    half = select(root, Selection(subset="50%"), quiet=True).view
    with pytest.raises(ResumeError, match="pass the view that the state was saved with"):
        trained(root, half.digest, state)


def test_the_same_conditions_on_a_directory_that_grew_are_another_view_and_its_name_needs_overwrite(
    root, tmp_path
):
    before = select(root, Selection(subset="50%"), name="half", quiet=True).view
    add_source(root, tmp_path)
    with pytest.raises(UsageError, match="'half': belongs to view .* from 63 images; .*--overwrite"):
        select(root, Selection(subset="50%"), name="half", quiet=True)
    after = select(root, Selection(subset="50%"), name="half", overwrite=True, quiet=True).view
    table = Dataset(root).table
    assert open_view(root, table, "half").digest == after.digest != before.digest
    assert open_view(root, table, before.digest).count == before.count


def test_images_that_the_directory_no_longer_holds_are_counted_with_the_way_out(root, tmp_path):
    view = select(root, Selection(), name="all", quiet=True).view
    source = write_source(tmp_path / "sa_000003.tar", pairs(IDS[:50]))
    fewer = make_root(tmp_path / "fewer", [source], Options())
    path = root / "views" / f"{view.digest}.json"
    with pytest.raises(
        ManifestError, match=r"13 of its 63 images .* \(5, 11, 150, 151, 152 and 8 more\)"
    ) as found:
        open_view(fewer, Dataset(fewer).table, path)
    assert f"--ids {path.with_suffix('.ids')} --missing skip" in str(found.value)
    left = select(fewer, Selection(ids=path.with_suffix(".ids"), missing="skip"), quiet=True)
    assert (len(left.view), left.missing.tolist()) == (50, sorted(IDS[50:]))


def test_every_changed_byte_of_the_ids_is_refused_where_they_are_read(root, tmp_path):
    select(root, Selection(subset="20%"), name="few", quiet=True)
    add_source(root, tmp_path)
    table = Dataset(root).table
    (ids,) = (root / "views").glob("*.ids")
    data = ids.read_bytes()
    for offset in range(len(data)):
        ids.write_bytes(data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :])
        with pytest.raises(ManifestError, match=f"{ids.name}: not the .* image ids of its view.*--name few"):
            open_view(root, table, "few")
    ids.write_bytes(data[:-8])
    with pytest.raises(ManifestError, match="image ids of its view"):
        open_view(root, table, "few", check=False)


# Views beside a directory


def test_a_view_of_a_read_only_directory_is_written_and_opened_elsewhere(root, tmp_path):
    names = sorted(path.name for path in root.iterdir())
    out, file = tmp_path / "views", tmp_path / "chosen" / "half.json"
    with lock(root):  # readers take no lock
        one = select(root, Selection(subset="50%"), name="half", out=out, quiet=True)
        two = select(root, Selection(images_where="masks >= 2"), name="some", out=out, quiet=True)
        three = select(root, Selection(subset="50%", masks_where="area > 3"), out=file, quiet=True)
    assert sorted(path.name for path in root.iterdir()) == names
    assert (one.path, three.path) == (str(out / f"{one.view.digest}.json"), str(file))
    table = Dataset(root).table
    for which, expected in (
        (Path(one.path), one), (one.path, one), (f"{out}/half", one), (f"{out}/{one.view.digest[:7]}", one),
        (out / "some", two), (file, three),
    ):  # fmt: skip
        found = open_view(root, table, which)
        assert (found.digest, ids_of(root, found)) == (expected.view.digest, ids_of(root, expected.view))
    assert trained(root, str(file))[0]
    with pytest.raises(ManifestError, match=r"a folder of 2 views \(.*name one: .*/NAME"):
        open_view(root, table, out)
    with pytest.raises(ManifestError, match="no such file; `.*sa1b view --out` makes it"):
        open_view(root, table, tmp_path / "nothing.json")
    with pytest.raises(ManifestError, match="no view 'half'"):
        open_view(root, table, "half")
    with pytest.raises(ManifestError, match="must be on this machine"):
        open_view(root, table, "s3://bucket/views/x.json")


def test_a_file_that_holds_another_view_needs_overwrite(root, tmp_path):
    file = tmp_path / "half.json"
    select(root, Selection(subset="50%"), out=file, quiet=True)
    select(root, Selection(subset="50%"), out=file, name="half", quiet=True)  # the same view
    with pytest.raises(
        UsageError, match=r"half.json: contains view .*another --out, or replace it with --overwrite"
    ):
        select(root, Selection(subset="40%"), out=file, quiet=True)
    other = select(root, Selection(subset="40%"), out=file, overwrite=True, quiet=True).view
    assert open_view(root, Dataset(root).table, file).digest == other.digest


def test_a_view_on_this_machine_of_a_directory_at_a_url(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"local://{root}"  # through fsspec, as an object store is
    one = select(url, Selection(subset="50%"), name="half", out=tmp_path / "out", quiet=True)
    here = select(root, Selection(subset="50%"), quiet=True)
    assert ids_of(root, one.view) == ids_of(root, here.view)
    assert trained(url, one.path)[0] == trained(url, one.view.digest)[0] == trained(root, one.view.digest)[0]


def test_a_view_in_a_directory_at_a_url_is_that_of_the_folder(root, tmp_path, monkeypatch):
    """Selected by conditions, written to the views of the URL, renamed, and opened by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(root, tmp_path / "bucket")
    (tmp_path / "bucket" / "views").mkdir()  # as a bucket, this file system has no other way to get folders
    url = f"local://{tmp_path}/bucket"
    selection = Selection(masks_where="area > 40 and area_fraction < 0.5", images_where="masks >= 1")
    here, there = (select(one, selection, name="good", quiet=True) for one in (root, url))
    assert there.path == f"{url}/views/{there.view.digest}.json"
    assert there.opens == "good"
    assert ids_of(root, there.view) == ids_of(root, here.view)
    views = {path.name: path.read_bytes() for path in (root / "views").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "bucket" / "views").iterdir()} == views
    assert trained(url, "good")[0] == trained(root, "good")[0]
    with pytest.raises(UsageError, match="--name 'good': belongs to view"):
        select(url, Selection(subset="50%"), name="good", quiet=True)
    other = select(url, Selection(subset="50%"), name="good", overwrite=True, quiet=True).view
    assert open_view(url, Dataset(url).table, "good").digest == other.digest


def test_a_missing_index_of_a_url_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(root, tmp_path / "bucket")
    gone = next(path for path in sorted((tmp_path / "bucket").glob("*.parquet")))
    gone.unlink()
    with pytest.raises(
        ShardError, match=f"{gone.name}: missing; run `.*index local:.*/bucket` to rebuild it"
    ):
        select(f"local://{tmp_path}/bucket", Selection(masks_where="area > 40"), quiet=True)


def test_what_is_printed_opens_the_view_it_was_printed_for(root):
    """Views of the same images differ only in their condition on masks."""
    one = select(root, Selection(subset="50%", masks_where="area > 1"), quiet=True)
    select(root, Selection(subset="50%"), quiet=True)
    printed = one.document()["digest"]
    assert printed in one.table()
    assert open_view(root, Dataset(root).table, printed).masks_where.text == "area > 1"
    assert Path(one.path).stem == printed
    with pytest.raises(ManifestError, match="stands for more than one view|is no view"):
        open_view(root, Dataset(root).table, printed[:5])


@pytest.mark.parametrize("text", ["{}", "mine", '{"format": "sa1b-shards-1"}'])
def test_a_file_without_a_view_is_never_replaced(root, tmp_path, text):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(
        UsageError, match=r"mine\.json: exists and contains no intact view; choose another --out"
    ):
        select(root, Selection(subset="50%"), out=tmp_path / "mine.json", overwrite=True, quiet=True)
    assert (tmp_path / "mine.json").read_text() == text


@pytest.mark.parametrize("ending", ["ids", "rows"])
def test_a_list_of_a_user_beside_a_new_view_is_never_replaced(root, tmp_path, ending):
    other, view = tmp_path / f"mine.{ending}", tmp_path / "mine.json"
    other.write_text("5\n")
    with pytest.raises(UsageError, match=rf"would replace .*mine\.{ending}, a file of no view"):
        select(root, Selection(subset="50%"), out=view, overwrite=True, quiet=True)
    assert other.read_text() == "5\n"
    other.unlink()
    select(root, Selection(subset="50%"), out=view, quiet=True)
    view.unlink()  # as if the command had been killed before the document
    select(root, Selection(subset="50%"), out=view, quiet=True)
    assert view.exists()
