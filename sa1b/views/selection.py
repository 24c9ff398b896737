"""Choosing the images of a view: conditions over the index files, and parts by hash of the id.

Each image id has a fixed 64-bit hash, h = random_word(0, Purpose.SUBSET, id) / 2**64 in [0, 1). A subset of
1 % contains the ids with h < 0.01. It is part of every larger subset and does not depend on the shards. The
held-out part of 2 % contains the ids with h >= 0.98; the training part has h < 0.98.
"""

import errno
from collections import Counter
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sa1b.console import command
from sa1b.errors import ShardError, UsageError
from sa1b.hashing import Purpose, random_words
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.file_names import names_of
from sa1b.shards.image_ids import listing, missing_ids, read_image_ids
from sa1b.shards.index_file import shard_files
from sa1b.shards.manifest import no_dataset
from sa1b.shards.stored import Ids, no_ids
from sa1b.storage.open import open_store
from sa1b.views.index_scan import scan
from sa1b.views.predicate import image_predicate, mask_predicate
from sa1b.views.view import View, write_view
from sa1b.views.view_document import check_free, check_name, document_path, view_target

_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_STORED_IMAGE = {"image_width", "image_height", "jpg_bytes"}  # 0 in directories without images
_COUNTS = ("masks", "of_masks", "without_masks")


@dataclass(frozen=True, slots=True)
class Selection:
    """The conditions of a view; all must hold. The attributes have the names of the command's flags."""

    masks_where: str | None = None  # see sa1b.views.predicate, as for images
    images_where: str | None = None
    subset: str | None = None  # part as text: "1%", "0.5 %" or "0.01"
    held_out: str | None = None  # part as text
    split: Literal["train", "held-out"] = "train"  # `subset` reduces the training images only
    ids: str | Path | None = None  # file of image ids, see sa1b.shards.image_ids
    # ids of that file that the dataset lacks are refused, counted, or listed
    missing: Literal["refuse", "skip", "list"] = "refuse"
    layers: tuple[str, ...] = ()  # names of layers whose changes the masks have

    def flags(self) -> dict[str, str]:
        """Flag -> value, for all flags that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "layers"}
        if self.held_out is None:
            del values["split"]
        if self.ids is None or self.missing == "refuse":
            del values["missing"]
        return {flag.replace("_", "-"): str(value) for flag, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Selected:
    """Result of a selection; None: not counted, because no condition needs the number."""

    view: View
    path: str  # path or URL of the view's document
    of_images: int
    masks: int | None = None  # of the view's images, those that pass the mask condition
    of_masks: int | None = None  # all masks of the view's images
    without_masks: int | None = None  # images of the view without a mask that passes
    missing: Ids = field(default_factory=no_ids)  # ids of the file that are not in the dataset, ascending
    list_missing: bool = False
    name: str | None = None
    opens: str = ""  # what opens the view: name or digest, or a path if it was written with `out`

    def document(self) -> dict[str, Any]:
        return {
            "images": len(self.view),
            "of_images": self.of_images,
            **{name: value for name in _COUNTS if (value := getattr(self, name)) is not None},
            "missing": len(self.missing),
            **({"missing_ids": self.missing.tolist()} if self.list_missing else {}),
            "digest": self.view.digest,
            "ids_sha256": self.view.ids_digest,
            **({"layers": [list(layer) for layer in self.view.layers]} if self.view.layers else {}),
            "path": self.path,
            "view": self.opens,
        }

    def table(self) -> str:
        lines = [f"  images  {len(self.view):,} of {self.of_images:,}"]
        if self.masks is not None:
            lines.append(f"  masks   {self.masks:,} of {self.of_masks:,} in these images")
        if self.without_masks:
            lines.append(
                f"          {self.without_masks:,} images have no mask left; "
                '--images-where "masks >= 1" drops them'
            )
        if len(self.missing):
            lines.append(
                f"  missing {len(self.missing):,} ids of --ids are not in the dataset and are skipped"
            )
            if self.list_missing:
                lines += map(str, self.missing.tolist())
        lines += [f"  layer   {name} ({digest})" for name, digest in self.view.layers]
        lines.append(f"  digest  {self.view.digest}")
        if self.name is not None:
            lines.append(f"  name    {self.name}")
        lines += [f"Written: {self.path}", f"Open it with view={self.opens!r}"]
        return "\n".join(lines)


def select(
    root: Path | str,
    selection: Selection,
    *,
    name: str | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    workers: int = 1,
    quiet: bool = False,
) -> Selected:
    """Select images of a dataset directory and write the view; the directory itself is only read.

    `name`, `out` and `overwrite`: see write_view. UsageError: a condition, part, file of ids or name cannot
    be used, or no image remains. ManifestError: no dataset, or its files do not belong together. ShardError:
    an index file is missing or damaged.
    """
    masks_where = None if selection.masks_where is None else mask_predicate(selection.masks_where)
    images_where = None if selection.images_where is None else image_predicate(selection.images_where)
    scanned = masks_where is not None or images_where is not None
    low, high = _range(selection)
    if name is not None:
        check_name(name)
    if "://" not in str(root) and not Path(root).is_dir():
        raise no_dataset(root)
    if out is not None and out.suffix != ".json" and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder, or a path that ends with .json")
    store = open_store(root)
    dataset = Dataset(root, layers=selection.layers)
    dataset.check_table()
    layers = tuple((layer.info.name, layer.info.digest) for layer in dataset.layers)
    if images_where is not None and (fields := images_where.fields & _STORED_IMAGE):
        check_images(
            dataset,
            f"--images-where with {' and '.join(sorted(fields))}",
            "use width and height, which are those of the source images, or ",
        )
    if scanned:  # the selection takes minutes, so a target that cannot be written is refused first
        views = view_target(store, out).views()
        again = selection.flags(), dataset.table.ids_digest, layers  # the view of an earlier, equal selection
        other_views = [
            view for view in views if (view.chosen_by, view.dataset.get("ids_sha256"), view.layers) != again
        ]
        check_free(other_views, out, name, None, overwrite=overwrite)
    chosen = _by_hash(dataset.table.image_id, low, high)
    missing = no_ids()
    if selection.ids is not None:
        listed, missing = _listed(dataset, selection)
        chosen &= listed
    counts: Counter[str] = Counter()
    if scanned:
        indexed = np.zeros(len(dataset), np.bool_)
        shards = np.unique(dataset.table.shard[chosen]).tolist()
        for part in scan(dataset, shards, masks_where, images_where, workers=workers, quiet=quiet):
            rows = _rows(dataset, part.ids)
            indexed[rows] = True
            chosen[rows] &= part.passes
            kept = chosen[rows]
            counts["masks"] += int(part.left[kept].sum())
            counts["of_masks"] += int(part.masks[kept].sum())
            counts["without_masks"] += int((part.left[kept] == 0).sum())
        _check_seen(dataset, chosen & ~indexed)
    try:
        view = write_view(
            store,
            dataset.table,
            np.flatnonzero(chosen).astype(np.uint32),
            masks_where=masks_where,
            layers=layers,
            name=name,
            chosen_by=selection.flags(),
            counts=dict(counts),
            out=out,
            overwrite=overwrite,
        )
    except OSError as error:
        if out is not None or error.errno not in _READ_ONLY:
            raise
        raise UsageError(f"{store.root}: cannot be written ({error.strerror}); use --out PATH") from None
    path = document_path(store, out, view.digest)
    return Selected(
        view,
        path,
        len(dataset),
        **{what: counts.get(what) for what in _COUNTS},
        missing=missing,
        list_missing=selection.missing == "list",
        name=name,
        opens=(name or view.digest) if out is None else path,
    )


def _check_seen(dataset: Dataset, missing: npt.NDArray[np.bool_]) -> None:
    if missing.any():
        row = int(missing.argmax())
        path = dataset.reader.url(shard_files(dataset.shards[int(dataset.table.shard[row])])[1])
        raise ShardError(
            f"{path}: image {int(dataset.table.image_id[row])} is in the sample table and not in this index; "
            f"`{command('index', dataset.root)}` rebuilds both"
        )


def fraction(text: str, flag: str) -> Fraction:
    """A part of all images, above 0 and up to 1: "1%", "2.5 %", "0.01"; UsageError names the flag."""
    try:
        part = Fraction(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(0)
    if not 0 < part <= 1:
        raise UsageError(f"{flag} {text!r}: must be a part of the images, above 0 and up to 1, as 1% or 0.01")
    return part


def _range(selection: Selection) -> tuple[int, int]:
    subset = None if selection.subset is None else fraction(selection.subset, "--subset")
    if selection.held_out is None:
        if selection.split == "held-out":
            raise UsageError("--split held-out: no images are held out; pass --held-out PART, such as 2%")
        return 0, _threshold(subset or Fraction(1))
    held_out = fraction(selection.held_out, "--held-out")
    if held_out + (subset or 0) > 1:
        raise UsageError(
            f"--subset {selection.subset} and --held-out {selection.held_out} overlap: together they are "
            "more than all images; make one smaller"
        )
    border = _threshold(1 - held_out)
    if selection.split == "held-out":
        return border, 1 << 64
    return 0, border if subset is None else _threshold(subset)


def _threshold(part: Fraction) -> int:
    return int(part * (1 << 64))


def _by_hash(ids: npt.NDArray[np.uint64], low: int, high: int) -> npt.NDArray[np.bool_]:
    if (low, high) == (0, 1 << 64):
        return np.ones(len(ids), np.bool_)
    hashes = random_words(0, Purpose.SUBSET, ids)
    inside = hashes >= np.uint64(low)
    if high < 1 << 64:
        inside &= hashes < np.uint64(high)
    return inside


def _listed(dataset: Dataset, selection: Selection) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Whether each image of the dataset is in the file of ids, and the ids that are not in the dataset."""
    assert selection.ids is not None
    ids = read_image_ids(selection.ids, names_of(dataset))
    known = dataset.table.image_id
    missing = missing_ids(ids, known)
    if len(missing) and selection.missing == "refuse":
        raise UsageError(
            f"{selection.ids}: {listing(missing)}: not in {dataset.root}; omit them with --missing skip, "
            "or list all of them with --missing list"
        )
    is_listed = np.zeros(len(known), np.bool_)
    is_listed[np.searchsorted(known, np.setdiff1d(ids, missing, assume_unique=True))] = True
    return is_listed, missing


def _rows(dataset: Dataset, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    known = dataset.table.image_id
    rows = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    if (known[rows] != ids).any():
        image_id = int(ids[known[rows] != ids][0])
        raise ShardError(
            f"{dataset.root}: image {image_id} is in an index and not in the sample table; "
            f"run `{command('index', dataset.root)}` to rebuild both"
        )
    return rows
