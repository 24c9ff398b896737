"""A view: a chosen subset of the images of a root, and which of their masks count.

    views/<key>.rows   row numbers of samples.bin, u32 little-endian, ascending: sorted by image id
    views/<key>.json   format, key, names, counts, digests, conditions and flags it was chosen with

Two digests. `View.digest` names the set of images: sha256 of their ids, sorted, u64 little-endian. It keys
the order of training, so another sharding or image size of the same images keeps the order. `View.key` names
the files: the digest, or with a condition on masks the sha256 of digest, space and condition, so that views
of the same images with different masks stand side by side and are trained in the same order.
"""

import hashlib
import json
import mmap
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import ManifestError, UsageError
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.cache import fetch_once
from sa1b.storage.errors import DamageError, MissingError
from sa1b.storage.publish import json_bytes, write_whole
from sa1b.storage.reader import Reader
from sa1b.views.predicate import Predicate, PredicateError, mask_predicate

FORMAT = "sa1b-view-1"
VIEWS = "views"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CAP = 4 << 20  # bytes of a view's document
_PREFIX = 6  # shortest part of a key or digest that may stand for it


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The images of a view and its condition on masks.

    Attributes:
        rows: rows of the sample table, uint32 [n]; None: all rows in the table's order, without an array.
        count: images, n.
        digest: of the set of images; for `by_place`, of the ids in that order.
        bytes_digest: of the sample table: other bytes, or another sharding, have another one. Guards
            integrity only.
        key: names the view's files.
        masks_where: the condition that a mask must pass, None: all masks. `masks_where.masks(annotations)`
            says which of an image's masks do.
    """

    rows: npt.NDArray[np.uint32] | None
    count: int
    digest: str
    bytes_digest: str
    key: str
    masks_where: Predicate | None = None

    def __len__(self) -> int:
        return self.count

    def table_rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the sample table, int64 [n], for the view's rows 0 to count - 1 that an Order gives."""
        return indices if self.rows is None else self.rows[indices].astype(np.int64)

    def by_place(self, table: SampleTable) -> "View":
        """The same images sorted by shard and offset, for an `Order` with run > 1.

        The digest is that of the ids in this order. Shards of the same sources with more or fewer images
        have the same; where images lie in another order, training has another order, and a resume is
        refused. Takes 4 bytes an image in this process, and 1.2 s for 11.2 million.
        """
        rows = np.arange(self.count, dtype=np.uint32) if self.rows is None else self.rows
        placed = rows[np.lexsort((table.offset[rows], table.shard[rows]))]
        digest = ids_digest(table.image_id[placed])
        return View(placed, self.count, digest, self.bytes_digest, self.key, self.masks_where)


def ids_digest(ids: npt.NDArray[np.uint64]) -> str:
    """sha256 of image ids as u64 little-endian; for all ids, sorted, that of samples.bin."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<u8").data).hexdigest()


def view_key(digest: str, masks_where: Predicate | None) -> str:
    """What names a view's files, see the module."""
    return (
        digest if masks_where is None else hashlib.sha256(f"{digest} {masks_where.text}".encode()).hexdigest()
    )


def whole(table: SampleTable, masks_where: Predicate | None = None) -> View:
    """The view of all images of a root; opening it costs nothing."""
    key = view_key(table.ids_digest, masks_where)
    return View(None, len(table), table.ids_digest, table.digest, key, masks_where)


def open_view(
    root: Path | str | Reader, table: SampleTable, which: str | None = None, *, check: bool = True
) -> View:
    """Open a view of a root by its name, or by its key or digest or the first characters of one.

    Args:
        root: folder or URL, or what reads there. Row numbers of a URL are copied to this machine once.
        table: the root's sample table.
        which: None or the digest of all images: the whole root.
        check: hold the row numbers against their digest: 0.05 s for 11 million.

    Raises:
        ManifestError: no such view, more than one, damaged, or made for another set of images.
        sa1b.storage.errors.StorageError: the URL cannot be read.
    """
    if which is None or which == table.ids_digest:
        return whole(table)
    reader = root if isinstance(root, Reader) else Reader(root)
    document = _resolve(reader, which)
    key, digest, masks_where = str(document["key"]), str(document["ids_sha256"]), document["masks_where"]
    name = f"{VIEWS}/{key}"
    again = f"make it again: python tools/view.py {reader.root} {_flags(document)}".rstrip()
    try:
        condition = None if masks_where is None else mask_predicate(masks_where)
        made_for = document["dataset"]["ids_sha256"]
        if view_key(digest, condition) != key:
            raise ValueError("its digest and condition are not those of its name")
    except (PredicateError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{reader.url(name)}.json: damaged ({error!r}); {again}") from None
    if made_for != table.ids_digest:
        raise ManifestError(
            f"{reader.url(name)}.json: chosen from other images than {reader.root} holds now; {again}"
        )
    rows_path = reader.url(f"{name}.rows")
    try:
        with fetch_once(reader, f"{name}.rows", str(document["rows_sha256"])).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, MissingError):
        raise ManifestError(f"{rows_path}: missing or empty; {again}") from None
    except DamageError as error:
        raise ManifestError(f"{error}; {again}") from None
    count = int(document["images"])
    if len(data) != 4 * count or (check and hashlib.sha256(data).hexdigest() != document["rows_sha256"]):
        raise ManifestError(f"{rows_path}: not the {count:,} row numbers of its view; {again}")
    return View(
        rows=np.frombuffer(data, "<u4"),
        count=count,
        digest=digest,
        bytes_digest=table.digest,
        key=key,
        masks_where=condition,
    )


def write_view(
    root: Path,
    table: SampleTable,
    rows: npt.NDArray[np.uint32],
    *,
    masks_where: Predicate | None = None,
    name: str | None = None,
    chosen_by: dict[str, str] | None = None,
    counts: dict[str, int] | None = None,
) -> View:
    """Write views/<key>.rows, then views/<key>.json; the same choice gives the same bytes.

    A view that is there already keeps its names.

    Args:
        rows: of the sample table, ascending, uint32 [n], at least one.
        name: readable alias.
        chosen_by: flag -> value, to make it again.
        counts: further counts for the record.

    Raises:
        UsageError: no rows, or the name cannot be used or belongs to another view.
        ManifestError: another view of the root is damaged.
    """
    if len(rows) == 0:
        raise UsageError("no image is left: the view would be empty; relax the conditions")
    if name is not None:
        check_name(name)
    digest = ids_digest(table.image_id[rows])
    key = view_key(digest, masks_where)
    documents = {document["key"]: document for document in read_views(Reader(root))}
    for other, document in documents.items():
        if name not in document["names"] or other == key:
            continue
        path = root / VIEWS / f"{other}.json"
        if document["dataset"]["ids_sha256"] == table.ids_digest:
            raise UsageError(
                f"the name {name!r} belongs to view {other}; choose another --name, or remove {path}"
            )
        # Of the images that the root held before: nobody can open it by that name any more.
        document["names"].remove(name)
        write_whole(path, json_bytes(document))
    names = set(documents[key]["names"]) if key in documents else set()
    if name is not None:
        names.add(name)
    data = np.ascontiguousarray(rows, "<u4").tobytes()
    document = {
        "format": FORMAT,
        "key": key,
        "names": sorted(names),
        "images": len(rows),
        **(counts or {}),
        "ids_sha256": digest,
        "rows_sha256": hashlib.sha256(data).hexdigest(),
        "masks_where": None if masks_where is None else masks_where.text,
        "chosen_by": chosen_by or {},
        "dataset": {
            "images": len(table),
            "ids_sha256": table.ids_digest,
            "columns_sha256": table.digest,
        },
    }
    write_whole(root / VIEWS / f"{key}.rows", data)
    write_whole(root / VIEWS / f"{key}.json", json_bytes(document))
    return open_view(root, table, key, check=False)


def check_name(name: str) -> None:
    """Whether a view can be called so.

    Raises:
        UsageError: not a plain word, or it could be taken for a digest.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name {name!r}: letters, digits, dots, dashes and underscores, at most 64")
    if re.fullmatch(f"[0-9a-f]{{{_PREFIX},}}", name):
        raise UsageError(f"--name {name!r} could be taken for the beginning of a digest")


def read_views(reader: Reader) -> list[dict[str, Any]]:
    """The documents of all views of a root, sorted by key.

    Raises:
        ManifestError: one is damaged or of another format.
    """
    documents = []
    for name in reader.names(VIEWS):
        if not name.endswith(".json"):
            continue
        path = reader.url(f"{VIEWS}/{name}")
        try:
            document = json.loads(reader.read_whole(f"{VIEWS}/{name}", _CAP))
            if document["format"] != FORMAT:
                raise ManifestError(f"{path}: format {document['format']!r}; this package reads {FORMAT!r}")
            if f"{document['key']}.json" != name or not isinstance(document["names"], list):
                raise ValueError(f"key {document['key']!r}")
            needed = "images", "ids_sha256", "rows_sha256", "masks_where", "chosen_by", "dataset"
            documents.append({**document, **{name: document[name] for name in needed}})
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(
                f"{path}: damaged ({error!r}); remove it and run tools/view.py again"
            ) from None
    return documents


def _resolve(reader: Reader, which: str) -> dict[str, Any]:
    documents = read_views(reader)
    found = [document for document in documents if which in document["names"]]
    if not found and len(which) >= _PREFIX:
        found = [
            document
            for document in documents
            if document["key"].startswith(which) or document["ids_sha256"].startswith(which)
        ]
        exact = [document for document in found if document["key"] == which]
        found = exact or found
    if len(found) == 1:
        return found[0]
    if not documents:
        raise ManifestError(f"no view {which!r} in {reader.root}: it has none; tools/view.py makes them")
    problem = "stands for more than one view" if found else "is no view"
    known = "; ".join(map(_describe, found or documents))
    raise ManifestError(f"{which!r} {problem} of {reader.root}. Known: {known}")


def _describe(document: dict[str, Any]) -> str:
    names = ", ".join(document["names"])
    return f"{names} ({document['key'][:12]})" if names else str(document["key"][:12])


def _flags(document: dict[str, Any]) -> str:
    """The command line's flags that made a view."""
    flags = [f"--{flag} {shlex.quote(value)}" for flag, value in document["chosen_by"].items()]
    return " ".join([*flags, *(f"--name {name}" for name in document["names"][:1])])
