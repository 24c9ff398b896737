"""`sa1b layer`: layers from files of a user, their list, their verification and their removal."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

import sa1b
from sa1b.errors import ManifestError, ShardError
from tests.cli.verb import called
from tests.kit import fault, files, flags, flip, no_space, nothing, put, refused, run
from tests.layer.layered import IDS, Changes, add, folder_of, made, mask_ids, masks_of, root, two
from tests.shards import tiny
from tests.views.served import served

__all__ = ["made", "root"]
layer = called("layer")


def coco(*documents: Any, **others: Any) -> dict[str, Any]:
    images = [{"id": one["image"]["image_id"], **one["image"]} for one in documents]
    annotations = [
        {"id": mask["id"], "image_id": one["image"]["image_id"], "category_id": 3, **mask}
        for one in documents
        for mask in one["annotations"]
    ]
    return {"images": images, "annotations": annotations, "categories": [{"id": 3, "name": "cat"}], **others}


def strings(document: Any) -> list[bytes]:
    return [mask["segmentation"]["counts"].encode() for mask in document["annotations"]]


def of_layers(root: Path, made: Path) -> list[str]:
    """The files that layers have added to a directory."""
    return [name for name in files(root) if not (made / name).exists()]


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
    assert sa1b.masks.encode(annotations.runs([3, 4, 5])) == strings(one)


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
    assert sa1b.masks.encode(annotations.runs([place])) == strings(one)[:1]
    assert found["replaced"] == (existing != "keep")
    assert found["hidden"] == 2 * (existing == "hide")
    assert layer("verify", root, "round2").returncode == 0


def test_ids_that_occur_twice_or_are_none_replace_nothing(tmp_path: Path) -> None:
    base, own = tiny.document(2, masks=4), tiny.document(2, 7, masks=5)
    for document, ids in ((base, (5, 5, -1, 8)), (own, (5, -1, 8, 8, 20))):
        for mask, mask_id in zip(document["annotations"], ids, strict=True):
            mask["id"] = mask_id
    tar = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pair_members(2, text=tiny.encode(base)))
    sa1b.reshard(tar, tmp_path / "shards", workers=1, quiet=True)
    folder = folder_of(tmp_path / "masks", own)
    for existing, kept in (("replace", [5, 5, -1, 8]), ("hide", [])):
        words = ("--name", existing, "--existing", existing)
        found = summary("add", tmp_path / "shards", folder, *words)
        assert (found["replaced"], found["renumbered"]) == (0, 4)
        assert masks_of(tmp_path / "shards", 2, existing) == [*kept, 21, 22, 23, 24, 20]


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


def test_an_image_may_lose_all_its_masks(root: Path) -> None:
    assert add(root, "none", {3: ([], mask_ids(3))})["hidden"] == 3
    assert masks_of(root, 3, "none") == []
    assert masks_of(root, 2, "none") == mask_ids(2)


def test_the_list_has_damaged_layers_and_those_that_build_on_others(root: Path, made: Path) -> None:
    ids = mask_ids(2)
    add(root, "damaged", two(2))
    for name in of_layers(root, made):
        flip(root, name, 60)
    add(root, "first", two(2))
    add(root, "second", {2: ([5], [ids[2]])}, on="first")
    for layers in (["second"], ["first", "second"]):
        assert masks_of(root, 2, *layers) == [ids[1], 5]
    found = summary("list", root)
    assert [(one["name"], one["parent"]) for one in found["layers"]] == [("first", None), ("second", "first")]
    assert (found["unfinished"], [*found["damaged"]]) == ([], ["damaged"])
    assert "damaged" in run("layer", "list", root).out
    refused("layer", "drop", root, "first", names="second")
    before = sa1b.open(root, layers=["second"])
    assert before.by_id(2).annotations.mask_id.tolist() == [ids[1], 5]
    add(root, "first", two(3), overwrite=True)  # not the layer that the second one was made on
    with pytest.raises(ManifestError, match="second"):
        sa1b.open(root, layers=["second"])
    assert before.by_id(2).annotations.mask_id.tolist() == [ids[1], 5]  # the files that it has open
    assert run("layer", "drop", root, "second", "first").out == "Dropped: second\nDropped: first\n"
    assert summary("list", root)["layers"] == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_layer_that_a_full_disk_stopped_is_made_by_the_same_command(
    root: Path, made: Path, overwrite: bool
) -> None:
    changes: Changes = {**two(2), **two(3)}
    with fault(root, 0, nothing) as counted:
        digest = add(root, "round2", changes)["digest"]
    run("layer", "drop", root, "round2")
    for at in range(1, counted.seen + 1):
        if overwrite:
            add(root, "round2", two(4))
        with fault(root, at, no_space), pytest.raises(AssertionError, match="ended with 2"):
            add(root, "round2", changes, overwrite=overwrite)
        found, text = summary("list", root), run("layer", "list", root).out
        assert (found["damaged"], "unfinished round2" in text) == ({}, bool(found["unfinished"]))
        if found["layers"]:  # the previous one
            assert (overwrite, masks_of(root, 2, "round2")) == (True, mask_ids(2))
        else:
            assert found["unfinished"] == (["round2"] if of_layers(root, made) else [])
            with pytest.raises(ManifestError, match="round2"):
                sa1b.open(root, layers=["round2"])
        if at == counted.seen:  # the layer may also be removed
            dropped = run("layer", "drop", root, "round2", "--json").json
            assert dropped == {"dropped": "round2", "exit_code": 0}
            assert of_layers(root, made) == []
        assert add(root, "round2", changes, overwrite=overwrite)["digest"] == digest
        run("layer", "drop", root, "round2")
        assert files(root) == files(made)


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


def test_a_removal_that_is_stopped_leaves_a_layer_to_remove(
    root: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(root, "first", two(2))
    unlink, count = os.unlink, len(of_layers(root, made))
    for at in range(count):
        add(root, "first", two(2), overwrite=True)
        left = iter(range(at))

        def stopped(path: Any, left: Any = left, **more: Any) -> None:
            if "/first/" in str(path) and next(left, None) is None:
                raise PermissionError(13, "Permission denied", str(path))
            unlink(path, **more)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", stopped)
            assert run("layer", "drop", root, "first", code=None).code != 0
        found = summary("list", root)
        assert [one["name"] for one in found["layers"]] + found["unfinished"] == ["first"]
        assert not found["layers"] or masks_of(root, 2, "first") == [*mask_ids(2)[1:], 5]
        assert run("layer", "drop", root, "first").out == "Dropped: first\n"
        assert files(root) == files(made)


def test_every_damaged_file_is_named_where_it_is_read_and_by_verify(root: Path, made: Path) -> None:
    add(root, "round2", {one: two(one)[one] for one in IDS})
    assert run("layer", "verify", root, "round2").out == "layer round2: 6 images verified, intact\n"
    for name in of_layers(root, made):
        flip(root, name, 3)
        assert name in run("layer", "verify", root, "round2", code=1).out
        flip(root, name, 3)
        data = files(root)[name]
        places = range(9, len(data), len(data) // 8)
        changed = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in places]
        for damaged in (*changed, data[:-3], None):
            put(root, name, damaged)
            done = run("layer", "verify", root, "round2", code=1)
            assert name in done.out
            with pytest.raises((ManifestError, ShardError), match=name):
                [sample.annotations for sample in sa1b.open(root, layers=["round2"])]
            put(root, name, data)


def test_a_layer_of_masks_that_left_is_refused_one_of_images_that_left_is_not(
    root: Path, tmp_path: Path
) -> None:
    other = tiny.make_tar(tmp_path / "sa_000021.tar", [50, 51])
    copy = shutil.copytree(root, tmp_path / "grown")
    sa1b.reshard(tmp_path / "sa_000021.tar", copy, workers=1, quiet=True)
    add(copy, "round2", two(2) | two(50))
    tiny.write_tar(tmp_path / "sa_000021.tar", [*other, *tiny.pairs([52])])
    sa1b.reshard(tmp_path / "sa_000021.tar", copy, workers=1, quiet=True, replace=True)
    assert masks_of(copy, 50, "round2") == [*mask_ids(50)[1:], 5]  # more images change nothing
    text = tiny.encode(tiny.document(50, 1))
    tiny.write_tar(tmp_path / "sa_000021.tar", [*tiny.pair_members(50, text=text), *tiny.pairs([51, 52])])
    sa1b.reshard(tmp_path / "sa_000021.tar", copy, workers=1, quiet=True, replace=True)
    with pytest.raises(ManifestError, match=r"round2.*\(50\)"):
        sa1b.open(copy, layers=["round2"])
    (problem,) = summary("verify", copy, "round2", code=1)["problems"]
    assert "50" in problem
    sa1b.reshard((), copy, drop="sa_000021", quiet=True)
    found = summary("verify", copy, "round2")
    assert (found["images"], found["absent"]) == (1, 1)
    assert masks_of(copy, 2, "round2") == [*mask_ids(2)[1:], 5]
    refused("layer", "verify", copy, "round3", names="", code=1)


def test_one_command_at_a_time_writes_a_layer_and_one_that_exists_is_kept(root: Path) -> None:
    with fault(root, 2, lambda _: refused("layer", "drop", root, "round2", names="round2")) as changes:
        digest = add(root, "round2", two(2))["digest"]
    assert changes.seen > 2
    with pytest.raises(AssertionError, match="--overwrite"):
        add(root, "round2", two(3))
    assert summary("list", root)["layers"][0]["digest"] == digest


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("add", "ROOT", "DIR"), "--name"),
        (("add", "ROOT", "--name", "a"), "--name a"),
        (("add", "ROOT", "DIR/none", "--name", "a"), "none"),
        (("add", "ROOT", "DIR/a.parquet", "--name", "a"), "a.parquet"),
        (("add", "ROOT", "DIR", "--name", "a"), "DIR"),
        *(
            (("add", "ROOT", "DIR", f"--name={name}"), "--name")
            for name in ("../a", "", ".a", "a/b", "a" * 65)
        ),
        (("add", "ROOT", "DIR", "--name", "a", "--on", "b"), "b"),
        (("drop", "ROOT"), "layer list ROOT"),
        (("drop", "ROOT", "a"), "layer list ROOT"),
        (("drop", "ROOT", "../tasks"), "../tasks"),
        (("verify", "ROOT"), "layer list ROOT"),
        (("list", "ROOT", "a"), "list"),
        (("list", "ROOT", "--name", "a"), "list"),
    ],
)
def test_flags_that_do_not_fit_are_named(made: Path, tmp_path: Path, words: Any, names: str) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    before = files(made)
    words = [word.replace("ROOT", str(made)).replace("DIR", str(tmp_path)) for word in words]
    refused("layer", *words, names=names.replace("ROOT", str(made)).replace("DIR", str(tmp_path)))
    assert files(made) == before


def test_an_export_has_the_masks_of_its_layers_and_keeps_to_them(root: Path, tmp_path: Path) -> None:
    add(root, "round2", two(2) | two(5))
    export = ("export", root, "--to", "folders", "--out")
    for name, layers in (("plain", ()), ("layered", ("round2",))):
        run(*export, tmp_path / name, *flags({"layers": layers}))
        exported = {one.stem: json.loads(one.read_bytes()) for one in (tmp_path / name).rglob("sa_*.json")}
        samples = sa1b.open(root, layers=layers)
        assert exported == {f"sa_{one.image_id}": one.annotations.to_json() for one in samples}
    refused(*export, tmp_path / "layered", names="layered")
    refused(*export, tmp_path / "layered", "--layers", "round3", names="round3")


def test_the_gallery_shows_the_masks_of_layers(root: Path, tmp_path: Path) -> None:
    add(root, "round2", {image_id: (range(9), ()) for image_id in IDS})
    page = tmp_path / "page.html"
    for words, more in (((), ()), (("--layers", "round2"), range(9))):
        run("gallery", root, "--out", page, *words)
        shown = [sorted(json.loads(ids)) for ids in re.findall(r'"mask_id": ?(\[[^]]*\])', page.read_text())]
        assert sorted(shown) == sorted([*more, *sorted(mask_ids(image_id))] for image_id in IDS)
    assert "round2 (" in page.read_text()
    refused("gallery", root, "--out", page, "--layers", "round3", names="round3")


def test_a_query_with_layers_is_about_the_changed_masks(root: Path) -> None:
    ids = mask_ids(2)
    add(root, "round2", {2: ([5, ids[1]], []), 5: ([5], [])})
    add(root, "round3", {2: ([5, 6], [])}, on="round2")
    layers = ("--layers", "round3", "--json")
    asked = "SELECT image_id, mask_id, layer, area, bbox_width, stability_score FROM masks"
    rows, dataset = run("query", root, asked, *layers).json, sa1b.open(root, layers=["round3"])
    for sample in dataset:
        own, found = [row for row in rows if row["image_id"] == sample.image_id], sample.annotations
        columns = found.mask_id, found.area, found.bbox[:, 2], found.stability_score
        for name, values in zip(("mask_id", "area", "bbox_width", "stability_score"), columns, strict=True):
            assert [row[name] for row in own] == values.tolist()
        expected = {2: ["round2", "round3", "round3"], 5: ["round2"]}.get(sample.image_id, [])
        assert [row["layer"] for row in own if row["mask_id"] in (5, 6, ids[1])] == expected
    images = run("query", root, "SELECT masks, shard FROM images ORDER BY image_id", *layers).json
    assert [row["masks"] for row in images] == [len(sample.annotations) for sample in dataset]
    assert {row["shard"] for row in images} == set(dataset.shards)
    refused("query", root, "SELECT layer FROM masks", names="layer")
    refused("query", root, "SELECT 1", "--layers", "none", names="none")


def test_a_view_from_a_query_with_layers_is_read_with_them(root: Path) -> None:
    add(root, "round2", two(2) | two(5))
    add(root, "round3", {2: ([5, 6], [])}, on="round2")
    query = (
        "query",
        root,
        "SELECT DISTINCT image_id FROM masks WHERE layer = 'round3'",
        "--as-view",
        "third",
    )
    for _ in range(2):
        found = run(*query, "--layers", "round3", "--json").json
        assert (found["images"], [name for name, _ in found["layers"]]) == (1, ["round2", "round3"])
        assert served(root, "third") == {2: masks_of(root, 2, "round3")}
    refused("query", root, "--layers", "round3", *query[2:], names="--layers")
    add(root, "other", two(2))
    refused(*query, "--layers", "other", names="round3")
