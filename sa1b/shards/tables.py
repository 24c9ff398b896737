"""Tables as they are published: Parquet, CSV, TSV, JSON lines and JSON, with rows that name images.

    {"image": "sam/images/sa_1.jpg", "conversations": [{"from": "human", ...}, {"from": "gpt", ...}]}

The last is the form of LLaVA's lists, which also name images of other datasets.
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

IMAGE_COLUMNS = ("image_id", "file_name", "image", "img_path", "image_path", "id")  # searched in this order
PARQUET, LINES, JSON = (".parquet", ".pq"), (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), (".json",)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*PARQUET, *LINES, *JSON, *DELIMITERS)
_NAMED = r"^(?:.*/)?sa_0*(?P<id>[0-9]{1,19})(?:\.[A-Za-z0-9]+)?$"
_NUMBER = r"^0*(?P<id>[0-9]{1,19})(?:\.jpg)?$"
_ANSWERS = ("gpt", "assistant")  # who gives the answers of a conversation


def read_table(path: str, names: Collection[str], needed: str | None = None) -> pa.Table:
    """The columns of a local file that have one of these names, or all columns of JSON lines and CSV.

    A Parquet file without the needed column gives all its columns, without rows. Raises ArrowException or
    ValueError for a file that cannot be read.
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
        return _read_json(path, list(names))
    options = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[Path(path).suffix], newlines_in_values=True)
    return pyarrow.csv.read_csv(path, parse_options=options)


def _read_json(path: str, names: list[str]) -> pa.Table:
    """The columns of a list of objects, or of the list `images` of an object."""
    fields = [(f"field_{number}", Any, None) for number in range(len(names))]
    renamed = {field: name for (field, *_), name in zip(fields, names, strict=True)}
    rows_type = GenericAlias(list, (msgspec.defstruct("Row", fields, rename=renamed, gc=False),))
    data = Path(path).read_bytes()
    if data.lstrip()[:1] == b"[":
        rows = msgspec.json.decode(data, type=rows_type)
    else:
        document: Any = msgspec.defstruct("Document", [("images", rows_type)])
        rows = msgspec.json.decode(data, type=document).images
    columns = {name: [getattr(one, field) for one in rows] for field, name in renamed.items()}
    return pa.table(
        {name: values for name, values in columns.items() if any(one is not None for one in values)}
    )


def ids_of_names(values: pa.ChunkedArray, *, numbers: bool) -> pa.ChunkedArray:
    """Image ids of texts such as sa_7, sa_7.jpg and any/folder/sa_7.jpg, null where a text names no image.
    `numbers`: take 7 and 7.jpg too, unless a text has a folder: coco/9.jpg is no image of SA-1B.
    """
    text = pc.utf8_trim_whitespace(values.cast(pa.large_string()))
    ids = pc.struct_field(pc.extract_regex(text, _NAMED), "id")
    if numbers and not pc.any(pc.match_substring(text, "/")).as_py():
        ids = pc.coalesce(ids, pc.struct_field(pc.extract_regex(text, _NUMBER), "id"))
    # Texts of equal length have the order of their numbers.
    outside = pc.greater_equal(pc.utf8_lpad(ids, 19, "0"), str(2**63))
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
    """Each id once, of ids int64 [N], ascending, with the list of all texts of its rows. The values are large
    strings, or lists of them.
    """
    first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    ends = np.append(first, len(ids))
    if hasattr(values.type, "value_type"):
        inner = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(values), 0).to_numpy())])
        return ids[first], pa.LargeListArray.from_arrays(pa.array(inner[ends]), values.flatten())
    return ids[first], pa.LargeListArray.from_arrays(pa.array(ends), values)
