"""`sa1b annotate`: pairs in SA-1B's form, complete and resumable; what cannot be annotated is listed."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch.distributed import TCPStore

import sa1b
import sa1b.masks
from sa1b.console import parse
from sa1b.errors import Sa1bError, UsageError
from sa1b.programs.annotate.annotate import AnnotationSummary, ImageShare, annotate, content_id, mask_ids
from sa1b.programs.annotate.images import AnnotationFolder
from sa1b.programs.annotate.layer import open_target
from sa1b.programs.annotate.verb_annotate import main
from sa1b.programs.layer.verb_layer import list_layers
from sa1b.programs.layer.verb_layer import main as layer_main
from sa1b.sam.mask_generator import GeneratorConfig
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from sa1b.shards.annotation import parse_annotation
from sa1b.shards.layer import layer_names
from sa1b.shards.layer_writer import drop
from sa1b.storage.atomic import temporary_path, this_process
from sa1b.storage.claim import Claim
from sa1b.storage.open import open_store
from sa1b.views.view import write_view
from tests.cli.verb import called
from tests.processes import Process, run
from tests.shards.tiny import ingest_tar, make_tar

SMALL = ModelConfig(image_size=32, patch_size=8, width=32, depth=1, heads=2, global_blocks=(0,), channels=32)
CONFIG = GeneratorConfig(points_per_side=3, min_predicted_iou=0, min_stability=0, max_box_iou=0.9)
FLAGS = ("--points-per-side", "3", "--min-predicted-iou", "0", "--min-stability", "0", "--max-box-iou", "0.9")

annotate_here = called("annotate")


@pytest.fixture(scope="module")
def model() -> Sam:
    """Random weights, with some masks in every image."""
    torch.manual_seed(5)
    made = Sam(SMALL).eval()
    with torch.no_grad():
        made.mask_decoder.iou_prediction_head.layers[-1].bias.fill_(0.9)
        for perceptron in made.mask_decoder.output_hypernetworks_mlps:
            perceptron.layers[-1].weight.mul_(100)
    return made


@pytest.fixture(scope="module")
def weights(model: Sam, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "sam.safetensors"
    write_weights(path, model.state_dict())
    return path


def photo(seed: int, height: int = 40, width: int = 56) -> bytes:
    random = np.random.default_rng(seed)
    pixels = np.kron(random.integers(0, 256, (5, 7, 3)), np.ones((-(-height // 5), -(-width // 7), 1)))
    return simplejpeg.encode_jpeg(pixels[:height, :width].astype(np.uint8), quality=90)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(5):
        (folder / f"IMG_{number}.jpg").write_bytes(photo(number))
    (folder / "more" / "A.JPEG").write_bytes(photo(9, 20, 70))
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def work(model: Sam, tmp_path: Path) -> Callable[..., AnnotationSummary]:
    def work(*paths: object, out: str = "labels", **options: Any) -> AnnotationSummary:
        settings = {"config": CONFIG, "max_pixels": 1 << 24, "quiet": True} | options
        return annotate([str(path) for path in paths], model, tmp_path / out, **settings)

    return work


def tree(folder: Path) -> dict[str, bytes]:
    """Path and content of every file, with the lines of the list in sorted order."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        name: b"".join(sorted(data.splitlines())) if name.endswith("l") else data
        for name, data in found.items()
    }


def test_the_result_is_resharded_and_has_the_masks_of_the_model(
    work: Callable[..., AnnotationSummary], model: Sam, photos: Path, tmp_path: Path
) -> None:
    summary = work(photos)
    assert (summary.images, summary.annotated, summary.refused, summary.others) == (6, 6, [], 1)
    done = run(
        [
            sys.executable,
            "-m",
            "sa1b",
            "reshard",
            tmp_path / "labels",
            "--out",
            tmp_path / "shards",
            "--json",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    dataset = sa1b.open(tmp_path / "shards")
    originals = {content_id(path.read_bytes()): path for path in photos.rglob("*.[jJ]*")}
    assert sorted(originals) == dataset.table.image_id.tolist()
    assert min(originals) >= 2**52
    masks: list[int] = []
    for sample in dataset:
        data = originals[sample.image_id].read_bytes()
        assert sample.jpeg == data
        found = sa1b.generate_masks(
            model,
            simplejpeg.decode_jpeg(data),
            points_per_side=3,
            min_predicted_iou=0,
            min_stability=0,
            max_box_iou=0.9,
        )
        columns = sample.annotations
        assert len(columns) == len(found)
        assert np.array_equal(columns.runs().runs, found.runs.runs)
        assert np.array_equal(columns.bbox, sa1b.masks.bbox_sa1b(found.runs))
        assert np.array_equal(columns.area, sa1b.masks.area(found.runs))
        assert np.array_equal(columns.point_coords, found.points)
        assert np.array_equal(columns.crop_box, found.crop_boxes)
        assert np.allclose(columns.predicted_iou, found.predicted_iou)
        assert np.allclose(columns.stability_score, found.stability_score)
        assert np.array_equal(columns.mask_id, mask_ids(sample.image_id, len(found)))
        assert columns.text is None  # the file has SA-1B's usual form
        masks += columns.mask_id.tolist()
    assert len(set(masks)) == len(masks) == summary.masks > 5
    lines = [json.loads(line) for line in (tmp_path / "labels/annotate.jsonl").read_text().splitlines()]
    assert {line["image_id"]: line["file"] for line in lines} == {
        image_id: str(path) for image_id, path in originals.items()
    }
    assert sum(line["masks"] for line in lines) == summary.masks
    for path in (tmp_path / "labels").rglob("sa_*.json"):
        assert not parse_annotation(path.read_bytes(), int(path.stem[3:])).warnings


def test_a_rerun_skips_complete_images_and_repeats_what_was_cut(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    work(photos)
    labels, before = tmp_path / "labels", tree(tmp_path / "labels")
    times = {path: path.stat().st_mtime_ns for path in labels.rglob("sa_*")}
    lost, *_ = sorted(labels.rglob("sa_*.json"))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    partial = lost.with_name(f".{lost.name}.{this_process(dead.pid)}-01234567.partial")
    own = lost.with_name(f".{lost.name}.{this_process()}-01234567.partial")
    for path in (partial, own):
        path.write_bytes(b"half")
    lost.unlink()
    lines = (labels / "annotate.jsonl").read_bytes()
    (labels / "annotate.jsonl").write_bytes(lines[: -len(lines.splitlines()[-1]) // 2])  # power was lost
    (photos / "copy.jpg").write_bytes(photo(3))
    summary = work(photos)
    assert (summary.annotated, summary.complete, summary.duplicates) in ((1, 6, 0), (1, 5, 1))
    assert not partial.exists()
    assert own.exists()  # its process runs
    own.unlink()
    after = tree(labels)
    names = {
        json.loads(line)["file"]
        for line in (labels / "annotate.jsonl").read_text().splitlines()
        if line[0] == "{" and line[-1] == "}"
    }
    assert names == {str(path) for path in photos.rglob("*.[jJ]*")}
    assert {**after, "annotate.jsonl": b""} == {**before, "annotate.jsonl": b""}
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {
        lost,
        lost.with_suffix(".jpg"),
    }


def test_parts_together_write_what_one_process_writes(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    (photos / "copy.jpg").write_bytes(photo(3))
    whole = work(photos, out="a/labels")
    assert work(photos, out="my labels").table().endswith(f"reshard '{tmp_path / 'my labels'}' --out shards")
    parts = [work(photos, out="b/labels", part=ImageShare(index, 3)) for index in range(3)]
    assert sum(part.images for part in parts) == whole.images == 7
    assert "Complete: this part of" in parts[1].table()
    assert "Next: after all parts, " in parts[1].table()
    assert f"Complete: {tmp_path / 'a/labels'}" in whole.table()
    assert whole.duplicates == 1
    one, other = tree(tmp_path / "a/labels"), tree(tmp_path / "b/labels")
    assert one.keys() == other.keys()
    one.pop("annotate.jsonl")
    other.pop("annotate.jsonl")  # a copy that another part annotated has no number of masks
    assert one == other


def test_what_cannot_be_annotated_is_listed(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    png = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 40), np.uint8)).save(png, "PNG")
    deep, moving, cmyk = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.fromarray(np.full((30, 40), 30_000, np.uint16)).save(deep, "PNG")
    Image.new("L", (30, 40)).save(moving, "GIF", save_all=True, append_images=[Image.new("L", (30, 40), 9)])
    Image.new("CMYK", (30, 40)).save(cmyk, "JPEG")
    bad = {
        "cut.jpg": (photo(20)[:300], "jpeg_truncated"),
        "flipped.jpg": (photo(21)[:700] + b"\xff\xd9", "jpeg_"),
        "empty.jpg": (b"", "not_a_jpeg"),
        "deep.png": (deep.getvalue(), "not_a_jpeg"),
        "moving.gif": (moving.getvalue(), "not_a_jpeg"),
        "icon.png": (png.getvalue(), "not_a_jpeg"),
        "print.jpg": (cmyk.getvalue(), "jpeg_unsupported"),
        "large.jpg": (photo(22, 100, 100), "absurd_size"),
    }
    for name, (data, _) in bad.items():
        (photos / name).write_bytes(data)
    os.mkfifo(photos / "pipe.jpg")
    (photos / "gone.jpg").symlink_to(photos / "nothing")
    (photos / os.fsdecode(b"\xff.jpg")).write_bytes(b"x")
    summary = work(photos, max_pixels=9000)
    assert summary.annotated == 6
    reasons = {Path(one["image"]).name: one["reason"] for one in summary.refused}
    assert reasons.keys() == bad.keys() | {"gone.jpg", "pipe.jpg", "\ufffd.jpg"}
    assert (reasons["gone.jpg"], reasons["pipe.jpg"]) == ("unreadable", "unreadable")
    assert all(reasons[name].startswith(reason) for name, (_, reason) in bad.items()), reasons
    assert summary.exit_code() == 3
    assert "--quality 95 converts what Pillow reads" in next(
        one["message"] for one in summary.refused if "icon" in one["image"]
    )
    assert "  refused  11" in summary.table()
    assert len(list((tmp_path / "labels").rglob("*.jpg"))) == 6

    again = work(photos, max_pixels=9000, quality=95)
    assert (again.annotated, again.complete) == (2, 6)
    reasons = {Path(one["image"]).name: one["reason"] for one in again.refused}
    assert reasons["empty.jpg"] == "not_an_image"
    assert (reasons["deep.png"], reasons["moving.gif"]) == ("image_unsupported", "image_unsupported")
    (stored,) = (tmp_path / "labels").rglob(f"sa_{content_id(png.getvalue())}.jpg")
    with Image.open(png) as image:
        difference = np.asarray(image.convert("RGB"), int) - simplejpeg.decode_jpeg(stored.read_bytes())
    assert np.abs(difference).mean() < 10
    assert work(photos, max_pixels=9000, quality=95).complete == 8

    nothing = work(photos / "cut.jpg", photos / "empty.jpg", out="nothing")
    assert (nothing.exit_code(), nothing.table().splitlines()[-1]) == (
        2,
        "Nothing is annotated: all images are refused.",
    )


def test_an_earlier_output_in_a_folder_of_images_is_not_annotated(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    first = work(photos, out="photos/labels")
    assert (first.annotated, first.others) == (6, 1)
    second = work(photos, out="again", config=replace(CONFIG, min_predicted_iou=100))
    assert (second.images, second.annotated, second.duplicates, second.others) == (6, 6, 0, 1)
    assert "no mask was found; lower --min-predicted-iou and --min-stability\n" in second.table()


def test_ids_from_names_numbers_and_dataset_directories(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    make_tar(tmp_path / "sa_000020.tar", [7, 9])
    ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "shards")
    work(photos, tmp_path / "shards", out="numbers", image_ids="100")
    ids = sorted(int(path.stem[3:]) for path in (tmp_path / "numbers").rglob("sa_*.json"))
    assert ids == [7, 9, 100, 101, 102, 103, 104, 105]
    stored = next((tmp_path / "numbers").rglob("sa_7.jpg")).read_bytes()
    assert stored == sa1b.open(tmp_path / "shards").by_id(7).jpeg

    (photos / "AAA.jpg").write_bytes(photo(30))  # moves the numbers of the others
    before = tree(tmp_path / "numbers")
    with pytest.raises(UsageError, match=r"AAA.jpg: .*sa_100.jpg is another image with this id; annotate"):
        work(photos, out="numbers", image_ids="100")
    assert tree(tmp_path / "numbers") == before

    (photos / "sa_55.jpg").write_bytes(photo(31))
    (photos / "more" / "sa_55.jpg").write_bytes(photo(32))
    named = work(photos, out="names", image_ids="name")
    assert named.annotated == 1
    assert sorted(one["reason"] for one in named.refused) == ["id_taken", *["no_id"] * 7]
    assert len(list((tmp_path / "names").rglob("sa_55.json"))) == 1


def test_masks_for_a_dataset_directory_become_a_layer_of_it_by_the_command_that_is_printed(
    work: Callable[..., AnnotationSummary], tmp_path: Path
) -> None:
    make_tar(tmp_path / "sa_000020.tar", [7, 9])
    ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "shards")
    summary = work(tmp_path / "shards", out="again")
    advice = summary.table().splitlines()[-1]
    assert advice.endswith(f"layer add {tmp_path}/shards {tmp_path}/again --name annotated")
    before = len(sa1b.open(tmp_path / "shards").by_id(7).annotations)
    action, root, *files, _, name = advice.split()[advice.split().index("layer") + 1 :]
    assert layer_main(action, root, tuple(files), name=name) == 0
    changed = sa1b.open(tmp_path / "shards", layers=[name])
    assert len(changed) == 2
    assert sum(len(one.annotations) for one in changed) == summary.masks + sum(
        len(one.annotations) for one in sa1b.open(tmp_path / "shards")
    )
    assert len(changed.by_id(7).annotations) >= before


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    make_tar(tmp_path / "sa_000020.tar", range(1, 7))
    ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "shards")
    return tmp_path / "shards"


def layer_of(
    work: Callable[..., AnnotationSummary], root: Path, name: str, **options: Any
) -> AnnotationSummary:
    own = {key: options.pop(key) for key in ("existing", "on", "view", "out") if key in options}
    return work(layer=open_target(str(root), name, **own), **options)


def files_in(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "layer.json")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("existing", ["keep", "hide"])
def test_the_images_of_a_dataset_directory_get_a_layer_with_the_masks_of_the_model(
    work: Callable[..., AnnotationSummary], model: Sam, shards: Path, existing: str
) -> None:
    before = files_in(shards)
    summary = layer_of(work, shards, "round2", existing=existing)
    assert (summary.images, summary.annotated, summary.exit_code()) == (6, 6, 0)
    assert "Complete: layer round2 (" in summary.table()
    assert summary.table().endswith(f"train --data.root {shards} --data.layers round2")
    after = files_in(shards)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"layers/round2/masks.bin", "layers/round2/index.parquet"}
    changed, count = sa1b.open(shards, layers=["round2"]), 0
    for sample, old in zip(changed, sa1b.open(shards), strict=True):
        found = sa1b.generate_masks(
            model,
            simplejpeg.decode_jpeg(sample.jpeg),
            points_per_side=3,
            min_predicted_iou=0,
            min_stability=0,
            max_box_iou=0.9,
        )
        kept = len(old.annotations) if existing == "keep" else 0
        count += len(found)
        assert len(sample.annotations) == kept + len(found)
        new = np.arange(kept, kept + len(found))
        assert np.array_equal(sample.annotations.runs(new).runs, found.runs.runs)
        assert np.allclose(sample.annotations.predicted_iou[new], found.predicted_iou)
        assert np.allclose(sample.annotations.stability_score[new], found.stability_score)
    assert summary.masks == count > 5
    info = changed.layers[0].info
    assert info.provenance["weights_sha256"] == [info.provenance["settings"]["weights_sha256"]]
    assert (info.provenance["program"], info.provenance["settings"]["existing"]) == (
        "sa1b annotate",
        existing,
    )


def test_masks_for_smaller_images_of_a_directory_have_the_size_of_the_source(
    work: Callable[..., AnnotationSummary], shards: Path, tmp_path: Path
) -> None:
    words = ["reshard", tmp_path / "sa_000020.tar", "--image-size", "32", "--out", tmp_path / "small"]
    done = run([sys.executable, "-m", "sa1b", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = layer_of(work, tmp_path / "small", "round2", existing="hide")
    assert summary.masks > 5
    assert "masks added, 0 replaced, " in summary.table()
    layered, whole = sa1b.open(tmp_path / "small", layers=["round2"]), sa1b.open(shards)
    for sample, source in zip(layered, whole, strict=True):
        assert sample.image.shape != source.image.shape
        assert sample.masks().shape[1:] == source.image.shape[:2]
    assert "Next: " in (pairs := work(tmp_path / "small")).table()
    assert " layer add " not in pairs.table()


def test_the_last_of_several_processes_writes_the_layer_that_one_process_writes(
    work: Callable[..., AnnotationSummary], shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(shards, tmp_path / "alone")
    wanted = layer_of(work, tmp_path / "alone", "round2").info
    assert wanted is not None
    parts = [layer_of(work, shards, "round2", part=ImageShare(index, 3)) for index in (1, 0, 1)]
    assert [part.info for part in parts] == [None] * 3
    assert [(part.annotated, part.complete) for part in parts] == [(2, 0), (2, 0), (0, 2)]
    assert parts[0].table().endswith("the last one writes round2")
    assert parts[0].exit_code() == 0
    lost = next((shards / "layers/.round2-annotated").rglob("sa_2.json"))
    lost.unlink()  # as if its process had been killed before
    found = list_layers(str(shards))
    assert found.annotated["round2"]["images"] == 4 - 1
    words = shlex.split(found.annotated["round2"]["command"].rpartition(" annotate ")[2])
    assert words[:6] == ["--shards", str(shards), "--name", "round2", "--weights", words[5]]
    assert ("--points-per-side", "3") in pairwise(words)
    assert "annotating round2: 3 images so far; `" in found.table()
    last = layer_of(work, shards, "round2", part=ImageShare(2, 3))
    assert last.info is None
    assert layer_names(open_store(shards)) == {}
    repeated = layer_of(work, shards, "round2", part=ImageShare(1, 3))
    assert repeated.annotated == 1
    assert repeated.info is not None
    assert repeated.info.digest == wanted.digest
    assert not (shards / "layers/.round2-annotated").exists()
    again = layer_of(work, shards, "round2")
    assert (again.complete, again.annotated, again.info) == (6, 0, repeated.info)
    with pytest.raises(UsageError, match="--name round2: .* was made in another way"):
        layer_of(work, shards, "round2", existing="hide")


def test_what_an_abandoned_run_has_stored_is_removed_with_its_layer(
    work: Callable[..., AnnotationSummary], shards: Path
) -> None:
    before = files_in(shards)
    layer_of(work, shards, "round2", part=ImageShare(0, 2))
    with pytest.raises(
        UsageError, match="existing keep, now hide.; run `.* annotate --shards .*, or choose another"
    ):
        layer_of(work, shards, "round2", existing="hide")
    folder = shards / "layers/.round2-annotated"
    part = next(path for path in folder.iterdir() if path.is_dir())
    temporary_path(part / "sa_9.json").write_bytes(b"{")
    (part / "notes.txt").write_text("of the user")
    with pytest.raises(UsageError, match=r"\.round2-annotated: has files that .* did not write; move them"):
        drop(open_store(shards), "round2")
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["notes.txt"]
    (part / "notes.txt").unlink()
    drop(open_store(shards), "round2")
    assert not folder.exists()
    assert files_in(shards) == before
    with pytest.raises(UsageError, match="has no layer of this name"):
        drop(open_store(shards), "round2")


def test_a_process_that_finds_the_layer_written_by_another_one_has_it_too(
    work: Callable[..., AnnotationSummary], shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layer_of(work, shards, "round2", part=ImageShare(0, 2))
    real = AnnotationFolder.scan

    def scan(folder: AnnotationFolder) -> None:
        real(folder)
        if len(folder.complete) == 6:  # between the look and the claim
            monkeypatch.setattr(AnnotationFolder, "scan", real)
            others.append(layer_of(work, shards, "round2", part=ImageShare(0, 2)))

    others: list[AnnotationSummary] = []
    monkeypatch.setattr(AnnotationFolder, "scan", scan)
    second = layer_of(work, shards, "round2", part=ImageShare(1, 2))
    assert (first.info, len(others)) == (None, 1)
    assert second.info == others[0].info is not None
    claim = Claim.take(open_store(shards), "layers/.round3.claim")
    assert claim is not None
    with claim:  # another process writes it now
        busy = layer_of(work, shards, "round3")
    assert (busy.info, busy.annotated) == (None, 6)
    assert layer_of(work, shards, "round3").info is not None


def test_a_damaged_image_is_listed_and_is_not_in_the_layer(
    work: Callable[..., AnnotationSummary], shards: Path
) -> None:
    dataset = sa1b.open(shards)
    row = dataset.row(3)
    path = shards / dataset.shards[0]
    data = bytearray(path.read_bytes())
    data[int(dataset.table.offset[row]) + 700] ^= 1
    path.write_bytes(data)
    summaries = [layer_of(work, shards, "round2", part=ImageShare(index, 2)) for index in range(2)]
    assert [len(one.refused) for one in summaries] == [1, 0]
    assert [one.exit_code() for one in summaries] == [3, 0]
    assert "sa_3.jpg is damaged" in summaries[0].refused[0]["message"]
    assert summaries[1].info is not None
    assert sa1b.open(shards, layers=["round2"]).layers[0].columns["image_id"].tolist() == [1, 2, 4, 5, 6]


def test_a_layer_on_a_layer_of_the_images_of_a_view_with_a_folder_of_the_user(
    work: Callable[..., AnnotationSummary], shards: Path, tmp_path: Path
) -> None:
    layer_of(work, shards, "round2", existing="hide")
    table = sa1b.open(shards).table
    view = write_view(shards, table, np.array([1, 3], np.uint32), name="some")
    summary = layer_of(work, shards, "round3", on="round2", view="some", out=tmp_path / "work")
    assert (summary.images, summary.annotated) == (2, 2)
    assert len(list((tmp_path / "work").rglob("sa_*.json"))) == 2
    assert not list((tmp_path / "work").rglob("*.jpg"))
    two, three = sa1b.open(shards, layers=["round2"]), sa1b.open(shards, layers=["round3"])
    for before, after in zip(two, three, strict=True):
        times = 2 if after.image_id in (2, 4) else 1  # the same masks again, with other ids
        assert len(after.annotations) == times * len(before.annotations)
        assert len({*after.annotations.mask_id.tolist()}) == len(after.annotations)
    assert three.layers[1].info.provenance["settings"]["view"] == view.digest


def test_a_renamed_folder_is_completed(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    work(photos)
    lost, damaged, *_ = sorted(tmp_path.glob("labels/*/*.jpg"))
    before = lost.read_bytes()
    lost.unlink()
    damaged.write_bytes(b"")
    (tmp_path / "labels").rename(tmp_path / "renamed")
    summary = work(photos, out="renamed")
    assert (summary.complete, summary.annotated, len(summary.refused)) == (4, 1, 1)
    message = summary.refused[0]["message"]
    assert "has other bytes than this image; repeat the --quality of the first run, or" in message
    assert "--image-ids" not in message
    assert [path.name for path in (tmp_path / "renamed").iterdir() if path.is_dir()] == ["labels-0000"]
    assert (tmp_path / "renamed/labels-0000" / lost.name).read_bytes() == before


def test_other_settings_and_other_folders_are_refused(
    work: Callable[..., AnnotationSummary], photos: Path, tmp_path: Path
) -> None:
    work(photos)
    with pytest.raises(UsageError, match=r"other settings \(points_per_side 3, now 4\); repeat"):
        work(
            photos,
            config=GeneratorConfig(points_per_side=4, min_predicted_iou=0, min_stability=0, max_box_iou=0.9),
        )
    other = json.loads((tmp_path / "labels/annotate.json").read_text()) | {"name": "../elsewhere"}
    for text in ("{", json.dumps(other)):
        (tmp_path / "labels/annotate.json").write_text(text)
        with pytest.raises(UsageError, match="annotate.json: damaged"):
            work(photos)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    make_tar(tmp_path / "sa_000020.tar", [7])
    shutil.copytree(photos, tmp_path / "within/photos")
    for paths, out, message in (
        ((photos,), "full", "is not empty, and has no annotate.json"),
        ((photos,), "full/file", "is a file"),
        ((photos, tmp_path / "gone"), "new", "gone: no such file or folder"),
        ((tmp_path / "empty",), "new", "empty: holds no image"),
        ((photos / "more",), "photos", "is inside --out"),
        ((photos, tmp_path / "sa_000020.tar"), "new", "sa_000020.tar: a tar; extract its images"),
    ):
        with pytest.raises(UsageError, match=message):
            work(*paths, out=out)
    assert not (tmp_path / "new").exists()
    (tmp_path / "within/loop").symlink_to(tmp_path / "within")
    (tmp_path / "within/photos/linked").symlink_to(tmp_path / "linked")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/x.jpg").write_bytes(photo(40))
    for name in ("shards/quarantine/photos/000001-x.jpg", "photos/@eaDir/x.jpg/THUMB.jpg"):
        (tmp_path / "within" / name).parent.mkdir(parents=True)
        (tmp_path / "within" / name).write_bytes(photo(41))
    (tmp_path / "within/shards/dataset.json").write_text("{}")
    inside = work(tmp_path / "within", out="within/labels")  # the output is not an input
    assert work(tmp_path / "within", out="within/labels").complete == inside.annotated == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weights": "/gone"}, "/gone: no such file or folder"),
        ({"points_per_side": 0}, "--points-per-side 0: must be a whole number from 1 to 1024"),
        ({"min_stability": 2.0}, "--min-stability 2.0: must be from 0 to 1"),
        ({"image_ids": "names"}, "--image-ids names: must be content, name, or a whole number"),
        ({"quality": 0}, "--quality 0: must be from 1 to 100"),
        ({"max_pixels": 0}, "--max-pixels 0: must be"),
        ({"part": "8/8"}, "--part 8/8: must have the form I/N with I from 0 to N - 1"),
        ({"part": "-1/8"}, "--part -1/8: must"),
        ({"precision": "tf32", "device": "cpu"}, "--precision tf32: needs a GPU"),
        ({"device": "gpu"}, "--device gpu: must be cpu, cuda or cuda:N"),
        ({"device": "meta"}, "--device meta: must be cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "--device cuda:99: this process sees"),
    ],
)
def test_a_wrong_flag_is_named(weights: Path, photos: Path, tmp_path: Path, flags: Any, message: str) -> None:
    given = {"weights": weights, "out": tmp_path / "labels", **flags}
    with pytest.raises(Sa1bError, match=message):
        parse(main, [str(photos), *(f"--{name.replace('_', '-')}={given[name]}" for name in given)], None)[
            0
        ]()
    assert not (tmp_path / "labels").exists()


def test_the_command_and_ranks_of_torchrun(weights: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "cut.jpg").write_bytes(photo(20)[:300])
    command = [sys.executable, "-m", "sa1b", "annotate", photos, "--weights", weights, *FLAGS, "--out"]
    found = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        done = run([*command, tmp_path / "labels", "--json"], capture_output=True, text=True, env=environment)
        found.append(json.loads(done.stdout))
        assert done.returncode == found[-1]["exit_code"], done.stderr
        done = run([*command, tmp_path / "p", "--part=1/2", "--json"], capture_output=True, env=environment)
        found.append(json.loads(done.stdout))
    assert [one["images"] for one in found[1::2]] == [2, 1]  # of the three images of the part
    assert [one["images"] for one in found[::2]] == [4, 3]
    assert sorted(one["exit_code"] for one in found[::2]) == [0, 3]
    done = run([*command, tmp_path / "labels"], capture_output=True, text=True)
    assert done.returncode == 3
    assert "  images   6 (6 already annotated)" in done.stdout
    assert "cut.jpg: jpeg_truncated" in done.stdout
    done = run(
        [*command[:4], photos, "--weights", tmp_path / "gone", "--out", "x"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gone: no such file or folder" in done.stderr


def test_ranks_of_torchrun_make_one_layer_and_wrong_combinations_are_named(
    weights: Path, shards: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sa1b", "annotate", "--shards", shards, "--weights", weights, *FLAGS]
    found = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        done = run([*command, "--name", "round2", "--json"], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [one["annotated"] for one in found] == [3, 3]
    assert found[0]["info"] is None
    assert found[1]["info"]["digest"] == sa1b.open(shards, layers=["round2"]).layers[0].info.digest
    for words, message in (
        (command[4:], "--name: missing; choose a name for the layer"),
        ([tmp_path, *command[4:], "--name", "a"], "not with --shards, whose images are annotated"),
        ([*command[4:], "--name", "../a"], "must be at most 64 letters"),
        ([*command[4:], "--name", "a", "--view", "none"], "no view 'none'"),
        ([*command[4:], "--name", "a", "--quality", "90"], "--image-ids and --quality: not with --shards"),
        ([tmp_path, "--weights", weights, "--name", "a"], "only for a layer; pass --shards ROOT"),
        ([tmp_path, "--weights", weights], "--out: missing; name a folder"),
    ):
        done = annotate_here(*words)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_rank_of_torchrun_does_not_end_before_the_others(
    weights: Path, photos: Path, tmp_path: Path
) -> None:
    (photos / "0.jpg").write_bytes(
        photo(20)[:300]
    )  # refused by rank 0, which torchrun would end the others for
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as that of torchrun
    command = [sys.executable, "-m", "sa1b", "annotate", photos, "--weights", weights, *FLAGS, "--out"]
    environment = {**os.environ, "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}

    def start(rank: int) -> Process:
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return Process([*command, tmp_path / "labels"], stdout=subprocess.PIPE, text=True, env=own)

    first = start(0)
    assert first.stdout is not None
    while not first.stdout.readline().startswith("Next: "):
        assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(1)
    second = start(1)
    assert (second.wait(), first.wait()) == (0, 3)


def test_an_interrupted_run_is_continued(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.jpg").write_bytes(photo(number))
    command = [sys.executable, "-m", "sa1b", "annotate", folder, "--weights", weights, *FLAGS]
    command += ["--out", tmp_path / "labels"]
    process = Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "labels/annotate.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert not list((tmp_path / "labels").rglob(".*partial"))
    before = len(list((tmp_path / "labels").rglob("*.json"))) - 1
    assert 0 < before < 60
    done = run([*command, "--json"], capture_output=True, text=True)
    summary = json.loads(done.stdout)
    assert (summary["complete"], summary["annotated"]) == (before, 60 - before)
