"""One stored sample: an image and its masks, as bytes, arrays, PIL images or on the screen."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sa1b.arguments import whole_number
from sa1b.console import command
from sa1b.errors import UsageError
from sa1b.masks import raster
from sa1b.masks.runs import Runs
from sa1b.names import image_name
from sa1b.shards import display, jpeg
from sa1b.shards.annotation import Annotations

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Sample(display.Displayed):
    """One image with its masks, as stored. A notebook shows it with its masks drawn over it.

    Attributes:
        image_id: the number in `sa_<id>.jpg`.
        jpeg: the bytes of `sa_<id>.jpg`; empty if the shards were made with --annotations-only.
        annotations: all masks with all their numbers, in pixels of the source image.
        shard: name of the shard.
        offset: offset of the JPEG's content in the shard, in bytes.
    """

    image_id: int
    jpeg: bytes
    annotations: Annotations
    shard: str
    offset: int

    def __repr__(self) -> str:
        found = self.annotations
        image = f"JPEG of {len(self.jpeg):,} bytes" if self.jpeg else "no JPEG"
        return (
            f"Sample({self.image_id}: {len(found):,} masks, {found.width} x {found.height} pixels, "
            f"{image} in {self.shard!r} at offset {self.offset:,})"
        )

    @property
    def image(self) -> npt.NDArray[np.uint8]:
        """The decoded image, RGB uint8 [height, width, 3]; decoded on every use.

        Smaller than the masks' frame if the shards were made with --image-size.

        Raises:
            BadSample: the JPEG does not decode.
            UsageError: the shards were made with --annotations-only.
        """
        self._check_image()
        return jpeg.decode(self.jpeg)

    @property
    def pil(self) -> "Image":
        """The same pixels as a PIL image in mode RGB; decoded on every use.

        Raises:
            BadSample: the JPEG does not decode.
            UsageError: the shards were made with --annotations-only.
        """
        from PIL import Image

        return Image.fromarray(self.image)

    @property
    def runs(self) -> Runs:
        """All masks as runs at source resolution; decoded on every use."""
        return self.annotations.runs()

    def masks(self, select: npt.ArrayLike | None = None) -> npt.NDArray[np.bool_]:
        """Masks as pixels at source resolution, equal to what pycocotools decodes.

        The frame is that of the annotations, `annotations.height` x `annotations.width` pixels, even if the
        stored image is smaller. 100 masks of 2250 x 1500 pixels take 338 MB: select the masks you need, or
        rasterise the runs at another size (`sa1b.masks.rasterize(sample.runs, height, width)`).

        Args:
            select: integers [K] or bool [N], the masks to decode; None: all N, in the order of the
                annotations.

        Returns:
            bool [K, height, width], True on the mask.

        Raises:
            IndexError: an index in `select` is outside the masks.
        """
        found = raster.rasterize(self.runs, select=select, dtype=np.bool_)
        return found.view(np.bool_)

    def overlay(self, masks: npt.ArrayLike | None = None, max_side: int = 1024) -> "Image":
        """The image with its masks drawn over it in colours, with contours, as a PIL image in mode RGB.

        It has the proportions of the source image, whose pixel (x, y) is at (x * width / annotations.width, y
        * height / annotations.height). Smaller masks are drawn over larger ones.

        Args:
            masks: integers [K] or bool [N], the masks to draw; None: all; []: none.
            max_side: pixels of the longer side, at most; the image is never enlarged beyond the stored JPEG.

        Raises:
            ValueError: max_side is not an integer of at least 1, or an index in `masks` is outside the masks.
            BadSample: the JPEG does not decode.
            UsageError: the shards were made with --annotations-only.
        """
        from PIL import Image

        from sa1b.shards.overlay import decode_for_display, overlay

        max_side = whole_number("max_side", max_side, 1)
        self._check_image()
        runs = self.runs
        if masks is not None:
            try:
                runs = runs.select(masks)
            except (IndexError, TypeError, ValueError):
                raise ValueError(
                    f"masks={masks!r} must be indices from 0 to {len(runs) - 1} of the {len(runs):,} masks "
                    f"of image {self.image_id}, or bool [{len(runs)}]"
                ) from None
        return Image.fromarray(overlay(decode_for_display(self.jpeg, max_side), runs))

    def show(self, masks: npt.ArrayLike | None = None, max_side: int = 1024) -> None:
        """Show the image with its masks: in the notebook, else in the image viewer that PIL finds.

        Args:
            masks: as for `overlay`.
            max_side: as for `overlay`.

        Raises:
            UsageError: this machine has no display or no image viewer, or as for `overlay`.
            ValueError, BadSample: as for `overlay`.
        """
        display.show(self.overlay(masks, max_side), image_name(self.image_id))

    def _check_image(self) -> None:
        """Raise UsageError if the shard contains no image."""
        if not self.jpeg:
            raise UsageError(
                f"{image_name(self.image_id)}: {self.shard} has annotations only and no images "
                f"(--annotations-only); convert its source with `{command('reshard')}` to another --out, "
                "without that flag"
            )

    def _preview(self) -> "Image":
        return display.preview(lambda: self, display.SAMPLE_SIDE)[0]
