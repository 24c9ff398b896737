"""Evaluation on a COCO-format annotation file, for example to reproduce published tables.

    sa1b train --preset vit_h --init sam_vit_h_4b8939.pth --evaluate-only
        --evaluation.coco instances_val2017.json --evaluation.images val2017

By default masks are scored by the protocol of sa1b.sam.protocol, with the annotations' boxes as box prompts.
The result is the mean IoU by prompt and by COCO's sizes. With --evaluation.detections, a file of COCO results
with boxes ([{"image_id", "category_id", "bbox", "score"}, ...]), these boxes are the prompts, and pycocotools
computes the average precision of the masks.

Box prompts have the form of the published code: x, y, x + width, y + height. Crowds are left out. Each rank
evaluates every world_size-th image.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from sa1b.arguments import BadValue
from sa1b.engine.config import Config
from sa1b.engine.precision import autocast
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import Sa1bError, UsageError
from sa1b.masks import coco
from sa1b.masks.raster import rasterize
from sa1b.sam.prediction import framed
from sa1b.sam.protocol import PROMPTS, BoxMasks, ImageTruth, SamProtocol, Score
from sa1b.sam.targets import Targets

_AP = ("ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large")  # names of the first figures of COCOeval


class CocoError(Sa1bError):
    """An image or a mask that cannot be read or decoded; the message names it."""


@dataclass(frozen=True, slots=True)
class EvaluatedImage:
    """An image of an annotation file, its size in pixels."""

    id: int
    path: Path
    height: int
    width: int
    truth: Any  # the COCO object of pycocotools
    annotations: list[dict[str, Any]]  # entries of its masks, without crowds
    detections: list[dict[str, Any]]  # entries of its boxes in the other file


def read_coco(annotations: Path, folder: Path, detections: Path | None = None) -> list[EvaluatedImage]:
    """The images of an annotation file, by id. UsageError names the flag and the file of another format, or
    with missing images.
    """
    from pycocotools.coco import COCO

    images: dict[int, EvaluatedImage] = {}
    with _named(f"--evaluation.coco {annotations}"):
        with contextlib.redirect_stdout(io.StringIO()):  # hides what pycocotools prints
            truth = COCO(str(annotations))
        for number, entry in truth.imgs.items():
            path, size = folder / entry["file_name"], (int(entry["height"]), int(entry["width"]))
            images[number] = EvaluatedImage(number, path, *size, truth, [], [])
        for entry in truth.dataset["annotations"]:
            if not entry.get("iscrowd"):
                images[entry["image_id"]].annotations.append(entry)
        if not any(image.annotations for image in images.values()):
            raise BadValue("has no annotations other than crowds")
    if detections is not None:
        with _named(f"--evaluation.detections {detections}"):
            for entry in json.loads(detections.read_bytes()):
                images[entry["image_id"]].detections.append(entry)
            if not any(image.detections for image in images.values()):
                raise BadValue("has no detections")
    if missing := [image.path for image in images.values() if not image.path.is_file()]:
        raise UsageError(
            f"--evaluation.images {folder}: lacks {len(missing):,} of the {len(images):,} images of "
            f"{annotations}, such as {missing[0].name}; pass the folder that holds all of them"
        )
    return [images[number] for number in sorted(images)]


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        what = f"no field or image {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{where}: {what}; pass a file in COCO's format, such as instances_val2017.json or its results"
        ) from None


@torch.no_grad()
def evaluate_coco(
    module: nn.Module, images: list[EvaluatedImage], config: Config, rank_info: RankInfo
) -> dict[str, float]:
    """The scores of a model on the images of `read_coco`. Collective; the same on all ranks.

    The wrapped `Interactive` is prompted with the annotations, or with detections if there are any: then the
    result is "ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large" of the masks. Else it is the scores
    of `Score.result` and "empty", the number of annotations without a pixel, which are left out. CocoError:
    an image or a mask cannot be read or decoded.
    """
    module.eval()
    device, detected = rank_info.device, config.evaluation.detections is not None
    score, results, empty = Score(device, PROMPTS), list[dict[str, Any]](), 0
    none = torch.zeros(0, device=device)
    # All ranks call the model equally often: one without an image of its own repeats one that does not count.
    ranks = rank_info.world_size
    numbers = range(rank_info.rank, -(-len(images) // ranks) * ranks, ranks)
    shown = tqdm(numbers, desc="evaluate", unit="image", disable=rank_info.rank > 0)
    with ThreadPoolExecutor(1) as pool:
        loaded = (pool.submit(load_image, images[number % len(images)]) for number in numbers)
        # A pair of the image and the next one, which is read meanwhile.
        for number, (ready, _) in zip(shown, pairwise(chain(loaded, [Future[Loaded]()])), strict=True):
            image, pixels, truth, areas = ready.result()
            square, taken = framed(pixels, config.image_size, device)
            # A protocol takes only the sizes of the targets.
            targets = Targets(none, none, none, none, none, none, taken.to(device))
            call = partial(module, square, targets, none)
            with autocast(config.parallel.precision, device):
                if detected:
                    boxes = np.array([[*map(float, one["bbox"])] for one in image.detections]).reshape(-1, 4)
                    boxes[:, 2:] += boxes[:, :2]
                    masks = call(protocol=BoxMasks(boxes, (image.height, image.width)))["masks"]
                    if number < len(images) and len(boxes):
                        results += _results(image, masks.cpu().numpy())
                    continue
                filled = truth.masks.any(axis=(1, 2))
                counted = ImageTruth(truth.masks[filled], truth.boxes[filled])
                outputs = call(protocol=SamProtocol([counted]))
                if number < len(images):
                    sizes = torch.from_numpy(areas[filled]).to(device)
                    score.add(outputs["intersections"], outputs["unions"], sizes, torch.ones_like(sizes))
                    empty += int((~filled).sum())
    if detected:
        return _average_precision(images[0].truth, [*chain(*rank_info.gather(results))])
    if rank_info.world_size > 1:
        dist.all_reduce(score.sums)
    return {**score.result(), "empty": sum(rank_info.gather(empty))}


def detection_line(scores: Mapping[str, Any]) -> str:
    """Average precisions in one line."""
    labels = ("AP", "AP50", "AP75", "small", "medium", "large")
    return ", ".join(f"{label} {scores[name]:.3f}" for name, label in zip(_AP, labels, strict=True))


Loaded = tuple[EvaluatedImage, npt.NDArray[np.uint8], ImageTruth, npt.NDArray[np.int64]]


def load_image(image: EvaluatedImage) -> Loaded:
    """Pixels uint8 [height, width, 3] RGB of an image, its masks and boxes, its areas int64 [N]. CocoError:
    the image or an annotation cannot be decoded.
    """
    data = np.fromfile(image.path, np.uint8)
    # Annotations refer to the stored pixels: the EXIF orientation is ignored.
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    decoded = cv2.imdecode(data, flags) if len(data) else None
    if decoded is None:
        raise CocoError(f"--evaluation.images: {image.path} cannot be decoded; download it again")
    if decoded.shape[:2] != (image.height, image.width):
        raise CocoError(
            f"--evaluation.images: {image.path} has {decoded.shape[1]} x {decoded.shape[0]} pixels, its "
            f"annotation {image.width} x {image.height}; pass the images that the annotations belong to"
        )
    masks = np.zeros((len(image.annotations), image.height, image.width), np.bool_)
    boxes = np.zeros((len(image.annotations), 4))
    areas = np.zeros(len(image.annotations), np.int64)
    for i, annotation in enumerate(image.annotations):
        try:
            coded = image.truth.annToRLE(annotation)
            if list(coded["size"]) != [image.height, image.width]:
                raise BadValue(f"its mask is of an image of {coded['size']} (height, width)")
            # Not pycocotools' decode, which fills a mask whose runs end too early from memory of others.
            masks[i] = rasterize(coco.decode([coded["counts"]], image.height, image.width), dtype=np.bool_)[0]
            boxes[i] = [*map(float, annotation["bbox"])]  # numpy would take null for NaN, a number for four
            areas[i] = int(annotation["area"]) if "area" in annotation else masks[i].sum()
        except Exception as error:  # pycocotools raises Exception itself
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise CocoError(
                f"--evaluation.coco: annotation {annotation.get('id')} of image {image.id}: {what}; correct "
                "the file"
            ) from None
    boxes[:, 2:] += boxes[:, :2]
    pixels = np.ascontiguousarray(decoded[..., ::-1], np.uint8)  # OpenCV's order is blue, green, red
    return image, pixels, ImageTruth(masks, boxes), areas


def _results(image: EvaluatedImage, masks: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    """COCO results: the masks of an image's detections."""
    from pycocotools import mask

    coded = mask.encode(np.asfortranarray(masks.transpose(1, 2, 0), np.uint8))
    return [
        {"image_id": image.id, "segmentation": runs} | {key: box[key] for key in ("category_id", "score")}
        for box, runs in zip(image.detections, coded, strict=True)
    ]


def _average_precision(truth: Any, results: list[dict[str, Any]]) -> dict[str, float]:
    if not results:
        return dict.fromkeys(_AP, 0.0)
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        judged = COCOeval(truth, truth.loadRes(results), "segm")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return dict(zip(_AP, map(float, judged.stats[: len(_AP)]), strict=True))
