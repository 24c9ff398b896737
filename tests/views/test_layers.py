"""Views of masks that layers change: what they count, that they name layers by digest, and are read with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.errors import ManifestError
from sa1b.shards.layer_writer import drop
from sa1b.storage.open import open_store
from sa1b.views.predicate import mask_predicate
from sa1b.views.selection import Selected, Selection, select
from sa1b.views.view import copy_view, images_of, view_of
from tests.cli.verb import called
from tests.shards.test_layer import change, made, root, two, write
from tests.verify.test_views import found

__all__ = ["made", "root"]
view, export, gallery = called("view"), called("export"), called("gallery")
WHERE = "mask_id < 10"  # masks of the layers below; those of the shards have higher ids


def of(root: Path, *layers: str, name: str | None = None, **flags: Any) -> Selected:
    return select(root, Selection(layers=layers, **flags), name=name, quiet=True)


def stream(root: Any, **options: Any) -> sa1b.Stream:
    return sa1b.Stream(root, global_batch=1, image_size=64, order="sequential", **options)


def masks(stream: sa1b.Stream) -> dict[int, list[int]]:
    assert stream.plan.micro_batch == 1
    return {int(batch.ids[0]): batch.mask_ids.tolist() for batch in stream}


def test_conditions_count_the_changed_masks(root: Path) -> None:
    write(root, "round2", two(2), change(5, [6, 7], [False] * 2, []))
    for flags in ({}, {"masks_where": WHERE}, {"masks_where": WHERE, "images_where": "masks >= 1"}):
        chosen = of(root, "round2", images_where=flags.pop("images_where", "masks >= 0"), **flags)
        where = mask_predicate(WHERE) if flags else None
        expected = {
            one.image_id: int(where.masks(one.annotations).sum()) if where else len(one.annotations)
            for one in sa1b.open(root, layers=["round2"])
        }
        if chosen.without_masks == 0 and flags:
            expected = {image_id: count for image_id, count in expected.items() if count}
            assert sorted(expected) == [2, 5]
        assert len(chosen.view) == len(expected)
        assert chosen.masks == sum(expected.values())
    assert of(root, masks_where=WHERE).masks == 0


def test_a_view_names_its_layers_by_digest_and_is_read_with_them(root: Path) -> None:
    write(root, "round2", two(2))
    write(root, "round3", change(2, [6], [False], []), on="round2")
    selected = of(root, "round3", name="new", masks_where=WHERE)
    digests = [layer.info.digest for layer in sa1b.open(root, layers=["round3"]).layers]
    assert selected.view.layers == (("round2", digests[0]), ("round3", digests[1]))
    document = json.loads(Path(selected.path).read_bytes())
    assert [one["digest"] for one in document["layers"]] == digests
    assert f"  layer   round2 ({digests[0]})" in selected.table()
    assert selected.view.digest != of(root, masks_where=WHERE).view.digest
    assert of(root, "round3", masks_where=WHERE).view.digest == selected.view.digest
    assert masks(stream(root, view="new")) == masks(stream(root, view="new", layers=["round3"]))
    assert masks(stream(root, view="new"))[2] == [5, 6]
    assert masks(stream(sa1b.open(root), view="new"))[2] == [5, 6]
    opened = sa1b.open(root)
    stream(opened, view="new")
    assert opened.layers == ()  # that of the user stays as it was
    state = stream(root, view="new").state_dict()
    assert [one[0] for one in state["layers"]] == ["round2", "round3"]
    stream(root, view="new", layers=["round3"]).load_state_dict(state)
    with pytest.raises(ManifestError, match=r"made with layers round2 \(.*, and opened with round2 \(.*omit"):
        stream(root, view="new", layers=["round2"])
    assert found(root) == set()


def test_a_view_without_a_condition_is_of_its_layers_too(root: Path) -> None:
    write(root, "round2", two(2))
    everything = of(root, "round2", name="all")
    assert everything.view.digest != everything.view.ids_digest == sa1b.open(root).table.ids_digest
    assert masks(stream(root, view="all")) == masks(stream(root, layers=["round2"]))
    assert masks(stream(root, view="all", rank=0, world_size=1)) != masks(stream(root))


def test_a_layer_of_a_view_that_was_replaced_or_dropped_is_named(root: Path) -> None:
    write(root, "round2", two(2))
    of(root, "round2", name="new")
    write(root, "round2", two(3), overwrite=True)
    with pytest.raises(ManifestError, match="round2/masks.bin is another one now; restore it from a copy"):
        stream(root, view="new")
    drop(open_store(root), "round2")
    with pytest.raises(ManifestError, match="round2/layer.json: no such layer"):
        stream(root, view="new")
    with pytest.raises(ManifestError, match="no such layer"):
        of(root, "round2", name="other")
    write(root, "round2", two(2))  # made again: the same digest
    assert masks(stream(root, view="new"))[2] == masks(stream(root, layers=["round2"]))[2]


def test_a_changed_document_is_found(root: Path) -> None:
    write(root, "round2", two(2))
    path = Path(of(root, "round2", name="new").path)
    path.write_bytes(path.read_bytes().replace(b'"name": "round2"', b'"name": "round3"'))
    assert found(root) == {"view_unreadable"}
    with pytest.raises(ManifestError, match="damaged"):
        stream(root, view="new")


def test_commands_take_the_layers_of_a_view(root: Path, tmp_path: Path) -> None:
    write(root, "round2", two(2))
    done = view(root, "--layers", "round2", "--masks-where", WHERE, "--name", "new", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert [name for name, _ in printed["layers"]] == ["round2"]
    assert printed["masks"] == 1
    ids, where, names = images_of(str(root), "new")
    assert (len(ids), where, names) == (6, mask_predicate(WHERE), ("round2",))
    done = export(root, "--to", "coco", "--view", "new", "--out", tmp_path / "coco")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "coco/annotations.json").read_text())
    assert [one["mask_id"] for one in document["annotations"]] == [5]
    done = gallery(root, "--view", "new", "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "round2 (" in (tmp_path / "page.html").read_text()


def test_the_copy_of_a_view_names_the_same_layers(root: Path, tmp_path: Path) -> None:
    write(root, "round2", two(2))
    selected = of(root, "round2", name="new", ids=None, subset="50%")
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/views")
    assert copy_view(str(root), str(tmp_path / "copy"), "new") == selected.view.digest
    opened, dataset = view_of(sa1b.open(tmp_path / "copy"), "new")
    assert opened.layers == selected.view.layers
    assert [layer.info.name for layer in dataset.layers] == ["round2"]
    assert np.array_equal(opened.image_ids(dataset.table), selected.view.image_ids(sa1b.open(root).table))
