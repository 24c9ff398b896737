"""Columns of other tables, such as captions, joined to the images or masks of a batch by id.

    stream = sa1b.Stream("shards", global_batch=256, join={"caption": "captions.parquet"})
    for batch in sa1b.Loader(stream, device="cuda"):
        batch.extra["caption"]  # list [B] of str, None for an image without a caption

The source of a column is a pyarrow table, or a file of Parquet, JSON lines, JSON, CSV or TSV as path or URL.
It has a column `mask_id`, or else one that names images (`sa1b.shards.image_ids`), and one of the joined
name. Rows that name no image of SA-1B are left out with a warning. `batch.extra[name]` is a list on the host
for every type of column, aligned with the masks or the images of the batch. It contains Python values, and
None if the source has no row or a null.

`stream.columns[name].missing` counts the None values of this process. A warning names a table that has none
of the first 1,000 ids.

A source is converted once, and again when its size or time has changed, to an Arrow file sorted by id in the
cache of sa1b.storage.cache; a pyarrow table to a temporary file, which is removed with the stream. Every
process maps the file into memory, and a lookup is a binary search. Converting takes three times the memory
of the column, in one process.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sa1b.arguments import plain_root
from sa1b.hashing import Purpose, below, random_words
from sa1b.shards.dataset import Dataset
from sa1b.shards.file_names import FileNames, names_of
from sa1b.shards.image_ids import collected, image_column, is_text, with_ids
from sa1b.shards.index_file import stored_texts
from sa1b.shards.tables import ENDINGS, IMAGE_COLUMNS, answers_of, read_table
from sa1b.storage.atomic import commit, flush, lock, naming_path
from sa1b.storage.cache import cache_folder
from sa1b.stream.text import KEYS, ColumnError, Row, Text, key_of, open_tokenizer, tokenized

Int64 = npt.NDArray[np.int64]
TEXTS = "texts"  # the source that means the texts of the dataset directory
_LOOKED_UP = 1000  # ids without a single value, after which there is a warning
_VERSION = 3  # format of the converted files


class Column:
    """A joined column in a converted file, by `key`: "image_id" or "mask_id". `missing` and `looked_up`: ids
    without a value, and all ids, that this process has looked up.
    """

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source
        self.missing = self.looked_up = 0
        with pa.memory_map(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        self.key: Any = batch.schema.names[0]
        self._ids: npt.NDArray[np.int64] = batch.column(0).to_numpy()  # a view of the mapped file
        self.values, self.kind = batch.column(1), batch.schema.types[1]

    def __len__(self) -> int:
        return len(self._ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, (self.name, self.path, self.source)

    def lookup(self, ids: npt.NDArray[np.int64]) -> list[Any]:
        """The values of image or mask ids, int64 [N], in their order; None where the table has no row."""
        rows, has_row = self._rows(ids)
        values: list[Any] = self.values.take(pa.array(rows, mask=~has_row)).to_pylist()
        before = self.looked_up
        self.missing += values.count(None)
        self.looked_up += len(values)
        if self.missing == self.looked_up >= _LOOKED_UP > before:
            first = f"{self.source} has no {self.name} for any of the first {self.looked_up:,} ids"
            what = f"are its {self.key}s those of the dataset, such as {ids[0]}?"
            warnings.warn(f"{first}; {what} If few images have one, make a view of them", stacklevel=2)
        return values

    def count(self, ids: npt.NDArray[np.int64]) -> int:
        """Number of these ids that have a row."""
        return int(np.count_nonzero(self._rows(ids)[1]))

    def _rows(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        rows = np.searchsorted(self._ids, ids)
        has_row = (rows < len(self)) & (ids >= 0)  # -1 is a mask without an id
        has_row[has_row] = self._ids[rows[has_row]] == ids[has_row]
        return rows, has_row


def open_columns(
    join: Mapping[str, str | Path | pa.Table | Column],
    storage_options: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    texts: bool = False,
    dataset: Dataset | None = None,
    argument: str = "join[{!r}]",
) -> dict[str, Column]:
    """The columns of sources by name; open ones are used unchanged. `key`: the column of ids, by default the
    first of KEYS, or one that names images. `texts`: an id may have several rows, and a conversation is its
    answers. `argument` names a source in messages.
    """
    columns, names = dict[str, Column](), None
    for name, source in join.items():
        if isinstance(source, Column):
            columns[name] = source
            continue
        if dataset is not None:
            names = names or names_of(dataset)
        wanted = _Wanted(name, argument.format(name), key, texts, names)
        if name in KEYS:
            way = f"must be the name of a column other than {' and '.join(KEYS)}"
            raise ColumnError(f"{wanted.argument}: {way}")
        if isinstance(source, pa.Table):
            columns[name] = _of_table(source, wanted)
        else:
            columns[name] = _of_file(source, storage_options, wanted)
    return columns


class _Wanted(NamedTuple):
    """A column, and the arguments of `open_columns` that decide how its source is converted."""

    name: str
    argument: str
    key: str | None
    texts: bool
    names: FileNames | None


def _of_table(table: pa.Table, wanted: _Wanted) -> Column:
    batch = _sorted(table, f"{wanted.argument}: the pyarrow table", wanted)
    descriptor, name = tempfile.mkstemp(prefix="sa1b-column-", suffix=".arrow")  # workers map it: no copies
    os.close(descriptor)
    _write(batch, Path(name))
    column = Column(wanted.name, Path(name), "the pyarrow table")
    weakref.finalize(column, _remove, name, os.getpid())
    return column


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked worker
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _of_file(given: str | Path, storage_options: Mapping[str, Any] | None, wanted: _Wanted) -> Column:
    name, argument, key, texts, names = wanted
    source = path = plain_root(given)
    if not source.lower().endswith(ENDINGS):
        endings = ", ".join(ENDINGS)
        raise ColumnError(f"{argument}: {source} is no table; its name must end with one of {endings}")
    system, state = None, list[Any]()
    try:
        if "://" in source:
            import fsspec

            system, path = fsspec.core.url_to_fs(source, **(storage_options or {}))
            state += sorted((entry, str(value)) for entry, value in system.info(path).items())
        else:
            source = path = str(Path(source).absolute())
            found = Path(path).stat()  # its inode may be another one at each look, as on some network disks
            state += found.st_size, found.st_mtime_ns
    except FileNotFoundError as error:
        raise ColumnError(f"{argument}: {source} does not exist; give the path of a table") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ColumnError(f"{source}: cannot be read ({why}); check the URL and the credentials") from error
    folder = cache_folder() / "columns" / _digest([source, name, key, texts, names and names.digest])
    final = folder / f"{_digest([_VERSION, state])}.arrow"
    if not final.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder, wait=True):
            if not final.exists():  # nor has another process converted it meanwhile
                _convert(system, path, final, source, wanted)
    return Column(name, final, source)


def _convert(system: Any, path: str, final: Path, source: str, wanted: _Wanted) -> None:
    for stale in final.parent.glob("*.partial"):
        stale.unlink()
    copy, temporary = final.parent / Path(path).name, final.with_suffix(".partial")
    try:
        if system is not None:
            with naming_path(copy):
                system.get_file(path, str(copy))
            if system.size(path) not in (None, copy.stat().st_size):
                raise ColumnError(f"{source}: the copy is not complete; run the command again")
            path = str(copy)
        names = dict.fromkeys((*KEYS, *IMAGE_COLUMNS, wanted.name))
        table = read_table(path, names, wanted.name, wanted.texts)
    except (pa.ArrowException, ValueError) as error:
        raise ColumnError(f"{source}: cannot be read ({error}); write the file again") from error
    finally:
        copy.unlink(missing_ok=True)
    with naming_path(temporary):
        _write(_sorted(table, source, wanted), temporary)
        flush(temporary)
        commit(temporary, final)


def _sorted(table: pa.Table, source: str, wanted: _Wanted) -> pa.RecordBatch:
    """Ids, int64, ascending, and values of a table; `source` names it in messages."""
    name, headings = wanted.name, table.schema.names
    known = ", ".join(headings) or "none"
    for one, use in ((name, ""), (wanted.key or name, f" to join {name!r} by")):
        if one not in headings:
            raise ColumnError(f"{source}: no column {one!r}{use}; choose from {known}")
    column = wanted.key or next((key for key in KEYS if key in headings), image_column(table.schema))
    if column is None:
        way = "name one mask_id, image_id or, with names of files, file_name"
        raise ColumnError(f"{source}: has {known}, and no column to join {name!r} by; {way}")
    if column != "mask_id" and is_text(table.schema.field(column).type):
        table, others = with_ids(table, column, wanted.names)
        if others and not len(table):
            way = "write such as sa_7.jpg or, of images alone, the path in their source"
            raise ColumnError(f"{source}: no row of column {column!r} names an image; {way}")
        if others:
            left = f"{others:,} of {others + len(table):,} rows of column {column!r} name no image"
            warnings.warn(f"{source}: {left}; they are left out", stacklevel=4)
    if nulls := table[column].null_count:
        raise ColumnError(f"{source}: column {column!r} has no id in {nulls:,} rows; remove these rows")
    try:
        ids = table[column].cast(pa.int64()).to_numpy()
        given = (answers_of(table[name]) if wanted.texts else None) or table[name]
        values = given.cast(_large(given.type)).combine_chunks()
    except pa.ArrowException as error:
        raise ColumnError(f"{source}: {error}") from error
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values.take(pa.array(order))
    if len(repeated := ids[1:][ids[1:] == ids[:-1]]):
        if not (wanted.texts and pa.types.is_large_string(getattr(values.type, "value_type", values.type))):
            raise ColumnError(
                f"{source}: id {repeated[0]} occurs more than once in column {column!r}; repeated rows "
                f"in all: {len(repeated):,}; keep one row of each, or collect the values of an id in a list"
            )
        ids, values = collected(ids, values)
    key = "mask_id" if column == "mask_id" else "image_id"
    return pa.record_batch([pa.array(ids), values], names=[key, name])


def _large(kind: pa.DataType) -> pa.DataType:
    """The type with 64-bit offsets: captions of all of SA-1B may take more than 2 GB."""
    if pa.types.is_dictionary(kind):
        return _large(kind.value_type)
    if pa.types.is_list(kind):
        return pa.large_list(_large(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _write(batch: pa.RecordBatch, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _digest(key: list[Any]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


class TextColumn:
    """An open table of texts."""

    def __init__(self, options: Text, column: Column) -> None:
        self.options, self.column = replace(options, source=column.source), column
        source, name, innermost, lists = column.source, column.name, column.kind, 0
        while hasattr(innermost, "value_type"):
            innermost, lists = innermost.value_type, lists + 1
        embeds = pa.types.is_floating(innermost)
        self.several = lists - embeds == 1  # an id has a list of texts; an embedding is a list itself
        if not (embeds or is_text(innermost)) or lists - embeds not in (0, 1):
            raise ColumnError(
                f"{source}: column {name!r} is {column.kind}; texts are strings or lists of strings, "
                "embeddings lists of float or lists of these"
            )
        texts = column.values.flatten() if self.several else column.values
        row = texts.is_valid().index(True).as_py()
        first = [] if row < 0 else texts[row].as_py()
        if first == []:
            raise ColumnError(
                f"{source}: column {name!r} has no value in any of its {len(column):,} rows; fill it"
            )
        # None: the table has embeddings
        self.tokenizer = None if embeds else open_tokenizer(options.tokenizer)
        self.width = len(first) if embeds else 0  # numbers of an embedding

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (self.options, self.column)

    def record(self) -> str:
        """A description for the state of a stream, equal where texts are equal."""
        read = "embeddings" if self.tokenizer is None else f"{self.tokenizer.name}, {self.options.length}"
        return f"{self.column.name} of {self.column.source} by {self.column.key} ({read})"

    def read(
        self, seed: int, ids: Int64, images: Int64, epochs: Int64, indices: Int64
    ) -> tuple[list[Any], list[Row | None]]:
        """The texts of N images or masks, according to the key, as Python values, and as rows of `Texts`."""
        values = self.column.lookup(ids)
        if self.several:
            counts = np.array([len(value or ()) for value in values], np.int64)
            words = random_words(seed, Purpose.TEXT, images, epochs, indices)
            chosen = below(words, np.maximum(counts, 1)).tolist()
            values = [value[index] if value else None for value, index in zip(values, chosen, strict=True)]
        if self.tokenizer is not None:
            return values, tokenized(values, self.tokenizer, self.options.length)
        rows = list[Row | None]()
        for value, one in zip(values, ids.tolist(), strict=True):
            vector = np.array(value or (), np.float32)  # a null becomes NaN
            rows.append(None if value is None else (key_of(vector.tobytes()), vector))
            if value is not None and not (len(value) == self.width and np.isfinite(vector).all()):
                lengths = f"of {len(value)} numbers, others have {self.width}"
                fault = lengths if len(value) != self.width else "with NaN or an infinite number"
                which = f"{self.column.key} {one} has an embedding {fault}"
                raise ColumnError(f"{self.column.source}: {which}; correct or remove its row")
        return values, rows


def open_text(text: Any, dataset: Dataset, storage_options: Any = None) -> TextColumn | None:
    """Open the table of `Stream(text=...)`: a `Text`, a source with its default options, or an open one."""
    if text is None or isinstance(text, TextColumn):
        return text
    options = text if isinstance(text, Text) else Text(text)
    name, source = options.column, options.source
    if source == TEXTS:
        name, source = TEXTS, stored_texts(dataset.reader, dataset.shards)
        if source is None:
            raise ColumnError(
                f"{dataset.root}: no image has a text of its source; sa1b reshard --images-only stores those "
                "of .txt and .json files beside the images and of columns of Parquet; or pass a table"
            )
    opened = open_columns(
        {name: source}, storage_options, key=options.key, texts=True, dataset=dataset, argument="text"
    )
    return TextColumn(options, opened[name])
