"""A layer from the masks in a user's files: pairs of SA-1B, files and results in COCO's format.

    sa_5.json, FOLDER, X.tar    annotation files of SA-1B, with or without images
    x.json                      an object with the lists images and annotations, or a list of results

Images are matched by id, their masks are checked with the size of the stored image, and the masks that the
image has already, also by the layer that the new one builds on, decide what is added, replaced and hidden.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sa1b.console import command, counted
from sa1b.errors import BadSample, SourceError, UsageError
from sa1b.names import ANNOTATE_FORMAT, ANNOTATE_SETTINGS, parse_member_path
from sa1b.report import bar, first_names
from sa1b.shards import MAX_STORED_PIXELS
from sa1b.shards.annotation import Annotations, parse_annotation
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import LayerInfo
from sa1b.shards.layer_writer import Existing, LayerWriter, make_change, provenance, writing
from sa1b.sources.coco_file import CocoFile, CocoImage, CocoOptions, read_results
from sa1b.sources.coco_pair import CocoPair, coco_pair
from sa1b.sources.discovery import Discovered, discover
from sa1b.sources.mirror import is_parquet
from sa1b.sources.source import Source, SourceReader
from sa1b.sources.tar_reader import holds_tar, is_tar_name
from sa1b.sources.tar_stream import Damage
from sa1b.storage.atomic import sha256_of
from sa1b.storage.open import open_store

ImageIds = Literal["keep", "name", "hash"]
_IMAGES = ("*.jpg", "*.JPG", "*.jpeg", "*.JPEG")
_FORMS = (
    "name sa_<id>.json files, folders or tars of them, or .json files or lists of results in COCO's format"
)


@dataclass(slots=True)
class Refusals:
    """Masks and images of the files that the layer lacks: reason -> number, and a message about the first
    one.
    """

    counts: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, message: str, count: int = 1) -> None:
        """Count images or masks of one reason."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.messages.setdefault(reason, message)


@dataclass(frozen=True, slots=True)
class FoundImage:
    """The masks of an image in a file."""

    image_id: int
    # takes height and width of the image in the dataset directory; BadSample: the masks cannot be used
    parse: Callable[[int, int], Annotations]


@dataclass(slots=True)
class MaskFiles:
    """The files of a user.

    Attributes:
        image_ids: where the ids of images in COCO's format come from: "keep": those of the file; "name": the
            number in `sa_<id>.jpg`; "hash": as `sa1b reshard --image-ids hash`.
        sources: name, kind and sha256 of each file that was read.
        refusals: images and masks that cannot be used.
        not_taken: files in folders that are no annotation files.
    """

    paths: tuple[Path, ...]
    image_ids: ImageIds = "keep"
    sources: list[dict[str, Any]] = field(default_factory=list)
    refusals: Refusals = field(default_factory=Refusals)
    not_taken: list[str] = field(default_factory=list)

    def images(self) -> Iterator[FoundImage]:
        """The images of all files in their order. SourceError: a file cannot be read at all."""
        for path in self.paths:
            named = parse_member_path(path.name)
            if path.is_file() and named is not None and named.ending == "json":
                yield FoundImage(named.image_id, partial(_pair, named.image_id, path.read_bytes()))
                self._read(path, "json", sha256_of(path))
            elif path.is_file() and path.name.lower().endswith(".json"):
                yield from self._results(path) if _is_list(path) else self._coco(path)
                self._read(path, "coco", sha256_of(path))
            else:
                discovered = _discovered(path)
                self.not_taken += [str(entry.path) for entry in discovered.not_taken]
                for source in discovered.sources:
                    yield from self._pairs(source)

    def _read(self, path: Path, kind: str, sha256: str | None) -> None:
        entry = {"name": path.resolve().name, "kind": kind, "sha256": sha256}
        settings = next(
            (
                recorded
                for folder in (path, path.resolve().parent)
                if (recorded := _annotate_settings(folder))
            ),
            None,
        )
        self.sources.append(entry if settings is None else entry | {"annotate": settings})

    def _pairs(self, source: Source) -> Iterator[FoundImage]:
        reader = SourceReader(source)
        try:
            for item in reader.items():
                if isinstance(item, Damage):
                    self.refusals.add("damage", f"{source.label}, offset {item.offset:,}: {item.message}")
                    continue
                named = parse_member_path(item.name)
                if named is None or named.ending != "json":
                    continue
                if item.kind != "file":
                    self.refusals.add("member_unreadable", f"{source.label}: {item.name}: {item.detail}")
                    continue
                yield FoundImage(named.image_id, partial(_pair, named.image_id, item.data))
            self._read(source.path, source.kind, reader.digests().get("sha256"))
            reader.check_unchanged()
        finally:
            reader.close()

    def _coco(self, path: Path) -> Iterator[FoundImage]:
        ids: Literal["keep", "hash"] = "keep" if self.image_ids == "keep" else "hash"
        file = CocoFile(path, path.stem, CocoOptions(ids=ids))
        lost = sum(map(len, file.unlisted.values()))
        if lost:
            self.refusals.add("image_unlisted", f"{path}: {lost:,} annotations of images that it lacks", lost)
        for image in file.images:
            image_id = image.image_id
            if self.image_ids == "name":
                named = parse_member_path(f"{image.name.rpartition('.')[0]}.jpg")
                if named is None:
                    self.refusals.add("image_name", f"{path}: {image.name!r} is not sa_<id>.jpg")
                    continue
                image_id = named.image_id
            yield FoundImage(image_id, partial(self._of_coco, path, file, image, image_id))

    def _of_coco(
        self, path: Path, file: CocoFile, image: CocoImage, image_id: int, height: int, width: int
    ) -> Annotations:
        size = image.size
        if (size[0] or height, size[1] or width) != (height, width):
            raise BadSample("image_size", _sizes(path.name, size[1], size[0], width, height))
        provenance = {"format": "coco", "file": path.name, "image": image.entry}
        pair = coco_pair(
            image_id,
            height,
            width,
            annotations=file.annotations(image),
            categories=file.categories,
            provenance=provenance,
        )
        return self._parsed(path, image_id, pair)

    def _results(self, path: Path) -> Iterator[FoundImage]:
        groups: dict[int, list[Any]] = {}
        for result in read_results(path):
            key = result.get("image_id") if isinstance(result, dict) else None
            if type(key) is not int:
                self.refusals.add("image_unlisted", f"{path}: an entry without an integer as image_id")
            else:
                groups.setdefault(key, []).append(result)
        provenance = {"format": "coco results", "file": path.name}

        def parse(image_id: int, annotations: list[Any], height: int, width: int) -> Annotations:
            pair = coco_pair(
                image_id, height, width, annotations=annotations, categories={}, provenance=provenance
            )
            return self._parsed(path, image_id, pair)

        for image_id, annotations in groups.items():
            yield FoundImage(image_id, partial(parse, image_id, annotations))

    def _parsed(self, path: Path, image_id: int, pair: CocoPair) -> Annotations:
        """The masks of an image in COCO's format; what was refused of them is counted."""
        for reason, lost in pair.refused.items():
            self.refusals.add(reason, f"{path}: image {image_id}: {pair.messages[reason]}", len(lost))
        return parse_annotation(pair.text, image_id, MAX_STORED_PIXELS).annotations


def _pair(image_id: int, text: bytes, height: int, width: int) -> Annotations:
    annotations = parse_annotation(text, image_id, MAX_STORED_PIXELS).annotations
    if (annotations.height, annotations.width) != (height, width):
        size = annotations.width, annotations.height
        raise BadSample("image_size", _sizes("its annotation file", *size, width, height))
    return annotations


def _sizes(what: str, width: Any, height: Any, stored_width: int, stored_height: int) -> str:
    size = f"{repr(width)[:20]} x {repr(height)[:20]}"
    return f"{what}: masks of {size} pixels, the image has {stored_width} x {stored_height}"


def _discovered(path: Path) -> Discovered:
    """The tars and folders of annotation files in a path."""
    if path.is_file() and not is_tar_name(path.name) and not holds_tar(path):
        raise SourceError(f"{path}: neither a .json file nor a tar; {_FORMS}")
    try:
        return discover([path], _IMAGES, numbered=True)
    except SourceError as error:  # its advice has the flags of `sa1b reshard`
        why = str(error).partition("; ")[0].removeprefix(f"{path}: ")
        raise SourceError(f"{path}: {why}; {_FORMS}") from None


def _is_list(path: Path) -> bool:
    """Whether the file has a list, as results in COCO's format have."""
    with path.open("rb") as file:
        return file.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _annotate_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of `sa1b annotate` in its output folder, among them the digest of the weights."""
    try:
        settings = json.loads((folder / ANNOTATE_SETTINGS).read_bytes())
        return dict(settings) if settings["format"] == ANNOTATE_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def check_files(paths: tuple[Path, ...]) -> None:
    """SourceError: a path does not exist, or is a Parquet file."""
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path}: no such file or folder; name files of masks, or folders of them")
        if is_parquet(path):
            raise SourceError(f"{path}: a Parquet file; write its masks in COCO's format as JSON")


_BATCH = 64  # images whose stored masks are read together


@dataclass(slots=True)
class AddSummary:
    """What `sa1b layer add` did; counts of images and masks."""

    root: str
    info: LayerInfo | None = None
    unchanged: int = 0  # images whose masks change nothing
    renumbered: int = 0  # added masks that had no id, or that of another mask of the image
    missing: list[int] = field(default_factory=list)  # ids of images that the directory lacks
    twice: list[int] = field(default_factory=list)  # ids of images that occur again, and were left out
    not_taken: list[str] = field(default_factory=list)  # files in folders
    refused: dict[str, int] = field(default_factory=dict)  # reason -> images or masks
    messages: dict[str, str] = field(default_factory=dict)  # reason -> about the first one

    def exit_code(self) -> int:
        """0: everything is in the layer; 3: the layer is complete, and lacks a part of the files."""
        may_have_masks = any(name.lower().endswith(".json") for name in self.not_taken)
        return 3 if self.missing or self.twice or self.refused or may_have_masks else 0

    def document(self) -> dict[str, Any]:
        """The summary as a JSON document."""
        assert self.info is not None
        names = ("unchanged", "renumbered", "missing", "twice", "not_taken", "refused", "messages")
        return {
            "exit_code": self.exit_code(),
            **self.info.figures(),
            **{name: getattr(self, name) for name in names},
        }

    def table(self) -> str:
        """The summary as text."""
        info = self.info
        assert info is not None
        masks = f"{info.added:,} masks added, {info.replaced:,} replaced, {info.hidden:,} hidden"
        lines = [f"layer {info.name} ({info.digest[:12]}): {masks} in {counted(info.images, 'image')}"]
        for count, text in (
            (self.unchanged, "without a change"),
            (len(self.missing), f"not in {self.root}: {first_names(self.missing)}"),
            (len(self.twice), f"a second time, left out: {first_names(self.twice)}"),
        ):
            lines += [f"{counted(count, 'image')} {text}"] if count else []
        if self.renumbered:
            some = counted(self.renumbered, "added mask")
            lines.append(f"{some} got a new id, having none or that of another mask of the image")
        lines += [f"left out {reason}: {n:,} ({self.messages[reason]})" for reason, n in self.refused.items()]
        if self.not_taken:
            some = f"{counted(len(self.not_taken), 'file')} not read: {first_names(self.not_taken)}"
            lines.append(f"{some}; name files in COCO's format themselves")
        lines.append(f"next: {command('train', '--data.root', self.root, '--data.layers', info.name)}")
        return "\n".join(lines)


def add_layer(
    root: str,
    paths: tuple[Path, ...],
    name: str,
    *,
    existing: Existing = "keep",
    image_ids: ImageIds = "keep",
    on: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> AddSummary:
    """Write a layer from the masks in files. UsageError: no image of the files is in the dataset directory.
    SourceError: a file cannot be read. Others as `sa1b.shards.layer_writer.writing`.

    Args:
        existing: what happens to the masks that an image of the files has. "keep": they stay; "replace":
            those with the id of a mask of the files are replaced; "hide": likewise, the others are hidden.
        on: the layer that the new one builds on.
    """
    check_files(paths)
    files, summary = MaskFiles(paths, image_ids), AddSummary(root)
    dataset = Dataset(root, layers=() if on is None else (on,))
    with writing(open_store(root), name, overwrite=overwrite) as writer:
        seen: set[int] = set()
        with bar(0, "read", " images", quiet) as shown:
            images = files.images()
            while batch := list(islice(images, _BATCH)):
                _add_batch(
                    dataset, batch, seen, writer=writer, files=files, summary=summary, existing=existing
                )
                shown.update(len(batch))
        if not len(writer.columns["image_id"]) and (why := _nothing(root, files, summary)):
            raise UsageError(why)
        weights = {
            str(source["annotate"].get("weights_sha256")) for source in files.sources if "annotate" in source
        }
        origin = provenance(
            "sa1b layer add",
            {"existing": existing, "image_ids": image_ids},
            sorted(weights),
            sources=files.sources,
        )
        parent = None if on is None else dataset.layers[-1].info
        summary.info = writer.commit(dataset.table, parent, origin)
    summary.refused, summary.messages = files.refusals.counts, files.refusals.messages
    summary.missing.sort()
    summary.not_taken = files.not_taken
    return summary


def _nothing(root: str, files: MaskFiles, summary: AddSummary) -> str:
    """Why no image is changed, as a message; empty if the images have the masks of the files."""
    if summary.missing:
        names = first_names(sorted(summary.missing))
        return (
            f"{files.paths[0]}: none of its images is in {root} (ids {names}); pass the dataset directory of "
            "these images or, for files in COCO's format, another --image-ids"
        )
    if files.refusals.counts:
        reason, message = next(iter(files.refusals.messages.items()))
        return f"{files.paths[0]}: no mask can be used ({reason}: {message}); correct the file"
    return "" if summary.unchanged else f"{files.paths[0]}: has no image; name files of masks"


def _add_batch(
    dataset: Dataset,
    batch: list[FoundImage],
    seen: set[int],
    writer: LayerWriter,
    files: MaskFiles,
    summary: AddSummary,
    existing: Existing,
) -> None:
    for image, row, base in _with_stored(dataset, batch, seen, summary):
        try:
            annotations = image.parse(base.height, base.width)
            change, renumbered = make_change(base, annotations, existing)
        except BadSample as error:
            files.refusals.add(error.reason, f"image {image.image_id}: {error}")
            continue
        if not len(change):
            summary.unchanged += 1
            continue
        summary.renumbered += renumbered
        writer.add(change, int(dataset.table.masks_crc32c[row]))


def _with_stored(
    dataset: Dataset, batch: list[FoundImage], seen: set[int], summary: AddSummary
) -> Iterator[tuple[FoundImage, int, Annotations]]:
    """The images of the dataset directory that were not read before, with their rows and stored masks."""
    images, rows = [], []
    for image in batch:
        try:
            row = dataset.row(image.image_id)
        except KeyError:
            summary.missing.append(image.image_id)
            continue
        if image.image_id in seen:
            summary.twice.append(image.image_id)
            continue
        seen.add(image.image_id)
        images.append(image)
        rows.append(row)
    return zip(images, rows, dataset.masks(rows), strict=True)
