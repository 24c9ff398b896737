"""--evaluate-only on a COCO annotation file, compared with predict, numpy and pycocotools."""

import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

import sa1b
from sa1b.engine.settings import EvaluationConfig
from sa1b.errors import UsageError
from sa1b.recipes.coco_evaluation import CocoError, load_image, read_coco
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from tests import processes
from tests.train.command import FLAGS, REPOSITORY, start

MODEL = ModelConfig(
    image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, pixel_features=8
)
WEIGHTS = "sam_vit_b_01ec64.pth"  # the published name, small random weights
SIZES = [(90, 120), (200, 150), (64, 64)]


def ellipse(height: int, width: int, x: int, y: int, a: int, b: int) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    return cv2.ellipse(mask, (x, y), (a, b), 0, 0, 360, 1, -1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Images, annotations in all forms, detections and weights."""
    folder = tmp_path_factory.mktemp("coco")
    (folder / "images").mkdir()
    random = np.random.default_rng(0)
    images, annotations, detections = [], [], []
    truth: dict[int, list[tuple[np.ndarray, list[float]]]] = {}
    for number, (height, width) in enumerate(SIZES, 11):
        name = f"{number}.png"
        pixels = cv2.resize(random.integers(0, 256, (9, 9, 3), np.uint8), (width, height))
        cv2.imwrite(str(folder / "images" / name), pixels)
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        truth[number] = []
        square = [10.0, 12.0, 40.0, 12.0, 40.0, 50.0, 10.0, 50.0]
        masks = [
            (coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects([square], height, width))), [square]),
            (ellipse(height, width, 30, 30, 25, 20), "string"),
            (ellipse(height, width, 45, 40, 12, 9), "counts"),
            (ellipse(height, width, 20, 40, 9, 9), "crowd"),
        ]
        for mask, form in masks[: 2 if number == 13 else 4]:
            coded = coco_mask.encode(np.asfortranarray(mask))
            segmentation: Any = {"size": [height, width], "counts": coded["counts"].decode()}
            if form == "counts":
                flat = mask.flatten(order="F")
                edges = np.flatnonzero(np.diff(flat)) + 1
                segmentation["counts"] = np.diff([0, *edges.tolist(), len(flat)]).tolist()
            elif isinstance(form, list):
                segmentation = form
            box = coco_mask.toBbox(coded).tolist()
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "bbox": box,
                 "area": int(mask.sum()), "iscrowd": int(form == "crowd"), "segmentation": segmentation}
            )  # fmt: skip
            if form != "crowd":
                truth[number].append((mask.astype(bool), box))
                moved = [box[0] + 2, box[1] - 1, box[2], box[3] + 1]
                detections.append(
                    {"image_id": number, "category_id": 1, "bbox": moved, "score": round(random.random(), 3)}
                )
    empty = {"size": list(SIZES[0]), "counts": [SIZES[0][0] * SIZES[0][1]]}
    annotations.append(
        {"id": 99, "image_id": 11, "category_id": 1, "bbox": [0, 0, 0, 0], "area": 0, "iscrowd": 0,
         "segmentation": empty}
    )  # fmt: skip
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "annotations.json").write_text(json.dumps(document))
    (folder / "detections.json").write_text(json.dumps(detections))
    torch.manual_seed(0)
    model = Sam(MODEL).eval()
    write_weights(folder / WEIGHTS, model.state_dict())
    return {
        "folder": folder, "truth": truth, "model": model, "detections": detections, "document": document
    }  # fmt: skip


def flags(folder: Path, *more: str) -> list[str]:
    coco = ["--evaluation.coco", f"{folder}/annotations.json", "--evaluation.images", f"{folder}/images"]
    return ["--init", f"{folder}/{WEIGHTS}", "--evaluate-only", "--json", *coco, *more]


def scores_of(folder: Path, out: Path, *more: str, ranks: int = 1, mode: str = "none") -> dict[str, float]:
    ended = start(folder, out, *flags(folder, *more), ranks=ranks, mode=mode)
    assert ended.codes == [0] * ranks, ended.outputs
    found: dict[str, float] = json.loads(ended.outputs[0].splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def scores(files: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return scores_of(files["folder"], tmp_path_factory.mktemp("run"))


def predicted(files: dict[str, Any], number: int, boxes: list[list[float]]) -> np.ndarray:
    pixels = cv2.imread(str(files["folder"] / "images" / f"{number}.png"))[..., ::-1]
    corners = np.array(boxes)
    corners[:, 2:] += corners[:, :2]
    return sa1b.predict(files["model"], np.ascontiguousarray(pixels), boxes=corners).masks


def test_box_prompts_give_the_mean_iou_that_numpy_finds_over_all_masks_but_crowds(
    files: dict[str, Any], scores: dict[str, float]
) -> None:
    ious, sizes = [], []
    for number, of_image in files["truth"].items():
        found = predicted(files, number, [box for _, box in of_image])
        for mask, (true, _) in zip(found, of_image, strict=True):
            ious.append((mask & true).sum() / (mask | true).sum())
            sizes.append(0 if true.sum() < 32**2 else 1 if true.sum() < 96**2 else 2)
    assert scores["masks"] == len(ious) == 8
    assert scores["empty"] == 1
    assert scores["miou_box"] == pytest.approx(np.mean(ious), abs=1e-3)
    for size, name in enumerate(("small", "medium", "large")):
        own = [iou for iou, of in zip(ious, sizes, strict=True) if of == size]
        assert scores[f"masks_{name}"] == len(own)
        if own:
            assert scores[f"miou_box_{name}"] == pytest.approx(np.mean(own), abs=1e-3)
    assert scores["miou_box_oracle"] >= scores["miou_box"]
    assert scores["miou_1_click_oracle"] >= scores["miou_1_click"] > 0


@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_ranks_do_not_change_a_digit(
    files: dict[str, Any], scores: dict[str, float], tmp_path: Path, mode: str, ranks: int
) -> None:
    assert scores_of(files["folder"], tmp_path, ranks=ranks, mode=mode) == scores


def test_the_command_needs_no_dataset_and_prints_a_line(
    files: dict[str, Any], scores: dict[str, float]
) -> None:
    folder = files["folder"]
    sizes = FLAGS[FLAGS.index("--model.image-size") : FLAGS.index("--model.drop-path")]
    command = [sys.executable, "sa1b/train.py", "--preset", "tiny", *sizes, *flags(folder)]
    command.remove("--json")
    done = processes.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{scores['miou_box']:.3f} (box, oracle {scores['miou_box_oracle']:.3f})" in done.stdout
    assert "on 8 masks; left out: masks without a pixel 1" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("annotations"), "no field or image 'annotations'"),
        (lambda one: one["images"][0].update(height=float("nan")), "cannot convert float NaN"),
        (lambda one: one["images"][0].pop("height"), "no field or image 'height'"),
        (lambda one: one["images"][0].update(width="wide"), "'wide'"),
        (lambda one: one["annotations"][1].update(image_id=5), "no field or image 5"),
        (lambda one: one["annotations"].clear(), "has no annotations other than crowds"),
        (lambda one: one["images"][1].update(file_name="gone.png"), "lacks 1 of the 3 images .* gone.png"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    files: dict[str, Any], tmp_path: Path, change: Any, message: str
) -> None:
    document = json.loads(json.dumps(files["document"]))
    change(document)
    (tmp_path / "annotations.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"--evaluation.(coco.*annotations.json|images).*{message}"):
        read_coco(tmp_path / "annotations.json", files["folder"] / "images")


DETECTION = {"image_id": 11, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--evaluation.detections .*detections.json: Expecting property name"),
        ({}, "has no detections"),
        ([], "--evaluation.detections .*detections.json: has no detections"),
        ([DETECTION | {"image_id": 7}], "--evaluation.detections .*detections.json: no field or image 7"),
    ],
)
def test_detections_that_do_not_fit_are_refused(
    files: dict[str, Any], tmp_path: Path, content: Any, message: str
) -> None:
    path, folder = tmp_path / "detections.json", files["folder"]
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=message):
        read_coco(folder / "annotations.json", folder / "images", path)


@pytest.mark.parametrize("missing", ["annotations.json", "detections.json"])
def test_a_file_that_is_not_there_is_refused_with_its_flag(
    files: dict[str, Any], tmp_path: Path, missing: str
) -> None:
    folder = files["folder"]
    given = {"annotations.json": folder / "annotations.json", "detections.json": folder / "detections.json"}
    flag = "--evaluation.coco" if missing == "annotations.json" else "--evaluation.detections"
    given[missing] = tmp_path / missing
    with pytest.raises(UsageError, match=f"{flag} .*{missing}: .*No such file or directory"):
        read_coco(given["annotations.json"], folder / "images", given["detections.json"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [1, 2, 3]}, "annotation 1 of image 11: could not broadcast"),
        (
            {"segmentation": {"size": [4, 4], "counts": "`0"}},
            "annotation 1 of image 11: its mask is of an image of .4, 4.",
        ),
        ({"segmentation": {"size": list(SIZES[0]), "counts": [5, 10]}}, "annotation 1 of image 11: .*runs"),
        ({"segmentation": [3]}, "annotation 1 of image 11: "),
        ({"bbox": None}, "annotation 1 of image 11: 'NoneType' object is not iterable"),
        ({"bbox": [1, 2, None, 4]}, "annotation 1 of image 11: .* not 'NoneType'"),
    ],
)
def test_an_annotation_that_cannot_be_read_is_named_with_its_file(
    files: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    document = json.loads(json.dumps(files["document"]))
    document["annotations"][0].update(change)
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(document))
    first = read_coco(path, files["folder"] / "images")[0]
    with pytest.raises(CocoError, match=f"--evaluation.coco: .*{message}"):
        load_image(first)


@pytest.mark.parametrize("mode", ["none", "ddp"])
def test_an_image_that_does_not_decode_ends_the_command_with_its_name(
    files: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for path in (files["folder"] / "images").iterdir():
        (folder / path.name).write_bytes(path.read_bytes() if path.stem != "12" else b"no image")
    ranks = 1 if mode == "none" else 2
    more = ("--evaluation.images", str(folder))
    ended = start(files["folder"], tmp_path / "run", *flags(files["folder"], *more), ranks=ranks, mode=mode)
    assert ended.codes[-1] == 1
    assert f"--evaluation.images: {folder}/12.png cannot be decoded" in ended.outputs[-1]
    assert "Traceback" not in ended.outputs[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coco": Path("a.json")}, "--evaluation.coco a.json: needs --evaluation.images; pass both"),
        ({"images": Path("a")}, "--evaluation.images a: needs --evaluation.coco; pass both"),
        (
            {"detections": Path("a.json")},
            "--evaluation.detections a.json: needs --evaluation.coco; pass both",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvaluationConfig(**settings)
