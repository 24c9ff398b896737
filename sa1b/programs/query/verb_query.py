"""Answer a question about images and masks in SQL, from the indexes of a dataset directory.

Example: sa1b query shards "SELECT count(*) FROM masks WHERE area_fraction < 0.001"
         sa1b query shards "SELECT image_id, avg(stability_score) FROM masks GROUP BY image_id" --csv
         sa1b query shards "SELECT image_id FROM images WHERE masks >= 100" --as-view crowded

Exit code 0: answered; 2: not answered; 130: interrupted.
"""

import csv
import json
import math
import sys
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range
from sa1b.console import counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import aligned, present
from sa1b.sources.path_arguments import check_here, check_writable, takes_endpoint

TOUR = (200, "Questions about both", "ask in SQL", 'sa1b query shards "SELECT count(*) FROM masks"')

if TYPE_CHECKING:
    from sa1b.programs.query.sql import Query

_WIDTH = 60  # characters of a value in the table


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    sql: Annotated[Positional[str], tyro.conf.arg(metavar="SELECT")],
    /,
    layers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    limit: Annotated[int, Range(1)] = 100,
    csv_output: Annotated[bool, tyro.conf.arg(name="csv")] = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
    parquet: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    as_view: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    masks_where: Annotated[str | None, tyro.conf.arg(metavar="CONDITION")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    overwrite: bool = False,
    workers: Annotated[int, Range(1)] = 4,
    memory: str = "2GB",
) -> int:
    """Answer a question about images and masks in SQL, from the indexes of a dataset directory.

    The table `images` has a row for each image: image_id; width and height (of the source, pixels);
    image_width and image_height (of the stored JPEG, pixels); jpg_bytes and masks_bytes (stored bytes);
    jpg_offset and masks_offset (bytes from the start of the shard); jpg_crc32c (checksum); masks (number of
    masks); shard and source (names). With sources of images alone, with texts or in COCO's format also:
    texts (list), and fields (of the image in its source, as JSON: fields->>'label').

    The table `masks` has a row for each mask: image_id, mask_id, width and height of the image; area
    (pixels), area_fraction (of the image); bbox_x, bbox_y, bbox_width, bbox_height (pixels);
    predicted_iou and stability_score (NULL: missing); point_x, point_y (pixels); crop_x, crop_y, crop_width,
    crop_height (pixels); runs_count (number of run lengths). If a source is a file in COCO's format also:
    category (name), category_id, iscrowd, and fields (all fields of the annotation, as JSON).

    Only the indexes are read, and of these only the columns that the statement uses. Files on this machine
    can be joined: JOIN 'captions.parquet' USING (image_id).

    Args:
        root: Dataset directory that `sa1b reshard` made: a folder or a URL.
        sql: One SELECT statement of DuckDB's SQL. Other statements are refused.
        layers: Ask about masks with the changes of these layers (`sa1b layer add`), in this order. `masks`
            has a column `layer` then: where the mask comes from, empty for the shards. The records of
            the changed images are read first. A view of --as-view is read with the layers.
        limit: Rows of the printed table; --csv, --json and --parquet write all rows.
        csv_output: Print all rows as CSV.
        json_output: Print all rows as a JSON array of objects. NaN and NULL are null. With --as-view: the
            view.
        parquet: Write all rows to this Parquet file.
        as_view: Write a view with this name, to train on: the images in the column image_id of the result.
        masks_where: With --as-view: condition on the masks of the view, see `sa1b view`.
        out: With --as-view: write the view here instead of ROOT/views: a folder, or a path that ends with
            .json.
        overwrite: Replace the file --parquet; with --as-view, move the name from another view to this view.
        workers: Threads of DuckDB.
        memory: Limit of DuckDB's memory. It uses a folder for temporary files beyond it.
    """
    forms = {"--csv": csv_output, "--parquet": parquet is not None, "--as-view": as_view is not None}
    chosen = [
        flag for flag, is_set in (forms | {"--json": json_output and as_view is None}).items() if is_set
    ]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: exclude each other; choose one form of the result")
    for flag, value in (("--masks-where", masks_where), ("--out", out)):
        if value is not None and as_view is None:
            raise UsageError(f"{flag} {value}: only with --as-view; omit it")
    check_here("--out", out)
    check_here("--parquet", parquet)
    if parquet is not None and parquet.exists() and not overwrite:
        raise UsageError(f"--parquet {parquet}: exists; choose another path, or replace it with --overwrite")
    if parquet is not None and not parquet.absolute().parent.is_dir():
        raise UsageError(f"--parquet {parquet}: its folder does not exist; create it, or check the path")
    if as_view is not None and out is None:
        check_writable("a view is written there without --out", root)
    with loading():
        from sa1b.programs.query.sql import open_query, write_query_view
    quiet = csv_output or json_output
    with open_query(root, sql, layers=layers, workers=workers, memory=memory, quiet=quiet) as query:
        if as_view is not None:
            written = write_query_view(
                query, name=as_view, out=out, masks_where=masks_where, overwrite=overwrite
            )
            present(written, json_output)
        elif parquet is not None:
            show(f"{counted(_write_parquet(query, parquet), 'row')}\nWritten: {parquet}")
        elif csv_output:
            _print_csv(query)
        elif json_output:
            _print_json(query)
        else:
            show(_table(query, limit))
    return 0


def _write_parquet(query: "Query", path: Path) -> int:
    import pyarrow.parquet as pq

    from sa1b.storage.atomic import commit, flush, naming_final, naming_path, temporary_path

    temporary = temporary_path(path)
    rows = 0
    try:
        batches = query.batches()
        first = next(batches)  # the statement may fail, so the file is opened later
        with naming_final(path):
            file = temporary.open("wb")
        with naming_path(path):
            with file, pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            flush(temporary)
        commit(temporary, path)
    finally:
        with suppress(OSError):  # another one on a disk that is read-only
            temporary.unlink()
    return rows


def _print_csv(query: "Query") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    head: list[tuple[Any, ...]] = [tuple(query.columns)]
    for rows in chain([head], query.rows()):
        if sys.stdout.isatty():  # files and programs get the values as they are
            writer.writerows(
                [_harmless(value) if isinstance(value, str) else value for value in row] for row in rows
            )
        else:
            writer.writerows(rows)


def _print_json(query: "Query") -> None:
    names = list(query.columns)
    separator = "["
    for rows in query.rows():
        for row in rows:
            sys.stdout.write(f"{separator}\n {json.dumps(_object(names, row), default=str)}")
            separator = ","
    sys.stdout.write("[]\n" if separator == "[" else "\n]\n")


def _object(names: list[str], row: tuple[Any, ...]) -> dict[str, Any]:
    return {name: _number(value) for name, value in zip(names, row, strict=True)}


def _number(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _number(item) for name, item in value.items()}
    return value


def _table(query: "Query", limit: int) -> str:
    fetched = [row for rows in query.rows(limit + 1) for row in rows]
    shown = [[_cell(value) for value in row] for row in fetched[:limit]]
    cells = [list(query.columns), *shown]
    right = [isinstance(value, int | float | Decimal) for value in (fetched[0] if fetched else ())]
    lines = aligned(cells, right)
    more = f"the first {counted(limit, 'row')}; --limit N prints more, --csv all"
    lines.append(more if len(fetched) > limit else counted(len(shown), "row"))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else _harmless(" ".join(str(value).split()))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _harmless(text: str) -> str:
    """A text of the user without control sequences of the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]
