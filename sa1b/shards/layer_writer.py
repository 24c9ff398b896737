"""Writing and removal of layers, see sa1b.shards.layer.

Records are written to a temporary file, then copied to masks.bin in the order of the image ids. Memory: 40
bytes an image. The files are moved to layers/<name>, and layer.json is written last. A process that dies
before leaves a layer without layer.json, which the next one of this name replaces.
"""

import contextlib
import json
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from sa1b.console import command
from sa1b.errors import BadSample, LockedError, ManifestError, UsageError
from sa1b.names import ANNOTATE_LINES, ANNOTATE_SETTINGS, ID_END, is_short_name, parse_member_name
from sa1b.shards.annotation import Annotations
from sa1b.shards.documents import LAYER_FORMAT, SEAL, LayerInfo, check_layer, seal_of
from sa1b.shards.layer import (
    COLUMNS,
    DOCUMENT,
    INDEX,
    MAGIC,
    MASKS,
    Change,
    check_layer_name,
    is_own,
    layer_digest,
    layer_names,
    read_info,
    schema,
)
from sa1b.shards.manifest import LAYERS
from sa1b.shards.sample_table import SampleTable
from sa1b.shards.staging import remove_local_leftovers
from sa1b.storage.atomic import (
    flush,
    json_bytes,
    naming_path,
    process_of_temporary,
    sha256_of,
    temporary_path,
)
from sa1b.storage.cache import fetch
from sa1b.storage.claim import Claim, holder
from sa1b.storage.store import Store
from sa1b.version import __version__

Existing = Literal["keep", "replace", "hide"]  # of the masks that an image has already
_UNSORTED = "unsorted"


@dataclass(slots=True, eq=False)
class LayerWriter:
    """Writes the records of a layer in any order of the images."""

    store: Store
    name: str
    folder: Path  # for the files until they are committed
    file: BinaryIO
    columns: dict[str, "array[int]"] = field(
        default_factory=lambda: {name: array(kind) for name, (_, kind) in COLUMNS.items()}
    )
    at: int = len(MAGIC)

    def add(self, change: Change, base_crc32c: int) -> None:
        """Add the changes of one image; `base_crc32c` is that of its record in the shard."""
        data, replaced = change.encode(), int(change.replaces.sum())
        counts = (len(change.masks) - replaced, replaced, len(change.hidden))
        head = (change.masks.image_id, self.at, len(data), crc32c(data), base_crc32c)
        with naming_path(self.folder):
            self.file.write(data)
        self.at += len(data)
        for column, value in zip(self.columns.values(), (*head, *counts), strict=True):
            column.append(value)

    def commit(self, table: SampleTable, parent: LayerInfo | None, provenance: dict[str, Any]) -> LayerInfo:
        """Complete the files and move them to layers/<name>; layer.json is written last."""
        with naming_path(self.folder):
            columns = self._complete()
        masks, index = self.folder / MASKS, self.folder / INDEX
        stored = {path: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in (masks, index)}
        above = None if parent is None else {"name": parent.name, "digest": parent.digest}
        digests = (str(stored[masks]["sha256"]), str(stored[index]["sha256"]))
        document = {
            "format": LAYER_FORMAT,
            "name": self.name,
            "digest": layer_digest(*digests, None if parent is None else parent.digest),
            "dataset": {"images": len(table), "ids_sha256": table.ids_digest},
            "images": len(columns["image_id"]),
            **{name: int(columns[name].sum()) for name in ("added", "replaced", "hidden")},
            "masks": stored[masks],
            "index": stored[index],
            "parent": above,
            "provenance": provenance,
        }
        document[SEAL] = seal_of(document)
        self._commit(json_bytes(document))
        return check_layer(document)

    def _complete(self) -> dict[str, npt.NDArray[Any]]:
        """Write both files, flushed; returns the columns of the index."""
        self.file.flush()
        columns = {name: np.asarray(values) for name, values in self.columns.items()}
        order = np.argsort(columns["image_id"], kind="stable")
        masks, index = self.folder / MASKS, self.folder / INDEX
        sizes = columns["bytes"][order]
        starts = np.cumsum(np.concatenate([[len(MAGIC)], sizes]), dtype=np.int64)[:-1]
        with (self.folder / _UNSORTED).open("rb") as unsorted, masks.open("wb") as file:
            file.write(MAGIC)
            for offset, length in zip(columns["offset"][order].tolist(), sizes.tolist(), strict=True):
                unsorted.seek(offset)
                file.write(unsorted.read(length))
        columns = {name: values[order] for name, values in columns.items()} | {"offset": starts}
        index_table = pa.table([pa.array(columns[name]) for name in COLUMNS], schema=schema())
        pq.write_table(index_table, index.absolute(), compression="zstd")
        flush(masks)
        flush(index)
        return columns

    def copy(self, source: Store, info: LayerInfo, document: bytes, progress: Callable[[int], None]) -> None:
        """Copy a complete layer, verified by its digests. DamageError: a file has other bytes."""
        for name, stored in ((MASKS, info.masks), (INDEX, info.index)):
            with (self.folder / name).open("w+b") as file:
                fetch(source.reader, f"{LAYERS}/{self.name}/{name}", stored.sha256, file, progress)
            flush(self.folder / name)
        self._commit(document)

    def _commit(self, document: bytes) -> None:
        folder = f"{LAYERS}/{self.name}"
        # Without layer.json, a reader does not take the files of two versions for one.
        self.store.remove(f"{folder}/{DOCUMENT}")
        self.store.commit([self.folder / MASKS, self.folder / INDEX], folder)
        self.store.put(f"{folder}/{DOCUMENT}", document)


def provenance(program: str, settings: dict[str, Any], weights: list[str], **others: Any) -> dict[str, Any]:
    """What the document of a layer says about its origin; `weights`: digests of the models."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {"program": program, "version": __version__, "date": date, "settings": settings}
    return {**about, "weights_sha256": weights, **others}


@contextlib.contextmanager
def writing(store: Store, name: str, *, overwrite: bool = False) -> Iterator[LayerWriter]:
    """Write a layer, as its only writer. What a killed process left under the name is replaced.
    UsageError: the layer exists, or its folder has unknown files. LockedError: another process writes it.
    """
    check_layer_name(name)
    with _claimed(store, name):
        if store.exists(f"{LAYERS}/{name}/{DOCUMENT}") and not overwrite:
            raise UsageError(
                f"--name {name}: {store.root} has a layer of this name; choose another one, or replace it "
                "with --overwrite"
            )
        remove_local_leftovers(store)
        _check_own(store, name)
        folder = temporary_path(store.scratch / LAYERS / name / "new")
        folder.mkdir(parents=True)
        try:
            with (folder / _UNSORTED).open("wb") as file:
                file.write(MAGIC)
                try:
                    yield LayerWriter(store, name, folder, file)
                finally:
                    with naming_path(folder):
                        file.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # it has the files of a layer
                folder.parent.rmdir()


def drop(store: Store, name: str) -> None:
    """Remove a layer, complete or not; UsageError: none, or others need it. LockedError: it is written."""
    check_layer_name(name, "layer")
    is_annotated = name in annotated(store)
    _check_own(store, name)
    if name not in layer_names(store) and not is_annotated:
        raise UsageError(
            f"{name}: {store.root} has no layer of this name; `{command('layer', 'list', store.root)}` "
            "prints the layers"
        )
    for other, is_complete in layer_names(store).items():
        with contextlib.suppress(ManifestError):  # a damaged layer is none to read
            above = read_info(store.reader, other).parent if is_complete else None
            if above is not None and above.name == name:
                raise UsageError(f"{name}: the layer {other} builds on it; drop {other} first")
    with _claimed(store, name):
        _remove(store, name)
        remove_annotated(store, name)
    if is_annotated and name in annotated(store):
        folder = store.url(annotated_folder(name))
        raise UsageError(f"{folder}: has files that `{command('annotate')}` did not write; move them away")


@contextlib.contextmanager
def _claimed(store: Store, name: str) -> Iterator[None]:
    path = f"{LAYERS}/.{name}.claim"
    claim = Claim.take(store, path)
    if claim is None:
        url = store.url(f"{LAYERS}/{name}")
        terms = "" if (other := holder(store, path)) is None else f" ({other.terms(store.url(path))})"
        raise LockedError(f"{url}: another process writes this layer{terms}; wait for it or stop it")
    with claim:
        yield


def _remove(store: Store, name: str) -> None:
    """Remove the files of a layer, layer.json first."""
    folder = f"{LAYERS}/{name}"
    remove_local_leftovers(store)
    _check_own(store, name)
    store.remove(f"{folder}/{DOCUMENT}", f"{folder}/{INDEX}")  # masks.bin says whose the folder is
    if store.is_folder(folder):
        store.remove_folder(folder, {MASKS}.__contains__)


def annotated_folder(name: str) -> str:
    """The folder of the annotation files of `sa1b annotate --shards` until the layer is complete."""
    return f"{LAYERS}/.{name}-annotated"


def annotated(store: Store) -> dict[str, dict[str, Any]]:
    """What `sa1b annotate --shards` has stored for layers that are not complete: name -> its settings and, as
    `images`, the number of annotated images.
    """
    settings_by_layer: dict[str, dict[str, Any]] = {}
    for path in sorted((store.scratch / LAYERS).glob(".*-annotated")) if store.is_local else ():
        name = path.name[1:].removesuffix("-annotated")
        if is_short_name(name) and path.is_dir():
            settings: Any = None
            with contextlib.suppress(OSError, ValueError, RecursionError):
                settings = json.loads((path / ANNOTATE_SETTINGS).read_bytes())
            count = sum(1 for _ in path.glob("*/sa_*.json"))
            settings_by_layer[name] = {**(settings if isinstance(settings, dict) else {}), "images": count}
    return settings_by_layer


def remove_annotated(store: Store, name: str) -> None:
    """Remove the annotation files for a layer and their folders; files of others stay."""
    place = annotated_folder(name)
    for folder in store.folders(place):
        store.remove_folder(f"{place}/{folder}", _is_annotation)
    if store.is_folder(place):
        store.remove_folder(place, {ANNOTATE_SETTINGS, ANNOTATE_LINES}.__contains__)


def _is_annotation(file: str) -> bool:
    return parse_member_name(file) is not None or process_of_temporary(Path(file)) is not None


def _check_own(store: Store, name: str) -> None:
    """UsageError if files in the folder have the names of a layer's files, and are not those of a layer."""
    if not is_own(store, name):
        raise UsageError(
            f"{store.url(f'{LAYERS}/{name}')}: has files that belong to no layer; move them, or choose "
            "another name"
        )


def make_change(base: Annotations, changes: Annotations, existing: Existing) -> tuple[Change, int]:
    """The change that a file's masks `changes` make to the masks `base` of an image; number of new ids.

    A mask of the file replaces a mask of the image if their id occurs once in each; -1 is no id. An added
    mask without an id, or with the id of another mask, gets the next id above all ids. BadSample: there is no
    such id.
    """
    replaces = np.zeros(len(changes), np.bool_)
    if existing != "keep":
        known, counts = np.unique(base.mask_id, return_counts=True)
        names, first, times = np.unique(changes.mask_id, return_index=True, return_counts=True)
        single = np.isin(names, known[counts == 1]) & (times == 1) & (names != -1)
        replaces[first[single]] = True
    hidden = np.empty(0, np.int64)
    if existing == "hide":
        hidden = np.setdiff1d(base.mask_id, changes.mask_id[replaces])
    taken = {*base.mask_id.tolist(), *changes.mask_id[replaces].tolist()} - {-1}
    ids = changes.mask_id.tolist()
    following = max([*taken, *ids, -1]) + 1
    changed: dict[int, int] = {}
    for i in np.flatnonzero(~replaces).tolist():
        if ids[i] in taken or ids[i] == -1:
            if following >= ID_END:
                raise BadSample("mask_ids", f"mask id {ids[i]} needs another one above all ids; none is left")
            changed[i], following = following, following + 1
        else:
            taken.add(ids[i])
    return Change(_renumbered(changes, changed), replaces, hidden), len(changed)


def _renumbered(changes: Annotations, changed: dict[int, int]) -> Annotations:
    if not changed:
        return changes
    ids, text = changes.mask_id.copy(), changes.text
    ids[[*changed]] = [*changed.values()]
    if text is not None:
        document = json.loads(text)
        for i, new in changed.items():
            document["annotations"][i]["id"] = new
        text = json.dumps(document).encode()
    return replace(changes, mask_id=ids, text=text)
