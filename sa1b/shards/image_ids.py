"""Files of image ids: text with an id on each line, CSV, TSV, Parquet, JSON, or a view's `.ids` file.

An id is `223750`, `sa_223750` or `sa_223750.jpg`, in text and in columns. Names may have folders, also with
backslashes; then only sa_<id> and, of images alone, a name of their own files is an image, and names of other
datasets are left out with a note. Parquet is detected by
content, .csv, .tsv, .json, .jsonl and .ids files by their ending. Any other file is CSV or TSV if its first
line has a column name or several columns, and otherwise has an id on each line.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from sa1b.console import show
from sa1b.errors import UsageError
from sa1b.names import ID_END
from sa1b.report import first_names
from sa1b.shards.file_names import FileNames, SoughtNames
from sa1b.shards.tables import IMAGE_COLUMNS, JSON, LINES, read_table

_NAMED = r"^(?:.*/)?sa_0*(?P<id>[0-9]{1,19})(?:\.[A-Za-z0-9]+)?$"
_NUMBER = r"^0*(?P<id>[0-9]{1,19})(?:\.jpg)?$"


def ids_of_names(values: pa.ChunkedArray, *, numbers: bool) -> pa.ChunkedArray:
    """Image ids of texts such as sa_7, sa_7.jpg and any/folder/sa_7.jpg, null where a text names no image.
    `numbers`: take 7 and 7.jpg too, unless a text has a folder: coco/9.jpg is no image of SA-1B.
    """
    text = pc.replace_substring(pc.utf8_trim_whitespace(values.cast(pa.large_string())), "\\", "/")
    ids = pc.struct_field(pc.extract_regex(text, _NAMED), "id")
    if numbers and not pc.any(pc.match_substring(text, "/")).as_py():
        ids = pc.coalesce(ids, pc.struct_field(pc.extract_regex(text, _NUMBER), "id"))
    # Texts of equal length have the order of their numbers.
    outside = pc.greater_equal(pc.utf8_lpad(ids, 19, "0"), str(ID_END))
    return pc.if_else(outside, None, ids).cast(pa.int64())


def image_column(schema: pa.Schema) -> str | None:
    """The first column that names images by texts; numbers count as image ids only in `image_id`."""
    return next(
        (name for name in IMAGE_COLUMNS if name in schema.names and is_text(schema.field(name).type)), None
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def with_ids(table: pa.Table, column: str, names: FileNames | None = None) -> tuple[pa.Table, int]:
    """The rows whose text in a column names an image, with its id instead; and the number of other rows."""
    ids = ids_of_names(table[column], numbers=column == "image_id")
    if names is not None:
        ids = pc.coalesce(names.ids(table[column]), ids)
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


_FORM = r"^(?:sa_)?0*(?P<id>[0-9]{1,19})(?:\.jpg)?$"
_SHOWN = 80  # largest number of characters of a value in a message
_HEAD = 64 << 10  # bytes that show what a file is


def read_image_ids(file: str | Path, names: FileNames | SoughtNames | None = None) -> npt.NDArray[np.uint64]:
    """The image ids of a file, or of FILE:COLUMN, ascending, each once. 11 million lines take 2 s.

    `names`: also take names of the dataset's own files. UsageError names the file and the line: no such file
    or column, no ids, or a value that is no image id. OSError: the file cannot be read.
    """
    path, column = _split(file)
    try:
        with path.open("rb") as opened:
            head = opened.read(_HEAD)
    except (FileNotFoundError, IsADirectoryError) as error:
        what = "is a folder" if isinstance(error, IsADirectoryError) else "no such file"
        raise UsageError(f"--ids {file}: {what}; pass a file of image ids") from None
    if path.suffix.lower() == ".ids":
        ids = _binary(path)
    elif head.startswith(b"PAR1") or path.name.lower().endswith((*LINES, *JSON)):
        read = _from_parquet if head.startswith(b"PAR1") else _from_json
        ids = _of_values(path, names, *read(path, column))
    else:
        delimiter = _delimiter(path, head, column)
        values = _from_lines(path) if delimiter is None else _from_csv(path, delimiter, column)
        ids = _parse(path, values, names, 1 if delimiter is None else 2)
    if not len(ids):
        raise UsageError(f"{path}: contains no image id; write one id on each line")
    ids = np.sort(ids)  # not np.unique, which takes 15 s for 11 million
    unique: npt.NDArray[np.uint64] = ids[np.concatenate([[True], ids[1:] != ids[:-1]])]
    return unique


def missing_ids(wanted: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The wanted ids that are not among the known ids; both arrays are ascending."""
    rows = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    return wanted[known[rows] != wanted] if len(known) else wanted


def listing(ids: npt.NDArray[np.uint64], shown: int = 5) -> str:
    """The first ids and the number of the others, for messages."""
    return first_names(ids.tolist(), shown)


def _split(file: str | Path) -> tuple[Path, str | None]:
    path = Path(file)
    if path.exists() or ":" not in str(file):
        return path, None
    name, _, column = str(file).rpartition(":")
    return (Path(name), column) if Path(name).exists() else (path, None)


def _binary(path: Path) -> npt.NDArray[np.uint64]:
    data = path.read_bytes()
    ids = np.frombuffer(data[: len(data) // 8 * 8], "<u8").astype(np.uint64)
    if len(data) % 8 or (ids >= np.uint64(ID_END)).any():
        raise UsageError(f"{path}: not the ids of a view; pass an .ids file of a view")
    return ids


def _delimiter(path: Path, head: bytes, column: str | None) -> str | None:
    """The delimiter of the columns of a text file; None: one id on each line."""
    try:
        first = head.split(b"\n", 1)[0].decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageError(
            f"{path}: not UTF-8 text or Parquet; pass a text file with one image id on each line, CSV, TSV "
            "or Parquet"
        ) from None
    if path.suffix.lower() == ".tsv" or "\t" in first:
        return "\t"
    is_table = path.suffix.lower() == ".csv" or "," in first or column is not None
    return "," if is_table or first.strip('"') in IMAGE_COLUMNS else None


def _from_lines(path: Path) -> pa.ChunkedArray:
    return _read_csv(
        path,
        arrow_csv.ReadOptions(column_names=["id"]),
        # No line of ids contains the delimiter; empty lines count, so that messages name the right one.
        arrow_csv.ParseOptions(delimiter="\x01", quote_char=False, ignore_empty_lines=False),
        arrow_csv.ConvertOptions(column_types={"id": pa.string()}, strings_can_be_null=False),
    )["id"]


def _from_csv(path: Path, delimiter: str, column: str | None) -> pa.ChunkedArray:
    # Only the chosen column has to be UTF-8.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        try:
            names = [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]
        except csv.Error as error:
            raise UsageError(
                f"{path}: no line with names of columns ({error}); write the file again"
            ) from None
    if not names:
        raise UsageError(f"{path}: contains no image id; write a column of them")
    chosen = _column(path, names, column)
    return _read_csv(
        path,
        arrow_csv.ReadOptions(column_names=[str(i) for i in range(len(names))], skip_rows=1),
        arrow_csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
        arrow_csv.ConvertOptions(
            include_columns=[str(names.index(chosen))],
            column_types={str(i): pa.string() for i in range(len(names))},
            strings_can_be_null=False,
        ),
    ).column(0)


def _read_csv(path: Path, read: Any, parse: Any, convert: Any) -> pa.Table:
    try:
        return arrow_csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            raise UsageError(f"{path}: contains no image id; write one id on each line") from None
        raise UsageError(
            f"{path}: cannot be parsed ({str(error)[:200]}); pass a text file with one image id on each "
            "line, CSV, TSV or Parquet"
        ) from None


def _from_parquet(path: Path, column: str | None) -> tuple[pa.ChunkedArray, str]:
    try:
        with pq.ParquetFile(path.absolute()) as file:
            schema = file.schema_arrow
            fit = [one.name for one in schema if is_text(one.type) or pa.types.is_integer(one.type)]
            chosen = _column(path, schema.names if column is not None or not fit else fit, column)
            return file.read([chosen])[chosen], chosen
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); write the file again") from None


def _from_json(path: Path, column: str | None) -> tuple[pa.ChunkedArray, str]:
    try:
        table = read_table(str(path), IMAGE_COLUMNS if column is None else (column,))
    except (pa.ArrowException, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); write the file again") from None
    chosen = _column(path, table.schema.names, column)
    return table[chosen], chosen


def _of_values(path: Path, names: Any, values: pa.ChunkedArray, chosen: str) -> npt.NDArray[np.uint64]:
    if not pa.types.is_integer(values.type):
        if not is_text(values.type):
            raise UsageError(
                f"{path}: column {chosen!r} is {values.type}; image ids are integers or text; "
                f"name another column: {path}:COLUMN"
            )
        return _parse(path, values.cast(pa.string()), names, 1, "row")
    if pa.types.is_unsigned_integer(values.type):
        outside = pc.greater_equal(values.cast(pa.uint64()), pa.scalar(ID_END, pa.uint64()))
    else:
        outside = pc.less(values.cast(pa.int64()), pa.scalar(0, pa.int64()))
    row = _first(pc.fill_null(outside, True))
    if row is not None:
        raise UsageError(
            f"{path}, row {row + 1}: {values[row].as_py()!r} is not an image id; write an integer from 0 to "
            "2**63 - 1"
        )
    ids: npt.NDArray[np.uint64] = values.cast(pa.uint64()).to_numpy()
    return ids


def _column(path: Path, names: list[str], column: str | None) -> str:
    wanted = (column,) if column is not None else IMAGE_COLUMNS
    for name in wanted:
        if name in names:
            return name
    known = ", ".join(names)[:500] or "none"
    missing = (
        repr(column) if column is not None else f"{', '.join(IMAGE_COLUMNS[:-1])} or {IMAGE_COLUMNS[-1]}"
    )
    raise UsageError(f"{path}: no column {missing}; its columns: {known}. Name one as {path}:COLUMN")


def _parse(
    path: Path, values: pa.ChunkedArray, names: FileNames | SoughtNames | None, first: int, unit: str = "line"
) -> npt.NDArray[np.uint64]:
    """Ids from text; `first` is the number of the first value. Blank lines, but not rows, are skipped."""
    blank = unit == "line"
    trimmed = pc.utf8_trim_whitespace(values)
    given = trimmed.filter(pc.not_equal(trimmed, "")) if blank else trimmed
    ids_by_name = None if names is None or pc.all(pc.ascii_is_decimal(given)).as_py() else names.ids(given)
    if ids_by_name is None and (alike := _parse_alike(given)) is not None:
        return alike
    if ids_by_name is not None or pc.any(pc.match_substring_regex(given, r"[/\\]")).as_py():
        named = ids_of_names(given, numbers=ids_by_name is not None)
        named = named if ids_by_name is None else pc.coalesce(ids_by_name, named)
        if 0 < named.null_count < len(named):
            others = first_names(given.filter(pc.is_null(named)).unique().to_pylist(), 3)
            counts = f"{named.null_count:,} of {len(named):,} rows name no image"
            show(f"note: {path}: {counts} ({others}); they are left out", sys.stderr)
        if named.null_count < len(named):
            of_names: npt.NDArray[np.uint64] = named.drop_null().cast(pa.uint64()).to_numpy()
            return of_names
    digits = pc.struct_field(pc.extract_regex(trimmed, _FORM), "id")
    bad = pc.is_null(digits)
    if blank:
        bad = pc.and_(bad, pc.not_equal(trimmed, ""))
    # Texts of equal length have the order of their numbers.
    long = pc.greater_equal(pc.utf8_lpad(pc.fill_null(digits, "0"), 19, "0"), str(ID_END))
    row = _first(pc.or_(pc.fill_null(bad, True), long))
    if row is not None:
        text = str(values[row].as_py())[:_SHOWN]
        raise UsageError(
            f"{path}, {unit} {row + first:,}: {text!r} is not an image id; write a number below 2**63 such "
            "as 223750, or a name such as sa_223750.jpg or, of images alone, that of a file in its source"
        )
    ids: npt.NDArray[np.uint64] = pc.drop_null(digits).cast(pa.uint64()).to_numpy()
    return ids


def _parse_alike(values: pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """Ids from text of one form, ten times as fast as by pattern; None for another form or several."""
    if values.null_count or not len(values):
        return None
    prefixed = pc.all(pc.starts_with(values, "sa_")).as_py()
    suffixed = pc.all(pc.ends_with(values, ".jpg")).as_py()
    digits = values
    if prefixed or suffixed:
        digits = pc.utf8_slice_codeunits(values, 3 if prefixed else 0, -4 if suffixed else None)
    if not pc.all(pc.ascii_is_decimal(digits)).as_py():
        return None
    try:
        ids: npt.NDArray[np.uint64] = digits.cast(pa.uint64()).to_numpy()
    except pa.ArrowInvalid:  # an id of 2**63 or more
        return None
    return ids if int(ids.max()) < ID_END else None


def _first(flags: pa.ChunkedArray) -> int | None:
    place = int(pc.index(flags, True).as_py())
    return None if place < 0 else place
