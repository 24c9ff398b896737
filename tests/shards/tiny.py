"""Tiny sources for tests: pairs in the exact form of the download, tars around them, ingest in process."""

import gzip as gzip_file
import json
import random
import re
import tarfile
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

import sa1b
from sa1b import masks as runs_of_masks
from sa1b.errors import SourceError
from tests import kit

Members = Sequence[tuple[str, bytes]]
SIZE = (48, 64)  # height, width


def runs_of(mask: npt.NDArray[np.bool_]) -> list[int]:
    """The runs of a mask [height, width], down the columns, background first."""
    pixels = mask.T.reshape(-1)
    changes = np.flatnonzero(np.diff(pixels)) + 1
    lengths = np.diff([0, *changes, len(pixels)]).tolist()
    return [0, *lengths] if pixels[0] else lengths


def counts_of(mask: npt.NDArray[np.bool_]) -> str:
    """The COCO string of one mask [height, width]."""
    return counts_from(runs_of(mask), *mask.shape)


def counts_from(runs: list[int], height: int, width: int) -> str:
    """The COCO string of one mask's runs."""
    joined = runs_of_masks.Runs(np.array(runs, np.uint32), np.array([0, len(runs)]), height, width)
    return runs_of_masks.encode(joined)[0].decode()


def document(image_id: int, seed: int = 0, size: tuple[int, int] = SIZE, masks: int = 3) -> dict[str, Any]:
    """An annotation file's content: overlapping ellipses; bbox in integers for the last one."""
    height, width = size
    draw = np.random.default_rng([image_id % 2**32, seed])
    rows, columns = np.mgrid[:height, :width]
    annotations = []
    for i in range(masks):
        y, x = draw.integers(0, height), draw.integers(0, width)
        radius_y, radius_x = draw.uniform(2, height / 2), draw.uniform(2, width / 2)
        mask = ((rows - y) / radius_y) ** 2 + ((columns - x) / radius_x) ** 2 <= 1
        ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        kind = int if i == masks - 1 else float
        bbox = [kind(v) for v in (xs[0], ys[0], xs[-1] - xs[0], ys[-1] - ys[0])]
        annotations.append(
            {
                "bbox": bbox,
                "area": int(mask.sum()),
                "segmentation": {"size": [height, width], "counts": counts_of(mask)},
                "predicted_iou": float(draw.uniform(0.88, 1.02)),
                "point_coords": [[float(x) + 0.0625, float(y)]],
                "crop_box": [kind(v) for v in (0, 0, width, height)],
                "id": (1 << 30) + image_id % 2**32 * 100 + i,
                "stability_score": float(draw.uniform(0.95, 1)),
            }
        )
    image = {"image_id": image_id, "width": width, "height": height, "file_name": f"sa_{image_id}.jpg"}
    return {"image": image, "annotations": annotations}


def picture(image_id: int, seed: int = 0, size: tuple[int, int] = SIZE) -> npt.NDArray[np.uint8]:
    """RGB pixels with some detail, so that no two JPEGs are alike."""
    draw = np.random.default_rng([image_id % 2**32, seed, 1])
    return draw.integers(0, 256, (*size, 3), np.uint8)


def encode(document: Any) -> bytes:
    """JSON as the download writes it."""
    return json.dumps(document).encode()


@cache
def pair(image_id: int, seed: int = 0, size: tuple[int, int] = SIZE) -> tuple[bytes, bytes]:
    """One image's JPEG and annotation file."""
    jpeg = simplejpeg.encode_jpeg(picture(image_id, seed, size), 75, "RGB", "420")
    return jpeg, encode(document(image_id, seed, size))


def pair_members(
    image_id: int, jpeg: bytes | None = None, text: bytes | None = None
) -> list[tuple[str, bytes]]:
    """The two members of one image; `jpeg` or `text` instead of the usual content."""
    usual = pair(image_id)
    return [
        (f"./sa_{image_id}.jpg", usual[0] if jpeg is None else jpeg),
        (f"./sa_{image_id}.json", usual[1] if text is None else text),
    ]


def pairs(ids: Sequence[int], seed: int | None = 0) -> list[tuple[str, bytes]]:
    """The members of many images, shuffled unless seed is None."""
    members = [member for image_id in ids for member in pair_members(image_id)]
    if seed is not None:
        random.Random(seed).shuffle(members)
    return members


def header(name: str, size: int = 0, *, kind: bytes = b"0", link: str = "", **fields: Any) -> bytes:
    """One tar header block with a right checksum; fields overwrite tarfile's."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def checksummed(block: bytes) -> bytes:
    """A header block with a corrected checksum."""
    total = sum(block) - sum(block[148:156]) + 8 * 0x20
    return block[:148] + b"%06o\0 " % total + block[156:]


def member(name: str, data: bytes, **fields: Any) -> bytes:
    """Header, content and padding of one member."""
    return header(name, len(data), **fields) + data + bytes(-len(data) % 512)


def tar_bytes(members: Members, *, end: bytes = bytes(1024)) -> bytes:
    """A plain tar."""
    return b"".join(member(name, data) for name, data in members) + end


def gzip_bytes(data: bytes) -> bytes:
    """A gzip member; equal data give equal bytes."""
    return gzip_file.compress(data, 6, mtime=0)


def write_tar(path: Path, members: Members, gzip: bool = True) -> Path:
    """A source tar on disk."""
    data = tar_bytes(members)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip_bytes(data) if gzip else data)
    return path


def make_tar(path: Path, ids: Sequence[int], *, seed: int = 0, gzip: bool = True) -> list[tuple[str, bytes]]:
    """A source tar of these images in random order; its members."""
    members = pairs(ids, seed)
    write_tar(path, members, gzip)
    return members


def synthesize(path: Path, *, images: int, first_id: int, long_side: int) -> Path:
    """A tar of `sa1b synthesize`, whose ids start at `first_id`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--tars", 1, "--images-per-tar", images, "--long-side", long_side, "--workers", 1)
        kit.run("synthesize", folder, *flags)
        with tarfile.open(Path(folder, "sa_000000.tar")) as tar:
            found = [(one.name, tar.extractfile(one).read()) for one in tar if one.isfile()]  # type: ignore[union-attr]
    members = []
    for name, data in found:
        number = int(re.search(r"sa_(\d+)", name)[1])  # type: ignore[index]
        new, text = number - 1 + first_id, json.loads(data) if name.endswith(".json") else {}
        if text:
            text["image"] |= {"image_id": new, "file_name": f"sa_{new}.jpg"}
        members.append((name.replace(f"sa_{number}.", f"sa_{new}."), encode(text) if text else data))
    return write_tar(path, members)


def ingest_tar(path: Path, root: Path, **options: Any) -> SimpleNamespace:
    """Make or extend a dataset directory; returns the task file of the source. SourceError: the source failed."""
    if options.pop("stop", False):
        options["on_error"] = "stop"
    options = {"replace": True, **options, "accept": sorted(options.get("accept", ()))}
    made = sa1b.reshard(path, root, workers=1, quiet=True, **options)
    for error in made.failed.values():
        raise SourceError(error)
    (name,) = (*made.done, *made.skipped)
    task = json.loads((root / "tasks" / f"{name}.json").read_text())
    task["shards"] = [SimpleNamespace(**shard) for shard in task["shards"]]
    return SimpleNamespace(name=name, warnings=task["counts"]["doubtful"], **task)


def resharded(sources: Sequence[str], *, out: str, json_output: bool = False, **options: Any) -> int:
    """`sa1b reshard` by its function, which prints what the command prints; the exit code."""
    made = sa1b.reshard(sources, out, quiet=True, **options)
    print(json.dumps(made.document) if json_output else made.text)
    return made.exit_code


def read_back(root: Path) -> dict[int, tuple[bytes, Any]]:
    """Every sample of a root: image id -> JPEG bytes and annotation document."""
    if not (root / "dataset.json").exists():
        sa1b.reshard((), root, finish=True, quiet=True)
    return {sample.image_id: (sample.jpeg, sample.annotations.to_json()) for sample in sa1b.open(root)}


def lines(root: Path, source: str, file: str = "refused.jsonl") -> list[dict[str, Any]]:
    """The lines of quarantine about a source."""
    path = root / "quarantine" / source / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def quarantined(root: Path, source: str, line: dict[str, Any]) -> bytes:
    """The bytes that a line of refused.jsonl points to."""
    return (root / "quarantine" / source / line["file"]).read_bytes()
