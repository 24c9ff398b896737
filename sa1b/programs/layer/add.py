"""A layer from the masks in a user's files.

Images are matched by id, their masks are checked with the size of the stored image, and the masks that the
image has already, also by the layer that the new one builds on, decide what is added, replaced and hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sa1b.console import command, counted
from sa1b.errors import BadSample, UsageError
from sa1b.programs.layer.files import FoundImage, ImageIds, MaskFiles, check_files
from sa1b.report import bar, first_names
from sa1b.shards.annotation import Annotations
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import LayerInfo
from sa1b.shards.layer_writer import Existing, LayerWriter, make_change, provenance, writing
from sa1b.storage.open import open_store

_BATCH = 64  # images whose stored masks are read together
_SHOWN = 5


@dataclass(slots=True)
class AddSummary:
    """What `sa1b layer add` did; counts of images and masks."""

    root: str
    info: LayerInfo | None = None
    unchanged: int = 0  # images whose masks change nothing
    renumbered: int = 0  # added masks that had no id, or that of another mask of the image
    missing: list[int] = field(default_factory=list)  # ids of images that the directory lacks
    twice: list[int] = field(default_factory=list)  # ids of images that occur again, and were left out
    not_taken: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # reason -> images or masks
    messages: dict[str, str] = field(default_factory=dict)  # reason -> about the first one

    def exit_code(self) -> int:
        """0: everything is in the layer; 3: the layer is complete, and lacks a part of the files."""
        return 3 if self.missing or self.twice or self.refused else 0

    def document(self) -> dict[str, Any]:
        """The summary as a JSON document."""
        info = self.info
        assert info is not None
        return {
            "exit_code": self.exit_code(),
            "name": info.name,
            "digest": info.digest,
            "images": info.images,
            "added": info.added,
            "replaced": info.replaced,
            "hidden": info.hidden,
            "unchanged": self.unchanged,
            "renumbered": self.renumbered,
            "missing": self.missing,
            "twice": self.twice,
            "not_taken": self.not_taken,
            "refused": self.refused,
            "messages": self.messages,
        }

    def table(self) -> str:
        """The summary as text."""
        info = self.info
        assert info is not None
        masks = f"{info.added:,} masks added, {info.replaced:,} replaced, {info.hidden:,} hidden"
        lines = [f"layer {info.name} ({info.digest[:12]}): {masks} in {counted(info.images, 'image')}"]
        for count, text in (
            (self.unchanged, "without a change"),
            (len(self.missing), f"not in {self.root}: {first_names(self.missing, _SHOWN)}"),
            (len(self.twice), f"a second time, left out: {first_names(self.twice, _SHOWN)}"),
        ):
            lines += [f"{counted(count, 'image')} {text}"] if count else []
        if self.renumbered:
            some = counted(self.renumbered, "added mask")
            lines.append(f"{some} got a new id, having none or that of another mask of the image")
        lines += [f"left out {reason}: {n:,} ({self.messages[reason]})" for reason, n in self.refused.items()]
        if self.not_taken:
            lines.append(f"{counted(self.not_taken, 'file')} not read: neither a tar nor an annotation file")
        lines.append(f"next: {command('train')} --data.root {self.root} --data.layers {info.name}")
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
                _add_batch(dataset, batch, seen, writer, files, summary, existing)
                shown.update(len(batch))
        if not len(writer.columns["image_id"]) and (why := _nothing(root, files, summary)):
            raise UsageError(why)
        weights = {str(one["annotate"].get("weights_sha256")) for one in files.sources if "annotate" in one}
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
        names = first_names(sorted(summary.missing), _SHOWN)
        return (
            f"{files.paths[0]}: none of its images is in {root} (ids {names}); for files in COCO's format, "
            "pass --image-ids name or hash"
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
    for one, row, base in _with_stored(dataset, batch, seen, summary):
        try:
            own = one.parse(base.height, base.width)
            change, renumbered = make_change(base, own, existing)
        except BadSample as error:
            files.refusals.add(error.reason, f"image {one.image_id}: {error}")
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
    found, rows = [], []
    for one in batch:
        try:
            row = dataset.row(one.image_id)
        except KeyError:
            summary.missing.append(one.image_id)
            continue
        if one.image_id in seen:
            summary.twice.append(one.image_id)
            continue
        seen.add(one.image_id)
        found.append(one)
        rows.append(row)
    return zip(found, rows, dataset.masks(rows), strict=True)
