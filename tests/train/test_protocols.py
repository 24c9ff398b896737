"""The scores of --evaluate-only by the protocol sam, compared with a loop of clicks over the public model, and of
detections, compared with pycocotools.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.nn import functional

import sa1b
import sa1b.masks
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from tests import kit
from tests.train.command import start
from tests.train.inside import MODEL, make_root, train

SIZE = 64
HOW = ("protocol", "clicks", "masks_per_image")
SIZES = [(90, 120), (200, 150), (64, 64)]
THREE, ONE = slice(1, 4), slice(0, 1)  # candidates for one prompt, and for more
FIGURES = ("1_click", "3_clicks", "5_clicks", "box", "1_click_oracle", "box_oracle")


class Truth(NamedTuple):
    """An image uint8 [height, width, 3], and its masks bool with their boxes x0, y0, x1, y1."""

    pixels: np.ndarray
    masks: list[np.ndarray]
    boxes: list[list[float]]


# The rules of docs/evaluation.md


def depths(region: np.ndarray) -> np.ndarray:
    """Squared distance of each pixel from the nearest one outside; the border of the image is outside."""
    padded = np.pad(region, 1).astype(np.uint8)
    found = cv2.distanceTransform(padded, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1]
    return np.rint(found.astype(np.float64) ** 2).astype(np.int64)


def next_click(predicted: np.ndarray, truth: np.ndarray, clicked: np.ndarray) -> tuple[int, int, int]:
    """Column, row and label; the label -1 if no wrong pixel is left to click."""
    missing, surplus = (depths(one) * ~clicked for one in (truth & ~predicted, predicted & ~truth))
    error = missing if missing.max() > surplus.max() else surplus
    row, column = np.unravel_index(error.argmax(), error.shape)  # of equals, the first in row-major order
    if not error[row, column]:
        return 0, 0, -1
    return int(column), int(row), int(truth[row, column])


class Prompted:
    """The public model on one image."""

    @torch.no_grad()
    def __init__(self, model: Sam, pixels: np.ndarray) -> None:
        self.model, self.source = model, pixels.shape[:2]
        self.features = sa1b.embed_image(model, pixels).features
        self.taken = sa1b.masks.framed_size(*self.source, SIZE)

    @torch.no_grad()
    def answer(
        self, at: Any, labels: Any, which: slice, low: torch.Tensor | None = None
    ) -> tuple[np.ndarray, torch.Tensor, int]:
        """Masks bool [K, height, width], their logits [1, K, R, R], and the best one by predicted IoU."""
        scale = np.array(self.taken[::-1]) / self.source[::-1]
        points = ((np.array(at, np.float64).reshape(1, -1, 2) + 0.5) * scale - 0.5).astype(np.float32)
        logits, iou = self.model.decode(
            self.features, torch.zeros(1, dtype=torch.int64), torch.from_numpy(points), torch.tensor([labels]), low,
            candidates=which,
        )  # fmt: skip
        large = functional.interpolate(logits, (SIZE, SIZE), mode="bilinear", align_corners=False)
        part = large[..., : self.taken[0], : self.taken[1]]
        masks = functional.interpolate(part, self.source, mode="bilinear", align_corners=False)
        return masks[0].numpy() > 0, logits, int(iou[0].argmax())


def iou(mask: np.ndarray, truth: np.ndarray) -> float:
    return float((mask & truth).sum() / (mask | truth).sum())


def scored(model: Sam, pixels: np.ndarray, truth: np.ndarray, box: list[float]) -> dict[str, float]:
    """IoU of one mask after each prompt."""
    prompted, found = Prompted(model, pixels), {}
    masks, _, best = prompted.answer(box, [2, 3], THREE)
    found["box"], found["box_oracle"] = iou(masks[best], truth), max(iou(mask, truth) for mask in masks)
    answer, clicked, low = np.zeros_like(truth), np.zeros_like(truth), None
    at, labels = [], []
    for number in range(1, 6):
        column, row, label = next_click(answer, truth, clicked)
        clicked[row, column] |= label >= 0
        at.append((column, row))
        labels.append(label)
        masks, logits, best = prompted.answer(
            [*at, (0, 0)], [*labels, -1], THREE if number == 1 else ONE, low
        )
        answer, low = masks[best], logits[:, best : best + 1]
        found[f"{number}_click" if number == 1 else f"{number}_clicks"] = iou(answer, truth)
        if number == 1:
            found["1_click_oracle"] = max(iou(mask, truth) for mask in masks)
    return found


def expected(model: Sam, truths: list[Truth]) -> dict[str, float]:
    rows = [
        (scored(model, one.pixels, mask, box), mask.sum())
        for one in truths
        for mask, box in zip(*one[1:], strict=True)
    ]
    limits = {"": (0, 1e9), "_small": (0, 32**2), "_medium": (32**2, 96**2), "_large": (96**2, 1e9)}
    found: dict[str, float] = {}
    for suffix, (low, high) in limits.items():
        own = [scores for scores, area in rows if low <= area < high]
        found[f"masks{suffix}"] = len(own)
        found |= {
            f"miou_{name}{suffix}": float(np.mean([one[name] for one in own])) for name in FIGURES if own
        }
    return found


# Files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights, a dataset directory with a view, and a file of annotations in COCO's format with its images."""
    made = tmp_path_factory.mktemp("protocols")
    torch.manual_seed(7)  # the best of three candidates differs between masks
    sizes = {"image_size": SIZE, "width": 32, "depth": 2, "heads": 2, "global_blocks": (1,), "window": 2}
    weights = Sam(ModelConfig(**sizes, channels=32, pixel_features=8)).state_dict()
    write_weights(made / "sam.pth", weights)
    fed = {name: value * (30 if ".mask_downscaling.6." in name else 1) for name, value in weights.items()}
    write_weights(made / "fed.pth", fed)  # the fed back mask decides much
    parts = ("similarity.", *(f"prompt_encoder.{one}" for one in ("mask_", "pe_layer", "point", "no")))
    for name in (name for name in weights if name.startswith(parts)):
        weights[name] *= (
            0.01  # masks hardly change with a click: the same error is left, but not clicked again
        )
    write_weights(made / "slow.pth", weights)
    make_root(made, 5)
    kit.run("view", made / "root", "--masks-where", "area > 0", "--name", "all")
    write_coco(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Sam:
    return sa1b.load_model(folder / "sam.pth")


def write_coco(folder: Path) -> None:
    (folder / "images").mkdir()
    random, images, annotations = np.random.default_rng(0), [], []
    for number, (height, width) in enumerate(SIZES, 11):
        small = random.integers(0, 256, (9, 9, 3), np.uint8)
        cv2.imwrite(str(folder / "images" / f"{number}.png"), cv2.resize(small, (width, height)))
        images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        for crowd, (x, y, a, b) in enumerate(
            [(30, 30, 25, 20), (45, 40, 12, 9), (20, 40, 9, 9)][: number - 10][::-1]
        ):
            mask = cv2.ellipse(np.zeros((height, width), np.uint8), (x, y), (a, b), 0, 0, 360, 1, -1)
            coded = coco_mask.encode(np.asfortranarray(mask))
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": int(crowd == 2),
                 "bbox": coco_mask.toBbox(coded).tolist(), "area": int(mask.sum()),
                 "segmentation": {"size": [height, width], "counts": coded["counts"].decode()}}
            )  # fmt: skip
    annotations.append(
        {
            **annotations[0],
            "id": 99,
            "area": 0,
            "segmentation": {"size": list(SIZES[0]), "counts": [90 * 120]},
        }
    )
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "annotations.json").write_text(json.dumps(document))


def of_coco(folder: Path, document: dict[str, Any]) -> Iterator[Truth]:
    """Without crowds and empty masks."""
    for image in document["images"]:
        pixels = cv2.imread(str(folder / "images" / image["file_name"]))[..., ::-1]
        own = [
            one
            for one in document["annotations"]
            if one["image_id"] == image["id"] and not one["iscrowd"] and one["area"]
        ]
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in own)]
        yield Truth(
            np.ascontiguousarray(pixels), [coco_mask.decode(one["segmentation"]) == 1 for one in own], boxes
        )


def of_root(root: Path) -> Iterator[Truth]:
    for sample in sa1b.open(root):
        runs = sample.annotations.runs()
        masks = [mask == 1 for mask in sa1b.masks.rasterize(runs)]
        boxes = [[x, y, x + w - 1, y + h - 1] for x, y, w, h in sa1b.masks.bbox(runs).tolist()]
        yield Truth(np.asarray(sample.image), masks, boxes)


def command(folder: Path, *words: object, weights: str = "sam.pth") -> Any:
    return train(*MODEL, "--init", folder / weights, "--evaluate-only", "--json", *words).json


def coco_flags(folder: Path, annotations: Path | None = None) -> tuple[object, ...]:
    return (
        "--evaluation.coco",
        annotations or folder / "annotations.json",
        "--evaluation.images",
        folder / "images",
    )


@pytest.mark.parametrize("weights", ["sam.pth", "slow.pth"])
def test_scores_on_a_view_are_those_of_the_clicks_of_the_page(
    weights: str, folder: Path, tmp_path: Path
) -> None:
    model = sa1b.load_model(folder / weights)
    view = ("--data.root", folder / "root", "--evaluation.view", "all", "--out", tmp_path)
    words = (*view, "--evaluation.protocol", "sam", "--data.micro-batch", 2)
    found = command(folder, *words, weights=weights)
    truths = list(of_root(folder / "root"))
    assert [found.pop(name) for name in HOW] == ["sam", "centres", 16]
    assert found == pytest.approx(expected(model, truths) | {"empty": 0, "damaged": 0}, abs=1e-8)
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert sorted(line["image_id"] for line in lines) == [
        sample.image_id for sample in sa1b.open(folder / "root")
    ]
    for line, truth in zip(sorted(lines, key=lambda line: line["image_id"]), truths, strict=True):
        prompted = Prompted(model, truth.pixels)
        for one, mask in zip(line["masks"], truth.masks, strict=True):
            column, row, _ = next_click(np.zeros_like(mask), mask, np.zeros_like(mask))
            masks, _, best = prompted.answer([(column, row), (0, 0)], [1, -1], THREE)
            assert one["point"] == [column + 0.5, row + 0.5]
            assert one["iou"] == pytest.approx(iou(masks[best], mask), abs=1e-4)
            assert (coco_mask.decode(one["segmentation"]) == masks[best]).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_on_annotations_are_those_of_the_clicks_of_the_page(
    ranks: int, folder: Path, model: Sam, tmp_path: Path
) -> None:
    wanted = expected(model, list(of_coco(folder, json.loads((folder / "annotations.json").read_text()))))
    found = evaluated(folder, tmp_path, ranks, *coco_flags(folder))
    assert [found.pop(name) for name in HOW] == ["sam", "centres", None]
    assert found == pytest.approx(wanted | {"empty": 1}, abs=1e-8)


def evaluated(folder: Path, out: Path, ranks: int, *words: object, weights: str = "sam.pth") -> Any:
    if ranks == 1:
        return command(folder, *words, "--out", out, weights=weights)
    given = ("--init", folder / weights, "--evaluate-only", "--json", *words)
    ended = start(folder / "root", out, *map(str, given), ranks=ranks, mode="ddp")
    assert ended.codes == [0] * ranks, ended.outputs
    return json.loads(ended.outputs[0].splitlines()[-1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_detections_give_the_average_precision_of_pycocotools(
    ranks: int, folder: Path, tmp_path: Path
) -> None:
    """Masks of a model with random weights fit no true mask, so that its masks for the true boxes are the truth."""
    document, model = (
        json.loads((folder / "annotations.json").read_text()),
        sa1b.load_model(folder / "fed.pth"),
    )
    random, boxes = np.random.default_rng(1), []

    def coded(image: dict[str, Any], box: list[float]) -> dict[str, Any]:
        prompted = Prompted(
            model, np.ascontiguousarray(cv2.imread(str(folder / "images" / image["file_name"]))[..., ::-1])
        )
        corners = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
        _, logits, best = prompted.answer(corners, [2, 3], THREE)
        masks, _, _ = prompted.answer(corners, [2, 3], ONE, logits[:, best : best + 1])
        found = coco_mask.encode(np.asfortranarray(masks[0].astype(np.uint8)))
        return {**found, "counts": found["counts"].decode()}

    images = {one["id"]: one for one in document["images"]}
    document["annotations"] = [one for one in document["annotations"] if one["area"]]
    for one in document["annotations"]:
        one["segmentation"] = coded(images[one["image_id"]], one["bbox"])
        one["area"] = int(coco_mask.area(one["segmentation"]))
        for reach in np.linspace(0, 8, 10):  # so that IoUs lie around all thresholds
            moved = (np.array(one["bbox"]) + random.uniform(-reach, reach, 4)).clip(0).tolist()
            score = round(random.random(), 3)
            boxes.append({"image_id": one["image_id"], "category_id": 1, "bbox": moved, "score": score})
    for name, content in (("annotations.json", document), ("boxes.json", boxes)):
        (tmp_path / name).write_text(json.dumps(content))
    given = (
        *coco_flags(folder, tmp_path / "annotations.json"),
        "--evaluation.detections",
        tmp_path / "boxes.json",
    )
    found = evaluated(folder, tmp_path / "out", ranks, *given, weights="fed.pth")
    results = [{**one, "segmentation": coded(images[one["image_id"]], one["bbox"])} for one in boxes]
    for one in results:
        del one["bbox"]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(tmp_path / "annotations.json"))
        judged = COCOeval(truth, truth.loadRes(results), "segm")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    names = ("ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large")
    assert found == pytest.approx(dict(zip(names, judged.stats[:6].tolist(), strict=True)), abs=1e-9)
    assert 0 < found["ap"] < 1
