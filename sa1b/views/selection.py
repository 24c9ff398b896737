"""Choosing the images of a view: conditions over the index files, in threads, and parts by hash of the id.

Each image id has a fixed 64-bit hash, h = random_word(0, Purpose.SUBSET, id) / 2**64 in [0, 1).
A subset of 1 % is h < 0.01: inside every larger one, and the same whatever the sharding. The held-out part of
2 % is h >= 0.98, at the other end, and what trains is h < 0.98.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sa1b.errors import ShardError, UsageError
from sa1b.hashing import Purpose, random_words
from sa1b.shards.dataset import Dataset
from sa1b.shards.shard import index_path
from sa1b.storage.publish import lock
from sa1b.views.index_scan import scan
from sa1b.views.predicate import image_predicate, mask_predicate
from sa1b.views.view import VIEWS, View, check_name, write_view

_SHOWN = 5
_COUNTS = ("masks", "of_masks", "without_masks")


@dataclass(frozen=True, slots=True)
class Selection:
    """What a view is chosen by; every condition must hold. The command line's flags, by their names.

    Attributes:
        masks_where, images_where: conditions, see sa1b.views.predicate.
        subset, held_out: parts as text: "1%", "0.5 %" or "0.01".
        split: which side of `held_out` to take; `subset` thins the training side only.
        ids: file with an image id a line.
    """

    masks_where: str | None = None
    images_where: str | None = None
    subset: str | None = None
    held_out: str | None = None
    split: Literal["train", "held-out"] = "train"
    ids: Path | None = None

    def flags(self) -> dict[str, str]:
        """Flag -> value, those that were given."""
        found = {
            flag.replace("_", "-"): str(value) for flag, value in asdict(self).items() if value is not None
        }
        if self.held_out is None:
            del found["split"]
        return found


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of a selection.

    Attributes:
        of_images: images in the root.
        masks, of_masks: of the view's images: those that pass the mask condition, all. None: not counted,
            as no condition asked for it.
        without_masks: images of the view of which no mask passes; None likewise.
    """

    view: View
    of_images: int
    masks: int | None
    of_masks: int | None
    without_masks: int | None

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "images": len(self.view),
            "of_images": self.of_images,
            **{name: value for name in _COUNTS if (value := getattr(self, name)) is not None},
            "digest": self.view.digest,
            "key": self.view.key,
        }

    def table(self, root: Path) -> str:
        """For people."""
        lines = [f"  images  {len(self.view):,} of {self.of_images:,}"]
        if self.masks is not None:
            lines.append(f"  masks   {self.masks:,} of {self.of_masks:,} in these images")
        if self.without_masks:
            lines.append(
                f"          {self.without_masks:,} images have no mask left; "
                '--images-where "masks >= 1" drops them'
            )
        lines += [f"  digest  {self.view.digest}", f"Written: {root / VIEWS / self.view.key}.json"]
        return "\n".join(lines)


def select(
    root: Path, selection: Selection, *, name: str | None = None, workers: int = 1, quiet: bool = False
) -> Chosen:
    """Choose images of a root and write the view. Reads only the columns named, of the shards concerned.

    Args:
        name: readable alias of the view.
        workers: threads.
        quiet: no progress bar.

    Raises:
        UsageError: a condition, part, list of ids or name that cannot be used, or no image is left.
        ManifestError: no dataset there, or its files do not belong together.
        ShardError: an index file is missing or damaged.
        LockedError: another process changes the root.
    """
    masks_where = None if selection.masks_where is None else mask_predicate(selection.masks_where)
    images_where = None if selection.images_where is None else image_predicate(selection.images_where)
    low, high = _range(selection)
    if name is not None:
        check_name(name)
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder")
    with lock(root):
        dataset = Dataset(root)
        wanted = _by_hash(dataset.table.image_id, low, high)
        if selection.ids is not None:
            wanted &= _listed(dataset, selection.ids)
        counts: Counter[str] = Counter()
        if masks_where is not None or images_where is not None:
            seen = np.zeros(len(dataset), np.bool_)
            shards = np.unique(dataset.table.shard[wanted]).tolist()
            for part in scan(dataset, shards, masks_where, images_where, workers, quiet):
                rows = _rows(dataset, part.ids)
                seen[rows] = True
                wanted[rows] &= part.passes
                kept = wanted[rows]
                counts["masks"] += int(part.left[kept].sum())
                counts["of_masks"] += int(part.masks[kept].sum())
                counts["without_masks"] += int((part.left[kept] == 0).sum())
            _check_seen(dataset, wanted & ~seen)
        view = write_view(
            root,
            dataset.table,
            np.flatnonzero(wanted).astype(np.uint32),
            masks_where=masks_where,
            name=name,
            chosen_by=selection.flags(),
            counts=dict(counts),
        )
    return Chosen(view, len(dataset), **{what: counts.get(what) for what in _COUNTS})


def _check_seen(dataset: Dataset, missing: npt.NDArray[np.bool_]) -> None:
    if missing.any():
        row = int(missing.argmax())
        path = index_path(Path(dataset.root) / dataset.shards[int(dataset.table.shard[row])])
        raise ShardError(
            f"{path}: image {int(dataset.table.image_id[row])} is in samples.bin and not in this index; "
            "tools/index.py makes both again"
        )


def fraction(text: str, flag: str) -> Fraction:
    """A part of all images, exactly: "1%", "2.5 %", "0.01".

    Raises:
        UsageError: not a number above 0 and up to 1 (100 %); the message names the flag.
    """
    try:
        part = Fraction(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(0)
    if not 0 < part <= 1:
        raise UsageError(f"{flag} {text!r}: expected a part of the images such as 1% or 0.01")
    return part


def _range(selection: Selection) -> tuple[int, int]:
    """The hashes [low, high) to take, out of 2**64."""
    subset = None if selection.subset is None else fraction(selection.subset, "--subset")
    if selection.held_out is None:
        if selection.split == "held-out":
            raise UsageError("--split held-out needs --held-out with the part to hold out, such as 2%")
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
    """Whether the hash of each id is in [low, high)."""
    if (low, high) == (0, 1 << 64):
        return np.ones(len(ids), np.bool_)
    hashes = random_words(0, Purpose.SUBSET, ids)
    inside = hashes >= np.uint64(low)
    if high < 1 << 64:
        inside &= hashes < np.uint64(high)
    return inside


def _listed(dataset: Dataset, path: Path) -> npt.NDArray[np.bool_]:
    """Whether each image of the root is in a file of ids."""
    ids: set[int] = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file with an image id a line") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            text = line.strip()
            if not text.isdecimal() or len(text) > 20 or int(text) >= 1 << 64:
                raise UsageError(f"{path}, line {number}: expected an image id, found {line[:80]!r}")
            ids.add(int(text))
    if not ids:
        raise UsageError(f"{path}: holds no image id")
    wanted = np.array(sorted(ids), np.uint64)
    unknown = wanted[~np.isin(wanted, dataset.table.image_id)].tolist()
    if unknown:
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"{path}: {', '.join(map(str, unknown[:_SHOWN]))}{more}: not in {dataset.root}; "
            "take them out of the list"
        )
    return np.isin(dataset.table.image_id, wanted)


def _rows(dataset: Dataset, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """The rows of these ids in the sample table."""
    known = dataset.table.image_id
    rows = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    if (known[rows] != ids).any():
        image_id = int(ids[known[rows] != ids][0])
        raise ShardError(
            f"image {image_id} is in an index of {dataset.root} and not in its samples.bin; "
            "tools/index.py makes both again"
        )
    return rows
