"""The images that ingest kept with warnings, as quarantine/ lists them.

quarantine/<source>/warnings.jsonl (doubtful.jsonl in older directories): one JSON line for each image and
reason, {"reason": "area", "image_id": 7, "message": "..."}.
"""

import json
from pathlib import Path

from sa1b.errors import ManifestError, UsageError
from sa1b.shards.manifest import QUARANTINE

_FILES = ("warnings.jsonl", "doubtful.jsonl")
Warnings = dict[int, list[tuple[str, str]]]  # image id -> reasons with their messages


def read_warnings(root: Path) -> Warnings:
    """All warnings of a dataset directory, by image.

    Raises:
        UsageError: there are none.
        ManifestError: a file is damaged; the message names the line.
    """
    found: Warnings = {}
    for name in _FILES:
        for path in sorted((root / QUARANTINE).glob(f"*/{name}")):
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    try:
                        entry = json.loads(line)
                        reasons = found.setdefault(int(entry["image_id"]), [])
                        reasons.append((str(entry["reason"]), str(entry["message"])))
                    except (ValueError, KeyError, TypeError) as error:
                        raise ManifestError(
                            f"{path}, line {number}: damaged ({error!r}); run tools/reshard.py again with "
                            "that source"
                        ) from None
    if not found:
        raise UsageError(f"{root}: no image was kept with a warning; leave --warnings out")
    return found
