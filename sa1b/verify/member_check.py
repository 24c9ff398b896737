"""What the members of a shard hold, against the shard's index: the second half of the check of a shard."""

import json

import numpy as np
import numpy.typing as npt

from sa1b.errors import BadSample
from sa1b.masks import geometry
from sa1b.masks.runs import MaskError, SizeError
from sa1b.shards import jpeg, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.index_reader import UNREADABLE, IndexReader
from sa1b.shards.record import RecordError
from sa1b.verify.report import Find, ShardResult, short


class ContentCheck:
    """Checks members whose bytes are those that were written, one after the other.

    Args:
        index: the shard's index and the row of each image in it, None and empty if it cannot be read.
        deep: also decode JPEGs and masks.
        find: reports damage of the shard; find_index: of its index.
        result: where counts go.
    """

    def __init__(
        self,
        index: IndexReader | None,
        rows: dict[int, int],
        result: ShardResult,
        *,
        deep: bool,
        find: Find,
        find_index: Find,
    ) -> None:
        self.index, self.rows, self.result, self.deep = index, rows, result, deep
        self.find, self.find_index = find, find_index
        self.annotations: Annotations | None = None  # of the last record

    def member(self, ending: str, data: bytes, offset: int, image_id: int) -> None:
        """Check the content of `sa_<image_id>.<ending>`, which begins at `offset` of the shard."""
        {"jpg": self._jpg, "masks": self._masks, "json": self._json}[ending](data, offset, image_id)

    def _jpg(self, data: bytes, offset: int, image_id: int) -> None:
        self._largest(jpg_bytes=len(data))
        self.result.jpg_bytes += len(data)
        try:
            frame = jpeg.frame(data)
            size = (frame.height, frame.width)
            if self.deep:
                size = jpeg.decode(data).shape[:2]
        except BadSample as error:
            self.find("jpg_undecodable", f"sa_{image_id}.jpg: {error}", offset, image_id)
            return
        row = self.rows.get(image_id)
        if self.index is not None and row is not None:
            columns = self.index.columns
            stored = (int(columns["image_height"][row]), int(columns["image_width"][row]))
            if stored != size:
                message = f"image_height, image_width {stored}, the JPEG has {size}"
                self.find_index("index_image_size", message, offset, image_id)

    def _masks(self, data: bytes, offset: int, image_id: int) -> None:
        self.annotations = None
        try:
            annotations = record.decode(data)
        except RecordError as error:
            self.find("record_unreadable", f"sa_{image_id}.masks: {error}", offset, image_id)
            return
        if annotations.image_id != image_id:
            message = f"sa_{image_id}.masks holds the masks of image {annotations.image_id}"
            self.find("record_image_id", message, offset, image_id)
        self.annotations = annotations
        self.result.masks += len(annotations)
        runs = int(annotations.runs_count.sum(dtype=np.int64))
        self._largest(
            masks=len(annotations), runs=runs, rle_bytes=len(annotations.rle), masks_bytes=len(data)
        )
        self._index_numbers(annotations, offset)
        if self.deep:
            self._decode_masks(annotations, offset, image_id)

    def _index_numbers(self, annotations: Annotations, offset: int) -> None:
        row = self.rows.get(annotations.image_id)
        if self.index is None or row is None:
            return
        index = self.index
        try:
            numbers = index.numbers(row)
        except UNREADABLE as error:
            self._index_damage(error, offset, annotations.image_id)
            return
        wrong = [
            f"{name} {int(index.columns[name][row])}, in the record {getattr(annotations, name)}"
            for name in ("width", "height")
            if int(index.columns[name][row]) != getattr(annotations, name)
        ]
        wrong += [name for name, values in numbers.items() if not _same(values, getattr(annotations, name))]
        if wrong:
            message = f"differs from the mask record in {', '.join(wrong)}"
            self.find_index("index_numbers", message, offset, annotations.image_id)

    def _index_damage(self, error: Exception, offset: int, image_id: int) -> None:
        message = f"row group cannot be read: {short(error)}"
        self.find_index("index_unreadable", message, offset, image_id)

    def _decode_masks(self, annotations: Annotations, offset: int, image_id: int) -> None:
        try:
            runs = annotations.runs()
        except (MaskError, SizeError, ValueError) as error:
            self.find("mask_undecodable", f"sa_{image_id}.masks: {error}", offset, image_id)
            return
        if not np.array_equal(np.diff(runs.offsets), annotations.runs_count):
            self.find("record_runs_count", f"sa_{image_id}.masks: runs_count is wrong", offset, image_id)
        row = self.rows.get(image_id)
        if self.index is not None and self.index.with_runs and row is not None:
            try:
                copy, offsets = self.index.runs(row)
            except UNREADABLE as error:
                self._index_damage(error, offset, image_id)
            else:
                if not (np.array_equal(copy, runs.runs) and np.array_equal(offsets, runs.offsets)):
                    self.find_index("index_runs", "runs are not those of the record", offset, image_id)
        area = geometry.area(runs)
        odd = {
            "empty_mask": (area == 0).any(),
            "area": (annotations.area != area).any(),
            "bbox": (annotations.bbox != geometry.bbox_sa1b(runs)).any(),
        }
        for what in (name for name, found in odd.items() if found):
            self.result.odd.setdefault(what, []).append((offset, image_id))

    def _json(self, data: bytes, offset: int, image_id: int) -> None:
        """The annotation file kept verbatim has no checksum of its own: the record must say the same."""
        if self.annotations is None or self.annotations.image_id != image_id:
            return  # damage there has been named
        try:
            same = json.dumps(json.loads(data)) == json.dumps(self.annotations.to_json())
        except (ValueError, RecursionError) as error:
            self.find("json_unreadable", f"sa_{image_id}.json: {short(error)}", offset, image_id)
            return
        if not same:
            message = f"sa_{image_id}.json does not say what the mask record says"
            self.find("json_damaged", message, offset, image_id)

    def _largest(self, **values: int) -> None:
        for name, value in values.items():
            self.result.largest[name] = max(value, self.result.largest.get(name, 0))


def _same(values: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> bool:
    """Bit by bit: NaN equals NaN, 0.0 differs from -0.0."""
    same_form = values.dtype == expected.dtype and values.size == expected.size
    return same_form and values.tobytes() == expected.tobytes()
