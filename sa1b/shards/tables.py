"""Tables of a user, such as lists of captions: Parquet, JSON lines, JSON, CSV and TSV as Arrow's tables."""

from collections.abc import Collection
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from sa1b.arguments import BadValue

IMAGE_COLUMNS = ("image_id", "file_name", "image", "img_path", "image_path", "id")  # searched in this order
PARQUET, LINES, JSON = (".parquet", ".pq"), (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), (".json",)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*PARQUET, *LINES, *JSON, *DELIMITERS)
_MASKS = "mask_annotation"  # of SACap-1M and SA-Z
_ANSWERS = ("gpt", "assistant")  # who gives the answers of a conversation


def read_table(path: str, names: Collection[str], needed: str | None = None, text: bool = False) -> pa.Table:
    """The columns of a local file that have one of these names, or all columns of JSON lines and CSV.

    A Parquet or JSON file without the needed column gives all its columns, without rows. With `text`, the
    needed column of CSV is text. Raises ArrowException or ValueError for a file that cannot be read.
    """
    lower = path.lower()
    if lower.endswith(PARQUET):
        with pq.ParquetFile(Path(path).absolute()) as file:
            if needed is not None and needed not in file.schema_arrow.names:
                return file.schema_arrow.empty_table()
            return file.read([name for name in names if name in file.schema_arrow.names])
    if lower.endswith(LINES):
        table = pyarrow.json.read_json(path)
        schema = pa.schema([(field.name, _without_dates(field.type)) for field in table.schema])
        options = pyarrow.json.ParseOptions(explicit_schema=schema)
        return table if schema == table.schema else pyarrow.json.read_json(path, parse_options=options)
    if lower.endswith(JSON):
        return _read_json(path, list(names), needed)
    options = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[Path(lower).suffix], newlines_in_values=True)
    kinds = pyarrow.csv.ConvertOptions(column_types={needed: pa.string()} if text else None)
    table = pyarrow.csv.read_csv(path, parse_options=options, convert_options=kinds)
    for field in table.schema:
        if field.name in names and pa.types.is_binary(field.type):  # Arrow's type of text that is not UTF-8
            raise BadValue(f"column {field.name!r} has another encoding than UTF-8")
    return table


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """The type as JSON has it: Arrow makes a date of a string that looks like one."""
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _without_dates(field.type)) for field in kind])
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _read_json(path: str, names: list[str], needed: str | None) -> pa.Table:
    """The columns of objects in a list, in the list `images` or by image; ids or names; texts by image."""
    data = Path(path).read_bytes()
    if (plain := _plain(data)) is not None:
        ids, texts = plain
        return pa.table({"image_id": ids} | ({} if needed is None or texts is None else {needed: texts}))
    fields, renamed = _fields(names)
    row: Any = msgspec.defstruct("Row", fields, rename=renamed, gc=False)
    keys, rows = _json_rows(data, row)
    columns = {name: [getattr(entry, field) for entry in rows] for field, name in renamed.items()}
    given = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    if needed is not None and needed not in given:
        inner, of_masks = _fields(["id", needed])
        mask: Any = msgspec.defstruct("Mask", inner, rename=of_masks, gc=False)
        masks_type = GenericAlias(list, (mask,))
        with_masks: Any = msgspec.defstruct(
            "Row", [(_MASKS, masks_type, msgspec.field(default_factory=list))]
        )
        masks = [item for entry in _json_rows(data, with_masks)[1] for item in getattr(entry, _MASKS)]
        id_field, value_field = of_masks
        if any(getattr(item, value_field) is not None for item in masks):
            return pa.table(
                {
                    "mask_id": [getattr(item, id_field) for item in masks],
                    needed: [getattr(item, value_field) for item in masks],
                }
            )
        document: dict[str, Any] = next(iter(_json_rows(data, dict)[1]), {})
        if needed not in document:
            return pa.table({name: [] for name in document})
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


def _plain(data: bytes) -> tuple[list[str], list[Any] | None] | None:
    """The ids of a list of them; the keys of an object of texts, and these; None for other documents."""
    ids = GenericAlias(list, (int | str,))
    texts = GenericAlias(dict, (str, str | GenericAlias(list, (str,))))
    try:
        document: Any = msgspec.json.decode(data, type=ids | texts)
    except msgspec.DecodeError:  # at the first value, so that a large document takes no time
        return None
    if not document or isinstance(document, list):
        return ([*map(str, document)], None) if document else None
    values = list(document.values())
    one_each = {*map(type, values)} == {str}
    return list(document), values if one_each else [
        [text] if isinstance(text, str) else text for text in values
    ]


def answers_of(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """The answers of each conversation, lists of strings; None if the values are no conversations."""
    kind = values.type
    of = getattr(kind, "value_type", None)
    if of is None or not pa.types.is_struct(of) or of.get_field_index("from") < 0:
        return None
    rows = values.to_pylist()
    texts = [[turn["value"] for turn in row or () if turn["from"] in _ANSWERS] for row in rows]
    return pa.chunked_array([pa.array(texts, pa.large_list(pa.large_string()))])
