"""Lists that ingest writes about the pairs of a source: the lines of quarantine/<source>/*.jsonl.

    refused.jsonl    a line for each refused member or damaged stretch, with the file that holds its bytes
    warnings.jsonl   a line for each image and reason that was kept with a warning

Each line is a JSON object with at least `reason` and `message`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sa1b.console import command
from sa1b.errors import ManifestError
from sa1b.shards.manifest import QUARANTINE
from sa1b.storage.open import open_store
from sa1b.storage.store import Root

REFUSED = "refused.jsonl"
WARNINGS = "warnings.jsonl"


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number (from 1) and content of each line of a file; the content is None for a line of another form.

    A missing file has no lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            whole = isinstance(entry, dict) and isinstance(entry.get("reason"), str) and line.endswith(b"\n")
            yield number, entry if whole else None


def read_warnings(root: Root) -> Iterator[tuple[str, dict[str, Any]]]:
    """Source and line of each image that was kept with a warning, by source.

    A line has `reason`, `image_id` and `message`.

    Raises:
        ManifestError: a line is damaged; the message names it.
    """
    store = open_store(root)
    for source in store.folders(QUARANTINE):
        name = f"{QUARANTINE}/{source}/{WARNINGS}"
        with store.files(name) as (path,):
            for number, entry in read_lines(path):
                if entry is None or type(entry.get("image_id")) is not int:
                    raise ManifestError(
                        f"{store.url(name)}, line {number}: damaged; restore it from a copy, "
                        f"or run `{command('reshard')}` again with that source"
                    )
                yield source, entry
