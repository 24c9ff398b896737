"""Exports by the command line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import sa1b
from tests import kit


def export(
    root: object, out: Path, form: str = "sa1b", *, images: Any = None, quiet: bool = True, **options: Any
) -> SimpleNamespace:
    """The summary of `sa1b export --to FORM`, with flags in `form`; `images` become a view."""
    if images is not None:
        ids = out.parent / f"{out.name}.ids.txt"
        stored = sa1b.open(root).table.image_id
        ids.write_text("\n".join(map(str, stored[np.isin(stored, images)].tolist())))
        kit.run("view", root, "--ids", ids, "--name", "images", "--overwrite")
        options["view"] = "images"
    return kit.summary("export", root, "--to", *form.split(), out=out, **options)


def main(root: object, to: str, out: Path, **options: Any) -> int:
    """The exit code of `sa1b export`, which prints."""
    return kit.called("export", root, to=to, out=out, **options)
