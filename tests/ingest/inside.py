"""Ingest of one source, and the writer of a layer, in this process, for tests of their parts; no dataset is published."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sa1b import Dataset
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.shards.documents import Options, Task
from sa1b.shards.layer import Change
from sa1b.shards.layer_writer import writing
from sa1b.sources.discovery import discover
from sa1b.storage.open import open_store


def ingest_tar(path: Path, root: Path, **options: Any) -> Task:
    """Ingest a tar or folder; options of `Options` and `Policy` alike."""
    (source,) = discover([path]).sources
    names = {field.name for field in fields(Options)}
    chosen = Options(**{name: value for name, value in options.items() if name in names})
    policy = Policy(**{name: value for name, value in options.items() if name not in names})
    root.mkdir(parents=True, exist_ok=True)
    return ingest(source, root, chosen, policy, replace_images=True)


def add_layer(root: Path, name: str = "round2", images: int = 3, overwrite: bool = False) -> Any:
    """A layer that adds, replaces and, where there are three masks, hides one of each of the first images."""
    dataset = Dataset(root)
    with writing(open_store(root), name, overwrite=overwrite) as writer:
        for row in range(images):
            base = next(dataset.masks([row]))
            own = base.keep(np.arange(len(base)) < 2)
            own = replace(
                own, mask_id=np.array([base.mask_id[0], base.mask_id.max() + 1])[: len(own)], text=None
            )
            change = Change(own, np.arange(len(own)) == 0, base.mask_id[2:3])
            writer.add(change, int(dataset.table.masks_crc32c[row]))
        return writer.commit(dataset.table, None, {"program": "test"})
