"""`sa1b layer`: layers from files of a user, their list, their verification and their removal."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

import sa1b
from sa1b.console import command
from sa1b.shards.layer_writer import drop, make_change
from sa1b.storage.open import open_store
from sa1b.storage.store import FolderStore
from tests.cli.verb import called
from tests.shards import tiny
from tests.shards.test_layer import IDS, change, made, mask_ids, parsed, root, two, write

__all__ = ["made", "root"]
layer, export, gallery, query = called("layer"), called("export"), called("gallery"), called("query")


def masks_of(root: Path, image_id: int, *layers: str) -> list[int]:
    return sa1b.open(root, layers=layers).by_id(image_id).annotations.mask_id.tolist()


def folder_of(path: Path, *documents: Any) -> Path:
    path.mkdir(parents=True)
    for one in documents:
        (path / f"sa_{one['image']['image_id']}.json").write_bytes(tiny.encode(one))
    return path


def coco(*documents: Any, **others: Any) -> dict[str, Any]:
    images = [{"id": one["image"]["image_id"], **one["image"]} for one in documents]
    annotations = [
        {"id": mask["id"], "image_id": one["image"]["image_id"], "category_id": 3, **mask}
        for one in documents
        for mask in one["annotations"]
    ]
    return {"images": images, "annotations": annotations, "categories": [{"id": 3, "name": "cat"}], **others}


def summary(*arguments: object, code: int = 0) -> Any:
    done = layer(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_annotation_files_in_a_folder_or_a_tar_are_added(root: Path, tmp_path: Path) -> None:
    new = [tiny.document(image_id, 7) for image_id in (4, 2)]
    for one in new:
        for i, mask in enumerate(one["annotations"]):
            mask["id"] = i
    folder = folder_of(tmp_path / "masks", *new)
    tar = tiny.write_tar(
        tmp_path / "masks.tar", [(f"sa_{one['image']['image_id']}.json", tiny.encode(one)) for one in new]
    )
    single = folder / "sa_2.json"
    first = summary("add", root, folder, "--name", "folder")
    assert (first["images"], first["added"], first["replaced"], first["hidden"]) == (2, 6, 0, 0)
    assert summary("add", root, tar, "--name", "tar")["digest"] == first["digest"]
    assert summary("add", root, single, "--name", "single")["images"] == 1
    for name in ("folder", "tar", "single"):
        assert masks_of(root, 2, name) == [*mask_ids(2), 0, 1, 2]
        assert masks_of(root, 3, name) == mask_ids(3)
    stored = sa1b.open(root, layers=["folder"]).by_id(4).annotations.to_json()
    assert stored["annotations"][3:] == new[0]["annotations"]
    document = json.loads((root / "layers/folder/layer.json").read_text())
    assert document["provenance"]["settings"] == {"existing": "keep", "image_ids": "keep"}
    (source,) = document["provenance"]["sources"]
    assert (source["name"], source["kind"], len(source["sha256"])) == ("masks", "folder", 64)


def test_the_output_of_annotate_gives_the_digest_of_the_weights(root: Path, tmp_path: Path) -> None:
    folder_of(tmp_path / "labelled" / "labelled-0000", tiny.document(2, 7))
    settings = {"format": "sa1b-annotate-1", "weights": "run", "weights_sha256": "5" * 64}
    (tmp_path / "labelled" / "annotate.json").write_text(json.dumps(settings))
    (tmp_path / "labelled" / "annotate.jsonl").write_text("")
    summary("add", root, tmp_path / "labelled", "--name", "round2")
    provenance = json.loads((root / "layers/round2/layer.json").read_text())["provenance"]
    assert provenance["weights_sha256"] == ["5" * 64]
    assert provenance["sources"][0]["annotate"] == settings


def test_a_coco_file_needs_no_images_and_keeps_its_categories(root: Path, tmp_path: Path) -> None:
    one = tiny.document(2, 7)
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(coco(one)))
    found = summary("add", root, path, "--name", "round2")
    assert (found["added"], found["renumbered"]) == (3, 3)
    annotations = sa1b.open(root, layers=["round2"]).by_id(2).annotations
    ids = mask_ids(2)
    assert annotations.mask_id.tolist() == [*ids, *(ids[-1] + 1 + i for i in range(3))]
    assert annotations.column("category").tolist() == ["", "", "", "cat", "cat", "cat"]
    assert [mask["id"] for mask in annotations.to_json()["annotations"]] == annotations.mask_id.tolist()
    wanted = parsed(one).runs()
    assert np.array_equal(annotations.runs([3, 4, 5]).runs, wanted.runs)


def test_ids_of_coco_images_come_from_names_or_hashes(root: Path, tmp_path: Path) -> None:
    file = coco(tiny.document(2, 7))
    file["images"][0] |= {"id": "a", "file_name": "images/sa_2.jpg"}
    for one in file["annotations"]:
        one["image_id"] = "a"
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(file))
    done = layer("add", root, path, "--name", "round2")
    assert done.returncode == 2
    assert "ids must be integers" in done.stderr
    assert summary("add", root, path, "--name", "round2", "--image-ids", "name")["added"] == 3
    done = layer("add", root, path, "--name", "hashed", "--image-ids", "hash")
    assert "none of its images is in" in done.stderr
    assert not (root / "layers/hashed").exists()


def test_results_in_coco_format_are_added_by_image_id(root: Path, tmp_path: Path) -> None:
    size = list(tiny.SIZE)
    pixels = np.zeros(tiny.SIZE, np.uint8, order="F")
    pixels[10:20, 5:9] = 1
    text = coco_mask.encode(pixels)["counts"].decode()
    entries = [
        {"image_id": 2, "category_id": 1, "segmentation": {"size": size, "counts": text}, "score": 0.75},
        {"image_id": 2, "category_id": 1, "segmentation": {"size": [5, 5], "counts": text}, "score": 0.5},
        {"image_id": "x", "segmentation": {"size": size, "counts": text}},
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(entries))
    found = summary("add", root, path, "--name", "round2", code=3)
    assert found["refused"] == {"image_unlisted": 1, "mask_size": 1}
    printed = layer("add", root, path, "--name", "again").stdout
    assert f"left out mask_size: 1 ({path}: image 2: annotation without an id: " in printed
    annotations = sa1b.open(root, layers=["round2"]).by_id(2).annotations
    assert (annotations.runs([3]).runs.sum(), annotations.predicted_iou[3]) == (48 * 64, 0.75)
    assert annotations.area[3] == 40


def test_folders_may_have_any_name_and_one_name(root: Path, tmp_path: Path) -> None:
    for number, folder in ((4, ""), (2, "Day 1/labels"), (3, "Tag 2 \u00e9/labels")):
        folder_of(tmp_path / "My labels" / folder, tiny.document(number, 7))
    copy = shutil.copytree(root, tmp_path / "my shards")
    done = layer("add", copy, tmp_path / "My labels", "--name", "round2")
    assert done.stdout.endswith(f"--data.root '{copy}' --data.layers round2\n")
    found = summary("add", root, tmp_path / "My labels", "--name", "round2")
    assert (found["images"], found["not_taken"]) == (3, [])


def test_a_json_file_in_a_folder_that_is_not_read_is_named(root: Path, tmp_path: Path) -> None:
    folder_of(tmp_path / "labels", tiny.document(2, 7))
    (tmp_path / "labels/notes.txt").write_text("notes")
    assert layer("add", root, tmp_path / "labels", "--name", "complete").returncode == 0
    results = tmp_path / "labels/results.json"
    results.write_text("[]")
    done = layer("add", root, tmp_path / "labels", "--name", "round2")
    assert done.returncode == 3
    assert f"{results}; name files in COCO's format themselves\n" in done.stdout


def test_files_of_another_form_are_refused_with_the_forms_that_can_be_named(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export/annotations.json").write_text("{}")
    (tmp_path / "ids.txt").write_text("5\n")
    (tmp_path / "lines.json").write_text('{"image_id": 2}\n')
    (tmp_path / "nan.json").write_text('[{"image_id": 2, "score": NaN}]')
    forms = "name sa_<id>.json files, folders or tars of them, or .json files or lists of results in COCO's"
    for name, message in (
        ("export", f"neither a tar nor a member of a pair)); {forms}"),
        ("ids.txt", f"ids.txt: neither a .json file nor a tar; {forms}"),
        ("lines.json", "the lists 'images' and 'annotations', or, for a layer, a list of results."),
        ("nan.json", "nan.json: not JSON (NaN is not JSON: write null)"),
    ):
        done = layer("add", root, tmp_path / name, "--name", "a")
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.parametrize("existing", ["keep", "replace", "hide"])
def test_existing_masks_are_kept_replaced_or_hidden(root: Path, tmp_path: Path, existing: str) -> None:
    ids = mask_ids(2)
    one = tiny.document(2, 7)
    for mask, mask_id in zip(one["annotations"], (ids[2], 40, 41), strict=True):
        mask["id"] = mask_id
    folder = folder_of(tmp_path / "masks", one)
    found = summary("add", root, folder, "--name", "round2", "--existing", existing)
    if existing == "keep":
        assert masks_of(root, 2, "round2") == [*ids, ids[2] + 1, 40, 41]
    elif existing == "replace":
        assert masks_of(root, 2, "round2") == [*ids, 40, 41]
    else:
        assert masks_of(root, 2, "round2") == [ids[2], 40, 41]
    annotations = sa1b.open(root, layers=["round2"]).by_id(2).annotations
    place = {"keep": 3, "replace": 2, "hide": 0}[existing]
    assert np.array_equal(annotations.runs([place]).runs, parsed(one).runs([0]).runs)
    assert found["replaced"] == (existing != "keep")
    assert found["hidden"] == 2 * (existing == "hide")
    assert layer("verify", root, "round2").returncode == 0


def test_ids_that_occur_twice_or_are_none_replace_nothing() -> None:
    base, own = tiny.document(2, masks=4), tiny.document(2, 7, masks=4)
    for document, ids in ((base, (5, 5, -1, 8)), (own, (5, -1, 8, 8))):
        for mask, mask_id in zip(document["annotations"], ids, strict=True):
            mask["id"] = mask_id
    found, renumbered = make_change(parsed(base), parsed(own), "replace")
    assert not found.replaces.any()
    assert (found.masks.mask_id.tolist(), renumbered) == ([9, 10, 11, 12], 4)
    found, _ = make_change(parsed(base), parsed(own), "hide")
    assert found.hidden.tolist() == [-1, 5, 8]
    assert found.apply(parsed(base)).mask_id.tolist() == [9, 10, 11, 12]


def test_what_has_no_partner_is_counted_and_named_shortly(root: Path, tmp_path: Path) -> None:
    others = []
    for image_id in range(1001, 2001):
        one = tiny.document(2, 7, masks=1)
        one["image"] |= {"image_id": image_id, "file_name": f"sa_{image_id}.jpg"}
        others.append(one)
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(coco(*others, tiny.document(2, 7))))
    done = layer("add", root, path, path, "--name", "round2")
    assert done.returncode == 3
    assert f"2,000 images not in {root}: 1001, 1001, 1002, 1002, 1003 and 1,995 more\n" in done.stdout
    assert "1 image a second time, left out: 2\n" in done.stdout
    assert len(done.stdout) < 1000
    found = summary("add", root, path, "--name", "round2", "--overwrite", code=3)
    assert found["missing"] == list(range(1001, 2001))


def test_masks_of_another_size_are_refused(root: Path, tmp_path: Path) -> None:
    one = tiny.document(2, 7, size=(30, 40))
    for path in (folder_of(tmp_path / "masks", one), tmp_path / "masks.json"):
        if path.suffix:
            path.write_text(json.dumps(coco(one)))
        done = layer("add", root, path, "--name", "round2")
        assert done.returncode == 2
        assert "masks of 40 x 30 pixels, the image has 64 x 48" in done.stderr
    assert layer("list", root).stdout == f"{root}: no layers\n"


def test_the_list_has_complete_unfinished_and_damaged_layers(root: Path) -> None:
    write(root, "first", two(2))
    write(root, "second", change(2, [9], [False], []), on="first")
    write(root, "damaged", two(2))
    path = root / "layers/damaged/layer.json"
    path.write_text(path.read_text().replace("test", "tost"))
    (root / "layers/unfinished").mkdir()
    found = summary("list", root)
    assert [(one["name"], one["parent"]) for one in found["layers"]] == [("first", None), ("second", "first")]
    assert found["unfinished"] == ["unfinished"]
    assert [*found["damaged"]] == ["damaged"]
    text = layer("list", root).stdout
    assert "unfinished unfinished: its command was stopped" in text
    assert "layers/damaged/layer.json: damaged" in text
    dropped = layer("drop", root, "second", "first").stdout
    assert dropped == "Dropped: second\nDropped: first\n"
    dropped = layer("drop", root, "unfinished", "--json").stdout
    assert json.loads(dropped) == {"dropped": "unfinished", "exit_code": 0}
    assert [*json.loads(layer("list", root, "--json").stdout)["layers"]] == []


def test_a_folder_of_others_is_no_layer(root: Path) -> None:
    notes, masks, sub = (root / "layers" / name for name in ("notes", "masks", "sub"))
    for folder, file in ((notes, "readme.txt"), (masks, "masks.bin"), (sub, "more/layer.json")):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("a user's")
    found = summary("list", root)
    assert (found["layers"], found["unfinished"], found["damaged"]) == ([], [], {})
    for folder in (notes, masks, sub):
        done = layer("drop", root, folder.name)
        reason = "has files that belong to no layer" if folder is masks else "has no layer of this name"
        assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
        assert len([path for path in folder.rglob("*") if path.is_file()]) == 1


def test_a_removal_that_is_stopped_leaves_a_layer_to_remove(root: Path, monkeypatch: Any) -> None:
    write(root, "first", two(2))
    monkeypatch.setattr(FolderStore, "remove_folder", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        drop(open_store(str(root)), "first")
    monkeypatch.undo()
    assert [path.name for path in (root / "layers/first").iterdir()] == ["masks.bin"]
    assert summary("list", root)["unfinished"] == ["first"]
    assert layer("drop", root, "first").stdout == "Dropped: first\n"
    assert not (root / "layers/first").exists()


@pytest.fixture
def checked(root: Path) -> Path:
    write(root, "round2", *map(two, IDS))
    assert layer("verify", root, "round2").stdout == "layer round2: 6 images verified, intact\n"
    return root


@pytest.mark.parametrize("file", ["masks.bin", "index.parquet", "layer.json"])
def test_verify_names_a_damaged_file(checked: Path, file: str) -> None:
    path = checked / "layers/round2" / file
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    done = layer("verify", checked, "round2")
    assert done.returncode == 1
    assert f"layers/round2/{file}: " in done.stdout


def test_verify_finds_masks_that_do_not_exist_and_images_that_left(root: Path) -> None:
    write(root, "round2", change(2, [77], [True], []), change(3, [], [], [78]), two(4))
    found = summary("verify", root, "round2", code=1)
    assert found["images"] == 1
    assert [problem.rpartition(": the image has no mask ")[2][:2] for problem in found["problems"]] == [
        "77",
        "78",
    ]
    assert layer("verify", root, "round3").returncode == 1


def test_flags_that_do_not_fit_are_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for words, message in (
        (("add", root, tmp_path), "--name: missing"),
        (("add", root, "--name", "a"), "--name a: no FILE"),
        (("add", root, tmp_path / "none", "--name", "a"), "no such file or folder"),
        (("add", root, tmp_path, "--name", "../a"), "must be at most 64 letters"),
        (("add", root, tmp_path, "--name", ".a"), "and begin with a letter or digit"),
        (
            ("add", root, tmp_path / "a.parquet", "--name", "a"),
            "a.parquet: a Parquet file; write its masks in",
        ),
        (("add", root, tmp_path, "--name", "a", "--on", "b"), "no such layer"),
        (("drop", root), "drop: no NAME"),
        (("drop", root, "a"), f"has no layer of this name; `{command('layer')} list {root}` prints"),
        (("list", root, "a"), "list takes no names"),
        (("list", root, "--name", "a"), "list: takes no flag but"),
    ):
        done = layer(*words)
        assert done.returncode == 2
        assert message in done.stderr


def test_an_export_has_the_masks_of_its_layers_and_is_made_again_for_others(
    root: Path, tmp_path: Path
) -> None:
    write(root, "round2", two(2), two(5))
    layered = sa1b.open(root, layers=["round2"])
    for words, dataset in ((("--layers", "round2"), layered), ((), sa1b.open(root))):
        out = tmp_path / f"out{len(words)}"
        done = export(root, "--to", "folders", "--out", out, *words)
        assert done.returncode == 0, done.stderr
        files = {int(path.stem[3:]): json.loads(path.read_bytes()) for path in out.rglob("sa_*.json")}
        assert files == {sample.image_id: sample.annotations.to_json() for sample in dataset}
    done = export(root, "--to", "folders", "--out", tmp_path / "out2")
    assert done.returncode == 2
    assert "not from an export of these images" in done.stderr
    done = export(root, "--to", "folders", "--out", tmp_path / "out2", "--layers", "round3")
    assert "no such layer" in done.stderr
    export(root, "--to", "coco", "--out", tmp_path / "coco", "--layers", "round2")
    document = json.loads((tmp_path / "coco" / "annotations.json").read_text())
    assert [one["mask_id"] for one in document["annotations"] if one["image_id"] == 2] == masks_of(
        root, 2, "round2"
    )


def test_the_gallery_shows_the_masks_of_layers(root: Path, tmp_path: Path) -> None:
    write(root, "round2", *(change(image_id, list(range(9)), [False] * 9, []) for image_id in IDS))
    page, shown = tmp_path / "page.html", []
    for words in ((), ("--layers", "round2")):
        done = gallery(root, "--out", page, *words)
        assert done.returncode == 0, done.stderr
        found = re.findall(r'"mask_id": ?(\[[^]]*\])', page.read_text())
        shown.append(sorted(sorted(json.loads(ids)) for ids in found))
    assert shown[0] == sorted(sorted(mask_ids(image_id)) for image_id in IDS)
    assert shown[1] == sorted([*range(9), *sorted(mask_ids(image_id))] for image_id in IDS)
    assert "round2 (" in page.read_text()
    assert gallery(root, "--out", page, "--layers", "round3").returncode == 2


def test_a_query_with_layers_is_about_the_changed_masks(root: Path) -> None:
    write(root, "round2", two(2), two(5))
    write(root, "round3", change(2, [5, 6], [True, False], []), on="round2")
    done = query(
        root,
        "SELECT image_id, mask_id, layer, area, bbox_width, stability_score, category FROM masks",
        "--layers",
        "round3",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    dataset = sa1b.open(root, layers=["round3"])
    for sample in dataset:
        own, found = [row for row in rows if row["image_id"] == sample.image_id], sample.annotations
        assert [row["mask_id"] for row in own] == found.mask_id.tolist()
        assert [row["area"] for row in own] == found.area.tolist()
        assert [row["bbox_width"] for row in own] == found.bbox[:, 2].tolist()
        assert [row["stability_score"] for row in own] == found.stability_score.tolist()
        layers = {2: ["round2", "", "round3", "round3"], 5: ["round2", "", "round2"]}
        assert [row["layer"] for row in own] == layers.get(sample.image_id, [""] * 3)
    counts = "SELECT image_id, masks, shard FROM images ORDER BY 1"
    rows = json.loads(query(root, counts, "--layers", "round3", "--json").stdout)
    assert [row["masks"] for row in rows] == [len(sample.annotations) for sample in dataset]
    assert {row["shard"] for row in rows} == set(dataset.shards)
    assert query(root, "SELECT layer FROM masks").returncode == 2
    assert "no such layer" in query(root, "SELECT 1", "--layers", "none").stderr


def test_a_view_from_a_query_with_layers_is_read_with_them(root: Path) -> None:
    write(root, "round2", two(2), two(5))
    write(root, "round3", change(2, [5, 6], [True, False], []), on="round2")
    asked = "SELECT DISTINCT image_id FROM masks WHERE layer = 'round3'"
    flags = ("--layers", "round3", "--as-view", "third", "--json")
    done = query(root, asked, *flags)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["images"], [name for name, _ in made["layers"]]) == (1, ["round2", "round3"])
    stream = sa1b.Stream(root, view="third", global_batch=1, masks=100, image_size=32, epochs=1)
    (batch,) = stream
    changed = sa1b.open(root, layers=["round3"])
    assert (
        len(batch.masks) == len(changed.by_id(2).annotations) == len(sa1b.open(root).by_id(2).annotations) + 1
    )
    assert query(root, asked, *flags).returncode == 0
    before = query(root, "--layers", "round3", asked, "--as-view", "a").stderr
    assert "SELECT: missing; --layers takes all words up to the next flag: write it after SELECT" in before
    write(root, "other", two(2))
    taken = query(root, asked, "--layers", "other", "--as-view", "third")
    assert taken.returncode == 2
    assert "round3" in taken.stderr
