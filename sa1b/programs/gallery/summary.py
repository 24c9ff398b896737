"""Summary of a gallery: the shown images, and the skipped ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GallerySummary:
    """The result of writing a gallery.

    Attributes:
        images, masks: totals of the input; masks is None if they were not counted.
        shown: ids of the images, in the order of the page.
        left_out: number of chosen images that did not fit.
        skipped: reason -> number of members that cannot be used.
        surveyed: number of surveyed shards and of all shards; None: the whole input.
    """

    page: Path
    bytes: int
    images: int
    masks: int | None
    shown: list[int]
    longer_side: int
    quality: int
    left_out: int
    skipped: dict[str, int]
    surveyed: tuple[int, int] | None

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
