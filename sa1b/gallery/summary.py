"""What a gallery shows and what its page left out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GallerySummary:
    """What was made.

    Attributes:
        page: where it lies; bytes: its size.
        images, masks: of the whole input; masks is None where they were not counted.
        shown: ids of the images, in the order of the page.
        longer_side, quality: of the images: pixels at most, JPEG quality.
        left_out: images that were chosen but did not fit.
        surveyed: shards that the distributions come from, and of how many; None: everything.
        skipped: reason -> what could not be used.
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
        """For scripts."""
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

    def text(self) -> str:
        """For people."""
        masks = f", {self.masks:,} masks in all" if self.masks is not None else ""
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
