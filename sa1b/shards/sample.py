"""One stored sample: an image and its masks, as bytes, arrays, PIL images or on the screen."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue, whole_number
from sa1b.console import command
from sa1b.errors import ShardError, UsageError
from sa1b.masks import raster
from sa1b.masks.runs import Runs
from sa1b.names import image_name, member_name
from sa1b.shards import display, jpeg, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.layer import Layer, PendingChange
from sa1b.shards.record import RecordError
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.errors import DamageError, MissingError, StorageError
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import Part

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
        annotations = self.annotations
        image = f"JPEG of {len(self.jpeg):,} bytes" if self.jpeg else "no JPEG"
        return (
            f"Sample({self.image_id}: {len(annotations):,} masks, {annotations.width} x {annotations.height} "
            f"pixels, {image} in {self.shard!r} at offset {self.offset:,})"
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
        masks = raster.rasterize(self.runs, select=select, dtype=np.bool_)
        return masks.view(np.bool_)

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

        max_side = whole_number("max_side", max_side, 1)
        self._check_image()
        runs = self.runs
        if masks is not None:
            try:
                runs = runs.select(masks)
            except (IndexError, TypeError, ValueError):
                raise BadValue(
                    f"masks={masks!r} must be indices from 0 to {len(runs) - 1} of the {len(runs):,} masks "
                    f"of image {self.image_id}, or bool [{len(runs)}]"
                ) from None
        return Image.fromarray(display.overlay(display.decode_for_display(self.jpeg, max_side), runs))

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


NEAR = 1 << 20  # largest gap between two samples, in bytes, that one read includes


class _Begun(Protocol):
    def result(self) -> bytes: ...

    def cancel(self) -> bool: ...


class _Shared:
    """One read for several samples; their threads may request it at the same time."""

    def __init__(self, begun: _Begun) -> None:
        self._begun = begun
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def result(self) -> bytes:
        with self._lock:
            if self._data is None:
                self._data = self._begun.result()
            return self._data

    def cancel(self) -> bool:
        return self._begun.cancel()


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Location of a sample in a shard; offsets are in bytes from its start."""

    image_id: int
    shard: str
    start: int  # of the jpg's content
    masks_start: int  # of the record's content
    stop: int  # end of the record
    jpg_bytes: int
    jpg_crc: int  # CRC-32C
    masks_crc: int  # of the record

    def without_image(self) -> "SampleLocation":
        """The location of the masks only."""
        return replace(self, start=self.masks_start, jpg_bytes=0, jpg_crc=0)

    def parts(self, origin: int) -> tuple[Part, Part]:
        """The checksums to verify in a range that starts at `origin`."""
        return (
            Part(self.start - origin, self.jpg_bytes, self.jpg_crc),
            Part(self.masks_start - origin, self.stop - self.masks_start, self.masks_crc),
        )


@dataclass(frozen=True, slots=True)
class PendingRead:
    location: SampleLocation
    reader: Reader
    begun: _Begun  # the pending read, which may cover a block of samples
    origin: int  # offset in the shard at which the read begins
    shared: bool  # whether the same read returns other samples
    changes: tuple[PendingChange, ...] = ()  # of the layers that have the image, in their order
    text: bool = True  # as for `Change.apply`

    def result(self) -> tuple[memoryview, Annotations]:
        """The JPEG's bytes and the masks, both verified. ShardError: they are damaged or belong to another
        sample. StorageError: the sample cannot be read now; its state is unknown.
        """
        jpeg, annotations = self._stored()
        for change in self.changes:
            annotations = change.apply(annotations, text=self.text)
        return jpeg, annotations

    def _stored(self) -> tuple[memoryview, Annotations]:
        location = self.location
        try:
            data = memoryview(self.begun.result())
        except DamageError as error:
            if self.shared:  # perhaps only a neighbouring sample is damaged
                return submit(self.reader, [location])[0].result()
            kind = "masks" if error.start >= location.masks_start else "jpg"
            name = member_name(location.image_id, kind)
            raise ShardError(
                f"{name} is damaged: {error}; `{command('verify', self.reader.root)}` lists all damage"
            ) from None
        except MissingError as error:
            raise _missing(self.reader, error) from None
        jpeg = data[location.start - self.origin :][: location.jpg_bytes]
        try:
            masks = data[location.masks_start - self.origin : location.stop - self.origin]
            annotations = record.decode(masks)
            if annotations.image_id != location.image_id:
                raise RecordError(f"the record is of image {annotations.image_id}")
        except RecordError as error:
            url = self.reader.url(location.shard)
            raise ShardError(
                f"{url}: record of image {location.image_id} at offset {location.masks_start:,}: {error}; "
                f"`{command('verify', self.reader.root)}` lists all damage"
            ) from None
        return jpeg, annotations

    def cancel(self) -> None:
        self.begun.cancel()
        for change in self.changes:
            change.cancel()


def _missing(reader: Reader, error: MissingError) -> MissingError:
    """The error for a shard that is missing in its dataset directory."""
    way_out = "copy it again from the dataset directory, or check the URL"
    if reader.is_local:
        way_out = f"`{command('verify', reader.root)}` says how to restore it"
    return MissingError(
        f"{error.url}: the shard is missing; {way_out}", url=error.url, start=error.start, length=error.length
    )


def check_size(reader: Reader, shard: str, document: Mapping[str, Any]) -> None:
    """Raise StorageError if an object has another size than dataset.json lists: its upload was incomplete."""
    listed = next(entry["bytes"] for entry in document["shards"] if entry["name"] == shard)
    if (size := reader.size(shard)) != listed:
        raise StorageError(
            f"{reader.url(shard)}: {size:,} bytes, {listed:,} listed in dataset.json; copy it again, "
            f"`{command('verify', reader.root)}` lists such shards",
            url=reader.url(shard),
        )


def location_of(table: SampleTable, row: int, shards: Sequence[str]) -> SampleLocation:
    masks_start = table.masks_offset(row)
    return SampleLocation(
        image_id=int(table.image_id[row]),
        shard=shards[int(table.shard[row])],
        start=int(table.offset[row]),
        masks_start=masks_start,
        stop=masks_start + int(table.masks_bytes[row]),
        jpg_bytes=int(table.jpg_bytes[row]),
        jpg_crc=int(table.jpg_crc32c[row]),
        masks_crc=int(table.masks_crc32c[row]),
    )


def submit(
    reader: Reader, locations: Sequence[SampleLocation], layers: Sequence[Layer] = (), *, text: bool = True
) -> list[PendingRead]:
    """Start to read samples in this order, with layers; neighbours in a shard share a read."""
    readings: list[PendingRead] = []
    ends = [
        i + 1
        for i, location in enumerate(locations)
        if i + 1 == len(locations)
        or locations[i + 1].shard != location.shard
        or not 0 <= locations[i + 1].start - location.stop <= NEAR
    ]
    for first, stop in pairwise([0, *ends]):
        run = locations[first:stop]
        origin = run[0].start
        checks = tuple(part for location in run for part in location.parts(origin))
        begun = reader.submit(Range(run[0].shard, origin, run[-1].stop - origin, checks))
        shared = len(run) > 1
        read: _Begun = _Shared(begun) if shared else begun
        for location in run:
            pending_changes = (layer.submit(reader, location.image_id) for layer in layers)
            changes = tuple(change for change in pending_changes if change is not None)
            readings.append(
                PendingRead(location, reader, read, origin=origin, shared=shared, changes=changes, text=text)
            )
    return readings
