"""What a view serves: images, their masks and their order, by streams."""

from pathlib import Path
from typing import Any

import numpy as np

import sa1b
from sa1b.shards.annotation import Annotations
from tests.kit import run
from tests.shards.tiny_source import make_root, pairs, write_source


def view(root: object, *words: object) -> Any:
    """What `sa1b view ROOT WORDS --json` says."""
    return run("view", root, *words, "--json").json


def served(root: object, which: str | Path | None = None, **options: Any) -> dict[int, list[int]]:
    """Image id -> ids of its masks, of all images of a view."""
    stream = sa1b.Stream(root, view=which, order="sequential", global_batch=1, image_size=32, **options)
    return {int(batch.ids[0]): batch.mask_ids.tolist() for batch in stream}


def order(root: object, which: str | Path | None = None, **options: Any) -> list[int]:
    """The image ids of a shuffled epoch."""
    options = {"global_batch": 8, "image_size": 32, "masks": 1, "seed": 3, **options}
    return [image_id for batch in sa1b.Stream(root, view=which, **options) for image_id in batch.ids.tolist()]


def grow(root: Path, ids: list[int]) -> Path:
    """Make a directory of these images, or add them to it, in a source of their own."""
    source = write_source(root.with_name(f"sa_{len(ids):06}.tar"), pairs(ids))
    return make_root(root, [source], {"images_per_shard": 5})


def fields(one: Annotations) -> list[dict[str, Any]]:
    """The fields of conditions, of each mask of an image."""
    corners = ("x", "y", "width", "height")
    columns = {
        **{f"bbox_{name}": one.bbox[:, i] for i, name in enumerate(corners)},
        **{f"crop_{name}": one.crop_box[:, i] for i, name in enumerate(corners)},
        **{f"point_{name}": one.point_coords[:, i] for i, name in enumerate("xy")},
        "area": one.area,
        "area_fraction": one.area / (one.width * one.height),
        "predicted_iou": one.predicted_iou,
        "stability_score": one.stability_score,
        "runs_count": one.runs_count,
        "mask_id": one.mask_id,
        "width": np.full(len(one), one.width),
        "height": np.full(len(one), one.height),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
