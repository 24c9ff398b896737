"""Synthetic source tars with the format, statistics and irregularities of SA-1B, but none of its data.

Every image is a function of (seed, image id, long side, simple). Means of 200 images at full size: JPEG 1.30
MB (q95) and 0.52 MB (q75); JSON 62 kB; 92 masks of 316 runs, with a median area of 0.21 %. One core draws 3
images a second at full size, 30 at 640 pixels (`pytest tests/synthetic -m slow`).
"""

import gzip
import io
import json
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.masks import coco
from sa1b.masks.runs import Runs
from sa1b.names import member_name
from sa1b.programs.synthetic.scene import Shape, described, draw
from sa1b.storage.atomic import commit, flush, temporary_path, write_whole
from sa1b.workers import Failure, supervise

IDS_PER_TAR = 11_187  # images per tar in the download; the ids of a tar do not depend on its number of images
MTIME = 1_680_000_000  # seconds; a fixed time, chosen arbitrarily
PHRASES = "phrases.parquet"
_SHUFFLE = 0x7A6  # separates the random values of a tar from those of an image
Document = dict[str, Any]


def _annotations(
    rng: np.random.Generator, image_id: int, height: int, width: int, shapes: list[Shape], runs: Runs
) -> Iterator[Document]:
    first_id = image_id * 2_654_435_761 % 2**22 * 512  # ids below 2^31 that differ between images
    integers = len(shapes) - int(rng.integers(1, 6))  # from this mask on, SA-1B's files have int numbers
    for index, (shape, counts) in enumerate(zip(shapes, coco.encode(runs), strict=True)):
        rows, columns = np.flatnonzero(shape.mask.any(1)), np.flatnonzero(shape.mask.any(0))
        x, y = shape.x + int(columns[0]), shape.y + int(rows[0])
        # As in SA-1B, width and height are one pixel less than the extent of the mask.
        box = [x, y, int(columns[-1] - columns[0]), int(rows[-1] - rows[0])]
        crop = _crop_box(rng, box, height, width)
        whole = index >= integers
        yield {
            "bbox": box if whole else [float(v) for v in box],
            "area": int(np.count_nonzero(shape.mask)),
            "segmentation": {"size": [height, width], "counts": counts.decode("ascii")},
            "predicted_iou": float(np.float32(0.88 + 0.145 * rng.beta(3.0, 2.0))),
            "point_coords": [_point(rng, shape)],
            "crop_box": crop if whole and rng.random() < 0.5 else [float(v) for v in crop],
            "id": first_id + index,
            "stability_score": float(np.float32(0.95 + 0.05 * rng.beta(2.0, 2.0))),
        }


def _runs(shape: Shape, height: int, width: int) -> npt.NDArray[np.uint32]:
    columns = np.zeros((height, shape.mask.shape[1]), np.bool_)
    columns[shape.y : shape.y + shape.mask.shape[0]] = shape.mask
    runs = Runs.from_pixels(columns[None]).runs
    runs = np.append(runs, np.zeros(1 - len(runs) % 2, np.uint32))  # background is first and last
    runs[0] += shape.x * height
    runs[-1] += (width - shape.x - shape.mask.shape[1]) * height
    return runs if runs[-1] else runs[:-1]


def _point(rng: np.random.Generator, shape: Shape) -> list[float]:
    """A prompt inside the mask, [x, y] in steps of 1/16 pixel, away from the outline if possible."""
    inner = cv2.erode(shape.mask, np.ones((3, 3), np.uint8), borderType=cv2.BORDER_CONSTANT, borderValue=0)
    choice = np.flatnonzero(inner if inner.any() else shape.mask)
    row, column = divmod(int(rng.choice(choice)), shape.mask.shape[1])
    return [shape.x + column + int(rng.integers(16)) / 16, shape.y + row + int(rng.integers(16)) / 16]


def _crop_box(rng: np.random.Generator, box: list[int], height: int, width: int) -> list[int]:
    """[x, y, width, height] of one of SAM's overlapping crops that contains the box."""
    fits = []
    for side in (1, 2, 4):
        overlap = int(512 / 1500 * min(height, width) * 2 / side) if side > 1 else 0
        w, h = -(-(overlap * (side - 1) + width) // side), -(-(overlap * (side - 1) + height) // side)
        for i in range(side):
            for j in range(side):
                x, y = (w - overlap) * i, (h - overlap) * j
                if x <= box[0] and y <= box[1] and box[0] + box[2] < x + w and box[1] + box[3] < y + h:
                    fits.append([x, y, min(w, width - x), min(h, height - y)])
    return fits[int(rng.integers(len(fits)))]


def scene(
    image_id: int, seed: int = 0, long_side: int | None = None, *, simple: bool = False
) -> tuple[bytes, Document, int, list[Document]]:
    """One image, its annotation file as `json.loads` returns it, the number of runs of its masks, and a row
    of the phrases of each mask. For the arguments see `scene.draw`.

    The JPEG is baseline, 4:2:0, of quality 95 or 75, without EXIF.
    """
    rng = np.random.default_rng([seed, image_id, long_side or 0])
    pixels, quality, shapes = draw(rng, long_side, simple)
    height, width, _ = pixels.shape
    jpeg = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
    shapes = [shapes[i] for i in rng.permutation(len(shapes))]
    pieces = [_runs(shape, height, width) for shape in shapes]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    runs = Runs(np.concatenate([np.zeros(0, np.uint32), *pieces]), offsets, height, width)
    masks = [*_annotations(rng, image_id, height, width, shapes, runs)]
    image = {
        "image_id": image_id,
        "width": width,
        "height": height,
        "file_name": member_name(image_id, "jpg"),
    }
    rows = [
        {"image_id": image_id, "mask_id": mask["id"]} | described(shape.look, mask["area"] / (height * width))
        for mask, shape in zip(masks, shapes, strict=True)
    ]
    return jpeg, {"image": image, "annotations": masks}, int(offsets[-1]), rows


def write_tar(
    path: str | Path,
    *,
    images: int,
    first_id: int,
    seed: int = 0,
    long_side: int | None = None,
    simple: bool = False,
    compress: bool = True,
    temporary: Path | None = None,
    progress: Callable[[int], Any] = lambda count: None,
) -> tuple["Counter[str]", list[Document]]:
    """Write one source tar in the format of the download, and commit it when it is complete; its figures, and
    a row of the phrases of each mask.

    Memory: a few images: a temporary file holds the members until they are shuffled. An existing file is
    replaced. `temporary`: path of the incomplete tar on the same disk. `progress` gets 1 for every image.
    """
    path = Path(path)
    temporary = temporary or temporary_path(path)
    figures, phrases = Counter(tars=1, images=images), list[Document]()
    members: list[tuple[str, int, int]] = []  # name, offset and length in the spill file
    with ExitStack() as stack:
        out: BinaryIO | gzip.GzipFile = stack.enter_context(temporary.open("wb"))
        if compress:  # no name and no time in gzip's header: equal content gives equal bytes
            out = stack.enter_context(gzip.GzipFile("", "wb", 6, out, mtime=0))
        tar = stack.enter_context(tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT))
        spill = stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
        for image_id in range(first_id, first_id + images):
            jpeg, document, runs, rows = scene(image_id, seed, long_side, simple=simple)
            text = json.dumps(document).encode()
            for suffix, data in (("jpg", jpeg), ("json", text)):
                members.append((f"./sa_{image_id}.{suffix}", spill.tell(), len(data)))
                spill.write(data)
            figures.update(masks=len(rows), runs=runs, jpeg_bytes=len(jpeg), json_bytes=len(text))
            phrases += rows
            progress(1)
        entry = _entry("./", 0)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
        for index in np.random.default_rng([seed, first_id, _SHUFFLE, 0]).permutation(len(members)):
            name, offset, length = members[index]
            spill.seek(offset)
            tar.addfile(_entry(name, length), io.BytesIO(spill.read(length)))
    figures["tar_bytes"] = temporary.stat().st_size
    flush(temporary)
    commit(temporary, path)
    return figures, phrases


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, MTIME, 0o644
    return entry


def write_tars(
    out: str | Path,
    *,
    tars: int = 2,
    images_per_tar: int = 100,
    first_tar: int = 0,
    workers: int = 1,
    overwrite: bool = False,
    phrases: bool = False,
    progress: Callable[[int], Any] = lambda count: None,
    **options: Any,
) -> "Counter[str]":
    """Write `sa_000000.tar`, `sa_000001.tar`, ... to a folder; the bytes do not depend on `workers`.

    The ids of tar t start at 1 + t * 11187. For `options` see `write_tar`. `phrases`: also write
    phrases.parquet, a row for each mask. FileExistsError: one of the files exists; nothing was written.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"sa_{tar:06d}.tar" for tar in range(first_tar, first_tar + tars)]
    present = [path for path in (*paths, *[out / PHRASES] * phrases) if path.exists()]
    if present and not overwrite:
        raise FileExistsError(f"{present[0]}: already exists; replace it and all others with --overwrite")
    total, rows = Counter[str](), list[Document]()
    # A worker that is killed leaves its incomplete tar in this folder.
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=out) as folder:
        tasks = []
        for tar, path in enumerate(paths, first_tar):
            own = {"first_id": 1 + tar * IDS_PER_TAR, "temporary": Path(folder, path.name)}
            tasks.append((path, {"images": images_per_tar, **own, **options}, phrases))
        with closing(supervise(_work, tasks, workers=workers)) as events:
            for event in events:
                if event.kind == "progress":
                    progress(event.value)
                elif event.kind == "done":
                    total.update(event.value[0])
                    rows += event.value[1]
                elif event.kind in ("failed", "lost"):
                    path, why = paths[event.task], event.value
                    if isinstance(why, Failure) and why.errno is not None:
                        raise OSError(why.errno, os.strerror(why.errno), str(path))
                    raise ChildProcessError(f"{path}: {why.message if isinstance(why, Failure) else why}")
    if phrases:
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        rows.sort(key=lambda row: (row["image_id"], row["mask_id"]))
        pq.write_table(pa.Table.from_pylist(rows), buffer)
        write_whole(out / PHRASES, buffer.getvalue())
    return total


def _work(
    path: Path, arguments: Document, phrases: bool, report: Callable[[int], None]
) -> tuple["Counter[str]", list[Document]]:
    cv2.setNumThreads(1)
    figures, rows = write_tar(path, **arguments, progress=report)
    return figures, rows if phrases else []
