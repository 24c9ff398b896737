"""Formats of an export, read by the rules of their consumers; every mask is compared with that of the dataset."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import webdataset
from pycocotools import mask as coco_mask

from sa1b import Dataset
from sa1b.errors import ShardError, UsageError
from sa1b.programs.export import coco, image_files
from sa1b.programs.export.export import export as export_here
from sa1b.programs.export.export_format import joined
from sa1b.programs.export.export_part import ExportRecord
from sa1b.programs.export.image_files import Folders, Images, Sam2
from tests import kit
from tests.export.exporting import export, main
from tests.shards.tiny_source import ROOTS, make_root, two_sources

WITHOUT_MASKS = 205
FORMATS = {
    **{name: name for name in ("folders", "images", "sam2", "efficientvit")},
    "flat folders": "folders --layout flat",
    "small images": "images --layout flat --image-size 32 --quality 80",
    "webdataset": "webdataset --images-per-tar 8",
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Name -> dataset directory: stored images, images scaled by reshard."""
    folder = tmp_path_factory.mktemp("formats")
    sources = two_sources(folder)
    return {name: make_root(folder / name, sources, ROOTS[name]) for name in ("plain", "image_size")}


@pytest.fixture(scope="module")
def dataset(roots):
    return Dataset(roots["plain"])


@pytest.fixture(scope="module")
def out(roots, tmp_path_factory):
    """Folder with an export in each format, named after it."""
    folder = tmp_path_factory.mktemp("out")
    for name, form in FORMATS.items():
        summary = export(roots["plain"], folder / name, form, quiet=True)
        assert (summary.images, summary.exit_code()) == (19, 0)
    return folder


def assert_equal(sample, jpeg, document):
    """The image has the stored bytes, and pycocotools decodes the dataset's masks."""
    assert jpeg == sample.jpeg
    assert document == sample.annotations.to_json()
    found = [coco_mask.decode(one["segmentation"]) for one in document["annotations"]]
    masks = sample.masks()
    assert len(found) == len(masks)
    for one, expected in zip(found, masks, strict=True):
        assert np.array_equal(one, expected)


def files(folder):
    """Path relative to the folder -> bytes, without the record."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".export.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_sam2_reads_every_image_with_masks(dataset, out):
    # SA1BRawDataset: the stem of each line names sa_<id>.jpg and sa_<id>.json; the number after the last "_"
    # is the video's id. SA1BSegmentLoader: the list "annotations" without those of area 0.
    folder = out / "sam2"
    names = [Path(line.strip()).stem for line in (folder / "file_list.txt").open()]
    ids = []
    for name in names:
        sample = dataset.by_id(int(name.split("_")[-1]))
        document = json.loads((folder / "gt_folder" / f"{name}.json").read_text())
        assert all(one["area"] > 0 for one in document["annotations"])
        assert_equal(sample, (folder / "img_folder" / f"{name}.jpg").read_bytes(), document)
        ids.append(sample.image_id)
    assert ids == sorted({*dataset.table.image_id.tolist()} - {WITHOUT_MASKS})
    # Without a list, every file that ends with .jpg is used: these are all images.
    assert len(list((folder / "img_folder").iterdir())) == len(dataset)


def test_efficientvit_reads_every_image_with_masks(dataset, out):
    # OnlineDataset: an integer on each line; images/sa_<id>.jpg; masks/sa_<id>.json with at least one
    # annotation, because it divides by their number; bbox and the first of point_coords are stacked.
    folder = out / "efficientvit"
    ids = [int(line) for line in (folder / "sa_images_ids.txt").read_text().splitlines()]
    for image_id in ids:
        document = json.loads((folder / f"masks/sa_{image_id}.json").read_text())
        assert_equal(dataset.by_id(image_id), (folder / f"images/sa_{image_id}.jpg").read_bytes(), document)
        annotations = document["annotations"]
        assert np.stack([one["point_coords"][0] for one in annotations]).shape == (len(annotations), 2)
        assert np.stack([one["bbox"] for one in annotations]).shape == (len(annotations), 4)
    assert ids == sorted({*dataset.table.image_id.tolist()} - {WITHOUT_MASKS})


@pytest.mark.parametrize("name", ["folders", "flat folders"])
def test_folders(dataset, out, name):
    found = files(out / name)
    for sample in dataset:
        source = "" if name == "flat folders" else f"sa_00000{1 if sample.image_id < 300 else 2}/"
        jpeg = found.pop(f"{source}images/sa_{sample.image_id}.jpg")
        text = found.pop(f"{source}annotations/sa_{sample.image_id}.json")
        assert_equal(sample, jpeg, json.loads(text))
    assert not found


def test_images_are_stored_ones_or_scaled_as_by_reshard(roots, dataset, out, tmp_path):
    scaled = Dataset(roots["image_size"])
    source = {sample.image_id: 1 if sample.image_id < 300 else 2 for sample in dataset}
    expected = {f"sa_00000{source[one.image_id]}/sa_{one.image_id}.jpg": one.jpeg for one in dataset}
    assert files(out / "images") == expected
    small = {f"sa_{one.image_id}.jpg": one.jpeg for one in scaled}
    assert files(out / "small images") == small
    assert {simplejpeg.decode_jpeg(data).shape for data in small.values()} == {(24, 32, 3)}
    export(roots["image_size"], tmp_path, "images --layout flat", quiet=True)  # of scaled shards
    assert files(tmp_path) == small


def test_webdataset_reads_images_annotations_and_columns(roots, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ids = dataset.table.image_id.tolist()
    some = [mask_id for sample in dataset for mask_id in sample.annotations.mask_id[:2].tolist()]
    tables = {
        "caption": pa.table({"image_id": ids[:-1], "caption": [f"é {i}" for i in ids[:-1]]}),
        "weight": pa.table({"image_id": ids, "weight": [i / 7 for i in ids]}),
        "phrase": pa.table({"mask_id": some, "phrase": [f"mask {i}" for i in some]}),
    }
    paths = {}
    for name, table in tables.items():
        paths[name] = tmp_path / f"{name}.parquet"
        pa.parquet.write_table(table, paths[name])
    pa.parquet.write_table(pa.table({"image_id": [1, 2], "note": ["a", "b"]}), tmp_path / "n.parquet")
    for given, message in (
        ([f"note={tmp_path}/n.parquet"], r"--join note: .* row for none of the 19 images of .* such as 100"),
        ([f"note={tmp_path}/n.parquet", f"note={paths['caption']}"], "--join note: given twice"),
        ([f"note={paths['caption']}"], r"no column 'note'; choose from image_id, caption"),
        (["note=none.parquet"], r"^--join note: /.*/none\.parquet does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            main(str(roots["plain"]), "webdataset", tmp_path / "refused", join=given)
    assert not (tmp_path / "refused").exists()
    form, join = "webdataset --images-per-tar 8", [f"{name}={path}" for name, path in paths.items()]
    summary = export(roots["plain"], tmp_path / "out", form, join=join, workers=2, quiet=True)
    assert summary.parts == ["sa1b-000000.tar", "sa1b-000001.tar", "sa1b-000002.tar"]
    tars = [str(tmp_path / "out" / name) for name in summary.parts]
    found = {one["__key__"]: one for one in webdataset.WebDataset(tars, shardshuffle=False).decode()}
    assert found.keys() == {f"sa_{i}" for i in ids}
    for sample in dataset:
        one = found[f"sa_{sample.image_id}"]
        assert_equal(sample, one["jpg"], one["json"])
        assert one.get("caption.txt") == (f"é {sample.image_id}" if sample.image_id != ids[-1] else None)
        assert one["weight.json"] == sample.image_id / 7
        masks = sample.annotations.mask_id.tolist()
        phrases = [f"mask {i}" if i in some else None for i in masks]
        assert one.get("phrase.json") == (phrases or None)
    again = export(roots["plain"], tmp_path / "out", form, join=join, quiet=True)
    assert again.skipped == summary.parts


def test_joined_columns_of_parquet_and_coco(roots, tmp_path):
    dataset = Dataset(roots["plain"])
    ids = [sample.image_id for sample in dataset]
    some = [int(one) for sample in dataset for one in sample.annotations.mask_id[::2]]
    tables = {
        "caption": pa.table({"image_id": ids[:-1], "caption": [f"é {i}" for i in ids[:-1]]}),
        "weight": pa.table({"image_id": ids, "weight": [[i / 7, 1.0] for i in ids]}),
        "phrase": pa.table({"mask_id": some, "phrase": [f"mask {i}" for i in some]}),
    }
    pa.parquet.write_table(pa.table({"image_id": ids, "width": ids}), tmp_path / "width.parquet")
    join = []
    for name, table in tables.items():
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
        join.append(f"{name}={tmp_path}/{name}.parquet")
    for to in ("parquet", "coco"):
        assert main(str(roots["plain"]), to, tmp_path / to, join=join, json_output=True) == 0
        assert main(str(roots["plain"]), to, tmp_path / to, join=join, json_output=True) == 0
        with pytest.raises(UsageError, match="--join width: .*; choose another name"):
            main(str(roots["plain"]), to, tmp_path / "refused", join=[f"width={tmp_path}/width.parquet"])
    (file,) = (tmp_path / "parquet").glob("*.parquet")
    rows = {row["image_id"]: row for row in pa.parquet.read_table(file).to_pylist()}
    document = json.loads((tmp_path / "coco" / "annotations.json").read_text())
    entries = {one["id"]: one for one in document["images"]}
    for sample in dataset:
        row, entry = rows[sample.image_id], entries[sample.image_id]
        caption = f"é {sample.image_id}" if sample.image_id != ids[-1] else None
        assert row["caption"] == entry.get("caption") == caption
        assert row["weight"] == entry["weight"] == [sample.image_id / 7, 1.0]
        phrases = [f"mask {i}" if i in some else None for i in sample.annotations.mask_id.tolist()]
        assert row["phrase"] == (phrases or None)
        own = [one for one in document["annotations"] if one["image_id"] == sample.image_id]
        assert [one["phrase"] for one in own] == phrases


@pytest.mark.parametrize("name", ["sam2", "webdataset"])
def test_any_number_of_workers_writes_the_same_files(roots, out, tmp_path, name):
    export(roots["plain"], tmp_path, FORMATS[name], workers=3, quiet=True)
    assert files(tmp_path) == files(out / name)
    lines, other = ((folder / ".export.jsonl").read_text().splitlines() for folder in (tmp_path, out / name))
    assert (lines[0], sorted(lines)) == (other[0], sorted(other))


def test_an_interrupted_part_has_no_file_and_the_same_command_continues(roots, out, tmp_path, monkeypatch):
    calls = []
    original = image_files.annotation_text

    def fails(sample):
        calls.append(sample.image_id)
        if len(calls) == 18:  # in the second part
            raise KeyboardInterrupt
        return original(sample)

    with monkeypatch.context() as broken:
        broken.setattr(image_files, "annotation_text", fails)
        with pytest.raises(KeyboardInterrupt):
            export_here(roots["plain"], tmp_path, Folders(), quiet=True)
    left = files(tmp_path)
    assert left == {path: data for path, data in files(out / "folders").items() if path in left}
    assert len(left) == 2 * 16
    summary = export_here(roots["plain"], tmp_path, Folders(), quiet=True)
    assert (summary.skipped, summary.images) == (["sa_000001-0000"], 19)
    assert files(tmp_path) == files(out / "folders")
    # A part whose file is cut or missing is not complete.
    (tmp_path / "sa_000002/annotations/sa_300.json").write_bytes(b"{")
    assert export_here(roots["plain"], tmp_path, Folders(), quiet=True).skipped == ["sa_000001-0000"]
    (tmp_path / "sa_000001/images/sa_100.jpg").unlink()
    assert export_here(roots["plain"], tmp_path, Folders(), quiet=True).skipped == ["sa_000002-0000"]
    assert files(tmp_path) == files(out / "folders")


def test_a_full_disk_names_the_joined_file(roots, tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(coco, "flush", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'annotations.json'}'"):
        export_here(roots["plain"], tmp_path, coco.Coco(), quiet=True)
    assert not list(tmp_path.glob("*annotations.json*"))


def test_the_list_is_written_again_without_the_images(roots, out, tmp_path):
    export(roots["plain"], tmp_path, "sam2", quiet=True)
    (tmp_path / "file_list.txt").unlink()
    assert export(roots["plain"], tmp_path, "sam2", quiet=True).bytes_written == 0
    assert files(tmp_path) == files(out / "sam2")


def test_sources_with_few_images_share_a_part(dataset):
    rows = np.arange(19)
    parts = [dict(form.parts(dataset, rows)) for form in (Sam2(), Folders())]
    assert [list(one) for one in parts] == [["sa_000001-0000"], ["sa_000001-0000", "sa_000002-0000"]]
    named = [("a", rows[:3]), ("b", rows[3:4]), ("c", rows[4:9]), ("d", rows[9:10]), ("e", rows[10:])]
    assert [(name, own.tolist()) for name, own in joined(named, 4)] == [
        ("a", [0, 1, 2, 3]),
        ("c", [4, 5, 6, 7, 8]),
        ("d", [9]),
        ("e", [*range(10, 19)]),
    ]


def test_samples_are_read_in_the_order_of_the_rows(dataset):
    rows = [*range(18, -1, -1), 3, 3]
    assert [one.jpeg for one in dataset.samples(rows)] == [dataset[row].jpeg for row in rows]
    assert list(dataset.samples([])) == []


INTERRUPTED = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from sa1b.console import run_directly
from sa1b.programs.export.export import export
from sa1b.programs.export.export_format import joined
from sa1b.programs.export.image_files import Sam2

@dataclass(frozen=True)
class Interrupted(Sam2):
    def write(self, part, samples, files):
        super().write(part, samples, files)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

if __name__ == "__main__":
    export_all = lambda: export(sys.argv[1], Path(sys.argv[2]), Interrupted(), workers=2, quiet=True).exit_code()
    run_directly(export_all)
"""


def test_ctrl_c_ends_the_workers_and_leaves_no_file(roots, tmp_path):
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, program, roots["plain"], tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".export.jsonl"]


def test_equal_files_of_an_earlier_export_become_links(roots, out, tmp_path):
    earlier = tmp_path / "earlier"
    export(roots["plain"], earlier, "folders", quiet=True)
    changed = earlier / "sa_000002/images/sa_300.jpg"
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    (earlier / "sa_000002/images/sa_301.jpg").unlink()
    ids = tmp_path / "ids.txt"
    ids.write_text("100\n300\n301\n")
    export(roots["plain"], tmp_path / "some", "folders", ids=ids, link_from=earlier, quiet=True)
    everything = files(out / "folders")
    found = files(tmp_path / "some")
    assert found == {path: data for path, data in everything.items() if path in found}
    linked = {path for path in found if (tmp_path / "some" / path).stat().st_nlink == 2}
    assert found.keys() - linked == {"sa_000002/images/sa_300.jpg", "sa_000002/images/sa_301.jpg"}
    summary = export(roots["plain"], tmp_path / "some", "folders", ids=ids, link_from=earlier, quiet=True)
    assert (summary.linked, "  linked  4 files\n" in summary.table()) == (4, True)
    flat = export(roots["plain"], tmp_path / "flat", "folders --layout flat", link_from=earlier, quiet=True)
    assert "  linked  0 files\n" in flat.table()
    with pytest.raises(UsageError, match="--link-from .*: no such folder"):
        export(roots["plain"], tmp_path / "x", "folders", link_from=tmp_path / "nowhere", quiet=True)


@pytest.mark.parametrize("name", ["folders", "sam2", "efficientvit", "webdataset"])
def test_scaled_images_are_refused_where_masks_are_exported(roots, tmp_path, name):
    with pytest.raises(UsageError, match="made with --image-size 32.*--to images"):
        export(roots["image_size"], tmp_path / "x", FORMATS[name], quiet=True)
    assert not (tmp_path / "x").exists()


def test_files_of_another_export_are_not_replaced_unasked(roots, tmp_path):
    (tmp_path / "file_list.txt").write_text("mine\n")
    with pytest.raises(UsageError, match=r"already has file_list\.txt, not from an export"):
        export(roots["plain"], tmp_path, "sam2", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file_list.txt"]
    export(roots["plain"], tmp_path, "sam2", overwrite=True, quiet=True)
    assert len((tmp_path / "file_list.txt").read_text().split()) == 18
    ids = tmp_path / "ids.txt"
    ids.write_text("100\n")
    with pytest.raises(
        UsageError, match=r"already has img_folder/sa_100\.jpg, .*not from an export of these"
    ):
        export(roots["plain"], tmp_path, "sam2", ids=ids, quiet=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("webdataset --images-per-tar 8", "webdataset --images-per-tar 19"),
        ("parquet --images-per-file 8", "parquet --images-per-file 19"),
        ("parquet --images-per-file 19", "parquet --images-per-file 8"),
    ],
)
def test_readers_of_all_files_never_read_those_of_two_exports(roots, tmp_path, first, second):
    export(roots["plain"], tmp_path, first, quiet=True)
    before = files(tmp_path)
    with pytest.raises(UsageError, match="has parts of an export of other images|already has"):
        export(roots["plain"], tmp_path, second, quiet=True)
    with pytest.raises(UsageError, match=r"has an export with --to \w+, not --to images --layout flat; name"):
        export(roots["plain"], tmp_path, "images --layout flat", overwrite=True, quiet=True)
    assert files(tmp_path) == before
    summary = export(roots["plain"], tmp_path, second, overwrite=True, quiet=True)
    assert sorted(Path(path).name.removesuffix(".parquet") for path in files(tmp_path)) == summary.parts
    assert export(roots["plain"], tmp_path, second, quiet=True).skipped == summary.parts


def test_a_folder_of_an_export_without_a_complete_part_takes_any_format(roots, tmp_path):
    record = ExportRecord(tmp_path)
    record.begin("coco", {"annotations-0000": ""})
    record.close()
    assert export(roots["plain"], tmp_path, "parquet", quiet=True).parts == ["train-00000-of-00001"]


def test_an_image_that_does_not_decode_costs_its_part(roots, tmp_path, monkeypatch):
    broken = Dataset(roots["plain"]).by_id(300).jpeg

    def decode(data, *arguments):
        if data == broken:
            raise image_files.BadSample("jpeg_broken", "JPEG does not decode: cut")
        return b"", 0, 0

    monkeypatch.setattr(image_files.jpeg, "scale_down", decode)
    with pytest.raises(
        ShardError, match="sa_000002-0000: .*image sa_300 cannot be scaled: .*; 1 part complete"
    ):
        export_here(roots["plain"], tmp_path, Images("by-source", 32), quiet=True)
    assert "sa_000001/sa_100.jpg" in files(tmp_path)
    assert "sa_000002/sa_301.jpg" not in files(tmp_path)


def test_missing_ids_are_listed_with_code_3(roots, tmp_path, capsys):
    ids = tmp_path / "ids.txt"
    ids.write_text("7\n100\nsa_8.jpg\n301\n")
    assert main(str(roots["plain"]), to="images", out=tmp_path / "a", ids=str(ids)) == 3
    printed = capsys.readouterr().out
    assert "images  2\n" in printed
    assert "missing: 7, 8; --json prints all of them\n" in printed
    assert main(str(roots["plain"]), to="images", out=tmp_path / "a", ids=str(ids), json_output=True) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["missing"], document["exit_code"], document["images"]) == ([7, 8], 3, 2)
    assert document["skipped"] == ["sa_000001-0000", "sa_000002-0000"]


def test_a_view_chooses_masks_too(roots, tmp_path):
    some = (roots["plain"], "--images-where", "image_id < 103", "--masks-where")
    kit.run("view", *some, "area < 100", "--name", "small")
    main(str(roots["plain"]), to="sam2", out=tmp_path / "a", ids=None, view="small")
    dataset = Dataset(roots["plain"])
    left = 0
    for image_id in (100, 101, 102):
        expected = dataset.by_id(image_id).annotations.to_json()
        every = expected["annotations"]
        expected["annotations"] = [one for one in every if one["area"] < 100]
        left += len(every) - len(expected["annotations"])
        assert json.loads((tmp_path / f"a/gt_folder/sa_{image_id}.json").read_text()) == expected
    assert left
    kit.run("view", *some, "area < 50", "--name", "less")
    with pytest.raises(UsageError, match=r"already has .*, not from an export of these images"):
        main(str(roots["plain"]), to="sam2", out=tmp_path / "a", view="less")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"to": "sam2", "layout": "flat"}, "--layout: is for --to folders and images, not for sam2; omit it"),
        ({"to": "folders", "image_size": 512}, "--image-size: is for --to images, not for folders; omit it"),
        ({"to": "images", "image_size": 5}, "--image-size 5: must be from 16 to 65500"),
        ({"to": "images", "quality": 80}, "--quality 80: .*needs --image-size"),
        ({"to": "images", "plain": True}, "--plain: is for --to sa1b, not for images"),
        ({"to": "sa1b", "join": ("a=b.parquet",)}, "--join: is for --to webdataset"),
        ({"to": "webdataset", "join": ("captions.parquet",)}, "--join captions.parquet: must be NAME=FILE"),
        ({"to": "webdataset", "join": ("json=a.parquet",)}, "--join json=a.parquet: must be NAME=FILE"),
        ({"to": "webdataset", "link_from": "x"}, "--link-from: is for --to folders, images, sam2 and"),
    ],
)
def test_flags_of_other_formats_are_refused(tmp_path, flags, message):
    with pytest.raises(UsageError, match=message):
        main(str(tmp_path), out=tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()
