"""Synthetic source tars with the format, statistics and irregularities of SA-1B, but none of its data.

Every image is a function of (seed, image id, long side, simple). Means of 200 images at full size: JPEG 1.30
MB (q95) and 0.52 MB (q75); JSON 62 kB; 92 masks of 316 runs, with a median area of 0.21 %. One core draws 3
images a second at full size, 30 at 640 pixels (`pytest tests/synthetic/test_source_tars.py -k calibration
-s`).
"""

import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.arguments import BadValue
from sa1b.masks import coco
from sa1b.masks.runs import Runs
from sa1b.names import member_name
from sa1b.programs.synthetic.phrases import Phrases
from sa1b.programs.synthetic.scene import Mask, Shape, draw, plan
from sa1b.storage.atomic import commit, temporary_path, write_whole
from sa1b.workers import Failure, supervise


class Segmentation(TypedDict):
    size: list[int]
    counts: str


class Annotation(TypedDict):
    bbox: list[float] | list[int]
    area: int
    segmentation: Segmentation
    predicted_iou: float
    point_coords: list[list[float]]
    crop_box: list[float] | list[int]
    id: int
    stability_score: float


class ImageInfo(TypedDict):
    image_id: int
    width: int
    height: int
    file_name: str


class AnnotationFile(TypedDict):
    image: ImageInfo
    annotations: list[Annotation]


def annotate(
    rng: np.random.Generator, image_id: int, height: int, width: int, shapes: list[Shape]
) -> tuple[AnnotationFile, int, list[Shape]]:
    """The annotation file of a scene, the number of runs of its masks, and its objects in random order."""
    shapes = [shapes[i] for i in rng.permutation(len(shapes))]
    pieces = [mask_runs(shape.mask, shape.x, shape.y, height, width) for shape in shapes]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    runs = np.concatenate([np.zeros(0, np.uint32), *pieces])
    strings = coco.encode(Runs(runs, offsets, height, width))
    first_id = image_id * 2_654_435_761 % 2**22 * 512  # ids below 2^31 that differ between images
    integers = len(shapes) - int(rng.integers(1, 6))  # from this mask on, SA-1B's files have int numbers
    annotations: list[Annotation] = []
    for index, (shape, counts) in enumerate(zip(shapes, strings, strict=True)):
        rows, columns = np.flatnonzero(shape.mask.any(1)), np.flatnonzero(shape.mask.any(0))
        x, y = shape.x + int(columns[0]), shape.y + int(rows[0])
        # As in SA-1B, width and height are one pixel less than the extent of the mask.
        box = [x, y, int(columns[-1] - columns[0]), int(rows[-1] - rows[0])]
        crop = _crop_box(rng, box, height, width)
        whole = index >= integers
        annotations.append(
            {
                "bbox": box if whole else [float(v) for v in box],
                "area": int(np.count_nonzero(shape.mask)),
                "segmentation": {"size": [height, width], "counts": counts.decode("ascii")},
                "predicted_iou": float(np.float32(0.88 + 0.145 * rng.beta(3.0, 2.0))),
                "point_coords": [_point(rng, shape)],
                "crop_box": crop if whole and rng.random() < 0.5 else [float(v) for v in crop],
                "id": first_id + index,
                "stability_score": float(np.float32(0.95 + 0.05 * rng.beta(2.0, 2.0))),
            }
        )
    name = member_name(image_id, "jpg")
    image: ImageInfo = {"image_id": image_id, "width": width, "height": height, "file_name": name}
    return {"image": image, "annotations": annotations}, len(runs), shapes


def mask_runs(mask: Mask, x: int, y: int, height: int, width: int) -> npt.NDArray[np.uint32]:
    """Runs uint32 [R] of one mask, uint8 [h, w] of 0 and 1, whose top left pixel is at x, y of the image."""
    columns = np.zeros((mask.shape[1], mask.shape[0] + 2), np.int8)
    columns[:, 1:-1] = mask.T
    column, row = np.nonzero(np.diff(columns, axis=1))
    edges = (column + x) * height + row + y
    # A run that ends at the bottom of a column continues at the top of the next one: join the two.
    joined = np.flatnonzero(edges[1:-1:2] == edges[2::2]) * 2 + 1
    edges = np.delete(edges, np.concatenate([joined, joined + 1]))
    runs = np.diff(edges, prepend=0, append=height * width)
    return (runs if runs[-1] or len(runs) == 1 else runs[:-1]).astype(np.uint32)


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


if TYPE_CHECKING:
    import pyarrow as pa

IDS_PER_TAR = 11_187  # images per tar in the download; the ids of a tar do not depend on its number of images
MTIME = 1_680_000_000  # seconds; a fixed time, chosen arbitrarily
PHRASES = "phrases.parquet"
_SHUFFLE = 0x7A6  # separates the random values of a tar from those of an image


@dataclass(slots=True)
class SyntheticSummary:
    tars: int = 0
    images: int = 0
    masks: int = 0
    runs: int = 0
    jpeg_bytes: int = 0
    json_bytes: int = 0
    tar_bytes: int = 0

    def add(self, other: "SyntheticSummary") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def document(self) -> dict[str, int]:
        return asdict(self)

    def table(self) -> str:
        images, masks = max(self.images, 1), max(self.masks, 1)
        return "\n".join(
            f"{name:<11}{total:>15,}{each}"
            for name, total, each in (
                ("tars", self.tars, ""),
                ("images", self.images, ""),
                ("masks", self.masks, f"{self.masks / images:>13,.1f} per image"),
                ("runs", self.runs, f"{self.runs / masks:>13,.1f} per mask"),
                ("JPEG bytes", self.jpeg_bytes, f"{self.jpeg_bytes / images:>13,.0f} per image"),
                ("JSON bytes", self.json_bytes, f"{self.json_bytes / images:>13,.0f} per image"),
                ("tar bytes", self.tar_bytes, ""),
            )
        )


def scene(
    image_id: int, seed: int = 0, long_side: int | None = None, *, simple: bool = False
) -> tuple[bytes, AnnotationFile]:
    """One image and its annotation file, as `json.loads` returns it.

    The JPEG is baseline, 4:2:0, of quality 95 or 75, without EXIF. `long_side`: pixels; None for full size
    (mostly 2250x1500). `simple`: see `sa1b.programs.synthetic.scene.plan`.
    """
    jpeg, annotations, *_ = _scene(image_id, seed, long_side, simple)
    return jpeg, annotations


def _scene(
    image_id: int, seed: int, long_side: int | None, simple: bool
) -> tuple[bytes, AnnotationFile, int, list[Shape]]:
    """The return values of `scene`, the number of runs of all masks, and the objects of the annotations."""
    rng = np.random.default_rng([seed, image_id, long_side or 0])
    outlook = plan(rng, long_side, simple=simple)
    picture, shapes = draw(rng, outlook)
    jpeg: bytes = simplejpeg.encode_jpeg(picture, quality=outlook.quality, colorsubsampling="420")
    return jpeg, *annotate(rng, image_id, outlook.height, outlook.width, shapes)


def write_tar(
    path: str | Path,
    *,
    images: int,
    first_id: int,
    seed: int = 0,
    long_side: int | None = None,
    simple: bool = False,
    compress: bool = True,
    directory: bool = True,
    temporary: Path | None = None,
    phrases: Phrases | None = None,
    progress: Callable[[int], Any] | None = None,
) -> SyntheticSummary:
    """Write one source tar in the format of the download, and commit it when it is complete.

    Memory: a few images, because a temporary file holds the members until they are shuffled. An existing file
    is replaced. Ids start at `first_id`. For the image see `scene`. `compress`: gzip, as in the download.
    `directory`: write an entry for `./` first. `temporary`: path of the incomplete tar, in the same folder;
    by default one that no other process uses. `phrases` receives those of the objects; `progress` is called
    with 1 for every image drawn.
    """
    path = Path(path)
    temporary = temporary or temporary_path(path)
    summary = SyntheticSummary(tars=1, images=images)
    members: list[tuple[str, int, int]] = []  # name, offset and length in the spill file
    try:
        with ExitStack() as stack:
            out: BinaryIO | gzip.GzipFile = stack.enter_context(temporary.open("wb"))
            if compress:  # no name and no time in gzip's header: equal content gives equal bytes
                out = stack.enter_context(gzip.GzipFile("", "wb", 6, out, mtime=0))
            tar = stack.enter_context(tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT))
            spill = stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
            for image_id in range(first_id, first_id + images):
                jpeg, annotations, runs, shapes = _scene(image_id, seed, long_side, simple)
                if phrases is not None:
                    _describe(phrases, annotations, shapes)
                text = json.dumps(annotations).encode()
                for suffix, data in (("jpg", jpeg), ("json", text)):
                    members.append((f"./sa_{image_id}.{suffix}", spill.tell(), len(data)))
                    spill.write(data)
                summary.masks += len(annotations["annotations"])
                summary.runs += runs
                summary.jpeg_bytes += len(jpeg)
                summary.json_bytes += len(text)
                if progress is not None:
                    progress(1)
            if directory:
                entry = _entry("./", 0)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            for index in np.random.default_rng([seed, first_id, _SHUFFLE, 0]).permutation(len(members)):
                name, offset, length = members[index]
                spill.seek(offset)
                tar.addfile(_entry(name, length), io.BytesIO(spill.read(length)))
        summary.tar_bytes = temporary.stat().st_size
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


def _describe(phrases: Phrases, annotations: AnnotationFile, shapes: list[Shape]) -> None:
    pixels = annotations["image"]["width"] * annotations["image"]["height"]
    areas = [annotation["area"] / pixels for annotation in annotations["annotations"]]
    looks = [shape.look for shape in shapes if shape.look is not None]
    ids = [annotation["id"] for annotation in annotations["annotations"]]
    phrases.add(annotations["image"]["image_id"], ids, looks, areas)


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
    seed: int = 0,
    long_side: int | None = None,
    simple: bool = False,
    compress: bool = True,
    workers: int = 1,
    overwrite: bool = False,
    phrases: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> SyntheticSummary:
    """Write `sa_000000.tar`, `sa_000001.tar`, ... to a folder; the bytes do not depend on `workers`.

    The ids of tar t start at 1 + t * 11187. For other arguments see `write_tar`. Each worker writes one tar
    at a time. `phrases`: also write phrases.parquet, a row for each mask; see
    `sa1b.programs.synthetic.phrases`.

    FileExistsError: one of the files exists; nothing was written. OSError: the disk is full or fails.
    ChildProcessError: a worker failed for another reason. ValueError: `images_per_tar` is out of range.
    """
    if not 0 < images_per_tar <= IDS_PER_TAR:
        raise BadValue(f"images_per_tar {images_per_tar}: must be from 1 to {IDS_PER_TAR}")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(out / f"sa_{tar:06d}.tar", 1 + tar * IDS_PER_TAR) for tar in range(first_tar, first_tar + tars)]
    present = [path for path, _ in jobs if path.exists()]
    if present and not overwrite:
        raise FileExistsError(
            f"{present[0]}: already exists ({len(present)} of {tars} tars do); replace them with --overwrite"
        )
    table = out / PHRASES
    if phrases and table.exists() and not overwrite:
        raise FileExistsError(f"{table}: already exists; replace it and the tars with --overwrite")
    options = images_per_tar, seed, long_side, simple, compress, phrases
    tasks = [(path, temporary_path(path), first_id, *options) for path, first_id in jobs]
    total, described = SyntheticSummary(), Phrases()
    events = supervise(_work, tasks, workers=workers)
    try:
        for event in events:
            if event.kind == "progress" and progress is not None:
                progress(event.value)
            elif event.kind == "done":
                summary, phrases_of_tar = event.value
                total.add(summary)
                described.extend(phrases_of_tar)
            elif event.kind in ("failed", "lost"):
                path = jobs[event.task][0]
                if isinstance(event.value, Failure) and event.value.errno is not None:
                    raise OSError(event.value.errno, os.strerror(event.value.errno), str(path))
                why = event.value.message if isinstance(event.value, Failure) else event.value
                raise ChildProcessError(f"{path}: {why}")
    finally:
        events.close()
        for _, temporary, *_ in tasks:
            temporary.unlink(missing_ok=True)
    if phrases:
        _write_table(described.table(), table)
    return total


def _write_table(table: "pa.Table", path: Path) -> None:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    write_whole(path, buffer.getvalue())


def _work(
    path: Path,
    temporary: Path,
    first_id: int,
    images: int,
    seed: int,
    long_side: int | None,
    simple: bool,
    compress: bool,
    describe: bool,
    report: Callable[[int], None],
) -> tuple[SyntheticSummary, Phrases]:
    cv2.setNumThreads(1)
    phrases = Phrases()
    summary = write_tar(
        path,
        images=images,
        first_id=first_id,
        seed=seed,
        long_side=long_side,
        simple=simple,
        compress=compress,
        temporary=temporary,
        phrases=phrases if describe else None,
        progress=report,
    )
    return summary, phrases
