"""Views of masks that layers change: what they count, that they name layers by digest, and are read with them."""

import json
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.errors import ManifestError
from tests.kit import files, flip, refused, run
from tests.layer.layered import IDS, add, made, mask_ids, root, two
from tests.shards import tiny
from tests.views.served import fields, served, view

__all__ = ["made", "root"]
WHERE = "mask_id < 10"  # masks of the layers below; those of the shards have higher ids


def test_conditions_count_the_changed_masks(root: Path) -> None:
    add(root, "round2", {**two(2), 3: ([], mask_ids(3)), 5: ([6, 7], [])})
    dataset = sa1b.open(root, layers=["round2"])
    for where in ("mask_id > 0", WHERE, "area > 500"):
        expected = {
            sample.image_id: [one["mask_id"] for one in fields(sample.annotations) if eval(where, {}, one)]
            for sample in dataset
        }
        found = view(root, "--layers", "round2", "--masks-where", where, "--name", "all", "--overwrite")
        assert found["masks"] == sum(map(len, expected.values()))
        assert found["without_masks"] == [*expected.values()].count([])
        assert served(root, "all") == expected
        with_masks = {image_id: masks for image_id, masks in expected.items() if masks}
        words = ("--layers", "round2", "--masks-where", where, "--images-where", "masks >= 1")
        assert served(root, view(root, *words)["view"]) == with_masks
    found = view(root, "--layers", "round2", "--images-where", "masks > 3")
    assert (found["images"], found["masks"]) == (1, 5)
    assert view(root, "--masks-where", WHERE)["masks"] == 0


def test_a_view_names_its_layers_by_digest_and_is_read_with_them(root: Path) -> None:
    first = add(root, "round2", two(2))
    second = add(root, "round3", {2: ([6], [])}, on="round2")
    words = ("--layers", "round3", "--masks-where", WHERE)
    found = view(root, *words, "--name", "new")
    assert found["layers"] == [["round2", first["digest"]], ["round3", second["digest"]]]
    assert first["digest"] in run("view", root, *words, "--name", "new").out
    assert found["digest"] != view(root, "--masks-where", WHERE)["digest"]
    new = {image_id: [5, 6] if image_id == 2 else [] for image_id in IDS}
    assert served(root, "new") == new
    assert served(root, "new", layers=["round3"]) == new
    opened = sa1b.open(root)
    assert served(opened, "new") == new
    assert len(opened.by_id(2).annotations) == 3  # what the user has opened stays as it was
    state = sa1b.Stream(root, view="new", global_batch=1).state_dict()
    sa1b.Stream(root, view="new", layers=["round3"], global_batch=1).load_state_dict(state)
    with pytest.raises(ManifestError, match=r"round2 \(.*, round3 .*round2 \("):
        served(root, "new", layers=["round2"])
    assert run("verify", root, "--json").json["exit_code"] == 0


def test_a_view_without_a_condition_is_of_its_layers_too(root: Path) -> None:
    add(root, "round2", two(2))
    everything = view(root, "--layers", "round2", "--name", "all")
    assert everything["digest"] != view(root, "--name", "plain")["digest"]
    assert everything["ids_sha256"] == view(root, "--name", "plain")["ids_sha256"]
    assert served(root, "all") == served(root, layers=["round2"]) != served(root) == served(root, "plain")


def test_a_layer_of_a_view_that_was_replaced_or_dropped_is_named(root: Path) -> None:
    add(root, "round2", two(2))
    view(root, "--layers", "round2", "--name", "new")
    before = served(root, "new")
    add(root, "round2", two(3), overwrite=True)
    with pytest.raises(ManifestError, match="round2"):
        served(root, "new")
    run("layer", "drop", root, "round2")
    with pytest.raises(ManifestError, match="round2"):
        served(root, "new")
    refused("view", root, "--layers", "round2", "--name", "other", names="round2")
    add(root, "round2", two(2))  # made again: the same digest
    assert served(root, "new") == before


def test_a_changed_name_of_a_layer_is_found(root: Path) -> None:
    add(root, "round2", two(2))
    path = Path(view(root, "--layers", "round2", "--name", "new")["path"])
    (name,) = (one for one in files(root) if one.endswith(path.name))
    flip(root, name, path.read_bytes().index(b'"round2"') + 6, 1)  # round3
    assert path.name in run("verify", root, code=1).out
    with pytest.raises(ManifestError, match=path.name):
        served(root, "new")


def test_commands_take_the_layers_of_a_view(root: Path, tmp_path: Path) -> None:
    add(root, "round2", two(2))
    view(root, "--layers", "round2", "--masks-where", WHERE, "--name", "new")
    run("export", root, "--to", "coco", "--view", "new", "--out", tmp_path / "coco")
    document = json.loads((tmp_path / "coco/annotations.json").read_text())
    assert [one["mask_id"] for one in document["annotations"]] == [5]
    assert len(document["images"]) == len(IDS)
    run("gallery", root, "--view", "new", "--out", tmp_path / "page.html")
    assert "round2 (" in (tmp_path / "page.html").read_text()


@pytest.fixture
def named(root: Path, tmp_path: Path) -> Any:
    """A layer of masks in COCO's format: name of a category -> id of its only mask."""
    names = ["dog", "größe 犬 🐕", "o'neil", 'a "b"', "a = b"]
    one = tiny.document(2, 7, masks=len(names))
    annotations = [
        {**mask, "id": number + 1, "image_id": 2, "category_id": number}
        for number, mask in enumerate(one["annotations"])
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    document = {"images": [{"id": 2, **one["image"]}], "annotations": annotations, "categories": categories}
    (tmp_path / "masks.json").write_text(json.dumps(document))
    run("layer", "add", root, tmp_path / "masks.json", "--name", "named")
    masks = sa1b.open(root, layers=["named"]).by_id(2).annotations.mask_id.tolist()[3:]
    return dict(zip(names, masks, strict=True))


def test_conditions_on_texts_are_written_as_in_python_or_sql(root: Path, named: Any) -> None:
    dog = named["dog"]
    for where, expected in (
        ("category = 'dog'", [dog]),
        ('category=="dog"', [dog]),
        ("not (category != 'dog')", [dog]),
        ("category != '' and category != 'dog'", [*named.values()][1:]),
        ("category = 'a = b' or area = 0", [named["a = b"]]),
        ("category_id > 0 and category_id < 3", [*named.values()][1:3]),
        *((f"category = {name!r} and area > 0", [mask]) for name, mask in named.items()),
    ):
        words = ("--layers", "named", "--masks-where", where, "--images-where", "masks > 0", "--name", "one")
        found = view(root, *words, "--overwrite")
        assert (found["images"], found["masks"]) == (1, len(expected))
        assert served(root, "one") == {2: expected}
