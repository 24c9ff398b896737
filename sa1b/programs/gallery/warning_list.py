"""The images that ingest kept with warnings, by image; see sa1b.shards.warning_list."""

from sa1b.errors import UsageError
from sa1b.shards import warning_list
from sa1b.storage.store import Root

Warnings = dict[int, list[tuple[str, str]]]  # image id -> reasons with their messages


def read_warnings(root: Root) -> Warnings:
    """All warnings of a dataset directory, by image; without warnings, UsageError."""
    warnings: Warnings = {}
    for _, entry in warning_list.read_warnings(root):
        warnings.setdefault(entry["image_id"], []).append((entry["reason"], str(entry.get("message"))))
    if not warnings:
        raise UsageError(f"{root}: no image has a warning; omit --warnings")
    return warnings
