"""Golden values of dataset directories and batches: the inputs, and what the package computes from them.

`make` is called once, by make.py. `record` computes the values; each of `SECTIONS` has a part of them.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch
import zstandard
from pycocotools import mask as coco

import sa1b
from sa1b import masks as runs_of
from sa1b.errors import Sa1bError
from sa1b.hashing import Purpose, random_word, random_words
from sa1b.masks import grid, raster_torch
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from sa1b.shards.record import decode
from sa1b.stream.crops import CropGroup, MultiCrop
from sa1b.stream.order import Order
from sa1b.stream.transform import RandomCrop, ScaleJitter
from tests import kit, processes

Values = dict[str, Any]
TIME = 1_700_000_000  # modification time of sources, which task files have
SIZES = ((96, 128), (128, 96), (100, 150), (61, 90), (80, 80), (40, 200))  # height, width

# Inputs


def _drawn(image_id: int, size: tuple[int, int], count: int) -> Values:
    """An annotation file in SA-1B's usual form, with ellipses as masks."""
    height, width = size
    draw = np.random.default_rng(image_id)
    rows, columns = np.mgrid[:height, :width]
    annotations = []
    for number in range(count):
        y, x = int(draw.integers(0, height)), int(draw.integers(0, width))
        radii = draw.uniform(2, height / 2), draw.uniform(2, width / 2)
        pixels = ((rows - y) / radii[0]) ** 2 + ((columns - x) / radii[1]) ** 2 <= 1
        down, right = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
        box = [right[0], down[0], right[-1] - right[0], down[-1] - down[0]]
        kind = int if number == 0 else float
        counts = coco.encode(np.asfortranarray(pixels, np.uint8))["counts"].decode()
        annotations.append(
            {
                "bbox": [kind(value) for value in box],
                "area": int(pixels.sum()),
                "segmentation": {"size": [height, width], "counts": counts},
                "predicted_iou": float(draw.uniform(0.88, 1.02)),
                "point_coords": [[x + 0.0625, float(y)]],
                "crop_box": [0.0, 0.0, float(width), float(height)],
                "id": image_id * 100 + number,
                "stability_score": float(draw.uniform(0.95, 1)),
            }
        )
    image = {"image_id": image_id, "width": width, "height": height, "file_name": f"sa_{image_id}.jpg"}
    return {"image": image, "annotations": annotations}


def _jpeg(number: int, size: tuple[int, int]) -> bytes:
    coarse = np.random.default_rng([number, 1]).integers(0, 256, (7, 9, 3), np.uint8)
    pixels = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
    return simplejpeg.encode_jpeg(pixels, 85, "RGB", "420")


def _pairs() -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
    """Image id -> JPEG and annotation file, of two sources. Some are odd, and one cannot be used."""
    first = {i: [_jpeg(i, (48, 64)), _drawn(i, (48, 64), 1 + i % 5)] for i in range(100, 117)}
    first[109][1]["annotations"][0]["colour"] = "blue"  # an unknown key
    first[110][1] = {name: first[110][1][name] for name in ("annotations", "image")}  # another order
    segmentation = first[111][1]["annotations"][0]["segmentation"]
    *_, last = segmentation["counts"]  # the last number, with one needless character
    more = chr(ord(last) + 32) + ("O" if (ord(last) - 48) & 16 else "0")
    segmentation["counts"] = segmentation["counts"][:-1] + more
    first[112][1]["annotations"][0]["area"] += 1  # a warning
    del first[113][1]["annotations"][0]["stability_score"]
    first[114][1]["annotations"] = []
    text = {i: [jpeg, json.dumps(document).encode()] for i, (jpeg, document) in first.items()}
    text[115][1] = json.dumps(first[115][1], separators=(",", ":")).encode()
    text[116][1] = text[116][1][:200]  # cannot be read
    ids = [9000 + 7 * n % 13 for n in range(13)]
    second = {i: (SIZES[i % 6], 2 + i % 7) for i in ids}
    return text, {i: [_jpeg(i, s), json.dumps(_drawn(i, s, n)).encode()] for i, (s, n) in second.items()}


def _write_tar(path: Path, pairs: dict[int, list[bytes]], seed: int) -> Path:
    """As downloaded: gzip, `./`, shuffled; equal bytes each time."""
    members = [
        (f"./sa_{i}.{end}", data)
        for i, pair in pairs.items()
        for end, data in zip(("jpg", "json"), pair, strict=True)
    ]
    random.Random(seed).shuffle(members)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(buffer.getvalue(), 6, mtime=0))
    return path


def _write_coco(folder: Path) -> Path:
    """Masks with categories: run lengths, uncompressed run lengths, a polygon and a crowd."""
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number, size in enumerate(SIZES[:5]):
        name, pixels = f"{'ab'[number % 2]}/{number}.jpg", _jpeg(500 + number, size)
        if number == 4:
            name = "photo.png"
            pixels = cv2.imencode(".png", cv2.imdecode(np.frombuffer(pixels, np.uint8), 1))[1].tobytes()
        (folder / "images" / name).parent.mkdir(exist_ok=True)
        (folder / "images" / name).write_bytes(pixels)
        images.append(
            {"id": 70 + number, "file_name": name, "height": size[0], "width": size[1], "licence": number}
        )
        for one in _drawn(600 + number, size, 3)["annotations"]:
            of = {"id": one["id"], "image_id": 70 + number, "category_id": 1 + one["id"] % 2, "iscrowd": 0}
            annotations.append(
                {**of, "segmentation": one["segmentation"], "area": one["area"], "bbox": one["bbox"]}
            )
    annotations[0]["segmentation"] = [[10, 10, 50.5, 12, 40, 60, 11, 50]]
    pixels = coco.decode(annotations[1]["segmentation"]).T.reshape(-1)
    counts = np.diff([0, *(np.flatnonzero(np.diff(pixels)) + 1), len(pixels)]).tolist()
    annotations[1] |= {"iscrowd": 1, "segmentation": {"size": list(SIZES[0]), "counts": counts}}
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "hat", "supercategory": "clothes"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "mine.json").write_text(json.dumps(document, indent=1))
    return folder / "mine.json"


def _write_photos(folder: Path) -> None:
    """Images alone, with texts, fields and a mask in PNG beside them."""
    (folder / "cats").mkdir(parents=True)
    for number, name in enumerate(("cats/1.jpg", "cats/2.jpg", "sa_77.jpg", "3.png")):
        data = _jpeg(800 + number, SIZES[number])
        if name.endswith("png"):
            data = cv2.imencode(".png", cv2.imdecode(np.frombuffer(data, np.uint8), 1))[1].tobytes()
        (folder / name).write_bytes(data)
    (folder / "cats" / "1.txt").write_text("a cat on a mat\na hat\n")
    (folder / "cats" / "2.json").write_text(
        json.dumps({"caption": "two cats", "label": 3, "who": {"x": [1]}})
    )
    mask = np.zeros(SIZES[1], np.uint8)
    mask[20:60, 30:70] = 255
    (folder / "cats" / "2.png").write_bytes(cv2.imencode(".png", mask)[1].tobytes())


def _write_mirror(path: Path) -> None:
    """Two images in Parquet, with a text; the annotations as JSON text."""
    ids = (8001, 8002)
    columns = {
        "image": [{"bytes": _jpeg(i, SIZES[n]), "path": f"sa_{i}.jpg"} for n, i in enumerate(ids)],
        "annotations": [json.dumps(_drawn(i, SIZES[n], 3)["annotations"]) for n, i in enumerate(ids)],
        "caption": ["left", "right"],
    }
    path.parent.mkdir()
    pq.write_table(pa.table(columns), path)


def _dated(folder: Path) -> Path:
    """All files have the same date: task files have that of their source, and a checkout has its own."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (TIME, TIME))
    return folder


def make(folder: Path) -> None:
    first, second = _pairs()
    sources = folder / "sources"
    _write_tar(sources / "sa_000001.tar", first, 1)
    _write_tar(sources / "sa_000002.tar", second, 2)
    _write_coco(folder / "coco")
    _write_photos(folder / "photos")
    _write_mirror(folder / "mirror" / "part.parquet")
    changes = [_drawn(i, (48, 64), n) for i, n in ((100, 2), (101, 3), (104, 2))]
    for document in changes:
        document["annotations"][-1]["id"] += 50
    (folder / "changes").mkdir()
    for document in changes:
        name = document["image"]["file_name"].replace("jpg", "json")
        (folder / "changes" / name).write_text(json.dumps(document))
    (folder / "ids.txt").write_text("103\nsa_9004\nsa_9010.jpg\n106\n9001\n")
    captions = {"image_id": [*first, *second][:20], "caption": [f"text {n}" for n in range(20)]}
    pq.write_table(pa.table(captions), folder / "captions.parquet")
    texts = {"image_id": captions["image_id"] * 3, "text": [f"é {n}" for n in range(60)]}
    pq.write_table(pa.table(texts), folder / "texts.parquet")
    _dated(folder)
    root = folder / "root"
    _reshard(sorted(sources.iterdir()), root)
    _add_views(folder, root)
    _add_layer(folder, root)
    _reshard([folder / "coco" / "mine.json"], folder / "mine", images=folder / "coco" / "images")
    states = {name: _state(folder, name) for name in STATES}
    (folder / "states.json").write_text(json.dumps(states, indent=1) + "\n")


def _reshard(sources: list[Path], root: Path, **options: Any) -> Path:
    sa1b.reshard(sources, root, quiet=True, **{"images_per_shard": 5, "workers": 1, **options})
    return root


def _add_views(folder: Path, root: Path) -> None:
    with contextlib.chdir(folder):  # the path becomes part of the view
        kit.run("view", root, "--ids", "ids.txt", "--name", "five")
    kit.run("view", root, "--masks-where", MASKS_WHERE, "--images-where", "masks >= 1", "--name", "some")


def _add_layer(folder: Path, root: Path) -> None:
    kit.run("layer", "add", root, folder / "changes", "--name", "round2", "--existing", "replace")
    later = [folder / "changes" / "sa_104.json", "--name", "round3", "--existing", "hide", "--on", "round2"]
    kit.run("layer", "add", root, *later)


MASKS_WHERE = "stability_score >= 0.96 and area > 50"

# Values as JSON


def _sha(data: Any) -> str:
    """Of bytes, arrays and tensors with their type and shape, and of all else by its JSON."""
    if isinstance(data, torch.Tensor):
        data = data.numpy()
    if isinstance(data, np.ndarray):
        head = f"{data.dtype.str} {data.shape} ".encode()
        data = head + np.ascontiguousarray(data).tobytes()
    elif not isinstance(data, bytes):
        data = json.dumps(data, default=repr).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _fields(values: Any, names: str) -> Values:
    return {name: _sha(getattr(values, name)) for name in names.split()}


# What depends on the time, the version, the host or on who wrote the Parquet file, and words that people read.
_OWN = {"versions", "version", "mtime_ns", "date", "seconds", "message", "note"}
_OWN |= {"index_bytes", "index_sha256"}


def _normal(value: Any, folder: Path | None = None) -> Any:
    """A document without what differs from run to run; paths of `folder` are relative."""
    if isinstance(value, dict):
        return {name: "..." if name in _OWN else _normal(one, folder) for name, one in value.items()}
    if isinstance(value, list):
        return [_normal(one, folder) for one in value]
    return value.replace(str(folder), ".") if folder and isinstance(value, str) else value


def _document(data: bytes) -> Values:
    whole = json.loads(data)
    document = {
        **_normal(whole),
        "(order)": " ".join(whole),
        "(as json.dumps)": (json.dumps(whole, indent=1) + "\n").encode() == data,
    }
    if document["format"].startswith("sa1b-shards"):
        document["sources"] = sorted(document.get("sources", []))  # without digests, which versions change
    if document["format"].startswith("sa1b-layer"):
        document |= dict.fromkeys(("digest", "index", "document_sha256"), "...")
        document["parent"] = (document["parent"] or {}).get("name")
    return document


def _parquet(data: bytes) -> Values:
    """Columns with their types, metadata, and digests of the values."""
    table = pq.read_table(io.BytesIO(data))
    schema = {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in table.schema}
    metadata = {repr(name): repr(value) for name, value in (table.schema.metadata or {}).items()}
    metadata.pop(repr(b"ARROW:schema"), None)
    return {
        "rows": table.num_rows,
        "schema": _sha(schema),
        "metadata": _sha(metadata),
        "values": _sha({name: table[name].to_pylist() for name in table.column_names}),
    }


def _tar(data: bytes) -> Values:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name: _sha(tar.extractfile(one).read()) for one in tar if one.isfile()}


def _lines(data: bytes) -> list[Any]:
    return [_normal(json.loads(line)) for line in data.splitlines()]


def _value(name: str, data: bytes) -> Any:
    """The value of one file by the ending of its name."""
    if name.endswith(".parquet"):
        return _parquet(data)
    if name.endswith(".tar"):
        return {"shard": _sha(data), **_tar(data)}
    if name.endswith(".jsonl"):
        return _lines(data)
    if name.endswith(".json") and data.startswith(b'{\n "format"'):
        return _document(data)
    return _sha(data)


def _directory(root: Path, short: bool = False) -> Values:
    """The files of a dataset directory; with `short`, a digest of each value."""
    found = {name: _value(name, data) for name, data in sorted(kit.files(root).items())}
    return {name: _sha(value) for name, value in found.items()} if short else found


# Formats


def reshard(folder: Path, scratch: Path) -> Values:
    """A directory of the two tars, with views and layers, file by file."""
    root = _reshard(sorted((folder / "sources").iterdir()), scratch / "root")
    _add_views(folder, root)
    _add_layer(folder, root)
    schema = pq.read_schema(root / "sa1b-000001-0000.parquet")
    return _directory(root) | {"columns of an index": str(schema.remove_metadata()).splitlines()}


OPTIONS: dict[str, Values] = {
    "keep_json": {"keep_json": True},
    "image_size": {"image_size": 32, "quality": 80},
    "annotations_only": {"annotations_only": True},
    "no_index_runs": {"no_index_runs": True},
    "decode_images": {"decode_images": True, "images_per_shard": 1024},
    "rename": {"ignore": ["*1.tar"]},
}


def options(folder: Path, scratch: Path) -> Values:
    found = {}
    for name, flags in OPTIONS.items():
        renamed = {"rename": [f"{folder}/sources/sa_000002.tar=other"]} if name == "rename" else {}
        root = _reshard([folder / "sources"], scratch / name, **flags, **renamed)
        found |= {f"{name}/{key}": value for key, value in _directory(root, short=True).items()}
    root = _reshard([folder / "sources" / "sa_000001.tar"], scratch / "more")
    _reshard([folder / "sources" / "sa_000002.tar"], root)
    _reshard([], root, drop=["sa_000001"])
    return found | {f"drop/{key}": value for key, value in _directory(root, short=True).items()}


def forms(folder: Path, scratch: Path) -> Values:
    """Sources that are not tars of the download."""
    images = folder / "coco" / "images"
    cases: dict[str, tuple[Path, Values]] = {
        "COCO": (folder / "coco" / "mine.json", {"images": images}),
        "COCO, hashed ids": (folder / "coco" / "mine.json", {"images": images, "image_ids": "hash"}),
        "images alone": (folder / "photos", {"images_only": True}),
        "Parquet": (folder / "mirror", {}),
        "folder of pairs": (scratch / "pairs", {}),
        "images of a tar": (scratch / "photos.tar", {"images_only": True}),
    }
    for name in ("sa_000001", "sa_000002"):
        with tarfile.open(folder / "sources" / f"{name}.tar") as tar:
            tar.extractall(scratch / "pairs" / name, filter="data")
    with tarfile.open(scratch / "photos.tar", "w") as tar:
        for path in sorted((folder / "photos").rglob("*.*")):
            info = tarfile.TarInfo(str(path.relative_to(folder / "photos")))  # without date and owner
            info.size = path.stat().st_size
            tar.addfile(info, io.BytesIO(path.read_bytes()))
    found = {}
    for name, (source, flags) in cases.items():
        root = _reshard([source], scratch / name.replace(" ", "-"), **flags)
        found |= {f"{name}/{key}": value for key, value in _directory(root, short=True).items()}
        found[f"{name}/ids"] = [sample.image_id for sample in sa1b.open(root)]
    return found


def _samples(root: Path, **more: Any) -> Values:
    """What `sa1b.open` reads of each image."""
    found = {}
    for sample in sa1b.open(root, **more):
        a, pixels = sample.annotations, sample.masks()
        names = (
            "mask_id area bbox predicted_iou stability_score point_coords crop_box number_types rle rle_bytes"
        )
        document = {name: getattr(a, name).tolist() for name in f"{names} runs_count".split()}
        found[str(sample.image_id)] = {
            "size": [a.width, a.height, len(a)],
            "jpeg": _sha(bytes(sample.jpeg)),
            "numbers": _sha(document),
            "file": _sha(a.to_json()),
            "masks": _sha(np.asarray(pixels).astype(np.uint8)),
        }
    return found


def directory(folder: Path, scratch: Path) -> Values:
    """The directories that were written then: read, verified, and indexed again."""
    found = {}
    for name in ("root", "mine"):
        root = shutil.copytree(folder / name, scratch / name)
        found |= {f"{name}/{key}": value for key, value in _samples(root).items()}
        report = kit.run("verify", root, "--deep", "--json").json
        found[f"{name}/verify"] = _normal(report, scratch)
    root = scratch / "root"
    for layers in (["round2"], ["round2", "round3"]):
        changed = _samples(root, layers=layers)
        found |= {f"layers {' '.join(layers)}/{i}": changed[i] for i in ("100", "101", "104")}
    for member, (data, _) in _members(root / "sa1b-000001-0001.tar").items():
        if member.endswith(".masks"):
            content = zstandard.decompress(data)
            (size,) = struct.unpack_from("<Q", content)
            found[f"record/{member}"] = {
                "header": json.loads(content[8 : 8 + size]),
                "content": _sha(content),
                "decoded": decode(data).mask_id.tolist(),
            }
    for tasks in (False, True):
        copy = shutil.copytree(folder / "root", scratch / f"copy{tasks}")
        for path in [*copy.glob("*.parquet"), *copy.glob("samples-*"), copy / "dataset.json"]:
            path.unlink()
        if tasks:
            shutil.rmtree(copy / "tasks")
        kit.run("index", copy)
        shown = _directory(copy, short=True)
        found |= {f"index{' without tasks' * tasks}/{key}": value for key, value in shown.items()}
    return found


def _members(path: Path) -> dict[str, tuple[bytes, int]]:
    """Name -> content and where it begins."""
    with tarfile.open(path) as tar:
        return {one.name: (tar.extractfile(one).read(), one.offset_data) for one in tar if one.isfile()}


# Order and random values


def hashing(folder: Path, scratch: Path) -> Values:
    found: Values = {"purposes": {one.name: int(one) for one in Purpose}}
    for one in Purpose:
        words = random_words(7, one, 4711, np.arange(40))
        found[f"{one.name}"] = {
            "first": str(int(words[0])),
            "40": _sha(words),
            "one": str(random_word(1, one, 3)),
        }
    found["negative numbers"] = str(random_word(2**63 - 1, Purpose.MASKS, -5, 2**40))
    found["grid"] = _sha(random_words(3, Purpose.POINT, np.arange(5)[:, None], np.arange(4)))
    return found


ORDERS = {
    "one": (1, 0, 1, True),
    "small": (29, 3, 1, True),
    "blocks": (29, 3, 8, True),
    "blocks of an epoch": (29, 3, 8, False),
    "large": (11_185_362, 1, 1, True),
    "large, blocks": (11_185_362, 1, 32, True),
}


def order(folder: Path, scratch: Path) -> Values:
    found: Values = {}
    for name, (count, seed, block, endless) in ORDERS.items():
        one = Order(count, "5ead" * 16, seed, block, endless)
        positions = np.arange(0, 3 * count) if count < 100 else np.arange(count - 200, count + 200)
        rows = one.rows(positions)
        found[name] = {
            "first": rows[:12].tolist(),
            "rows": _sha(rows),
            "substitutes": [one.substitute(p, attempt) for p in (0, 5, 40) for attempt in range(3)],
        }
    return found


# Batches

USUAL: Values = {"global_batch": 6, "image_size": 64, "masks": 4, "seed": 3}
CROPS = MultiCrop((CropGroup(2, 32, area=(0.3, 1.0)), CropGroup(3, 16, area=(0.05, 0.3))))
STREAMS: dict[str, Values] = {
    "plain": {},
    "another seed": {"seed": 4},
    "blocks of 8": {"block_size": 8, "global_batch": 24},
    "blocks of 4, endless": {"block_size": 4, "global_batch": 12, "epochs": None},
    "endless": {"epochs": None, "global_batch": 7},
    "micro-batches of 2": {"micro_batch": 2, "global_batch": 9},
    "view of ids": {"view": "five", "global_batch": 3},
    "view with a condition": {"view": "some"},
    "strategy area": {"strategy": "area", "masks": 3},
    "strategy quality": {"strategy": "quality", "masks": 3},
    "strategy coverage": {"strategy": "coverage", "masks": 3},
    "flip": {"flip": 0.5},
    "stretch": {"resize": "stretch", "flip": 0.3},
    "crop": {"resize": "crop"},
    "RandomCrop": {"transform": RandomCrop((0.25, 1)), "flip": 0.5},
    "RandomCrop, ScaleJitter": {"transform": [RandomCrop((0.5, 1), None), ScaleJitter(0.5, 2)]},
    "MultiCrop": {"transform": CROPS, "masks": 0, "image_size": CROPS.image_size},
    "min_pixels": {"min_pixels": 40, "min_pixels_size": 48},
    "no masks": {"masks": 0},
    "layers": {"layers": ["round2", "round3"], "masks": 8},
    "joined column": {"join": {"caption": "captions.parquet"}},
    "texts": {"text": "texts.parquet"},
    "sequential": {"order": "sequential", "global_batch": 8},
    "sequential, all masks": {"order": "sequential", "global_batch": 5, "masks": 20, "view": "some"},
}
WORLDS = ((1, 0), (2, 1), (3, 0), (3, 1), (3, 2))  # ranks, and one of them


def _stream(root: Path, scratch: Path, **changes: Any) -> sa1b.Stream:
    values = {**USUAL, "damage_log": scratch / "damage.jsonl", "rank": 0, "world_size": 1, **changes}
    if "text" in values:
        values["text"] = sa1b.Text(root.parent / values["text"], length=5)
    if "join" in values:
        values["join"] = {name: root.parent / file for name, file in values["join"].items()}
    return sa1b.Stream(root, **values)


def _seen(batches: Any) -> Values:
    """Ids and positions of batches; digests of their images and masks."""
    found: Values = {"ids": [], "position": []}
    parts: dict[str, list[Any]] = {
        name: [] for name in ("mask_index", "masks", "numbers", "frames", "pixels")
    }
    for batch in batches:
        found["ids"].append(batch.ids.tolist())
        found["position"].append(batch.position)
        dense = _sha(batch.masks.dense(24)) if len(batch.masks) else None
        parts["mask_index"].append(batch.mask_index.tolist())
        parts["masks"].append([dense, _fields(batch, "mask_ids areas"), batch.masks.image.tolist()])
        parts["numbers"].append(_fields(batch, "boxes points predicted_iou stability_score"))
        frames = _fields(batch, "source_sizes framed_sizes windows flipped positions")
        parts["frames"].append([frames, batch.valid.tolist()])
        parts["pixels"].append(_sha(batch.images))
        if not batch.valid.all():
            found.setdefault("invalid", []).append(
                [len(found["ids"]) - 1, (~batch.valid).nonzero()[:, 0].tolist()]
            )
        if batch.source:
            found.setdefault("source", []).append(" ".join(batch.source))
        if batch.texts is not None:
            found.setdefault("texts", []).append(_fields(batch.texts, "tokens offsets keys"))
        if batch.extra:
            found.setdefault("extra", []).append(batch.extra)
    return {**found, **{name: _sha(values) for name, values in parts.items()}}


def batches(folder: Path, scratch: Path) -> Values:
    found = {}
    for name, changes in STREAMS.items():
        endless = changes.get("epochs", 1) is None
        for world, rank in WORLDS:
            # The default when the values were recorded.
            more = {"micro_batch": -(-changes["global_batch"] // world)} if "block_size" in changes else {}
            stream = _stream(folder / "root", scratch, rank=rank, world_size=world, **changes, **more)
            if endless or "order" in changes:
                found[f"{name}/rank {rank} of {world}"] = _seen(islice(stream, 10))
                continue
            stream.set_epoch(first := 0 if world == 1 else 7)
            for epoch in range(first, 2 if world == 1 else 8):
                found[f"{name}/rank {rank} of {world}/epoch {epoch}"] = _seen(stream)
    return found | {"COCO": _seen(_stream(folder / "mine", scratch, global_batch=2))}


def loaders(folder: Path, scratch: Path) -> Values:
    """The same batches with threads and worker processes; dense masks of a loader."""
    options: Values = {"flip": 0.5, "micro_batch": 3}
    found = {}
    loader = sa1b.Loader(_stream(folder / "root", scratch, **options), threads=2, quiet=True, dense=16)
    for epoch in range(2):
        seen = list(loader)
        found[f"Loader/epoch {epoch}"] = {**_seen(seen), "dense": _sha([_sha(one.dense) for one in seen])}
        padded = [one.padded() for one in seen]
        found[f"padded/epoch {epoch}"] = _sha([_fields(one, "points boxes index valid") for one in padded])
    stream = _stream(folder / "root", scratch, **options)
    workers = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    return found | {f"DataLoader/epoch {epoch}": _seen(workers) for epoch in range(2)}


# Mixtures and states


def _mix(folder: Path, scratch: Path, mixed: Values | None = None, **changes: Any) -> sa1b.Mix:
    changes = {"epochs": None, **changes}
    streams = {
        "all": (_stream(folder / "root", scratch, **changes), 3),
        "five": (_stream(folder / "root", scratch, view="five", seed=1, masks=2, **changes), 2),
        "mine": (_stream(folder / "mine", scratch, seed=2, strategy="area", **changes), 1),
    }
    return sa1b.Mix(streams, **(mixed or {}))


def mixtures(folder: Path, scratch: Path) -> Values:
    found: Values = {}
    schedule = {20: {"all": 1, "five": "0.5", "mine": 3}, 44: {"all": 0, "five": 1, "mine": 1}}
    for world, rank in WORLDS:
        ranks = {"rank": rank, "world_size": world}
        key = f"rank {rank} of {world}"
        found[f"3:2:1/{key}"] = _seen(islice(_mix(folder, scratch, **ranks), 14))
        changed = _mix(folder, scratch, {"schedule": schedule}, micro_batch=2, **ranks)
        found[f"schedule/{key}"] = _seen(islice(changed, 14))
    for until in ("first", "all"):
        mix = _mix(folder, scratch, {"until": until})
        found |= {f"until {until}/iteration {number}": _seen(mix) for number in range(2)}
    mix = _mix(folder, scratch)
    found["seen"] = {str(position): mix.seen(position) for position in (1, 7, 100, 12345)}
    sequential = _mix(folder, scratch, epochs=1, order="sequential", rank=1, world_size=2)
    return found | {"sequential/rank 1 of 2": _seen(sequential)}


STATES: dict[str, Callable[..., Any]] = {  # what makes the stream of a state
    "stream": lambda f, s, **more: _stream(f / "root", s, **more),
    "blocks": lambda f, s, **more: _stream(f / "root", s, block_size=4, global_batch=12, epochs=None, **more),
    "view": lambda f, s, **more: _stream(f / "root", s, view="some", flip=0.5, strategy="coverage", **more),
    "mixture": _mix,
    "micro-batches": lambda f, s, **more: _stream(f / "root", s, micro_batch=2, **more),
    "loader": lambda f, s, **more: sa1b.Loader(_stream(f / "root", s, **more), threads=2, quiet=True),
}


def _state(folder: Path, name: str) -> Values:
    """The state in the middle of the second epoch, or of the endless one."""
    stream = STATES[name](folder, folder)
    if name in ("stream", "view", "micro-batches", "loader"):
        for _ in stream:
            pass
    ahead = iter(stream)
    seen = [next(ahead) for _ in range(3)]
    return stream.state_dict() if name == "loader" else stream.state_dict(seen[-1])


def states(folder: Path, scratch: Path) -> Values:
    """States of today, and streams that go on from those that were saved then."""
    saved = json.loads((folder / "states.json").read_text())
    found: Values = {}
    for name, make_stream in STATES.items():
        found[f"{name}/state"] = _state(folder, name)
        for world, rank in ((1, 0), (3, 0), (3, 1), (3, 2)):
            stream = make_stream(folder, scratch, rank=rank, world_size=world)
            stream.load_state_dict(saved[name])
            key = f"{name}/rank {rank} of {world}"
            if name in ("blocks", "mixture"):
                found[key] = _seen(islice(stream, 5))
            else:
                found |= {f"{key}/rest": _seen(stream), f"{key}/next epoch": _seen(stream)}
    others: dict[str, Values] = {
        "seed": {"seed": 4},
        "view": {"view": "five"},
        "order": {"order": "sequential"},
        "endless": {"epochs": None},
        "block_size": {"block_size": 2},
        "global_batch": {"global_batch": 10},
        "image_size": {"image_size": 32},
    }
    for name, changes in others.items():
        stream = _stream(folder / "root", scratch, **changes)
        try:
            stream.load_state_dict(saved["stream"])
            found[f"other {name}"] = _seen(islice(stream, 2))["ids"]
        except Sa1bError as error:
            found[f"other {name}"] = type(error).__name__
    return found


def damage(folder: Path, scratch: Path) -> Values:
    """Samples whose bytes have changed: substitutes in training, invalid in evaluation, lines of the log."""
    root = shutil.copytree(folder / "root", scratch / "root")
    for member in ("sa_100.jpg", "sa_108.masks", "sa_9003.jpg"):
        shard = next(path for path in root.glob("sa1b-*.tar") if member in _members(path))
        kit.flip(root, shard.name, _members(shard)[member][1] + 200)
    found: Values = {}
    for name, changes in {
        "shuffle": {},
        "blocks": {"block_size": 4, "global_batch": 8},
        "sequential": {"order": "sequential"},
    }.items():
        for rank in range(2):
            log = scratch / f"{name}{rank}.jsonl"
            stream = _stream(root, scratch, rank=rank, world_size=2, damage_log=log, **changes)
            key = f"{name}/rank {rank} of 2"
            found |= {f"{key}/epoch {epoch}": _seen(stream) for epoch in range(1 + (name != "sequential"))}
            text = log.read_text() if log.exists() else ""
            lines = [{**json.loads(line), "reason": "..."} for line in text.splitlines()]
            found[f"{key}/log"] = sorted(lines, key=lambda line: (line["position"], line["image_id"]))
    return found


# Masks


def masks(folder: Path, scratch: Path) -> Values:
    """Functions on the runs of every image."""
    found: dict[str, list[Any]] = {}
    for sample in sa1b.open(folder / "root"):
        runs = sample.runs
        if not len(runs):
            continue
        height, width = runs.height, runs.width
        count = np.arange(len(runs))
        words = random_words(1, Purpose.POINT, sample.image_id, count)
        window = (3, 5, width - 9, height - 11)
        taken = runs_of.framed_size(height, width, 96)
        of_runs = {
            "crop": runs_of.crop(runs, *window),
            "flip_horizontal": runs_of.flip_horizontal(runs),
            "flip_vertical": runs_of.flip_vertical(runs),
            "resize": runs_of.resize(runs, 37, 51),
            "frame": runs_of.frame(runs, 96, 40),
            "decode": runs_of.decode(runs_of.encode(runs), height, width),
        }
        values: dict[str, Any] = {name: [_sha(one.runs), _sha(one.offsets)] for name, one in of_runs.items()}
        boxes = runs_of.bbox_sa1b(runs)
        tensors = [torch.from_numpy(one.astype(np.int64)) for one in (runs.runs, runs.offsets)]
        values |= {
            "area": runs_of.area(runs).tolist(),
            "bbox": runs_of.bbox(runs).tolist(),
            "bbox_sa1b": boxes.tolist(),
            "encode": [string.decode() for string in runs_of.encode(runs)],
            "rasterize": _sha(runs_of.rasterize(runs, 33, 65)),
            "of torch": [
                _sha(raster_torch.rasterize(*tensors, height, width, 33, 65)),
                _sha(raster_torch.rasterize_frame(*tensors, height, width, 96, 40)),
            ],
            "rasterize_frame": _sha(runs_of.rasterize_frame(runs, image_size=96, size=40)),
            "framed_size": list(taken),
            "grid.framed": [_sha(grid.firsts(axis)) for axis in grid.framed((height, width), 96, 40)],
            "grid.resized": [_sha(grid.firsts(axis)) for axis in grid.resized((height, width), (33, 65))],
            "intersection": runs_of.intersection(runs, runs).tolist(),
            "iou": runs_of.iou(runs, runs).tolist(),
            "contains": runs_of.contains(runs, np.stack([count * 7 % width, count * 5 % height], 1)).tolist(),
            "nth_foreground": runs_of.nth_foreground(runs, runs_of.area(runs) // 3).tolist(),
            "uniform_point": runs_of.uniform_point(runs, words).tolist(),
            "suppress": runs_of.suppress(boxes, sample.annotations.predicted_iou, 0.3).tolist(),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {
        name: value if name in ("framed_size", "suppress") else _sha(value) for name, value in found.items()
    }


# Commands that select and export

VIEWS = {
    "area": ["--masks-where", "area >= 200"],
    "scores": [
        "--masks-where",
        "stability_score >= 0.97 and predicted_iou > 0.9",
        "--images-where",
        "masks >= 2",
    ],
    "fraction": ["--masks-where", "0.1 < area_fraction <= 0.3", "--images-where", "masks > 0"],
    "box": [
        "--masks-where",
        "bbox_x + bbox_width < 60 or bbox_height > 2 * bbox_width",
        "--images-where",
        "masks >= 2",
    ],
    "runs": [
        "--masks-where",
        "not (runs_count < 30) and point_y < crop_height / 2",
        "--images-where",
        "masks >= 1",
    ],
    "size": ["--images-where", "width > height and masks >= 3"],
    "bytes": ["--images-where", "jpg_bytes > 1500 and masks_bytes < 900"],
    "both": [
        "--masks-where",
        "area > 50",
        "--images-where",
        "masks >= 2 and (image_id < 105 or image_id >= 9005)",
    ],
    "ids": ["--ids", "ids.txt"],
    "some ids": ["--ids", "captions.parquet:image_id", "--missing", "list"],
    "subset": ["--subset", "40%"],
    "train": ["--held-out", "30%"],
    "held out": ["--held-out", "30%", "--split", "held-out"],
    "subset of train": ["--held-out", "30%", "--subset", "50%", "--masks-where", "area > 100"],
    "layers": ["--layers", "round2", "--masks-where", "mask_id != 10050 and area > 100"],
}


def views(folder: Path, scratch: Path) -> Values:
    found = {}
    for name, flags in VIEWS.items():
        path = scratch / f"{name.replace(' ', '-')}.json"
        with contextlib.chdir(folder):
            done = kit.run("view", "root", *flags, "--out", path, "--json", code=None)
        ids = np.frombuffer(path.with_suffix(".ids").read_bytes(), "<u8")
        found[name] = {
            "code": done.code,
            "ids": ids.tolist(),
            "answer": _normal(done.json, scratch),
            "document": _normal(json.loads(path.read_text()), scratch),
        }
        if "layers" in found[name]["document"]:
            found[name] = {"code": done.code, "ids": ids.tolist(), "masks": done.json["masks"]}
    return found


QUERIES = [
    "SELECT count(*) AS images, sum(masks) AS masks, min(width), max(height) FROM images",
    "SELECT * FROM images ORDER BY image_id LIMIT 2",
    "SELECT * FROM masks ORDER BY image_id, mask_id LIMIT 3",
    "SELECT image_id, avg(stability_score) AS s, count(*) AS n FROM masks GROUP BY image_id ORDER BY s LIMIT 5",
    "SELECT shard, source, sum(jpg_bytes) AS b FROM images GROUP BY ALL ORDER BY shard",
    "SELECT source, count(*) AS n FROM masks JOIN images USING (image_id) WHERE area_fraction < 0.05 GROUP BY source ORDER BY n",
    "SELECT mask_id FROM masks WHERE stability_score IS NULL",
    "SELECT image_id FROM images WHERE masks = 0",
    "SELECT quantile_cont(predicted_iou, 0.5) AS median, sum(area) AS pixels, max(runs_count) AS r FROM masks",
]
MINE = [
    "SELECT category, count(*) AS n, sum(iscrowd) AS crowds FROM masks GROUP BY category ORDER BY category",
    "SELECT image_id, fields->>'licence' AS licence FROM images ORDER BY image_id",
]


def queries(folder: Path, scratch: Path) -> Values:
    found = {text: kit.run("query", folder / "root", text, "--json").json for text in QUERIES}
    found |= {text: kit.run("query", folder / "mine", text, "--json").json for text in MINE}
    text = "SELECT layer, count(*) AS n FROM masks GROUP BY layer ORDER BY layer"
    answer = kit.run(
        "query", folder / "root", text, "--layers", "round2", "--layers", "round3", "--json"
    ).json
    csv = kit.run("query", folder / "root", QUERIES[3], "--csv").out
    return found | {text: answer, "csv": csv.splitlines()}


EXPORTS: dict[str, list[str]] = {
    "sa1b": ["--to", "sa1b", "--plain"],
    "sa1b, gzip, view": ["--to", "sa1b", "--view", "some", "--images-per-tar", "10"],
    "sa1b, layers": ["--to", "sa1b", "--plain", "--layers", "round2", "--ids", "ids.txt"],
    "folders": ["--to", "folders"],
    "folders, view, flat": ["--to", "folders", "--view", "some", "--layout", "flat"],
    "images": ["--to", "images", "--view", "five"],
    "images, smaller": ["--to", "images", "--image-size", "40", "--quality", "70", "--layout", "flat"],
    "sam2": ["--to", "sam2"],
    "sam2, view": ["--to", "sam2", "--view", "some"],
    "efficientvit": ["--to", "efficientvit"],
    "efficientvit, view": ["--to", "efficientvit", "--view", "some"],
    "webdataset": ["--to", "webdataset", "--images-per-tar", "8"],
    "webdataset, joined": ["--to", "webdataset", "--view", "some", "--join", "caption=captions.parquet"],
    "coco": ["--to", "coco"],
    "coco, polygons, view": ["--to", "coco", "--segmentation", "polygons", "--view", "some"],
    "coco, files": ["--to", "coco", "--images-per-file", "10", "--layers", "round2"],
    "yolo-seg": ["--to", "yolo-seg", "--val-view", "five"],
    "yolo-seg, view": ["--to", "yolo-seg", "--view", "some"],
    "parquet": ["--to", "parquet", "--images-per-file", "10"],
    "parquet, view, joined": ["--to", "parquet", "--view", "some", "--join", "caption=captions.parquet"],
}


def exports(folder: Path, scratch: Path) -> Values:
    """Names and contents of the files; of some kinds one digest for all."""
    found: Values = {}
    cases = {name: ("root", flags) for name, flags in EXPORTS.items()}
    cases |= {
        f"COCO to {to}": ("mine", ["--to", to])
        for to in ("coco", "sa1b", "parquet", "webdataset", "yolo-seg")
    }
    for name, (root, flags) in cases.items():
        out = scratch / name.replace(" ", "-")
        with contextlib.chdir(folder):
            done = kit.run("export", root, *flags, "--out", out, "--json", code=None)
        answer = _normal(done.json, scratch) if done.code in (0, 3) else {}
        contents = {}
        for file, data in kit.files(out).items():
            if file.endswith(".tar"):
                contents[file] = _sha(sorted(_tar(data).items()))
            elif file.endswith(".parquet"):
                contents[file] = _sha(_parquet(data))
            else:
                contents[file] = _sha(data.replace(str(scratch).encode(), b"."))
        names = sorted(contents)
        found[name] = {
            "code": done.code,
            "answer": answer,
            "files": names if len(names) < 12 else [len(names), names[0], names[-1], _sha(names)],
            "contents": contents if len(names) < 12 else _sha(sorted(contents.items())),
        }
    return found


# Commands: exit codes and fields


def _shape(value: Any) -> Any:
    """The names and JSON types of an answer; of a list, those of all its elements together."""
    if isinstance(value, dict):
        return {name: _shape(one) for name, one in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for one in map(_shape, value):
            if one not in shapes:
                shapes.append(one)
        return shapes
    names = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return names[type(value)]


# fmt: off
def _commands(folder: Path, scratch: Path) -> Iterator[tuple[str, list[object]]]:
    """Name and words; --json is added."""
    root, tars = folder / "root", sorted((folder / "sources").iterdir())
    damaged = shutil.copytree(root, scratch / "damaged")
    kit.flip(damaged, "sa1b-000001-0000.tar", 11000)
    kit.flip(damaged, "layers/round2/masks.bin", 30)
    broken = scratch / "broken.tar"
    broken.write_bytes(tars[0].read_bytes()[:9000])
    weights = scratch / "tiny.safetensors"
    config = ModelConfig(image_size=64, width=64, depth=2, heads=1, global_blocks=(1,), window=2, channels=32)
    torch.manual_seed(0)
    write_weights(weights, Sam(config).state_dict())
    photos, ids = folder / "photos", ["--ids", folder / "ids.txt"]
    yield "synthesize", ["synthesize", scratch / "made", "--tars", 1, "--images-per-tar", 2, "--long-side", 64, "--workers", 1]
    yield "synthesize, a file is there", ["synthesize", scratch / "made", "--tars", 1]
    yield "synthesize, bad number", ["synthesize", scratch / "made2", "--tars", 0]
    yield "plan", ["plan", *tars, "--out", scratch / "planned", "--workers", 2, "--rate", 50]
    yield "plan, nothing there", ["plan", scratch / "none"]
    yield "reshard", ["reshard", *tars[1:], "--out", scratch / "shards", "--workers", 1]
    yield "reshard, a pair is refused", ["reshard", *tars, "--out", scratch / "shards", "--workers", 1]
    yield "reshard, damaged source", ["reshard", broken, "--out", scratch / "shards2", "--workers", 1]
    yield "reshard, no tar", ["reshard", root / "dataset.json", "--out", scratch / "shards3"]
    yield "reshard, other options", ["reshard", *tars, "--out", scratch / "shards", "--keep-json"]
    yield "reshard, bad flag", ["reshard", *tars, "--out", scratch / "shards", "--qualit", 5]
    yield "fetch", ["fetch", *tars, *ids, "--out", scratch / "some", "--search-all"]
    yield "fetch, an id is missing", ["fetch", tars[0], *ids, "--out", scratch / "some2", "--search-all"]
    yield "fetch, no ids", ["fetch", *tars, "--ids", scratch / "none.txt", "--out", scratch / "some3"]
    yield "verify", ["verify", root]
    yield "verify, damage", ["verify", damaged, "--deep"]
    yield "verify, warnings", ["verify", root, "--warnings"]
    yield "verify, no dataset", ["verify", photos]
    yield "gallery", ["gallery", root, "--out", scratch / "page.html", "--count", 3]
    yield "gallery, damage", ["gallery", damaged, "--out", scratch / "page2.html"]
    yield "gallery, unknown image", ["gallery", root, "--id", 5, "--out", scratch / "page3.html"]
    yield "view", ["view", root, "--subset", "50%", "--masks-where", "area > 5", "--out", scratch / "view.json"]
    yield "view, ids are missing", ["view", root, "--ids", f"{folder}/captions.parquet:image_id", "--missing", "list", "--out", scratch / "view2.json"]
    yield "view, bad condition", ["view", root, "--masks-where", "aria > 5", "--out", scratch / "view3.json"]
    yield "view, refused ids", ["view", root, "--ids", f"{folder}/captions.parquet:image_id", "--out", scratch / "view4.json"]
    yield "locate", ["locate", root, 100, "sa_9001.jpg"]
    yield "locate, not stored", ["locate", root, 100, 223750]
    yield "locate, no dataset", ["locate", scratch / "none", 100]
    changed = shutil.copytree(root, scratch / "changed")
    yield "layer add", ["layer", "add", changed, folder / "changes", "--name", "more", "--existing", "hide"]
    yield "layer add, an image is not there", ["layer", "add", changed, scratch / "made", "--name", "other"]
    yield "layer add, name is taken", ["layer", "add", changed, folder / "changes", "--name", "more"]
    yield "layer list", ["layer", "list", changed]
    yield "layer verify", ["layer", "verify", changed, "more"]
    yield "layer verify, damage", ["layer", "verify", damaged, "round2"]
    yield "layer drop", ["layer", "drop", changed, "more"]
    yield "layer drop, none", ["layer", "drop", changed, "none"]
    yield "query", ["query", root, "SELECT image_id, source, stability_score > 1 AS b, NULL AS n FROM masks JOIN images USING (image_id) LIMIT 1"]
    yield "query, view", ["query", changed, "SELECT image_id FROM images WHERE masks >= 3", "--as-view", "many"]
    yield "query, no SELECT", ["query", root, "DROP TABLE images"]
    yield "bench", ["bench", root, "--image-size", 64, "--batch", 4, "--threads", 1, "--seconds", 1]
    yield "bench, no dataset", ["bench", scratch / "none"]
    yield "doctor", ["doctor", root, "--only", "dataset"]
    yield "doctor, damage", ["doctor", photos, "--only", "dataset"]
    yield "doctor, no such check", ["doctor", root, "--only", "luck"]
    yield "convert", ["convert", weights, "--out", scratch / "tiny.pth"]
    yield "convert, file is there", ["convert", weights, "--out", scratch / "tiny.pth"]
    some = ["--points-per-side", 4, "--min-predicted-iou", 0, "--min-stability", 0, "--device", "cpu"]
    yield "annotate", ["annotate", photos / "sa_77.jpg", "--weights", weights, "--out", scratch / "labelled", *some]
    yield "annotate, layer", ["annotate", "--shards", changed, "--view", "five", "--weights", weights, "--name", "found", *some]
    yield "annotate, no JPEG", ["annotate", photos, "--weights", weights, "--out", scratch / "labelled2", *some]
    yield "annotate, no weights", ["annotate", photos, "--weights", scratch / "none", "--out", scratch / "labelled3", *some]
    yield "slurm", ["slurm", "reshard", *tars, "--out", scratch / "shards"]
    yield "slurm, bad flag", ["slurm", "reshard", *tars, "--out", scratch / "shards", "--worker", 3]
    yield "index", ["index", shutil.copytree(root, scratch / "indexed")]
    yield "index, damage", ["index", damaged]
    yield "index, no dataset", ["index", scratch / "none"]
    yield "export", ["export", root, "--to", "coco", "--out", scratch / "coco"]
    yield "export, an id is missing", ["export", root, "--to", "images", "--ids", f"{folder}/captions.parquet:image_id", "--out", scratch / "images"]
    yield "export, damage", ["export", damaged, "--to", "folders", "--out", scratch / "folders"]
    yield "export, bad format", ["export", root, "--to", "zip", "--out", scratch / "zip"]
    yield "copy", ["copy", root, scratch / "copied"]
    yield "copy, damage", ["copy", damaged, scratch / "copied2"]
    yield "copy, no dataset", ["copy", photos, scratch / "copied3"]
    yield "no such verb", ["shard", root]
# fmt: on


def commands(folder: Path, scratch: Path) -> Values:
    found: Values = {}
    for name, given in _commands(folder, scratch):
        words = [*given, *(["--json"] if given[0] not in ("slurm", "shard") else [])]
        if name.startswith("doctor"):  # it ends its process
            line = [sys.executable, "-m", "sa1b", *map(str, words)]
            ended = processes.run(line, capture_output=True, text=True, cwd=processes.REPOSITORY)
            done = kit.Done(ended.returncode, ended.stdout, ended.stderr)
        else:
            done = kit.run(*words, code=None)
        is_json = done.out.startswith(("{", "["))
        found[name] = {"code": done.code, "answer": _shape(done.json) if is_json else None}
        if name == "gallery":
            found["images of a gallery"] = done.json["shown"]
    labelled = json.loads(next((scratch / "labelled").rglob("sa_*.json")).read_bytes())
    found["ids of annotate"] = [labelled["image"]["image_id"], labelled["annotations"][0]["id"]]
    return found


SECTIONS: dict[str, Callable[[Path, Path], Values]] = {
    one.__name__: one
    for one in (
        *(
            reshard,
            options,
            forms,
            directory,
            hashing,
            order,
            batches,
            loaders,
            mixtures,
            states,
            damage,
            masks,
        ),
        *(views, queries, exports, commands),
    )
}


def section(name: str, folder: Path, scratch: Path) -> Values:
    """The values of one section, with its name before each key."""
    scratch.mkdir(parents=True, exist_ok=True)
    return {f"{name}/{key}": value for key, value in SECTIONS[name](folder, scratch).items()}


def record(folder: Path, scratch: Path) -> Values:
    """All values."""
    return {key: value for name in SECTIONS for key, value in section(name, folder, scratch / name).items()}
