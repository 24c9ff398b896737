"""A view: a named subset of the images of a dataset directory, and a condition on their masks.

A view is its image ids and its condition on masks, see sa1b.views.view_document for the files. `View.digest`
is its identity: commands print it, its files are named after it, and it opens the view. Without a condition,
the digest is the sha256 of the sorted ids, u64 little-endian; for others see `view_digest`. A view that was
made with layers records their digests, and they are applied when the view is read.

`View.ids_digest` depends on the ids only. It is the key of the training order, so the order is the same for
views with other masks, other shards or other image sizes of the same images. A dataset directory that gets
more images keeps its views: the ids are looked up in its new sample table.
"""

import copy
import hashlib
import mmap
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sa1b.console import command
from sa1b.errors import ManifestError, UsageError
from sa1b.report import first_names
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import view_digest
from sa1b.shards.layer import reopen_layers
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import is_of_dead_process, process_of_temporary
from sa1b.storage.cache import fetch_once
from sa1b.storage.claim import exclusive
from sa1b.storage.errors import DamageError, MissingError, ReplacedError
from sa1b.storage.open import open_store
from sa1b.storage.reader import Reader
from sa1b.storage.store import Root
from sa1b.views.predicate import Predicate, PredicateError
from sa1b.views.view_document import (
    PREFIX,
    Layers,
    ViewDocument,
    check_free,
    check_name,
    document_at,
    find,
    is_path,
    read_documents,
    view_target,
)

SHOWN_DIGEST = 12  # characters of a digest in a repr; `open_view` accepts this abbreviation
_PIECE = 1 << 12  # number of ids that are looked up at a time


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The images of a view and its condition on masks."""

    # of the sample table, [n]; None: all rows in the table's order, without an array
    rows: npt.NDArray[np.uint32] | None
    count: int  # images, n
    digest: str  # the view's identity
    # of the sorted image ids or, for `by_location`, of the ids in its order: the key of the training order
    ids_digest: str
    # of the sample table, which differs for other bytes, other shards or more images; for integrity only
    bytes_digest: str
    masks_where: Predicate | None = None  # the condition that a mask must pass; None: all masks
    layers: Layers = ()  # whose changes the masks have

    def __repr__(self) -> str:
        condition = "" if self.masks_where is None else f", masks with {self.masks_where.text}"
        layers = "".join(f", layer {name}" for name, _ in self.layers)
        return f"View({self.digest[:SHOWN_DIGEST]}: {self.count:,} images{condition}{layers})"

    def __len__(self) -> int:
        return self.count

    def table_rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the sample table for rows of the view (0 to count - 1), int64 [n]."""
        return indices if self.rows is None else self.rows[indices].astype(np.int64)

    def image_ids(self, table: SampleTable) -> npt.NDArray[np.uint64]:
        """The image ids, uint64 [n], ascending or, for `by_location`, in its order."""
        return table.image_id if self.rows is None else table.image_id[self.rows]

    def by_location(self, table: SampleTable) -> "View":
        """The same images sorted by shard and offset, for an `Order` with block_size > 1.

        `ids_digest` is the digest of the ids in this order, which does not depend on the number of images per
        shard. If the images are stored in another order, a resume is refused. The call takes 4 bytes of
        memory per image, and 1.2 s for 11.2 million images.
        """
        rows = np.arange(self.count, dtype=np.uint32) if self.rows is None else self.rows
        placed = rows[np.lexsort((table.offset[rows], table.shard[rows]))]
        return replace(self, rows=placed, ids_digest=ids_digest(table.image_id[placed]))


def ids_digest(ids: npt.NDArray[np.uint64]) -> str:
    """sha256 of image ids as u64 little-endian; for all sorted ids, the digest in the sample table."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<u8").data).hexdigest()


def _digest(ids_sha256: str, masks_where: Predicate | None, layers: Layers) -> str:
    where = None if masks_where is None else masks_where.text
    return view_digest(ids_sha256, where, [digest for _, digest in layers])


def whole(table: SampleTable, masks_where: Predicate | None = None, layers: Layers = ()) -> View:
    """The view of all images of a dataset directory; opening it takes no time."""
    about = _digest(table.ids_digest, masks_where, layers), table.ids_digest, table.digest
    return View(None, len(table), *about, masks_where, layers)


def view_of(dataset: Dataset, which: str | Path | None) -> tuple[View, Dataset]:
    """A view of an open dataset as `open_view`, and the dataset with the layers that the view was made with.

    ManifestError: also if the dataset was opened with other layers, or one of the view was replaced.
    """
    view = open_view(dataset.reader, dataset.table, which)
    layers = tuple((layer.info.name, layer.info.digest) for layer in dataset.layers)
    if not view.layers or layers == view.layers:
        return view, dataset
    made = f"made with layers {_listed(view.layers)}"
    if layers:
        raise ManifestError(
            f"view {which}: {made}, and opened with {_listed(layers)}; omit these: the view names its own"
        )
    opened = copy.copy(dataset)
    try:
        opened.layers = reopen_layers(dataset.reader, dataset.table, view.layers)
    except ReplacedError as error:
        raise ManifestError(
            f"view {which}: {made}, and {error.url} is another one now; restore it from a copy, or make the "
            "view again"
        ) from None
    return view, opened


def _listed(layers: Layers) -> str:
    return ", ".join(f"{name} ({digest[:SHOWN_DIGEST]})" for name, digest in layers)


def open_view(
    root: Path | str | Reader, table: SampleTable, which: str | Path | None = None, *, check: bool = True
) -> View:
    """Open a view of a dataset directory, or of a reader of it.

    The view's image ids are looked up in the table, unless the view was made for the same set of images: then
    its row numbers are mapped and nothing is copied. Looking up 11 million ids takes 0.4 s and 4 bytes of
    memory per image. Files of views at a URL are copied to this machine once.

    Args:
        which: name of a view in ROOT/views, or at least the first 6 characters of its digest. Or a path on
            this machine that `sa1b view --out` wrote: the view's .json file or its folder. A string with a
            "/" or the ending .json is a path, and so is every `Path`. None, or the digest of all images,
            opens all images.
        check: verify the digests of the view's files, which takes 0.1 s for 11 million images.

    Raises:
        ManifestError: no such view or more than one, it is damaged, or the table lacks some of its images.
    """
    if which is None or which == table.ids_digest:
        return whole(table)
    reader = root if isinstance(root, Reader) else Reader(root)
    located = find_view(reader, table, which)
    if located is None:
        return whole(table)
    source, document = located
    again = f"rebuild it: {document.again(reader.root)}"
    path = source.url(f"{document.stem}.json")
    try:
        condition = document.condition()
        made_for = document.dataset["ids_sha256"]
        if _digest(document.ids_sha256, condition, document.layers) != document.digest:
            raise ValueError("its ids and condition are not those of its digest")
    except (PredicateError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: damaged ({error!r}); {again}") from None
    if document.ids_sha256 == table.ids_digest:
        return whole(table, condition, document.layers)
    if made_for == table.ids_digest:
        data = _map(source, document, ".rows", document.rows_sha256, width=4, check=check, again=again)
        rows = np.frombuffer(data, "<u4")
    else:
        data = _map(source, document, ".ids", document.ids_sha256, width=8, check=check, again=again)
        rows = _look_up(table, np.frombuffer(data, "<u8"), source.url(f"{document.stem}.ids"), reader.root)
    about = document.digest, document.ids_sha256, table.digest
    return View(rows, document.images, *about, condition, document.layers)


def find_view(
    reader: Reader, table: SampleTable, which: str | Path | None
) -> tuple[Reader, ViewDocument] | None:
    """The document of a view and the reader of its files; None: all images. Arguments as for `open_view`."""
    if which is None or which == table.ids_digest:
        return None
    if isinstance(which, Path) or is_path(which):
        return document_at(str(which))
    documents = read_documents(reader)
    prefix = len(which) >= PREFIX and table.ids_digest.startswith(which)
    known = {document.digest for document in documents if document.digest.startswith(which)}
    if prefix and known <= {table.ids_digest} and not any(which in document.names for document in documents):
        return None
    return reader, find(documents, which, reader.root)


def write_view(
    root: Root,
    table: SampleTable,
    rows: npt.NDArray[np.uint32],
    *,
    masks_where: Predicate | None = None,
    layers: Layers = (),
    name: str | None = None,
    chosen_by: dict[str, str] | None = None,
    counts: dict[str, int] | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> View:
    """Write a view's files, the document last; the same selection gives the same bytes.

    If the view already exists, it keeps its names. UsageError: there are no rows, or the name is invalid or
    belongs to another view.

    Args:
        rows: rows of the sample table, ascending, uint32 [n], at least one.
        layers: names and digests of the layers that the view is read with.
        chosen_by: flags of the selection -> values; stored in the document, so that it can be repeated.
        counts: further counts for the document.
        out: where to write: a folder, or the path of the .json file; None: ROOT/views.
        overwrite: move `name` from another view to this view; replace a file `out`.
    """
    if len(rows) == 0:
        raise UsageError(f"view of {root}: no image is left; relax the conditions, or take a larger part")
    if name is not None:
        check_name(name)
    ids = np.ascontiguousarray(table.image_id[rows], "<u8")
    row_bytes = np.ascontiguousarray(rows, "<u4").tobytes()
    ids_sha256 = ids_digest(ids)
    digest = _digest(ids_sha256, masks_where, layers)
    target = view_target(root, out)
    store, final = target.store, target.document(digest)
    with exclusive(store, target.claim, store.url(final)):  # writers only; readers take no claim
        if store.is_local:
            for left in Path(store.url(target.folder)).glob(".*.partial"):
                if is_of_dead_process(process_of_temporary(left) or ""):
                    left.unlink(missing_ok=True)
        others = target.views()
        names = {alias for other in others if other.digest == digest for alias in other.names}
        check_free(others, out, name, digest, overwrite=overwrite)
        if name is not None:
            names.add(name)
        document = ViewDocument(
            digest=digest,
            names=tuple(sorted(names)),
            images=len(rows),
            ids_sha256=ids_sha256,
            rows_sha256=hashlib.sha256(row_bytes).hexdigest(),
            masks_where=None if masks_where is None else masks_where.text,
            chosen_by=chosen_by or {},
            dataset={"images": len(table), "ids_sha256": table.ids_digest},
            counts=counts or {},
            layers=layers,
        )
        stem = final.removesuffix(".json")
        files = {f"{stem}.ids": ids.tobytes(), f"{stem}.rows": row_bytes}
        for path, data in files.items() if out is not None and not others else ():
            if store.exists(path) and store.read(path) != data:  # not left by this command, killed
                raise UsageError(
                    f"--out {out}: would replace {store.url(path)}, a file of no view; choose another --out, "
                    "or move the file"
                )
        for path, data in files.items():
            store.put(path, data)
        store.put(final, document.encode())
        for other in others:
            if name in other.names and other.digest != digest and target.file is None:
                renamed = replace(other, names=tuple(alias for alias in other.names if alias != name))
                store.put(target.document(other.digest), renamed.encode())
    which = digest if out is None else Path(store.url(final))
    return open_view(store.reader, table, which, check=False)


def _map(
    reader: Reader, document: ViewDocument, ending: str, sha256: str, *, width: int, check: bool, again: str
) -> mmap.mmap:
    """A file of a view (image ids or row numbers), memory-mapped."""
    name = f"{document.stem}{ending}"
    try:
        with fetch_once(reader, name, sha256).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, MissingError):
        raise ManifestError(f"{reader.url(name)}: missing or empty; {again}") from None
    except DamageError as error:
        raise ManifestError(f"{reader.url(name)}: damaged ({error}); {again}") from None
    what = "row numbers" if width == 4 else "image ids"
    if len(data) != width * document.images or (check and hashlib.sha256(data).hexdigest() != sha256):
        raise ManifestError(f"{reader.url(name)}: not the {document.images:,} {what} of its view; {again}")
    return data


def _look_up(table: SampleTable, ids: npt.NDArray[np.uint64], path: str, root: str) -> npt.NDArray[np.uint32]:
    """The rows of a view's images in a table of another set of images."""
    known = table.image_id
    rows = np.empty(len(ids), np.uint32)
    for start in range(0, len(ids), _PIECE):  # ids are sorted: the table's part for a piece stays in cache
        piece = ids[start : start + _PIECE]
        first, last = np.searchsorted(known, piece[[0, -1]])
        rows[start : start + _PIECE] = first + np.searchsorted(known[first : last + 1], piece)
    present = known[np.minimum(rows, max(len(known) - 1, 0))] == ids
    if not present.all():
        missing = ids[~present]
        raise ManifestError(
            f"{path}: {len(missing):,} of its {len(ids):,} images are not in {root} "
            f"({first_names(missing)}); add their sources again with `{command('reshard')}`, or make "
            f"a view of the other images: `{command('view', root)} --ids {shlex.quote(path)} --missing skip`"
        )
    return rows


def images_of(
    root: str, which: str, layers: Sequence[str] = ()
) -> tuple[npt.NDArray[np.uint64], Predicate | None, tuple[str, ...]]:
    """The image ids of a view of a dataset directory, uint64 [n], ascending, its condition on masks, and the
    layers that it is read with: `layers`, or those that it was made with.
    """
    view, dataset = view_of(Dataset(root, layers=layers), which)
    names = tuple(name for name, _ in view.layers) or tuple(layers)
    return view.image_ids(dataset.table), view.masks_where, names


def copy_view(root: str, dest: str, which: str) -> str:
    """Write a view of `root` to `dest` and return its digest, which is the same there.

    The row numbers are those of the sample table of `dest`. Names of the view move to it. ManifestError:
    `dest` lacks an image of the view.
    """
    dataset = Dataset(root)
    located = find_view(dataset.reader, dataset.table, which)
    view = open_view(dataset.reader, dataset.table, which)
    if located is None:
        return view.digest  # all images, which need no document
    _, document = located
    table = Dataset(dest).table
    rows = np.flatnonzero(np.isin(table.image_id, view.image_ids(dataset.table), assume_unique=True))
    for name in document.names or (None,):
        written = write_view(
            open_store(dest),
            table,
            rows.astype(np.uint32),
            masks_where=view.masks_where,
            layers=view.layers,
            name=name,
            chosen_by=document.chosen_by,
            counts=document.counts,
            overwrite=True,
        )
    return written.digest
