"""Tables as they are published: Parquet, CSV, TSV, JSON lines and JSON, with rows that name images.

    {"image": "sam/images/sa_1.jpg", "conversations": [{"from": "human", ...}, {"from": "gpt", ...}]}

The last is the form of LLaVA's lists, which also name images of other datasets. An object by image, such as
that of SACap-1M and SA-Z, has keys sa_1 and may have texts of the masks:

    {"sa_1": {"image_id": "sa_1", "prompt": "...", "mask_annotation": [{"id": 7, "caption": "..."}]}}
"""

from collections.abc import Collection
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sa1b.names import ID_END

IMAGE_COLUMNS = ("image_id", "file_name", "image", "img_path", "image_path", "id")  # searched in this order
PARQUET, LINES, JSON = (".parquet", ".pq"), (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), (".json",)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*PARQUET, *LINES, *JSON, *DELIMITERS)
_NAMED = r"^(?:.*/)?sa_0*(?P<id>[0-9]{1,19})(?:\.[A-Za-z0-9]+)?$"
_NUMBER = r"^0*(?P<id>[0-9]{1,19})(?:\.jpg)?$"
_MASKS = "mask_annotation"  # of SACap-1M and SA-Z
_ANSWERS = ("gpt", "assistant")  # who gives the answers of a conversation


def read_table(path: str, names: Collection[str], needed: str | None = None) -> pa.Table:
    """The columns of a local file that have one of these names, or all columns of JSON lines and CSV.

    A Parquet or JSON file without the needed column gives all its columns, without rows. Raises
    ArrowException or ValueError for a file that cannot be read.
    """
    import pyarrow.csv
    import pyarrow.json

    if path.endswith(PARQUET):
        with pq.ParquetFile(Path(path).absolute()) as file:
            if needed is not None and needed not in file.schema_arrow.names:
                return file.schema_arrow.empty_table()
            return file.read([name for name in names if name in file.schema_arrow.names])
    if path.endswith(LINES):
        return pyarrow.json.read_json(path)
    if path.endswith(JSON):
        return _read_json(path, list(names), needed)
    options = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[Path(path).suffix], newlines_in_values=True)
    return pyarrow.csv.read_csv(path, parse_options=options)


def _read_json(path: str, names: list[str], needed: str | None) -> pa.Table:
    """The columns of a list of objects, of the list `images` in an object, or of an object by image."""
    fields, renamed = _fields(names)
    row: Any = msgspec.defstruct("Row", fields, rename=renamed, gc=False)
    data = Path(path).read_bytes()
    keys, rows = _json_rows(data, row)
    columns = {name: [getattr(one, field) for one in rows] for field, name in renamed.items()}
    given = {name: values for name, values in columns.items() if any(one is not None for one in values)}
    if needed is not None and needed not in given:
        inner, of_masks = _fields(["id", needed])
        mask: Any = msgspec.defstruct("Mask", inner, rename=of_masks, gc=False)
        masks_type = GenericAlias(list, (mask,))
        with_masks: Any = msgspec.defstruct(
            "Row", [(_MASKS, masks_type, msgspec.field(default_factory=list))]
        )
        masks = [one for found in _json_rows(data, with_masks)[1] for one in getattr(found, _MASKS)]
        id_field, value_field = of_masks
        if any(getattr(one, value_field) is not None for one in masks):
            return pa.table(
                {
                    "mask_id": [getattr(one, id_field) for one in masks],
                    needed: [getattr(one, value_field) for one in masks],
                }
            )
        found: dict[str, Any] = next(iter(_json_rows(data, dict)[1]), {})
        if needed not in found:
            return pa.table({name: [] for name in found})
    if keys is not None and given.keys().isdisjoint(IMAGE_COLUMNS):
        given = {"image_id": keys} | given
    return pa.table(given)


def _fields(names: list[str]) -> tuple[list[Any], dict[str, str]]:
    """Fields of a struct for keys with any name, and field -> key."""
    fields = [(f"field_{number}", Any, None) for number in range(len(names))]
    return fields, {field: name for (field, *_), name in zip(fields, names, strict=True)}


def _json_rows(data: bytes, row: Any) -> tuple[list[str] | None, list[Any]]:
    """The objects of a document, and their keys if it is an object by image."""
    rows = GenericAlias(list, (row,))
    if data.lstrip()[:1] == b"[":
        return None, msgspec.json.decode(data, type=rows)
    document: Any = msgspec.defstruct("Document", [("images", rows)])
    try:
        return None, msgspec.json.decode(data, type=document).images
    except msgspec.ValidationError:
        by_image = msgspec.json.decode(data, type=GenericAlias(dict, (str, row)))
        return list(by_image), list(by_image.values())


def ids_of_names(values: pa.ChunkedArray, *, numbers: bool) -> pa.ChunkedArray:
    """Image ids of texts such as sa_7, sa_7.jpg and any/folder/sa_7.jpg, null where a text names no image.
    `numbers`: take 7 and 7.jpg too, unless a text has a folder: coco/9.jpg is no image of SA-1B.
    """
    text = pc.utf8_trim_whitespace(values.cast(pa.large_string()))
    ids = pc.struct_field(pc.extract_regex(text, _NAMED), "id")
    if numbers and not pc.any(pc.match_substring(text, "/")).as_py():
        ids = pc.coalesce(ids, pc.struct_field(pc.extract_regex(text, _NUMBER), "id"))
    # Texts of equal length have the order of their numbers.
    outside = pc.greater_equal(pc.utf8_lpad(ids, 19, "0"), str(ID_END))
    return pc.if_else(outside, None, ids).cast(pa.int64())


def answers_of(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """The answers of each conversation, lists of strings; None if the values are no conversations."""
    kind = values.type
    of = getattr(kind, "value_type", None)
    if of is None or not pa.types.is_struct(of) or of.get_field_index("from") < 0:
        return None
    rows = values.to_pylist()
    texts = [[turn["value"] for turn in row or () if turn["from"] in _ANSWERS] for row in rows]
    return pa.chunked_array([pa.array(texts, pa.large_list(pa.large_string()))])


def image_column(schema: pa.Schema) -> str | None:
    """The first column that names images by texts; numbers count as image ids only in `image_id`."""
    return next(
        (name for name in IMAGE_COLUMNS if name in schema.names and is_text(schema.field(name).type)), None
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def with_ids(table: pa.Table, column: str) -> tuple[pa.Table, int]:
    """The rows whose text in a column names an image, with its id instead; and the number of other rows."""
    ids = ids_of_names(table[column], numbers=column == "image_id")
    rows = table.filter(pc.is_valid(ids))
    return rows.set_column(table.schema.names.index(column), column, ids.drop_null()), ids.null_count


def collected(ids: npt.NDArray[np.int64], values: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Each id once, ascending, with the list of all texts of its rows, large strings or lists of them."""
    first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    ends = np.append(first, len(ids))
    if hasattr(values.type, "value_type"):
        inner = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(values), 0).to_numpy())])
        return ids[first], pa.LargeListArray.from_arrays(pa.array(inner[ends]), values.flatten())
    return ids[first], pa.LargeListArray.from_arrays(pa.array(ends), values)
