"""Layers: the changes of masks beside shards, and what happens to damaged and unfinished ones."""

import contextlib
import copy
import itertools
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.storage.errors import ReplacedError, StorageError
from tests.directories import reshard
from tests.kit import durable, fault, files, flip, kill, put, refused, run, started
from tests.layer.layered import IDS, add_files, folder_of, ids_of, made, mask_ids, masks, root
from tests.shards import tiny
from tests.shards.test_record import equal

__all__ = ["made", "root"]
PROVENANCE = "provenance"


def drawn(image_id: int, draw: random.Random, ids: list[int], name: str) -> dict[str, Any]:
    """An annotation file of any form."""
    found = tiny.document(image_id, draw.randrange(99), masks=max(1, len(ids)))
    found["annotations"] = [mask | {"id": i} for mask, i in zip(found["annotations"], ids, strict=False)]
    form = draw.choice(["usual", "unknown key", "coco"])
    for i, mask in enumerate(found["annotations"]):
        mask.update({"note": f"{name} {i}"} if form == "unknown key" else {})
    if form == "coco":
        origins = [{"category": f"{name} {i}", "category_id": i} for i in range(len(ids))]
        found[PROVENANCE] = {"source": name, "masks": origins}
    return found


def merged(base: dict[str, Any], own: dict[str, Any], existing: str) -> dict[str, Any]:
    """What the file of an image with a layer is, made by hand."""
    place = {mask["id"]: i for i, mask in enumerate(own["annotations"])}
    pairs = []
    for i, mask in enumerate(base["annotations"]):
        if mask["id"] in place:
            pairs.append((own, place.pop(mask["id"])))
        elif existing != "hide":
            pairs.append((base, i))
    pairs += [(own, i) for i in place.values()]
    expected = {**base, "annotations": [file["annotations"][i] for file, i in pairs]}
    if expected["annotations"] != base["annotations"] and (PROVENANCE in base or PROVENANCE in own):
        origins = [file[PROVENANCE]["masks"][i] if PROVENANCE in file else {} for file, i in pairs]
        expected[PROVENANCE] = {**(base.get(PROVENANCE) or own[PROVENANCE]), "masks": origins}
    return copy.deepcopy(expected)


def test_shards_with_layers_equal_those_of_files_with_the_same_masks(tmp_path: Path) -> None:
    draw = random.Random(5)
    base, expected, layers = dict[int, Any](), dict[int, Any](), {"keep": [], "replace": [], "hide": []}
    for image_id, existing in zip(range(1, 61), itertools.cycle(layers), strict=False):
        ids = [1000 + i for i in range(draw.randrange(6))]
        base[image_id] = drawn(image_id, draw, ids, "base")
        own_ids = [i for i in ids if existing != "keep" and draw.random() < 0.5]
        own_ids = [*own_ids, *range(draw.randrange(4))] if image_id % 4 else []  # some lose all their masks
        own = drawn(image_id, draw, draw.sample(own_ids, len(own_ids)), "layer")
        expected[image_id] = merged(base[image_id], own, existing)
        layers[existing].append(own)
    for name, documents in (("root", base), ("direct", expected)):
        members = [tiny.pair_members(i, text=tiny.encode(one)) for i, one in documents.items()]
        tar = tiny.write_tar(tmp_path / name / "sa_000001.tar", [one for pair in members for one in pair])
        reshard(tmp_path / name / "root", tar, accept=["keys"])
    for existing, documents in layers.items():
        add_files(tmp_path / "root/root", existing, *documents, existing=existing)
    layered = sa1b.open(tmp_path / "root/root", layers=list(layers))
    for sample, other in zip(layered, sa1b.open(tmp_path / "direct/root"), strict=True):
        wanted, found = other.annotations, sample.annotations
        assert found.to_json() == expected[sample.image_id] == wanted.to_json()
        assert np.array_equal(found.runs().runs, wanted.runs().runs)
        # With a text, number_types are not used.
        types = found.number_types if wanted.text is None else wanted.number_types
        assert equal(replace(found, text=None, number_types=types), replace(wanted, text=None))
        own, direct = found.origin(), wanted.origin()
        assert (own is None) == (direct is None)
        assert own is None or direct is None or all((own[name] == direct[name]).all() for name in own)


def test_a_layer_is_applied_by_name_and_no_other_image_changes(root: Path) -> None:
    with durable(root):
        info = add_files(root, "round2", masks(5, 7), masks(2, 8, 9))
    assert [info[name] for name in ("images", "added", "replaced", "hidden")] == [2, 3, 0, 0]
    plain, layered = sa1b.open(root), sa1b.open(root, layers=["round2"])
    for image_id in IDS:
        assert ids_of(layered, image_id) == ids_of(plain, image_id) + {2: [8, 9], 5: [7]}.get(image_id, [])
        assert layered.by_id(image_id).jpeg == plain.by_id(image_id).jpeg
    assert [len(one) for one in layered.masks([0, 1])] == [3, 5]
    assert "layer round2" in repr(layered)


def test_a_layer_builds_on_another_one(root: Path) -> None:
    ids = mask_ids(2)
    add_files(root, "first", masks(2, ids[1], 5), existing="hide")
    add_files(root, "second", masks(2, 5), existing="hide", on="first")
    assert ids_of(sa1b.open(root, layers=["first"]), 2) == [ids[1], 5]
    for layers in (["second"], ["first", "second"]):
        assert ids_of(dataset := sa1b.open(root, layers=layers), 2) == [5]
        assert re.findall(r"layer (\w+)", repr(dataset)) == ["first", "second"]
    refused("layer", "drop", root, "first", names="second")
    add_files(root, "first", masks(3, 5), overwrite=True)
    with pytest.raises(ManifestError, match="not the layer that second was made on"):
        sa1b.open(root, layers=["second"])


def test_damage_is_refused_with_the_name_of_the_file_or_harmless(root: Path) -> None:
    add_files(root, "round2", masks(2, 5))
    whole = sa1b.open(root, layers=["round2"]).by_id(2).annotations
    for name, data in files(root / "layers").items():
        found = list[str]()
        for at in np.linspace(0, len(data) - 1, 40).astype(int).tolist():
            flip(root / "layers", name, at, 4)
            run("layer", "verify", root, "round2", code=1)
            try:
                assert equal(sa1b.open(root, layers=["round2"]).by_id(2).annotations, whole)
            except (ManifestError, ShardError) as error:
                found.append(str(error))
            flip(root / "layers", name, at, 4)
        assert len(found) > 36
        assert all(f"layers/{name}" in one for one in found)
        for rest in (data[:-3], data + b"\0", None):
            put(root / "layers", name, rest)
            with pytest.raises(ManifestError, match=f"layers/{name}"):
                sa1b.open(root, layers=["round2"])
        put(root / "layers", name, data)


def test_a_name_that_is_no_layer_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"layers/round2.*sa1b layer list"):
        sa1b.open(root, layers=["round2"])
    folder = folder_of(tmp_path / "masks", masks(2, 5))
    for name in ("../tasks", "", ".hidden", "a/b", "a" * 65):
        with pytest.raises(UsageError):
            sa1b.open(root, layers=[name])
        refused("layer", "add", root, folder, "--name", name, names="--name")
    for wrong in ("round2", 5, ["a", "a"]):
        with pytest.raises(ValueError, match="layers="):
            sa1b.open(root, layers=wrong)


@pytest.mark.parametrize("is_during", [False, True])
def test_other_masks_in_the_shards_are_detected_and_more_sources_are_not_a_change(
    made: Path, tmp_path: Path, is_during: bool
) -> None:
    """Sources are added and replaced after a layer was written, or while it is."""
    root = shutil.copytree(made, tmp_path / "root")

    def with_source(name: str, image_id: int, source: str, members: list[tuple[str, bytes]]) -> None:
        tar = tiny.write_tar(tmp_path / source, members)
        with fault(root, 1 if is_during else 0, lambda _: tiny.ingest_tar(tar, root)):
            add_files(root, name, masks(image_id, 5))
        if not is_during:
            tiny.ingest_tar(tar, root)

    with_source("grown", 3, "sa_000021.tar", tiny.pairs([50, 51]))
    assert ids_of(sa1b.open(root, layers=["grown"]), 3) == [*mask_ids(3), 5]
    others = tiny.pair_members(2, text=tiny.pair(2, seed=1)[1])
    with_source("replaced", 2, "sa_000020.tar", [*tiny.pairs([1, 3, 4, 5, 6]), *others])
    with pytest.raises(ManifestError, match=r"layers/replaced: .*\(2\)"):
        sa1b.open(root, layers=["replaced"])
    assert len(sa1b.open(root, layers=["grown"])) == 8


@pytest.mark.parametrize(("at", "is_there"), [(1, False), (2, False), (3, False), (2, True)])
def test_a_killed_run_leaves_an_unfinished_layer_that_the_next_one_replaces(
    root: Path, tmp_path: Path, at: int, is_there: bool
) -> None:
    words = (
        "layer",
        "add",
        root,
        folder_of(tmp_path / "masks", masks(2, 5), masks(3, 6)),
        "--name",
        "round2",
    )
    if is_there:
        add_files(root, "round2", masks(4, 7))
        words += ("--overwrite",)
    with started(*words, base=root, at=at, what=kill) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert run("layer", "list", root, "--json").json["layers"] == []
    with pytest.raises(ManifestError, match="layers/round2"):
        sa1b.open(root, layers=["round2"])
    assert run(*words, "--json").json["images"] == 2
    left = {path.name for path in (root / "layers").rglob("*")}
    add_files(root, "other", masks(2, 5), masks(3, 6))
    assert left == {"round2", *(path.name for path in (root / "layers/other").iterdir())}
    run("layer", "drop", root, "round2", "other")
    assert list((root / "layers").iterdir()) == []


def test_readers_have_the_old_layer_or_none_until_the_new_one_is_complete(root: Path) -> None:
    add_files(root, "round2", masks(2, 5))
    old, seen = [*mask_ids(2), 5], list[list[int]]()
    reader = sa1b.open(root, layers=["round2"])
    assert ids_of(reader, 2) == old

    def look(_: str) -> None:
        for one in (lambda: reader, lambda: sa1b.open(root, layers=["round2"])):
            with contextlib.suppress(ManifestError, ShardError, StorageError):
                seen.append(ids_of(one(), 2))

    for at in (1, 2, 3, 4):  # of the claim and three files
        with fault(root, at, look, count_claims=True) as changes:
            add_files(root, "round2", masks(2, 1, 2, 3), overwrite=True)
        assert changes.seen >= 4
        assert seen[:2] == [old, old]
        assert all(one == old for one in seen)
        assert ids_of(sa1b.open(root, layers=["round2"]), 2) == [*mask_ids(2), 1, 2, 3]
        with pytest.raises(ReplacedError):
            reader.check_shard(reader.shards[0])
        add_files(root, "round2", masks(2, 5), overwrite=True)
        reader = sa1b.open(root, layers=["round2"])


def test_one_process_writes_a_layer(root: Path, tmp_path: Path) -> None:
    words = ("layer", "add", root, folder_of(tmp_path / "masks", masks(2, 5)), "--name", "round2")
    with fault(root, 1, lambda _: refused(*words, "--overwrite", names="layers/round2")) as changes:
        run(*words)
    assert changes.seen
    assert ids_of(sa1b.open(root, layers=["round2"]), 2) == [*mask_ids(2), 5]
    refused(*words, names="--name round2")


def test_files_of_a_user_are_not_removed(root: Path, tmp_path: Path) -> None:
    words = ("layer", "add", root, folder_of(tmp_path / "masks", masks(2, 5)))
    run(*words, "--name", "other")
    for name in files(root / "layers/other"):
        put(root / "layers/round2", name, b"not of this program")
        put(root / "layers/round2", "notes.txt", b"mine")
        before = files(root / "layers/round2")
        refused(*words, "--name", "round2", names="round2")
        refused("layer", "drop", root, "round2", names="round2")
        assert files(root / "layers/round2") == before
        put(root / "layers/round2", name, None)
    run(*words, "--name", "round2")
    run("layer", "drop", root, "round2")
    assert files(root / "layers/round2") == {"notes.txt": b"mine"}
    refused("layer", "drop", root, "round3", names="round3")
