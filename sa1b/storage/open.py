"""The store of a path or URL."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sa1b.arguments import plain_root, was_url
from sa1b.errors import UsageError
from sa1b.storage.bucket import BucketStore
from sa1b.storage.protocols import kind_of
from sa1b.storage.store import FolderStore, Root, Store

_buckets: dict[tuple[object, ...], BucketStore] = {}  # share their connections


def open_store(root: Root, *, scratch: Path | None = None, options: Mapping[str, Any] | None = None) -> Store:
    """The store of a dataset directory; the same store of a URL whenever a process opens it. An open store is
    returned. Scratch folder and options are of a URL, see `sa1b.storage.bucket.BucketStore`.
    """
    if isinstance(root, Store):
        return root
    text = plain_root(root)
    if "://" in text:
        endpoint = os.environ.get(kind_of(text).endpoint_variable)
        key = (text.rstrip("/"), scratch, endpoint, repr(sorted((options or {}).items())))
        if key not in _buckets:
            _buckets.setdefault(key, BucketStore(text, scratch=scratch, options=options))
        return _buckets[key]
    if not text:
        raise UsageError(f"{text!r}: names no folder; pass its path, such as . for the current one, or a URL")
    if was_url(text) and not Path(text).exists():
        scheme, _, path = text.partition(":/")
        raise UsageError(f"{text}: no such folder; did you mean {scheme}://{path}?")
    return FolderStore(Path(text))
