"""The largest value of each quantity over the images of a shard or a source: bounds of a reader's memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sa1b.shards.index import Row
from sa1b.shards.manifest import LARGEST


@dataclass(slots=True)
class Largest:
    """Largest masks, runs, and bytes of COCO strings, JPEG and mask record of one image."""

    values: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0))

    def see(self, row: Row) -> None:
        """Add one image."""
        self.merge(
            {
                "masks": len(row.annotations),
                "runs": len(row.runs.runs),
                "rle_bytes": len(row.annotations.rle),
                "jpg_bytes": row.jpg_bytes,
                "masks_bytes": row.masks_bytes,
            }
        )

    def merge(self, found: Mapping[str, int]) -> None:
        """Add the quantities of an image or of another shard."""
        for name, value in found.items():
            self.values[name] = max(self.values[name], value)
