"""Layers: the changes of masks beside shards, their files, and what happens to damaged and unfinished ones."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sa1b
from sa1b.errors import LockedError, ManifestError, ShardError, UsageError
from sa1b.masks import Runs
from sa1b.shards import layer, layer_writer
from sa1b.shards.annotation import PROVENANCE, Annotations, parse_annotation
from sa1b.shards.layer import Change
from sa1b.shards.record import RecordError
from sa1b.storage.claim import Claim
from sa1b.storage.open import open_store
from tests import processes
from tests.shards import tiny
from tests.shards.test_record import equal

IDS = range(1, 7)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    tiny.make_tar(folder / "sa_000020.tar", IDS)
    root = folder / "shards"
    tiny.ingest_tar(folder / "sa_000020.tar", root)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "shards"
    subprocess.run(["cp", "-r", made, copy], check=True)
    before = contents(copy)
    yield copy
    assert {name: data for name, data in contents(copy).items() if name in before} == before


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and "layers" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def parsed(document: Any) -> Annotations:
    return parse_annotation(tiny.encode(document), document["image"]["image_id"]).annotations


def change(image_id: int, ids: list[int], replaces: list[bool], hidden: list[int], seed: int = 9) -> Change:
    document = tiny.document(image_id, seed, masks=max(1, len(ids)))
    document["annotations"] = document["annotations"][: len(ids)]
    for mask, mask_id in zip(document["annotations"], ids, strict=True):
        mask["id"] = mask_id
    return Change(parsed(document), np.array(replaces, np.bool_), np.array(hidden, np.int64))


def mask_ids(image_id: int) -> list[int]:
    return [mask["id"] for mask in tiny.document(image_id)["annotations"]]


def write(root: Path, name: str, *changes: Change, overwrite: bool = False, on: str | None = None) -> Any:
    dataset = sa1b.open(root)
    store = open_store(root)
    parent = None if on is None else layer.read_info(store.reader, on)
    with layer_writer.writing(store, name, overwrite=overwrite) as writer:
        for one in changes:
            writer.add(one, int(dataset.table.masks_crc32c[dataset.row(one.masks.image_id)]))
        return writer.commit(dataset.table, parent, {"program": "test"})


def two(image_id: int) -> Change:
    """A mask that is added, one that is replaced, one that is hidden."""
    ids = mask_ids(image_id)
    return change(image_id, [5, ids[1]], [False, True], [ids[0]])


FORMS = st.sampled_from(["usual", "unknown key", "coco"])


def in_form(document: Any, form: str, name: str) -> Any:
    for i, mask in enumerate(document["annotations"]):
        if form == "unknown key":
            mask["note"] = f"{name} {i}"
    if form == "coco":
        origins = [{"category": f"{name} {i}", "category_id": i} for i in range(len(document["annotations"]))]
        document[PROVENANCE] = {"source": name, "masks": origins}
    return document


def test_an_image_may_lose_all_its_masks() -> None:
    document = tiny.document(3, 1, masks=3)
    base, nothing = parsed(document), parsed({**document, "annotations": []})
    ids = np.array([mask["id"] for mask in document["annotations"]], np.int64)
    result = Change(nothing, np.zeros(0, np.bool_), ids).apply(base)
    assert result.to_json() == {**document, "annotations": []}
    assert len(result.runs()) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_shard_with_a_layer_equals_annotations_that_are_made_directly(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 5), "masks")
    base = in_form(tiny.document(3, 1, masks=max(1, count)), data.draw(FORMS), "base")
    base["annotations"] = base["annotations"][:count]
    base.get(PROVENANCE, {}).get("masks", [])[count:] = []
    ids = [mask["id"] for mask in base["annotations"]]
    actions = data.draw(st.lists(st.sampled_from("krh"), min_size=count, max_size=count), "keep/replace/hide")
    added = data.draw(st.integers(0, 3), "added")
    replaced = [i for i, action in enumerate(actions) if action == "r"]
    new_ids = [*(ids[i] for i in replaced), *range(added)]
    own = in_form(tiny.document(3, 2, masks=max(1, len(new_ids))), data.draw(FORMS), "layer")
    own["annotations"] = own["annotations"][: len(new_ids)]
    own.get(PROVENANCE, {}).get("masks", [])[len(new_ids) :] = []
    order = data.draw(st.permutations(range(len(new_ids))), "order")
    for i, mask in enumerate(own["annotations"]):
        mask["id"] = new_ids[order[i]]
    place = {mask["id"]: i for i, mask in enumerate(own["annotations"])}
    hidden = [ids[i] for i, action in enumerate(actions) if action == "h"]
    # What the file of the image is, made by hand.
    pairs = [("own", place[ids[i]]) if i in replaced else ("base", i) for i in range(count)]
    pairs = [one for one, action in zip(pairs, actions, strict=True) if action != "h"]
    pairs += [("own", i) for i, mask in enumerate(own["annotations"]) if mask["id"] in range(added)]
    files = {"base": base, "own": own}
    expected = {**base, "annotations": [files[which]["annotations"][i] for which, i in pairs]}
    if PROVENANCE in base or PROVENANCE in own:
        origins = [files[w][PROVENANCE]["masks"][i] if PROVENANCE in files[w] else {} for w, i in pairs]
        expected[PROVENANCE] = {**(base.get(PROVENANCE) or own[PROVENANCE]), "masks": origins}

    replaces = np.array([mask["id"] in ids for mask in own["annotations"]], np.bool_)
    one = Change(parsed(own), replaces, np.array(hidden, np.int64))
    again = Change(*layer.record.decode_of_layer(one.encode()))
    result = again.apply(parsed(base))
    wanted = parsed(expected)
    assert result.to_json() == expected
    for made in (result, again.apply(parsed(base), text=False)):
        # With a text, number_types are not used.
        types = made.number_types if wanted.text is None else wanted.number_types
        assert equal(replace(made, text=None, number_types=types), replace(wanted, text=None))
    runs: Runs = result.runs()
    assert np.array_equal(runs.runs, wanted.runs().runs)
    found, origin = result.origin(), wanted.origin()
    assert (found is None) == (origin is None)
    if found is not None and origin is not None:
        assert all((found[name] == origin[name]).all() for name in found)


def test_a_layer_is_applied_by_name_and_no_other_image_changes(root: Path) -> None:
    info = write(root, "round2", two(5), two(2))
    assert (info.images, info.added, info.replaced, info.hidden) == (2, 2, 2, 2)
    plain, layered = sa1b.open(root), sa1b.open(root, layers=["round2"])
    for image_id in IDS:
        ids = plain.by_id(image_id).annotations.mask_id.tolist()
        wanted = [*ids[1:], 5] if image_id in (2, 5) else ids
        assert layered.by_id(image_id).annotations.mask_id.tolist() == wanted
        assert layered.by_id(image_id).jpeg == plain.by_id(image_id).jpeg
    assert [len(one) for one in layered.masks([0, 1])] == [3, 3]
    assert "layer round2" in repr(layered)


def test_equal_changes_in_any_order_give_equal_files(root: Path) -> None:
    one, other = write(root, "a", two(5), two(2), two(3)), write(root, "b", two(3), two(2), two(5))
    assert one.digest == other.digest
    assert (root / "layers/a/masks.bin").read_bytes() == (root / "layers/b/masks.bin").read_bytes()
    assert (root / "layers/a/index.parquet").read_bytes() == (root / "layers/b/index.parquet").read_bytes()


def test_a_layer_builds_on_another_one(root: Path) -> None:
    ids = mask_ids(2)
    write(root, "first", two(2))
    write(root, "second", change(2, [5], [True], [ids[2]]), on="first")
    for layers in (["second"], ["first", "second"]):
        dataset = sa1b.open(root, layers=layers)
        assert [one.info.name for one in dataset.layers] == ["first", "second"]
        assert dataset.by_id(2).annotations.mask_id.tolist() == [ids[1], 5]
    with pytest.raises(UsageError, match="the layer second builds on it; drop second first"):
        layer_writer.drop(open_store(root), "first")
    write(root, "first", two(3), overwrite=True)
    with pytest.raises(ManifestError, match="not the layer that second was made on"):
        sa1b.open(root, layers=["second"])


@pytest.mark.parametrize("file", ["masks.bin", "index.parquet", "layer.json"])
def test_a_flipped_byte_is_refused_with_the_name_of_the_file(root: Path, file: str) -> None:
    write(root, "round2", two(2))
    path = root / "layers/round2" / file
    data = path.read_bytes()
    for at in np.linspace(8, len(data) - 1, 8 if file == "masks.bin" else 40).astype(int).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises((ManifestError, ShardError), match=rf"layers/round2/{file}: .*; .*") as error:
            sa1b.open(root, layers=["round2"]).by_id(2)
        assert isinstance(error.value, ShardError) == (file == "masks.bin")
    path.write_bytes(data[:-3])
    with pytest.raises(ManifestError, match=f"layers/round2/{file}"):
        sa1b.open(root, layers=["round2"])
    path.unlink()
    with pytest.raises(ManifestError, match=f"layers/round2/{file}: (missing|no such layer)"):
        sa1b.open(root, layers=["round2"])


def test_a_missing_layer_is_named_with_the_command_that_lists_them(root: Path) -> None:
    with pytest.raises(ManifestError, match=r"layers/round2/layer.json: no such layer.*sa1b layer list"):
        sa1b.open(root, layers=["round2"])
    for name in ("../tasks", "", ".hidden", "a/b", "a" * 65):
        with pytest.raises(UsageError, match="must be at most 64 letters"):
            sa1b.open(root, layers=[name])
        with pytest.raises(UsageError, match="must be at most 64 letters"):
            write(root, name, two(2))
    for wrong in ("round2", 5, ["a", "a"]):
        with pytest.raises(ValueError, match="layers="):
            sa1b.open(root, layers=wrong)  # a list of names is expected


def test_other_masks_in_the_shards_are_detected_and_more_sources_are_not_a_change(
    root: Path, tmp_path: Path
) -> None:
    dataset = sa1b.open(root)
    with layer_writer.writing(open_store(root), "old") as writer:
        writer.add(two(2), int(dataset.table.masks_crc32c[dataset.row(2)]) ^ 1)
        writer.commit(dataset.table, None, {})
    with pytest.raises(ManifestError, match=r"layers/old: made for other masks of 1 images \(2\)"):
        sa1b.open(root, layers=["old"])
    write(root, "round2", two(2))
    copy = tmp_path / "grown"
    subprocess.run(["cp", "-r", root, copy], check=True)
    tiny.make_tar(tmp_path / "sa_000021.tar", [50, 51])
    tiny.ingest_tar(tmp_path / "sa_000021.tar", copy)
    assert len(sa1b.open(copy, layers=["round2"]).by_id(2).annotations) == 3


def test_changes_that_do_not_fit_an_image_are_refused() -> None:
    base = parsed(tiny.document(2))
    for one, why in (
        (change(2, [77], [True], []), "no mask 77"),
        (change(2, [], [], [78]), "no mask 78"),
        (change(3, [1], [False], []), "the image has the id 2"),
    ):
        with pytest.raises(RecordError, match=why):
            one.apply(base)
    empty = parsed({**tiny.document(2), "annotations": []})
    with pytest.raises(RecordError, match="no mask 77"):
        change(2, [77], [True], []).apply(empty)
    assert change(2, [77], [False], []).apply(empty).mask_id.tolist() == [77]


KILLED = """
import os, signal, sys
from pathlib import Path
from sa1b.storage.store import FolderStore
from tests.shards import test_layer
root, where = Path(sys.argv[1]), sys.argv[2]
def kill(*arguments, **others): os.kill(os.getpid(), signal.SIGKILL)
real = FolderStore.commit
def commit(self, *arguments): real(self, *arguments); kill()
if where == "commit": FolderStore.commit = kill
if where == "document": FolderStore.commit = commit
if where == "records": test_layer.layer_writer.LayerWriter.commit = kill
test_layer.write(root, "round2", test_layer.two(2), test_layer.two(3))
"""


@pytest.mark.parametrize("where", ["records", "commit", "document"])
def test_a_killed_run_leaves_an_unfinished_layer_that_the_next_one_replaces(root: Path, where: str) -> None:
    done = processes.run([sys.executable, "-c", KILLED, str(root), where])
    assert done.returncode == -signal.SIGKILL
    assert layer.layer_names(open_store(root)) == {"round2": False}
    with pytest.raises(ManifestError, match="no such layer, or it is unfinished"):
        sa1b.open(root, layers=["round2"])
    write(root, "round2", two(2))
    assert layer.layer_names(open_store(root)) == {"round2": True}
    left = sorted(path.name for path in (root / "layers/round2").iterdir())
    assert left == ["index.parquet", "layer.json", "masks.bin"]
    layer_writer.drop(open_store(root), "round2")
    assert list((root / "layers").iterdir()) == []


def test_readers_continue_while_a_layer_is_written_and_notice_its_replacement(root: Path) -> None:
    write(root, "round2", two(2))
    reader = sa1b.open(root, layers=["round2"])
    dataset = sa1b.open(root)
    with layer_writer.writing(open_store(root), "round2", overwrite=True) as writer:
        writer.add(change(2, [1, 2, 3], [False] * 3, []), int(dataset.table.masks_crc32c[dataset.row(2)]))
        assert len(reader.by_id(2).annotations) == 3
        assert len(sa1b.open(root, layers=["round2"]).by_id(2).annotations) == 3
        writer.commit(dataset.table, None, {})
    assert len(reader.by_id(2).annotations) == 3  # the file that it has open
    assert len(sa1b.open(root, layers=["round2"]).by_id(2).annotations) == 6
    with pytest.raises(sa1b.storage.errors.ReplacedError, match="replaced since the dataset was opened"):
        reader.check_shard(reader.shards[0])


def test_sources_are_added_and_replaced_while_a_layer_is_written(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "shards"
    subprocess.run(["cp", "-r", made, root], check=True)

    def written_beside(name: str, image_id: int, source: str, members: list[tuple[str, bytes]]) -> None:
        dataset = sa1b.open(root)
        with layer_writer.writing(open_store(root), name) as writer:
            writer.add(two(image_id), int(dataset.table.masks_crc32c[dataset.row(image_id)]))
            tiny.write_tar(tmp_path / source, members, gzip=True)
            tiny.ingest_tar(tmp_path / source, root)
            writer.commit(dataset.table, None, {})

    written_beside("grown", 3, "sa_000021.tar", tiny.pairs([50, 51]))
    assert len(sa1b.open(root, layers=["grown"]).by_id(3).annotations) == 3
    others = tiny.pair_members(2, text=tiny.pair(2, seed=1)[1])
    written_beside("replaced", 2, "sa_000020.tar", [*tiny.pairs([1, 3, 4, 5, 6]), *others])
    with pytest.raises(ManifestError, match=r"layers/replaced: made for other masks of 1 images \(2\)"):
        sa1b.open(root, layers=["replaced"])
    assert len(sa1b.open(root, layers=["grown"])) == 8


def test_one_process_writes_a_layer(root: Path) -> None:
    store = open_store(root)
    claim = Claim.take(store, "layers/.round2.claim")
    assert claim is not None
    with claim, pytest.raises(LockedError, match=r"layers/round2: another process writes this layer"):
        write(root, "round2", two(2))
    write(root, "round2", two(2))
    with pytest.raises(UsageError, match="has a layer of this name; choose another one"):
        write(root, "round2", two(2))


def test_files_of_a_user_are_not_removed(root: Path) -> None:
    folder = root / "layers/round2"
    folder.mkdir(parents=True)
    (folder / "masks.bin").write_bytes(b"not of this program")
    (folder / "notes.txt").write_text("mine")
    for attempt in (
        lambda: write(root, "round2", two(2)),
        lambda: layer_writer.drop(open_store(root), "round2"),
    ):
        with pytest.raises(UsageError, match="has files that belong to no layer"):
            attempt()
    assert (folder / "masks.bin").read_bytes() == b"not of this program"
    (folder / "masks.bin").unlink()
    write(root, "round2", two(2))
    layer_writer.drop(open_store(root), "round2")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="has no layer of this name"):
        layer_writer.drop(open_store(root), "round3")


def test_the_document_gives_digests_and_origin(root: Path) -> None:
    info = write(root, "round2", two(2))
    document = json.loads((root / "layers/round2/layer.json").read_text())
    assert document["provenance"] == {"program": "test"}
    assert document["dataset"]["ids_sha256"] == sa1b.open(root).table.ids_digest
    assert document["digest"] == info.digest
    assert (root / "layers/round2/masks.bin").read_bytes()[:8] == layer.MAGIC
