"""Print which shard or source contains an image.

Example: sa1b locate shards 223750 sa_223751.jpg
         sa1b locate s3://BUCKET/shards --ids ids.txt --tsv > locations.tsv
         sa1b locate shards/tasks/sa_000020.json shards/sa1b-000021-0000.parquet --ids ids.txt
         sa1b locate --links links.txt 223750

Exit code 0: every image is stored in one of the shards; 2: nothing was searched; 3: printed, and an image is
in none of the shards, so that its source is estimated or unknown; 130: interrupted.
"""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import counted, loading, show
from sa1b.errors import UsageError
from sa1b.names import ID_END
from sa1b.report import aligned
from sa1b.sources.path_arguments import takes_endpoint
from sa1b.sources.stored_file import read_links

TOUR = (190, "Questions about both", "find images by id", "sa1b locate shards 223750")

if TYPE_CHECKING:
    from sa1b.shards.locate import Located

_ID = re.compile(r"(?:sa_)?0*([0-9]{1,19})(?:\.jpg)?")
_SHOWN = 100  # rows of the table


@takes_endpoint
def main(
    where: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="ROOT|ID...", help_behavior_hint="")
    ] = (),
    /,
    ids: Annotated[str | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None,
    links: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    tsv: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print which shard or source contains an image.

    For an image in none of the shards, the source is estimated: each tar of SA-1B has a contiguous block of
    about 11,187 image ids. The output marks estimates.

    Args:
        where: Dataset directories (folders or URLs), indexes of shards (.parquet), task files (tasks/*),
            and image ids: 223750, sa_223750 or sa_223750.jpg.
        ids: Also these images: a text file with one id per line, a CSV, TSV, Parquet or JSON file with a
            column of ids or names (see `sa1b fetch --help`), or the .ids file of a view.
        links: Meta's list of links: estimates are limited to its tars.
        tsv: Print a row for every image, with columns separated by tabs; -1 and empty fields: unknown.
        json_output: Print the result as JSON.
    """
    words = [_ID.fullmatch(word) for word in where]
    inputs = [word for word, match in zip(where, words, strict=True) if match is None]
    named = [int(match[1]) for match in words if match is not None]
    if not inputs and links is None:
        raise UsageError(
            "ROOT or --links: missing; pass a dataset directory, an index, a task file or a list of links"
        )
    if not named and ids is None:
        unknown = [word for word in inputs if "://" not in word and not Path(word).exists()]
        raise UsageError(f"{(*unknown, *inputs, links)[0]}: no image id; pass ids, or a file with --ids")
    if (large := max(named, default=0)) >= ID_END:
        raise UsageError(f"{large}: not an image id; pass a number below 2**63")
    with loading():
        import numpy as np

        from sa1b.shards.image_ids import read_image_ids
        from sa1b.shards.locate import locate
    wanted = np.array(named, np.uint64)
    if ids is not None:
        wanted = np.concatenate([wanted, read_image_ids(ids)])
    listed = [] if links is None else [link.file_name.removesuffix(".tar") for link in read_links(links)[0]]
    located = locate(np.unique(wanted), inputs, listed)
    if json_output:
        print(json.dumps(_document(located), indent=1))
    elif tsv:
        _print_tsv(located)
    else:
        show(_table(located))
    return 0 if located.is_stored.all() else 3


def _document(located: "Located") -> dict[str, object]:
    columns = {name: values.tolist() for name, values in located.columns().items()}
    rows = [
        {name: None if value in ("", -1) else value for name, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]
    return {"exit_code": 0 if located.is_stored.all() else 3, "images": rows}


def _print_tsv(located: "Located") -> None:
    columns = {name: values.tolist() for name, values in located.columns().items()}
    sys.stdout.write("\t".join(columns) + "\n")
    sys.stdout.writelines("\t".join(map(str, row)) + "\n" for row in zip(*columns.values(), strict=True))


def _table(located: "Located") -> str:
    rows = [("image id", "source", "shard", "offset", "bytes")]
    columns = [values[:_SHOWN].tolist() for values in located.columns().values()]
    for image_id, status, source, shard, offset, jpg_bytes, masks_bytes in zip(*columns, strict=True):
        if status == "stored":
            rows.append((str(image_id), source, shard, f"{offset:,}", f"{jpg_bytes:,} + {masks_bytes:,}"))
        else:
            rows.append((str(image_id), f"{source} (estimate)" if source else "unknown", "-", "-", "-"))
    lines = aligned(rows)
    if (more := len(located.image_id) - _SHOWN) > 0:
        lines.append(f"and {counted(more, 'more image')}, all printed with --tsv or --json")
    stored = int(located.is_stored.sum())
    return "\n".join([*lines, f"{counted(stored, 'image')} stored, {len(located.image_id) - stored:,} not"])
