"""SQL over the index files of a dataset directory, with DuckDB: the views `images` and `masks`.

DuckDB reads only the columns that a query uses, and no tar. Over 11,000 indexes of 1,024 images and 100 masks
each, four threads took 10 s for the mean of `masks`, and 37 s for the mean of area_fraction under a condition
on stability_score, with at most 0.53 GB. As in `sa1b view`, reads of a URL are not compared with digests.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem

from sa1b.console import command
from sa1b.errors import ShardError, UsageError
from sa1b.limit import Worker
from sa1b.programs.query.layer_masks import with_layers, write_changed
from sa1b.report import bar
from sa1b.shards.annotation import NO_ORIGIN
from sa1b.shards.dataset import Dataset
from sa1b.shards.image_ids import listing, missing_ids
from sa1b.shards.index_file import RangeFile, shard_files
from sa1b.shards.locate import shard_sources
from sa1b.shards.manifest import READING, no_dataset
from sa1b.shards.stored import Ids
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store
from sa1b.storage.reader import Reader
from sa1b.views.predicate import MASK_FIELDS, mask_predicate
from sa1b.views.selection import Selected
from sa1b.views.view import write_view
from sa1b.views.view_document import check_free, check_name, document_path, view_target

_POLL_SECONDS = 0.1
_ROWS = 4096  # rows fetched at a time
_PER_IMAGE = (
    "image_id, width, height, image_width, image_height, jpg_bytes, masks_bytes, jpg_offset, masks_offset, "
    "jpg_crc32c"
)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A SELECT statement over the indexes of a dataset directory; made by `open_query`."""

    dataset: Dataset
    text: str
    columns: dict[str, str]  # names of the result's columns -> DuckDB's types as text
    connection: Any
    quiet: bool
    storage_errors: list[StorageError]
    layers: list[tuple[str, str]]  # names and digests, in the order in which they are applied

    def rows(self, limit: int | None = None) -> Iterator[list[tuple[Any, ...]]]:
        """Execute the query; yields at most `limit` rows of the result, some thousands at a time.

        UsageError: DuckDB cannot execute the query. ShardError: an index file is missing or damaged.
        StorageError: one of a URL cannot be read.
        """
        with self._executed() as run:
            run(lambda: self.connection.execute(self._readable()))
            remaining = limit
            while remaining is None or remaining > 0:
                count = _ROWS if remaining is None else min(remaining, _ROWS)
                if not (rows := run(partial(self.connection.fetchmany, count))):
                    return
                yield rows
                remaining = None if remaining is None else remaining - len(rows)

    def _readable(self) -> str:
        """The statement with timestamps of a time zone as text, because DuckDB needs pytz to return them."""
        zoned = [name for name, kind in self.columns.items() if "TIMESTAMP WITH TIME ZONE" in kind]
        quoted = ['"' + name.replace('"', '""') + '"' for name in zoned]
        casts = ", ".join(f"{name}::VARCHAR AS {name}" for name in quoted)
        return f"SELECT * REPLACE ({casts}) FROM query({_literal(self.text)})" if casts else self.text

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Execute the query; yields the result as Arrow's batches, at least one. Errors as for `rows`."""
        with self._executed() as run:
            reader = run(lambda: pa.RecordBatchReader.from_stream(self.connection.sql(self.text)))
            yield pa.RecordBatch.from_pylist([], reader.schema)
            while (batch := run(lambda: next(reader, None))) is not None:
                yield batch

    def image_ids(self) -> Ids:
        """The column image_id of the result, ascending, each id once. UsageError: there is none, or a column
        mask_id, or a value is no id of the dataset directory. For other errors, see `rows`.
        """
        if "image_id" not in self.columns:
            raise UsageError(
                f"--as-view: the result has no column image_id; its columns: {', '.join(self.columns)}. "
                "Select image_id"
            )
        if "mask_id" in self.columns:
            raise UsageError(
                "--as-view: the result has a column mask_id, and a view selects masks by a condition; leave "
                "mask_id out and pass the condition to --masks-where"
            )
        if not (kind := self.columns["image_id"]).endswith(("INT", "INTEGER")):
            raise UsageError(f"--as-view: column image_id has type {kind}; select the ids as integers")
        with self._executed() as run:
            statement = f"SELECT DISTINCT image_id::BIGINT AS image_id FROM query({_literal(self.text)})"
            column = run(lambda: self.connection.execute(statement).fetchnumpy())["image_id"]
        if np.ma.is_masked(column):
            raise UsageError("--as-view: column image_id contains NULL; add WHERE image_id IS NOT NULL")
        numbers = np.sort(np.asarray(column))
        if len(numbers) and numbers[0] < 0:
            raise UsageError(f"--as-view: column image_id contains {numbers[0]}; omit negative ids")
        ids: Ids = numbers.astype(np.uint64)
        if len(ids) == 0:
            raise UsageError("--as-view: the result has no rows; relax the conditions")
        unknown = missing_ids(ids, self.dataset.table.image_id)
        if len(unknown):
            raise UsageError(f"--as-view: {listing(unknown)}: not in {self.dataset.root}; omit these ids")
        return ids

    @contextmanager
    def _executed(self) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """A function that runs calls of DuckDB in one thread, with a progress bar."""
        worker = Worker("query")
        try:
            with bar(100, "query", "%", self.quiet, delay=1.0) as progress:

                def run(work: Callable[[], Any]) -> Any:
                    outcome = worker.begin(work)
                    while not outcome.wait(_POLL_SECONDS):
                        percent = int(self.connection.query_progress())
                        progress.update(max(0, min(99, percent) - progress.n))
                    try:
                        return outcome.result()
                    except Exception as error:
                        translated = self.translated(error)
                    raise translated

                yield run
                progress.update(100 - progress.n)
        finally:
            worker.end()
            with suppress(duckdb.ConnectionException):  # closed already after a second Ctrl-C
                self.connection.interrupt()
            worker.join()

    def translated(self, error: Exception) -> Exception:
        """The error of a call of DuckDB as an error of this package, in one line."""
        if self.storage_errors:
            return self.storage_errors[0]
        if not isinstance(error, duckdb.Error):
            return error
        text = _reason(error)
        if 'extension "httpfs' in text or "extension 'httpfs" in text:
            return UsageError(
                "SQL (file at a URL): cannot be joined; copy it to this machine and name the copy"
            )
        if isinstance(error, duckdb.OutOfMemoryException):
            reason = text.partition(" Possible solutions")[0]
            return UsageError(f"--memory: too small ({reason[:500]}); raise it, or select fewer columns")
        for shard in self.dataset.shards:
            if (name := shard_files(shard)[1]) in text:
                url, rebuild = self.dataset.reader.url(name), command("index", self.dataset.root)
                return ShardError(f"{url}: {text[:500]}; `{rebuild}` rebuilds it")
        return UsageError(f"SQL: {text[:1000]}")


@contextmanager
def open_query(
    root: Path | str,
    text: str,
    *,
    layers: Sequence[str] = (),
    workers: int = 1,
    memory: str = "2GB",
    quiet: bool = False,
) -> Iterator[Query]:
    """Check a SELECT statement over the views `images` and `masks`; `Query.rows` executes it.

    With `layers`, masks have their changes, and `masks` has a column `layer`. DuckDB has `workers` threads
    and this memory, such as "2GB". UsageError: the text is not one SELECT statement, or names what does not
    exist. For other errors, see `Query.rows`.
    """
    _check_select(text)
    if "://" not in str(root) and not Path(root).is_dir():
        raise no_dataset(root)
    dataset = Dataset(root)
    if not dataset.shards:
        raise UsageError(f"{root}: contains no images; run `{command('reshard')}` again to finish it")
    errors: list[StorageError] = []
    with interrupts(), tempfile.TemporaryDirectory(prefix="sa1b-query-") as spill, connected() as connection:
        settings = {
            "threads": workers,
            "memory_limit": memory,
            "temp_directory": spill,
            "autoinstall_known_extensions": False,  # no download
        }
        for name, value in settings.items():
            try:
                connection.execute(f"SET {name} = {_literal(value)}")
            except duckdb.Error as error:
                raise UsageError(
                    f"--memory {memory}: {_reason(error)[:200]}; write a size such as 2GB"
                ) from None
        connection.register_filesystem(IndexFiles(dataset.reader, errors))
        query = Query(dataset, text, {}, connection, quiet=quiet, storage_errors=errors, layers=[])
        try:
            changed = Path(spill) / "layers.parquet" if layers else None
            if changed is not None:
                opened = write_changed(dataset, layers, changed, quiet=quiet)
                query.layers.extend((layer.info.name, layer.info.digest) for layer in opened)
            for statement in _views(dataset, changed):
                connection.execute(statement)
            described = connection.execute(f"SELECT * FROM query({_literal(text)}) LIMIT 0").description
            query.columns.update((str(column[0]), str(column[1])) for column in described)
        except Exception as error:
            raise query.translated(error) from None
        yield query


def _check_select(text: str) -> None:
    try:
        kinds = [statement.type.name for statement in duckdb.extract_statements(text)]
    except duckdb.Error as error:
        raise UsageError(f"SQL: {_reason(error)[:1000]}") from None
    if kinds != ["SELECT"]:
        listed = ", ".join(kinds) or "no statement"
        raise UsageError(
            f"SQL ({listed}): must be one SELECT statement; other statements and several are refused"
        )


def write_query_view(
    query: Query,
    *,
    name: str | None,
    out: Path | None = None,
    masks_where: str | None = None,
    overwrite: bool = False,
) -> Selected:
    """Write the view of the images of the result; as `write_view` and `Query.image_ids`."""
    dataset, layers = query.dataset, tuple(query.layers)
    condition = None if masks_where is None else mask_predicate(masks_where)
    if name is not None:
        check_name(name, "--as-view")
    store = open_store(dataset.root)
    chosen_by = {"sql": query.text} | ({} if masks_where is None else {"masks-where": masks_where})
    views = view_target(store, out).views()
    others = [view for view in views if (view.chosen_by, view.layers) != (chosen_by, layers)]
    # Before the query, which may take minutes.
    check_free(others, out, name, None, overwrite=overwrite, flag="--as-view")
    ids = query.image_ids()
    view = write_view(
        store,
        dataset.table,
        np.searchsorted(dataset.table.image_id, ids).astype(np.uint32),
        masks_where=condition,
        layers=layers,
        name=name,
        chosen_by=chosen_by,
        out=out,
        overwrite=overwrite,
    )
    path = document_path(store, out, view.digest)
    return Selected(view, path, len(dataset), name=name, opens=(name or view.digest) if out is None else path)


def _views(dataset: Dataset, changed: Path | None) -> Iterator[str]:
    """The statements of the views `images` and `masks`; `changed`: see `write_changed`."""
    files = [shard_files(shard)[1] for shard in dataset.shards]
    reader = dataset.reader
    # DuckDB takes paths as patterns, so that a folder with such a character is read like a URL.
    if reader.is_local and not set("*?[]{}") & set(str(Path(reader.root).absolute())):
        paths = [str(Path(reader.url(name)).absolute()) for name in files]
    else:
        paths = [f"{SCHEME}://{name}" for name in files]
    sources = shard_sources(dataset)
    yield "CREATE TABLE sa1b_shards (file VARCHAR, shard VARCHAR, source VARCHAR)"
    rows = zip(paths, dataset.shards, sources, strict=True)
    values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
    yield f"INSERT INTO sa1b_shards VALUES {values}"
    listed = ", ".join(map(_literal, paths))
    readings = dataset.manifest.get(READING, {}).values()
    of_coco = any(reading["kind"] == "coco" for reading in readings)
    texts = of_coco or any(reading["kind"] == "parquet" or reading.get("images_only") for reading in readings)
    select = f"SELECT * FROM read_parquet([{listed}], filename = true, union_by_name = {_literal(texts)})"
    # Indexes of other sources lack the columns of COCO files, texts and fields, and so may these.
    absent = "NULL::VARCHAR[] AS texts, NULL::VARCHAR AS image_fields"
    select += f" UNION ALL BY NAME SELECT {absent} WHERE false" * texts
    if changed is not None:
        select, of_coco = with_layers(select, _literal(str(changed)), of_coco=of_coco), True
    yield f"CREATE VIEW sa1b_indexes AS {select}"
    yield (
        f"CREATE VIEW images AS SELECT {_PER_IMAGE}, len(runs_count) AS masks, shard, source"
        f"{', texts, image_fields AS fields' * texts} FROM sa1b_indexes "
        "LEFT JOIN sa1b_shards ON filename = file"
    )
    # NaN in an index stands for a missing value, which is NULL in SQL.
    per_mask = ", ".join(
        f"{column}[i] AS {name}"
        if column in ("area", "runs_count")
        else f"nullif({column}[i]{'' if part is None else f'[{part + 1}]'}, 'nan'::DOUBLE) AS {name}"
        for name, (column, part) in MASK_FIELDS.items()
        if name not in ("mask_id", "area_fraction", "width", "height")
    )
    if of_coco:
        per_mask += "".join(
            f", coalesce({name}[i], {_literal(value)}) AS {name}" for name, value in NO_ORIGIN.items()
        )
    if changed is not None:
        per_mask += ", coalesce(layer[i], '') AS layer"
    # One list of positions is unnested and not every column, so that unused columns are not read.
    yield (
        f"CREATE VIEW masks AS SELECT image_id, mask_id[i] AS mask_id, width, height, {per_mask}, "
        "area[i] / (width::DOUBLE * height) AS area_fraction "
        "FROM (SELECT *, unnest(generate_series(1, len(runs_count))) AS i FROM sa1b_indexes)"
    )


def _reason(error: Exception) -> str:
    """DuckDB's message in one line, without the quoted part of the statement."""
    return " ".join(str(error).partition("\nLINE ")[0].split())


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int) else "'" + str(value).replace("'", "''") + "'"


_INTERRUPTED = "Query interrupted"  # DuckDB's message
_RETRY_SECONDS = 0.05


@contextmanager
def connected() -> Iterator[Any]:
    """A connection of DuckDB; at the end, a call of it in another thread is interrupted."""
    connection = duckdb.connect()
    # A division by zero is NULL, as in the conditions of views; the setting depends on the version.
    for name in ("ieee_floating_point_ops", "error_on_division_by_zero"):
        with suppress(duckdb.CatalogException):
            connection.execute(f"SET {name} = false")
    try:
        yield connection
    finally:
        while True:
            connection.interrupt()
            try:
                connection.close()
                break
            except duckdb.Error as error:
                if "busy" not in str(error):
                    raise
                time.sleep(_RETRY_SECONDS)


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C in a call of DuckDB, which itself raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from None


SCHEME = "sa1b-index"


class IndexFiles(AbstractFileSystem):
    """The index files of a URL, for DuckDB. Errors of the store are appended to `errors`."""

    protocol = SCHEME
    cachable = False

    def __init__(self, reader: Reader, errors: list[StorageError]) -> None:
        super().__init__()
        self._reader, self._errors = reader, errors
        self._sizes: dict[str, int] = {}

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        file = RangeFile(self._reader, path, self._errors.append)
        self._sizes[path] = file.size
        return file

    def size(self, path: str) -> int:  # of a file that is open
        return self._sizes[self._strip_protocol(path)]

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path]  # the paths are those of dataset.json; a missing file is an error of the first read

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(0, UTC)  # an index is never changed in place
