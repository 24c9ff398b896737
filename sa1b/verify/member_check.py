"""Checks of the members of a shard: locations by the index and by the sample table, and contents."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import BadSample, TableError
from sa1b.masks import geometry
from sa1b.masks.runs import MaskError, SizeError
from sa1b.names import member_name
from sa1b.shards import jpeg, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.documents import ShardInfo
from sa1b.shards.index import FIELDS, IndexReader, MemberLocation
from sa1b.shards.index_file import TEXTS, UNREADABLE, shard_files
from sa1b.shards.record import RecordError
from sa1b.shards.sample_table import open_table
from sa1b.shards.shard import Largest
from sa1b.storage.atomic import sha256_of
from sa1b.verify.report import Find, Findings, Problem, short

_ODD_KEPT = 20  # images of each reason in ShardResult.odd_images


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """Expectations for a shard, from the files of the dataset directory; None is unknown."""

    info: ShardInfo  # entry of the shard in the task file or dataset.json
    source: str | None = None
    table: str | None = None  # file name of the sample table; None if it cannot be compared
    number: int = 0  # of the shard in that table
    keep_json: bool | None = None
    index_runs: bool | None = None
    annotations_only: bool | None = None


@dataclass(slots=True)
class ShardResult:
    """Result of the check of one shard; totals and largest values are over complete pairs. Its size does not
    grow with the shard's images.

    With `deep`, the result also has odd images (area, bbox, empty_mask), whose numbers differ from their
    masks. This is not damage: ingest keeps such images and counts them as warnings.
    """

    name: str
    findings: Findings = field(default_factory=Findings)
    images: int = 0
    masks: int = 0
    bytes: int = 0  # read from the shard and the index
    jpg_bytes: int = 0
    largest: Largest = field(default_factory=Largest)
    odd: dict[str, int] = field(default_factory=dict)  # reason -> images
    # reason -> offset and id of the first such images
    odd_images: dict[str, list[list[int]]] = field(default_factory=dict)
    unchecked: str | None = None  # why the shard could not be checked, which is not damage
    sha256: str = ""  # of the tar; "": not read to its end

    def count_odd(self, reason: str, offset: int, image_id: int) -> None:
        """Count an image whose numbers differ from its masks."""
        self.odd[reason] = self.odd.get(reason, 0) + 1
        if self.odd[reason] <= _ODD_KEPT:
            self.odd_images.setdefault(reason, []).append([offset, image_id])

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "ShardResult":
        stored, largest = document["findings"], document["largest"]
        findings = Findings([Problem(**finding) for finding in stored["kept"]], stored["counts"])
        return cls(**{**document, "findings": findings, "largest": Largest(**largest)})


class Locations:
    """Locations of the members by the index and by the sample table.

    Damage of the index is reported to `find_index`; the bytes read are counted in `result`. Index and table
    are None if they cannot be read. `rows` is image id -> row of the index, `table` image id -> ending ->
    location. `table_file` is None if it cannot be compared.
    """

    def __init__(
        self, index: Path, table: Path | None, expected: ExpectedShard, result: ShardResult, find_index: Find
    ) -> None:
        self.index_file = shard_files(expected.info.name)[1]
        self.index: IndexReader | None = None
        self.rows: dict[int, int] = {}
        self._open_index(index, expected, result, find_index)
        self.table_file = expected.table
        self.table = None if expected.table is None else self._table_rows(table, expected)

    def _open_index(self, path: Path, expected: ExpectedShard, result: ShardResult, find: Find) -> None:
        info = expected.info
        try:
            sha256, size = sha256_of(path), path.stat().st_size
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                find("index_missing", "not there")
            else:
                find("index_unreadable", short(error))
            return
        result.bytes += size
        if size != info.index_bytes:
            find("index_bytes", f"{size:,} bytes, {info.index_bytes:,} written")
        elif sha256 != info.index_sha256:
            find("index_sha256", f"sha256 is {sha256}, written {info.index_sha256}")
        try:
            self.index = IndexReader(path)
        except MemoryError:  # Arrow's is among UNREADABLE, and says nothing about the file
            raise
        except UNREADABLE as error:
            find("index_unreadable", short(error))
            return
        ids = self.index.columns["image_id"].tolist()
        self.rows.update((image_id, row) for row, image_id in enumerate(ids))
        if len(self.rows) != len(ids):
            find("index_duplicate", "two rows have the same image id")
        if len(ids) != info.images:
            find("index_rows", f"{len(ids):,} rows, {info.images:,} images written")
        offsets = self.index.columns["jpg_offset"]
        for row in np.flatnonzero(offsets[1:] <= offsets[:-1])[:1].tolist():
            message = "the rows are not in the order of the tar"
            find("index_order", message, int(offsets[row + 1]), ids[row + 1])
        if expected.index_runs is not None and self.index.with_runs != expected.index_runs:
            message = "with" if self.index.with_runs else "without"
            find("index_columns", f"{message} the decoded masks, against the options")

    def _table_rows(
        self, path: Path | None, expected: ExpectedShard
    ) -> dict[int, dict[str, MemberLocation]] | None:
        if path is None:
            return None
        try:
            table = open_table(path)
        except (TableError, OSError):
            return None  # RootCheck reports it once for all shards
        rows = {}
        for row in np.flatnonzero(table.shard == expected.number).tolist():
            offsets = {"jpg": int(table.offset[row]), "masks": table.masks_offset(row)}
            rows[int(table.image_id[row])] = {
                ending: MemberLocation(
                    offset,
                    int(getattr(table, f"{ending}_bytes")[row]),
                    int(getattr(table, f"{ending}_crc32c")[row]),
                )
                for ending, offset in offsets.items()
            }
        return rows

    def find(self, image_id: int, ending: str) -> dict[str, MemberLocation]:
        """File name -> location of the jpg or the masks that this file records."""
        locations = {}
        if self.index is not None and image_id in self.rows:
            locations[self.index_file] = self.index.location(self.rows[image_id], ending)
        if self.table is not None and self.table_file is not None and image_id in self.table:
            locations[self.table_file] = self.table[image_id][ending]
        return locations

    def image_ids(self) -> list[int]:
        """Image ids in the index or the sample table, in their order."""
        return list(dict.fromkeys([*self.rows, *(self.table or ())]))


class ContentCheck:
    """Checks of the contents of undamaged members, one member after the other; `deep` also decodes them.

    `index` has the shard's index and the row of each image in it, None and empty if it cannot be read. `find`
    reports damage of the shard, `find_index` of its index; `result` receives the counts.
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
        self.annotations: Annotations | None = None  # of the last mask record that was read

    def member(self, ending: str, data: bytes, offset: int, image_id: int) -> None:
        """Check the content of `sa_<image_id>.<ending>`, which begins at `offset` of the shard."""
        {"jpg": self._jpg, "masks": self._masks, "json": self._json}[ending](data, offset, image_id)

    def _jpg(self, data: bytes, offset: int, image_id: int) -> None:
        self.result.largest.merge({"jpg_bytes": len(data)})
        self.result.jpg_bytes += len(data)
        try:
            frame = jpeg.frame(data)
            size = (frame.height, frame.width)
            if self.deep:
                size = jpeg.check_decodes(data)
        except BadSample as error:
            self.find("jpg_undecodable", f"{member_name(image_id, 'jpg')}: {error}", offset, image_id)
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
            self.find("record_unreadable", f"{member_name(image_id, 'masks')}: {error}", offset, image_id)
            return
        if annotations.image_id != image_id:
            message = f"{member_name(image_id, 'masks')} holds the masks of image {annotations.image_id}"
            self.find("record_image_id", message, offset, image_id)
        self.annotations = annotations
        self.result.masks += len(annotations)
        runs = int(annotations.runs_count.sum(dtype=np.int64))
        quantities = {"masks": len(annotations), "runs": runs, "rle_bytes": len(annotations.rle)}
        self.result.largest.merge({**quantities, "masks_bytes": len(data)})
        self._index_numbers(annotations, offset)
        if self.deep:
            self._decode_masks(annotations, offset, image_id)

    def _index_numbers(self, annotations: Annotations, offset: int) -> None:
        row = self.rows.get(annotations.image_id)
        if self.index is None or row is None:
            return
        index = self.index
        try:
            numbers, of_image = index.numbers(row), index.of_image(row)
        except MemoryError:
            raise
        except UNREADABLE as error:
            self._index_damage(error, offset, annotations.image_id)
            return
        wrong = [
            f"{name} {int(index.columns[name][row])}, in the record {getattr(annotations, name)}"
            for name in ("width", "height")
            if int(index.columns[name][row]) != getattr(annotations, name)
        ]
        wrong += [name for name, values in numbers.items() if not _same(values, annotations.column(name))]
        wrong += [TEXTS] * ((of_image.get(TEXTS) or []) != (annotations.texts() or []))
        fields = of_image.get(FIELDS)  # indexes of earlier versions lack them
        wrong += [FIELDS] * (fields is not None and fields != (annotations.image_fields() or "{}"))
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
            self.find("mask_undecodable", f"{member_name(image_id, 'masks')}: {error}", offset, image_id)
            return
        if not np.array_equal(np.diff(runs.offsets), annotations.runs_count):
            self.find(
                "record_runs_count",
                f"{member_name(image_id, 'masks')}: runs_count is wrong",
                offset,
                image_id,
            )
        row = self.rows.get(image_id)
        if self.index is not None and self.index.with_runs and row is not None:
            try:
                copy, offsets = self.index.runs(row)
            except MemoryError:
                raise
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
        for what in (name for name, is_odd in odd.items() if is_odd):
            self.result.count_odd(what, offset, image_id)

    def _json(self, data: bytes, offset: int, image_id: int) -> None:
        """The annotation file kept verbatim has no checksum of its own: it is compared with the record."""
        if self.annotations is None or self.annotations.image_id != image_id:
            return  # damage there has been named
        try:
            same = json.dumps(json.loads(data)) == json.dumps(self.annotations.to_json())
        except (ValueError, RecursionError) as error:
            self.find("json_unreadable", f"{member_name(image_id, 'json')}: {short(error)}", offset, image_id)
            return
        if not same:
            message = f"{member_name(image_id, 'json')} differs from the mask record"
            self.find("json_damaged", message, offset, image_id)


def _same(values: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> bool:
    same_form = values.dtype == expected.dtype and values.size == expected.size
    return same_form and values.tobytes() == expected.tobytes()
