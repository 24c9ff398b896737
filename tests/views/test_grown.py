"""Views of directories that grow, are read-only or are at a URL keep their images and order."""

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.errors import ManifestError
from sa1b.stream.plan import ResumeError
from tests.directories import bucket, reshard
from tests.kit import fault, files, refused, run
from tests.shards.tiny_source import pairs, write_source
from tests.views.served import grow, order, served, view

IDS = [*range(100, 120), 2**40 + 7, 11, 5]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grow(tmp_path_factory.mktemp("grown") / "root", IDS)


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(made, tmp_path / "root")


def trained(root: object, which: Any, state: Any = None) -> tuple[list[list[int]], Any]:
    """The image ids of some training steps, and the state after these steps."""
    stream = sa1b.Stream(root, view=which, epochs=None, seed=3, global_batch=8, image_size=32, masks=2)
    if state is not None:
        stream.load_state_dict(state)
    batches = list(islice(stream, 6))
    return [batch.ids.tolist() for batch in batches], stream.state_dict(batches[-1])


@pytest.mark.filterwarnings("ignore:.*has changed since the state was saved")
def test_a_view_of_a_directory_that_grew_keeps_its_images_its_sequence_and_its_state(root: Path) -> None:
    words = ("--subset", "60%", "--masks-where", "area > 99")
    made = view(root, *words, "--name", "most")
    before = served(root, "most")
    first, state = trained(root, "most")
    rest, _ = trained(root, "most", state)
    # New ids are lower and higher than the old ids, so that all row numbers change.
    grow(root, [*range(20, 25), *range(110_000, 110_004)])
    assert len(sa1b.open(root)) == len(IDS) + 9
    for which in ("most", made["path"], Path(made["path"])):
        assert served(root, which) == before
    assert trained(root, "most")[0] == first
    assert trained(root, "most", state)[0] == rest
    # The same conditions are another view now, and its name needs --overwrite.
    done = refused("view", root, *words, "--name", "most", names="most")
    assert "--overwrite" in done.err
    assert served(root, "most") == before
    after = view(root, *words, "--name", "most", "--overwrite")
    assert after["digest"] != made["digest"]
    assert served(root, "most").items() > before.items()


def test_all_images_of_a_directory_that_grew_are_another_sequence_and_the_way_out_is_named(
    root: Path,
) -> None:
    first, state = trained(root, None)
    view(root, "--name", "all")
    assert trained(root, "all")[0] == first
    grow(root, [*range(500, 510)])
    with pytest.raises(ResumeError, match=r"sa1b view .* --ids FILE --name NAME"):
        trained(root, None, state)
    rest, _ = trained(root, None)
    assert rest != first
    with pytest.warns(UserWarning, match="has changed since the state was saved"):
        trained(root, "all", state)
    view(root, "--subset", "50%", "--name", "half")
    with pytest.raises(ResumeError):
        trained(root, "half", state)


def test_images_that_the_directory_lacks_are_counted_with_the_way_out(root: Path, tmp_path: Path) -> None:
    path = view(root, "--name", "all")["path"]
    fewer = grow(tmp_path / "fewer", IDS[:14])
    with pytest.raises(ManifestError, match=r"\b9 of .* \(5, 11, 114, 115, 116 and 4 more\)") as found:
        served(fewer, path)
    ids = f"{path.removesuffix('.json')}.ids"
    assert f"--ids {ids} --missing skip" in str(found.value)
    left = run("view", fewer, "--ids", ids, "--missing", "skip", "--json", code=3).json
    assert [*served(fewer, left["view"])] == sorted(IDS[:14])
    assert left["missing"] == 9


# Views beside a directory


def test_a_view_of_a_read_only_directory_is_written_and_opened_elsewhere(root: Path, tmp_path: Path) -> None:
    before, out, file = files(root), tmp_path / "views", tmp_path / "chosen" / "half.json"
    one = view(root, "--subset", "50%", "--name", "half", "--out", out)
    two = view(root, "--images-where", "masks >= 2", "--name", "some", "--out", out)
    three = view(root, "--subset", "50%", "--masks-where", "area > 300", "--out", file)
    above = view(root, "--subset", "50%", "--out", tmp_path / "chosen" / ".." / "last")
    assert files(root) == before
    assert (Path(one["path"]).parent, three["path"]) == (out, str(file))
    half = served(root, one["view"])
    for which in (f"{out}/half", Path(one["path"]), above["view"]):
        assert served(root, which) == half
    assert served(root, out / "some") == served(root, two["view"])
    assert served(root, file).keys() == half.keys()
    assert served(root, str(file)) != half
    assert len(trained(root, str(file))[0]) == 6
    for which, names in (
        (out, str(out)), (tmp_path / "none.json", "none.json"), ("half", "'half'"), ("s3://bucket/x.json", "s3://"),
    ):  # fmt: skip
        with pytest.raises(ManifestError, match=names):
            served(root, which)
    (tmp_path / "file").write_text("mine")
    refused("view", root, "--subset", "50%", "--out", tmp_path / "file", names="--out")


def test_a_view_is_made_and_read_while_a_command_changes_the_directory(root: Path, tmp_path: Path) -> None:
    source, found = write_source(tmp_path / "sa_000009.tar", pairs([300, 301])), []

    def chosen(_: str) -> None:
        found.append(view(root, "--subset", "50%", "--out", tmp_path / "half.json"))
        found.append(served(root, tmp_path / "half.json"))

    with fault(root, 1, chosen):
        reshard(root, source)
    assert found[0]["images"] == len(found[1]) > 0
    assert served(root, tmp_path / "half.json") == found[1]


def test_a_file_that_holds_another_view_needs_overwrite(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "half.json"
    view(root, "--subset", "50%", "--out", file)
    view(root, "--subset", "50%", "--out", file, "--name", "half")  # the same view
    before = files(tmp_path)
    done = refused("view", root, "--subset", "30%", "--out", file, names=str(file))
    assert "--overwrite" in done.err
    assert files(tmp_path) == before
    half = served(root, file)
    view(root, "--subset", "30%", "--out", file, "--overwrite")
    assert served(root, file).keys() < half.keys()


@pytest.mark.parametrize("name", ["mine.json", "mine.ids", "mine.rows"])
@pytest.mark.parametrize("text", ["{}", "5\n", '{"format": "sa1b-shards-1"}'])
def test_a_file_of_a_user_is_never_replaced(root: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    words = ("view", root, "--subset", "50%", "--out", tmp_path / "mine.json")
    done = run(*words, "--overwrite", code=None)
    assert (done.code, name in done.err) == (2, True) or name == "mine.rows"
    assert (tmp_path / name).read_text() == text
    (tmp_path / name).unlink()
    run(*words, "--overwrite")
    (tmp_path / "mine.json").unlink()  # as if the command had been killed before the document
    run(*words)
    assert len(served(root, tmp_path / "mine.json")) > 0


# At a URL


def test_a_view_at_a_url_is_that_of_the_folder(root: Path, tmp_path: Path) -> None:
    """Selected by conditions, written to the views of the URL or beside it, renamed, and opened by name."""
    url = bucket(shutil.copytree(root, tmp_path / "bucket"), "sa_000023")
    conditions = ("--masks-where", "area > 40 and area_fraction < 0.5", "--images-where", "masks >= 1")
    here, there = (view(one, *conditions, "--name", "good") for one in (root, url))
    assert there["path"].startswith(f"{url}/views/")
    assert {**there, "path": here["path"]} == here
    assert files(f"{url}/views") == files(root / "views")
    assert served(url, "good") == served(root, "good")
    assert order(url, "good") == order(root, "good")
    beside = view(url, *conditions, "--out", tmp_path / "out")
    assert order(url, beside["view"]) == order(root, "good")
    refused("view", url, "--subset", "50%", "--name", "good", names="good")
    view(url, "--subset", "50%", "--name", "good", "--overwrite")
    assert served(url, "good") != served(root, "good")
    gone = next(path for path in sorted((tmp_path / "bucket").glob("*.parquet")))
    gone.unlink()
    done = refused("view", url, "--masks-where", "area > 40", names=gone.name)
    assert f"index {url}" in done.err
