"""Small sources and roots for tests: 64 x 48 pixels, a handful of masks, made in milliseconds."""

import io
import json
import random
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import simplejpeg

import sa1b
from sa1b import masks as runs_of_masks
from tests import kit

HEIGHT, WIDTH = 48, 64


def picture(rng):
    """JPEG bytes with some detail."""
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = np.kron(coarse, np.ones((8, 8, 1), np.uint8)) ^ rng.integers(0, 8, (HEIGHT, WIDTH, 3), np.uint8)
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90, "RGB", "420")


def masks(rng, count):
    """Random rectangles as runs."""
    pieces = []
    for _ in range(count):
        x, y = int(rng.integers(1, WIDTH - 8)), int(rng.integers(1, HEIGHT - 8))
        w, h = int(rng.integers(1, WIDTH - x)), int(rng.integers(1, HEIGHT - y))
        runs = [x * HEIGHT + y, *[h, HEIGHT - h] * (w - 1), h]
        pieces.append(np.array([*runs, HEIGHT * WIDTH - sum(runs)], np.uint32))
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
    runs = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
    return runs_of_masks.Runs(runs, offsets.astype(np.int64), HEIGHT, WIDTH)


def annotation(image_id, rng):
    """An annotation file in SA-1B's usual form, as a document."""
    runs = masks(rng, int(rng.integers(1, 7)))
    areas, boxes = runs_of_masks.area(runs).tolist(), runs_of_masks.bbox_sa1b(runs).tolist()
    annotations = [
        {
            "bbox": [float(v) for v in box] if i else box,
            "area": area,
            "segmentation": {"size": [HEIGHT, WIDTH], "counts": string.decode()},
            "predicted_iou": float(rng.uniform(0.88, 1.02)),
            "point_coords": [[box[0] + 0.5, float(box[1])]],
            "crop_box": [0.0, 0.0, float(WIDTH), float(HEIGHT)],
            "id": image_id * 100 + i,
            "stability_score": float(rng.uniform(0.95, 1.0)),
        }
        for i, (area, box, string) in enumerate(zip(areas, boxes, runs_of_masks.encode(runs), strict=True))
    ]
    image = {"image_id": image_id, "width": WIDTH, "height": HEIGHT, "file_name": f"sa_{image_id}.jpg"}
    return {"image": image, "annotations": annotations}


def pairs(ids, seed=0):
    """image id -> (JPEG, annotation file) in the usual form."""
    rng = np.random.default_rng(seed)
    return {i: (picture(rng), json.dumps(annotation(i, rng)).encode()) for i in ids}


def odd_pairs(first_id, seed=1):
    """Annotation files that are readable but not in the usual form; one has a warning about its area."""
    usual = pairs(range(first_id, first_id + 7), seed)
    texts = [json.loads(text) for _, text in usual.values()]
    texts[0]["annotations"][0]["colour"] = "blue"  # an unknown key
    texts[1] = {"annotations": texts[1]["annotations"], "image": texts[1]["image"]}  # another order
    segmentation = texts[2]["annotations"][0]["segmentation"]
    *_, last = segmentation["counts"]  # the last number, with one needless character
    more = chr(ord(last) + 32) + ("O" if (ord(last) - 48) & 16 else "0")
    segmentation["counts"] = segmentation["counts"][:-1] + more
    texts[3]["annotations"][0]["area"] += 1
    del texts[4]["annotations"][0]["stability_score"]
    texts[5]["annotations"] = []
    encoded = [json.dumps(text).encode() for text in texts]
    encoded[6] = json.dumps(texts[6], separators=(",", ":")).encode()  # other white space, same columns
    return {i: (jpg, text) for (i, (jpg, _)), text in zip(usual.items(), encoded, strict=True)}


def write_source(path, content, seed=0):
    """A source tar as downloaded: gzip, `./`, shuffled. `content` as from `pairs`."""
    members = [
        (f"./sa_{i}.{ending}", data)
        for i, pair in content.items()
        for ending, data in zip(("jpg", "json"), pair, strict=True)
    ]
    random.Random(seed).shuffle(members)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def make_root(root, sources, options):
    """Make a finished dataset directory; `options` are those of `sa1b.reshard`, or have its fields."""
    if not isinstance(options, dict):
        options = asdict(options)
        options["no_index_runs"] = not options.pop("index_runs")
    made = sa1b.reshard(sources, root, workers=1, quiet=True, **options)
    assert made.exit_code in (0, 3), made.text
    return root


ROOTS = {  # the options of reshard
    "plain": {"images_per_shard": 5},
    "no_index_runs": {"images_per_shard": 5, "no_index_runs": True},
    "keep_json": {"images_per_shard": 5, "keep_json": True},
    "image_size": {"images_per_shard": 5, "image_size": 32, "quality": 80},
    "annotations_only": {"images_per_shard": 5, "annotations_only": True},
}


def add_layer(root, name="round2", images=3, overwrite=False):
    """A layer that adds, replaces and, where there are three masks, hides one of each of the first images."""
    with tempfile.TemporaryDirectory() as folder:
        for sample in list(sa1b.open(root))[:images]:
            text = sample.annotations.to_json()
            kept = [one for number, one in enumerate(text["annotations"]) if number != 2]
            kept.append({**kept[-1], "id": max(one["id"] for one in text["annotations"]) + 1})
            text["annotations"] = kept
            Path(folder, f"sa_{sample.image_id}.json").write_text(json.dumps(text))
        more = ("--overwrite",) if overwrite else ()
        return kit.run(
            "layer", "add", root, folder, "--name", name, "--existing", "hide", "--json", *more
        ).json


def two_sources(folder: Path, more: Mapping[int, tuple[bytes, bytes]] = {}) -> list[Path]:
    """sa_000001.tar with odd annotation files among its pairs, and `more` pairs; and sa_000002.tar."""
    return [
        write_source(folder / "sa_000001.tar", {**pairs(range(100, 109)), **odd_pairs(200), **more}),
        write_source(folder / "sa_000002.tar", pairs(range(300, 303), seed=2), seed=2),
    ]
