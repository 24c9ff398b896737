"""Summary of a gallery: the shown images, and the skipped ones."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa1b.errors import UsageError
from sa1b.shards.manifest import dataset_around


@dataclass(frozen=True, slots=True)
class GallerySummary:
    """The result of writing a gallery."""

    page: Path
    bytes: int
    images: int  # total of the input
    masks: int | None  # total of the input; None: they were not counted
    shown: list[int]  # ids of the images, in the order of the page
    longer_side: int
    quality: int
    left_out: int  # chosen images that did not fit
    skipped: dict[str, int]  # reason -> number of members that cannot be used
    surveyed: tuple[int, int] | None  # number of surveyed shards and of all; None: the whole input

    def document(self) -> dict[str, Any]:
        names = (
            "bytes",
            "images",
            "masks",
            "shown",
            "longer_side",
            "quality",
            "left_out",
            "skipped",
            "surveyed",
        )
        return {"page": str(self.page)} | {name: getattr(self, name) for name in names}

    def table(self) -> str:
        masks = f", {self.masks:,} masks in total" if self.masks is not None else ""
        lines = [
            f"  shown      {len(self.shown):,} of {self.images:,} images{masks}",
            f"  drawn at   at most {self.longer_side:,} px, JPEG quality {self.quality}",
        ]
        if self.left_out:
            lines.append(f"  left out   {self.left_out:,} images that do not fit into 20 MB")
        if self.surveyed is not None:
            some, of = self.surveyed
            lines.append(
                f"  survey     distributions over {some:,} of {of:,} shards; --survey all reads every index"
            )
        if self.skipped:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in self.skipped.items())
            lines.append(f"  skipped    {reasons}")
        lines.append(f"{self.page}: {self.bytes / 1e6:.1f} MB; open it in a browser")
        return "\n".join(lines)


_HEAD = 4096  # bytes; the mark is in the first lines of a page


def origin_mark(source: Path | str, out: Path) -> str:
    """The mark in the head of a page: a digest of the path of its input, relative to the page's folder."""
    # The path itself may contain private names, and pages are sent to others.
    is_url = "://" in str(source)
    relative = str(source) if is_url else os.path.relpath(Path(source).resolve(), out.resolve().parent)
    return f"sa1b gallery {hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"


def check_replaceable(source: Path | str, out: Path, *, overwrite: bool) -> None:
    """UsageError for a file that is no gallery page of the input, unless `overwrite`; for a folder, the
    input.
    """
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; pass the path of a file")
    if "://" not in str(source) and out.exists() and out.samefile(source):
        raise UsageError(f"--out {out}: is the input; choose another --out")
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    if b'content="sa1b gallery ' not in head and (root := dataset_around(out)) is not None:
        raise UsageError(f"--out {out}: is a file of the dataset directory {root}; choose another --out")
    if overwrite:
        return
    if origin_mark(source, out).encode() not in head:
        what = (
            "a page of another input" if b'content="sa1b gallery ' in head else "not written by this command"
        )
        raise UsageError(
            f"--out {out}: exists and is {what}; choose another --out, or replace it with --overwrite"
        )
