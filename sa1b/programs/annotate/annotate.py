"""Annotation of a user's images: read, find masks, write pairs.

The next image is read and decoded, and the previous one is written, while the model works.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sa1b.console import command, counted
from sa1b.engine.precision import autocast, set_float32
from sa1b.errors import BadSample, UsageError
from sa1b.hashing import Purpose, random_words
from sa1b.masks import coco, geometry
from sa1b.names import parse_member_name
from sa1b.programs.annotate.images import (
    AnnotationFolder,
    FoundImages,
    InputImage,
    find_images,
    open_folder,
    read_image,
)
from sa1b.programs.annotate.layer import LayerTarget
from sa1b.report import bar, first_lines
from sa1b.sam.mask_generator import GeneratedMasks, GeneratorConfig, generate
from sa1b.sam.model import Sam
from sa1b.sam.published import weights_digest
from sa1b.shards.annotation import MAX_JSON_BYTES, Annotations
from sa1b.shards.documents import LayerInfo

_ID_BITS = 52


def content_id(data: bytes) -> int:
    """An image id from the bytes of its file: 2**52 plus the first 52 bits of their SHA-256."""
    # The ids of SA-1B are far smaller, and float64 represents all ids exactly. Two of a million different
    # images have the same id with a probability of 1 in 9,000.
    first = int.from_bytes(hashlib.sha256(data).digest()[:8]) >> (64 - _ID_BITS)
    return (1 << _ID_BITS) + first


def mask_ids(image_id: int, count: int) -> npt.NDArray[np.int64]:
    """Ids of the masks of an image: int64 [count], hashes of image id and index, below 2**63."""
    words = random_words(0, Purpose.MASK_ID, image_id, np.arange(count, dtype=np.int64))
    return (words >> np.uint64(1)).astype(np.int64)


def annotation_file(image_id: int, masks: GeneratedMasks) -> bytes:
    """The JSON file of an image in SA-1B's form; BadSample if it is larger than `sa1b reshard` accepts."""
    runs, count = masks.runs, len(masks)
    text, lengths = coco.encode_joined(runs)
    columns = Annotations(
        image_id=image_id,
        width=runs.width,
        height=runs.height,
        mask_id=mask_ids(image_id, count),
        area=geometry.area(runs),
        bbox=geometry.bbox_sa1b(runs).astype(np.float64),
        predicted_iou=masks.predicted_iou.astype(np.float64),
        stability_score=masks.stability_score.astype(np.float64),
        point_coords=masks.points,
        crop_box=masks.crop_boxes.astype(np.float64),
        number_types=np.zeros(count, np.uint8),
        rle=text,
        rle_bytes=lengths.astype(np.uint32),
        runs_count=np.diff(runs.offsets).astype(np.uint32),
    )
    document = json.dumps(columns.to_json()).encode()
    if len(document) > MAX_JSON_BYTES:
        raise BadSample(
            "json_too_large",
            f"{count:,} masks make an annotation file of {len(document):,} bytes, cap {MAX_JSON_BYTES:,}; "
            "raise --min-predicted-iou or --min-stability",
        )
    return document


Precision = Literal["fp32", "tf32", "bf16"]
_PREFETCHED = 2  # images that are read and decoded before the model needs them


@dataclass(frozen=True, slots=True)
class ImageShare:
    """The images of one of several processes: every count-th image, starting with number `index`."""

    index: int = 0
    count: int = 1


@dataclass(slots=True)
class AnnotationSummary:
    """The result of an annotation, of the images of this process."""

    out: str
    root: str = ""  # the dataset directory, if all images are of one
    layer: str | None = None  # name of the layer to make
    info: LayerInfo | None = None  # of the layer, if it is complete
    processes: int = 1  # that share the images
    images: int = 0
    annotated: int = 0  # images of this run
    complete: int = 0  # images that an earlier run had annotated
    duplicates: int = 0  # images with the same bytes as another image of this run
    # name, reason and message of the images that cannot be annotated
    refused: list[dict[str, str]] = field(default_factory=list)
    masks: int = 0
    empty: int = 0  # images without a mask
    others: int = 0  # files in folders that are not images, by their extensions
    seconds: float = 0.0

    def exit_code(self) -> int:
        """0: all images are annotated; 2: all were refused; 3: an image was refused."""
        if self.refused and not self._done:
            return 2
        return 3 if self.refused else 0

    @property
    def _done(self) -> int:
        return self.annotated + self.complete + self.duplicates

    def document(self) -> dict[str, Any]:
        layer = {"info": None if self.info is None else msgspec.to_builtins(self.info)}
        return asdict(self) | layer | {"exit_code": self.exit_code()}

    def table(self) -> str:
        notes = [f"{self.complete:,} already annotated"] if self.complete else []
        notes += [counted(self.duplicates, "duplicate")] if self.duplicates else []
        rate = self.annotated / self.seconds if self.seconds else 0.0
        lines = [f"  images   {self._done:,}" + (f" ({', '.join(notes)})" if notes else "")]
        if self.annotated:
            each, empty = self.masks / self.annotated, counted(self.empty, "image")
            lines.append(f"  masks    {self.masks:,} ({each:,.1f} per image, {empty} without any)")
        if self.annotated and not self.masks:
            lines.append("  note     no mask was found; lower --min-predicted-iou and --min-stability")
        lines.append(f"  refused  {len(self.refused):,}")
        refused = [
            f"{refusal['image']}: {refusal['reason']}: {refusal['message']}" for refusal in self.refused
        ]
        lines += (f"    {line}" for line in first_lines(refused))
        if self.others:
            lines.append(
                f"  other    {counted(self.others, 'file')} in the folders without the extension of an image"
            )
        if not self._done:
            return "\n".join([*lines, "Nothing is annotated: all images are refused."])
        if self.layer is not None:
            return "\n".join([*lines, *self._of_layer()])
        part = "this part of " if self.processes > 1 else ""
        lines.append(f"Complete: {part}{self.out} ({rate:,.2f} images/s, {self.seconds:,.1f} s)")
        way = f"{command('reshard', self.out)} --out shards"
        if self.root:
            way = f"{command('layer', 'add', self.root, self.out)} --name annotated"
        return "\n".join([*lines, f"Next: {'after all parts, ' if part else ''}{way}"])

    def _of_layer(self) -> list[str]:
        if self.info is None:
            return [
                f"Not complete: other processes annotate further images; the last one writes {self.layer}"
            ]
        info, root = self.info, self.root
        changes = f"{info.added:,} masks added, {info.replaced:,} replaced, {info.hidden:,} hidden"
        return [
            f"Complete: layer {info.name} ({info.digest[:12]}): {changes} in {counted(info.images, 'image')}",
            f"Next: {command('train', '--data.root', root, '--data.layers', info.name)}",
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """An image that is ready for the model, or an image that needs none: refused or complete."""

    name: str
    error: BadSample | None = None
    image_id: int = -1
    jpeg: bytes = b""
    digest: bytes = b""  # sha256 of the JPEG
    pixels: npt.NDArray[np.uint8] | None = None


def annotate(
    paths: Sequence[str],
    model: Sam,
    out: Path,
    config: GeneratorConfig,
    *,
    layer: LayerTarget | None = None,
    image_ids: str = "content",
    quality: int | None = None,
    max_pixels: int,
    precision: Precision = "fp32",
    part: ImageShare | None = None,
    weights: str = "",
    quiet: bool = False,
) -> AnnotationSummary:
    """Find the masks of images and write them as pairs in SA-1B's form; `sa1b annotate` has the details.

    Memory: a few images, and 1 kB for each name. OSError: the disk is full; complete images are kept.

    Args:
        paths: files, folders and dataset directories.
        out: folder for the pairs; the folder of an earlier run with the same settings is completed.
        layer: annotate its images instead, and make the layer; `paths` and `out` are not used.
        image_ids: origin of the ids: "content", "name" or the first of consecutive numbers.
        quality: of JPEGs that images of other formats are converted to; None: refuse these.
        part: the images of this process; None: all images.
        weights: name of the weights, for the record.
    """
    began = time.monotonic()
    part = part or ImageShare()
    device = model.pixel_mean.device
    try:
        set_float32(precision, device)
    except UsageError as error:  # names the flag of training
        raise UsageError(str(error).replace("--parallel.", "--")) from None
    if layer is not None:
        inputs, out = FoundImages(layer.images()), layer.out
    else:
        inputs = find_images(paths, out)
    first = _first_id(image_ids)
    settings = {
        "weights": weights,
        "weights_sha256": weights_digest(model.state_dict()),
        **{name: value for name, value in asdict(config).items() if name != "points_per_batch"},
        "precision": precision,
        "image_ids": image_ids,
    }
    if layer is not None:
        settings |= layer.own_settings
        of_layer = {name: value for name, value in settings.items() if name != "weights"}
        if (made := layer.written(of_layer)) is not None:
            done = len(inputs.images)
            return AnnotationSummary(
                out=str(out), root=layer.dataset.root, layer=layer.name, info=made, images=done, complete=done
            )
        usual = asdict(GeneratorConfig())
        flags = {name: value for name, value in asdict(config).items() if value != usual[name]}
        flags |= {} if precision == "fp32" else {"precision": precision}
        settings["command"] = layer.command(weights=weights, **flags)
    folder = open_folder(out, settings, len(inputs.images), with_images=layer is None)
    numbered_images = list(enumerate(inputs.images))[part.index :: part.count]
    some = inputs.images[0]
    root = paths[0] if len(paths) == 1 and some.image_id is not None and some.source_size is None else ""
    summary = AnnotationSummary(str(out), root, images=len(numbered_images), others=inputs.others)
    summary.processes = part.count
    if layer is not None:
        summary.root, summary.layer = layer.dataset.root, layer.name

    def prepare(numbered: tuple[int, InputImage]) -> _Prepared:
        number, image = numbered
        if layer is not None and image.image_id in folder.complete:
            return _Prepared(image.name, image_id=image.image_id)
        try:
            read = read_image(image, max_pixels, quality)
            image_id = _image_id(image, read.source, None if first is None else first + number, image_ids)
            if folder.is_complete(image_id, read.jpeg):
                return _Prepared(image.name, image_id=image_id)
            digest = hashlib.sha256(read.jpeg).digest()
            size = None if layer is None or image.source_size is None else image.source_size()
            return _Prepared(
                image.name, image_id=image_id, jpeg=read.jpeg, digest=digest, pixels=read.pixels(size)
            )
        except BadSample as error:
            return _Prepared(image.name, error, image.image_id or 0)

    with (
        bar(len(numbered_images), "annotate", "image", quiet) as progress,
        ThreadPoolExecutor(1) as writer,
        ThreadPoolExecutor(_PREFETCHED) as threads,
    ):
        work = _Work(model, config, precision, folder, summary=summary, writer=writer)
        for prepared in _prefetched(threads, prepare, numbered_images):
            try:
                work.take(prepared)
            except BadSample as error:
                printable = os.fsencode(prepared.name).decode(errors="replace")
                if first is not None and error.reason == "id_taken":  # so are the numbers after it
                    raise UsageError(f"{printable}: {error}") from None
                summary.refused.append({"image": printable, "reason": error.reason, "message": str(error)})
                if layer is not None:
                    folder.refuse(prepared.image_id, prepared.name, error.reason)
            progress.update(1)
        work.wait(0)
    if layer is not None:
        summary.info = layer.finish(folder, of_layer, quiet=quiet)
    summary.seconds = time.monotonic() - began
    return summary


@dataclass(slots=True)
class _Work:
    """The part of a run that takes one image at a time."""

    model: Sam
    config: GeneratorConfig
    precision: Precision
    folder: AnnotationFolder
    summary: AnnotationSummary
    writer: ThreadPoolExecutor
    begun: dict[int, tuple[str, bytes]] = field(default_factory=dict)  # id -> name and digest, of this run
    writing: deque[Future[None]] = field(default_factory=deque)

    def take(self, prepared: _Prepared) -> None:
        """Annotate an image, or count it if it is complete or a copy; BadSample refuses it."""
        if prepared.error is not None:
            raise prepared.error
        if prepared.pixels is None:
            self.summary.complete += 1
            self._submit(self.folder.list_image, prepared.image_id, prepared.name, None)
        elif prepared.image_id in self.begun:
            name, digest = self.begun[prepared.image_id]
            if digest != prepared.digest:
                message = f"{name} is another image with the id {prepared.image_id}"
                raise BadSample("id_taken", f"{message}; {self.folder.other_ids()}")
            self.summary.duplicates += 1
            self._submit(self.folder.list_image, prepared.image_id, prepared.name, None)
        else:
            masks = self._masks(prepared.pixels)
            document = annotation_file(prepared.image_id, masks)
            self.begun[prepared.image_id] = prepared.name, prepared.digest
            self._submit(self._write, prepared, document, len(masks))
            self.summary.annotated += 1
            self.summary.masks += len(masks)
            self.summary.empty += len(masks) == 0

    def wait(self, most: int) -> None:
        """Wait until at most `most` images are being written; OSError if writing failed."""
        while len(self.writing) > most:
            self.writing.popleft().result()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self.wait(_PREFETCHED)
        self.writing.append(self.writer.submit(function, *arguments))

    def _masks(self, pixels: npt.NDArray[np.uint8]) -> GeneratedMasks:
        device = self.model.pixel_mean.device
        try:
            with autocast(self.precision, device):
                return generate(self.model, pixels, self.config)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"--points-per-batch {self.config.points_per_batch}: not enough memory on {device}; "
                "pass a smaller number"
            ) from None

    def _write(self, prepared: _Prepared, document: bytes, masks: int) -> None:
        self.folder.write(prepared.image_id, prepared.jpeg, document)
        self.folder.list_image(prepared.image_id, prepared.name, masks)


def _prefetched(
    threads: ThreadPoolExecutor,
    prepare: Callable[[tuple[int, InputImage]], _Prepared],
    images: Sequence[tuple[int, InputImage]],
) -> Iterator[_Prepared]:
    """The prepared images, in order, each prepared before it is needed."""
    waiting: deque[Future[_Prepared]] = deque()
    for image in images:
        waiting.append(threads.submit(prepare, image))
        if len(waiting) > _PREFETCHED:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _first_id(image_ids: str) -> int | None:
    """The first of consecutive ids, if --image-ids is a number."""
    if image_ids in ("content", "name"):
        return None
    if not image_ids.isdecimal() or int(image_ids) >= 2**62:
        raise UsageError(
            f"--image-ids {image_ids}: must be content, name, or a whole number below 2**62, the first id"
        )
    return int(image_ids)


def _image_id(image: InputImage, source: bytes, number: int | None, image_ids: str) -> int:
    """The id of an image; BadSample if it should come from a name that has none."""
    if image.image_id is not None:
        return image.image_id
    if number is not None:
        return number
    if image_ids == "content":
        return content_id(source)
    named = parse_member_name(f"{Path(image.name).stem}.jpg")
    if named is None:
        raise BadSample("no_id", "its name is not sa_<id>; pass --image-ids content, or rename it")
    return named.image_id
