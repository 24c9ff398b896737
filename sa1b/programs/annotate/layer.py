"""A layer from the masks that a model finds in the images of a dataset directory.

    layers/.<name>-annotated/   the annotation files, without images, until the layer is complete

Any number of processes may write annotation files, also at different times. The one after which no image is
missing writes the layer. An image that is refused, such as a damaged one, is listed and is not in the layer.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.console import command
from sa1b.errors import LockedError, UsageError
from sa1b.programs.annotate.images import AnnotationFolder, InputImage, stored_images
from sa1b.report import bar
from sa1b.shards import MAX_STORED_PIXELS
from sa1b.shards.annotation import parse_annotation
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.documents import LayerInfo
from sa1b.shards.layer import check_layer_name, layer_names, read_info
from sa1b.shards.layer_writer import (
    Existing,
    annotated_folder,
    make_change,
    provenance,
    remove_annotated,
    writing,
)
from sa1b.storage.open import open_store
from sa1b.views.view import view_of

PROGRAM = "sa1b annotate"
_BATCH = 64  # images whose stored masks are read together


@dataclass(frozen=True, slots=True, eq=False)
class LayerTarget:
    """The layer to make: of which images, and what happens to the masks that they have.

    Attributes:
        dataset: with the layers that the new one builds on.
        rows: of the sample table, int64 [n], the images to annotate.
        out: folder for the annotation files.
        is_temporary: whether `out` is removed when the layer is complete.
    """

    dataset: Dataset
    name: str
    rows: npt.NDArray[np.int64]
    existing: Existing
    own_settings: dict[str, Any]
    out: Path
    is_temporary: bool
    flags: Mapping[str, object]  # of the command, those that differ from their defaults

    def images(self) -> list[InputImage]:
        return stored_images(self.dataset, self.rows)

    def written(self, settings: dict[str, Any]) -> LayerInfo | None:
        """The layer, if it was written with the same settings. UsageError: the name is taken."""
        store = open_store(self.dataset.root)
        if not layer_names(store).get(self.name, False):
            return None
        info = read_info(store.reader, self.name)
        if info.provenance.get("program") == PROGRAM and info.provenance.get("settings") == settings:
            self._remove()
            return info
        raise UsageError(
            f"--name {self.name}: {self.dataset.root} has a layer of this name that was made in another way; "
            "choose another name"
        )

    def finish(self, folder: AnnotationFolder, settings: dict[str, Any], *, quiet: bool) -> LayerInfo | None:
        """Write the layer if no image is missing, also of those that other processes annotate. None: one is,
        or another process writes the layer at the same time.
        """
        try:
            folder.scan()
            ids = self.dataset.table.image_id[self.rows].tolist()
            if not folder.complete.union(folder.refused).issuperset(ids):
                return None
            info = self._write(
                [image_id for image_id in ids if image_id in folder.complete], folder, settings, quiet
            )
        except (FileNotFoundError, UsageError, LockedError) as error:
            other = self.written(settings)  # by another process
            if other is None and not isinstance(error, LockedError):
                raise
            return other
        self._remove()
        return info

    def _write(
        self, ids: list[int], folder: AnnotationFolder, settings: dict[str, Any], quiet: bool
    ) -> LayerInfo:
        dataset = self.dataset
        with (
            writing(open_store(dataset.root), self.name) as writer,
            bar(len(ids), "layer", "image", quiet) as shown,
        ):
            for block in (ids[i : i + _BATCH] for i in range(0, len(ids), _BATCH)):
                rows = [dataset.row(image_id) for image_id in block]
                for image_id, row, base in zip(block, rows, dataset.masks(rows), strict=True):
                    text = folder.path(image_id, "json").read_bytes()
                    annotations = parse_annotation(text, image_id, MAX_STORED_PIXELS).annotations
                    change, _ = make_change(base, annotations, self.existing)
                    if len(change):
                        writer.add(change, int(dataset.table.masks_crc32c[row]))
                    shown.update(1)
            parent = dataset.layers[-1].info if dataset.layers else None
            return writer.commit(
                dataset.table, parent, provenance(PROGRAM, settings, [settings["weights_sha256"]])
            )

    def _remove(self) -> None:
        if self.is_temporary:
            remove_annotated(open_store(self.dataset.root), self.name)

    def command(self, **others: object) -> str:
        """The command that resumes this one; `others`: further flags that differ from their defaults."""
        flags = {"shards": self.dataset.root, "name": self.name, **self.flags, **others}
        given = {flag.replace("_", "-"): shlex.quote(str(value)) for flag, value in flags.items()}
        words = [f"--{flag} {value}" for flag, value in given.items()]
        return " ".join([command("annotate"), *words])


def open_target(
    root: str,
    name: str,
    *,
    view: str | None = None,
    existing: Existing = "keep",
    on: str | None = None,
    out: Path | None = None,
) -> LayerTarget:
    """The layer `name` of a dataset directory, of the images of a view or of all; `on`: the layer that it
    builds on. UsageError: a name is invalid, or `out` is missing and the directory is at a URL.
    """
    check_layer_name(name)
    dataset = Dataset(root, layers=() if on is None else (on,))
    check_images(dataset, "the model")
    if out is None and not dataset.reader.is_local:
        raise UsageError(
            f"{root}: at a URL; pass --out, a folder that all processes share, for the annotations until the "
            "layer is complete"
        )
    chosen, dataset = view_of(dataset, view)
    settings = {
        "existing": existing,
        "view": None if view is None else chosen.digest,
        "on": [layer.info.digest for layer in dataset.layers],
    }
    rows = chosen.table_rows(np.arange(len(chosen)))
    work = Path(dataset.root) / annotated_folder(name) if out is None else out
    flags = {"view": view, "existing": None if existing == "keep" else existing, "on": on, "out": out}
    given = {flag: value for flag, value in flags.items() if value is not None}
    return LayerTarget(
        dataset=dataset,
        name=name,
        rows=rows,
        existing=existing,
        own_settings=settings,
        out=work,
        is_temporary=out is None,
        flags=given,
    )
