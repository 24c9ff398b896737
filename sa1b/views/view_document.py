"""The document of a view, `<digest>.json`: its contents, its selection and its names.

Two other files have the same stem:

    .ids    image ids, u64 little-endian, ascending: the view, independent of the dataset directory
    .rows   row numbers of the sample table that the view was made for, u32 little-endian: saves the look-up
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from sa1b.console import command
from sa1b.errors import ManifestError, UsageError
from sa1b.names import is_short_name
from sa1b.shards.documents import SEAL, VIEW_FORMAT, check_view, seal_of, view_arguments
from sa1b.shards.manifest import VIEWS
from sa1b.storage.atomic import json_bytes
from sa1b.storage.open import open_store
from sa1b.storage.reader import Reader
from sa1b.storage.store import Root, Store
from sa1b.views.predicate import Predicate, mask_predicate

PREFIX = 6  # smallest number of characters of an abbreviated digest
_CAP = 4 << 20  # largest document in bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")
Layers = tuple[tuple[str, str], ...]  # names and digests of layers, in the order in which they are applied
_FIELDS = ("names", "images", "ids_sha256", "rows_sha256", "masks_where", "chosen_by", "dataset")


@dataclass(frozen=True, slots=True)
class ViewDocument:
    """The contents of a view's document."""

    digest: str
    names: tuple[str, ...]
    images: int
    ids_sha256: str  # of the file beside it
    rows_sha256: str  # of the file beside it
    masks_where: str | None
    chosen_by: dict[str, str]  # flags of the selection -> values; `sql`: the statement of `sa1b query`
    dataset: dict[str, Any]  # images and ids_sha256 of the directory that it was selected from
    counts: dict[str, int] = field(default_factory=dict)  # further ones to print
    layers: Layers = ()
    stem: str = ""  # path of the three files without their endings, relative to their reader

    def encode(self) -> bytes:
        """The bytes of the file; equal views give equal bytes."""
        document: dict[str, Any] = {
            "format": VIEW_FORMAT,
            "digest": self.digest,
            "names": list(self.names),
            "images": self.images,
            **self.counts,
            "ids_sha256": self.ids_sha256,
            "rows_sha256": self.rows_sha256,
            "masks_where": self.masks_where,
            "chosen_by": self.chosen_by,
            "dataset": self.dataset,
        }
        if self.layers:
            document["layers"] = [{"name": name, "digest": digest} for name, digest in self.layers]
        return json_bytes({**document, SEAL: seal_of(document)})

    def condition(self) -> Predicate | None:
        """The parsed condition on masks, or PredicateError."""
        return None if self.masks_where is None else mask_predicate(self.masks_where)

    def flags(self) -> str:
        """The arguments of `sa1b view`, or of `sa1b query`, that selected the view."""
        return shlex.join(self._arguments()[1])

    def again(self, root: object) -> str:
        """The command that selects the view again from a dataset directory."""
        verb, words = self._arguments()
        return f"`{command(verb, root, *words)}`"

    def _arguments(self) -> tuple[str, list[str]]:
        return view_arguments(self.chosen_by, [name for name, _ in self.layers], self.names)

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"{names} ({self.digest[:12]})" if names else self.digest[:12]


def check_name(name: str, flag: str = "--name") -> None:
    """Refuse a name that is no plain word, or resembles a digest or a path: UsageError with `flag`."""
    if not is_short_name(name):
        raise UsageError(
            f"{flag} {name!r}: must be at most 64 letters (a to z), digits, dots, dashes and underscores, "
            "and begin with a letter or digit"
        )
    if name.endswith(".json"):
        raise UsageError(f"{flag} {name!r}: looks like a path; choose a name that does not end with .json")
    if re.fullmatch(f"[0-9a-f]{{{PREFIX},}}", name):
        raise UsageError(f"{flag} {name!r}: looks like the start of a digest; choose another name")


def read_document(reader: Reader, name: str) -> ViewDocument:
    """Read one document, by its path relative to the reader; ManifestError: damaged, or of another format."""
    path = reader.url(name)
    try:
        document = json.loads(reader.read_whole(name, _CAP))
        if document["format"] != VIEW_FORMAT:
            raise ManifestError(f"{path}: format {document['format']!r}; this package reads {VIEW_FORMAT!r}")
        check_view(document)
        fields = {what: document[what] for what in _FIELDS}
        digest = str(document["digest"])
        stem = PurePath(name).stem
        if _SHA256.fullmatch(stem) and stem != digest:
            raise ValueError(f"digest {digest!r}")
        fields |= {"names": tuple(fields["names"])}
        counts = {what: n for what, n in document.items() if what not in fields and type(n) is int}
        layers = tuple((layer["name"], layer["digest"]) for layer in document.get("layers", []))
        stem = name.removesuffix(".json")
        return ViewDocument(**fields, digest=digest, counts=counts, layers=layers, stem=stem)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(
            f"{path}: damaged ({str(error)[:200]}); remove it and run `{command('view')}` again"
        ) from None


def read_documents(reader: Reader, folder: str = VIEWS) -> list[ViewDocument]:
    """The documents of all views of a folder, sorted by digest; other files are ignored."""
    names = [name for name in reader.names(folder) if _SHA256.fullmatch(name.removesuffix(".json"))]
    return [read_document(reader, f"{folder}/{name}") for name in names if name.endswith(".json")]


def find(documents: list[ViewDocument], which: str, where: str) -> ViewDocument:
    """The view of this name, or whose digest begins with `which`; none or several: ManifestError."""
    matches = [document for document in documents if which in document.names]
    if not matches and len(which) >= PREFIX:
        matches = [document for document in documents if document.digest.startswith(which)]
    if len(matches) == 1:
        return matches[0]
    if not documents:
        raise ManifestError(f"no view {which!r} in {where}: it has none; `{command('view')}` makes them")
    problem = "stands for more than one view" if matches else "is no view"
    if not matches and len(which) < PREFIX and re.fullmatch("[0-9a-f]+", which):
        problem += f" (a digest may be shortened to {PREFIX} characters, not fewer)"
    known = "; ".join(map(str, matches or documents))
    raise ManifestError(f"{which!r} {problem} of {where}. Known: {known}")


def is_path(which: str) -> bool:
    """Whether `which` is the path of a view, not a name or a digest: it has a "/" or ends with .json."""
    return "/" in which or which.endswith(".json")


@dataclass(frozen=True, slots=True)
class ViewTarget:
    """Where `write_view` writes: a folder of a store, or a `file` of it."""

    store: Store
    folder: str
    file: str | None = None

    @property
    def claim(self) -> str:
        """Name of the claim of a process that writes here."""
        return f"{self.folder}/.views.claim" if self.folder else ".views.claim"

    def document(self, digest: str) -> str:
        """Name of the document of a view in the store."""
        return self.file or f"{self.folder}/{digest}.json"

    def views(self) -> list[ViewDocument]:
        """The existing views: those of the folder, or the one in the file."""
        if self.file is None:
            return read_documents(self.store.reader, self.folder)
        if not self.store.exists(self.file):
            return []
        try:
            return [read_document(self.store.reader, self.file)]
        except ManifestError:
            path = self.store.url(self.file)
            raise UsageError(
                f"--out {path}: exists and contains no intact view; choose another --out"
            ) from None


def view_target(root: Root, out: Path | None) -> ViewTarget:
    """Where a view is written; `out` is as for `write_view`."""
    if out is None:
        return ViewTarget(open_store(root), VIEWS)
    path = _absolute(out)
    return ViewTarget(open_store(path.parent), *(("", path.name) if path.suffix == ".json" else (path.name,)))


def _absolute(path: Path) -> Path:
    """An absolute path without `..`, whose last part is a name."""
    path = path.absolute()
    return path.resolve() if ".." in path.parts else path


def document_path(root: Root, out: Path | None, digest: str) -> str:
    """The path or URL of the document of a view, as it is printed."""
    if out is not None and out.suffix == ".json":
        return str(out)
    return f"{open_store(root).url(VIEWS) if out is None else out}/{digest}.json"


def check_free(
    views: list[ViewDocument],
    out: Path | None,
    name: str | None,
    digest: str | None,
    *,
    overwrite: bool,
    flag: str = "--name",
) -> None:
    """Raise UsageError if the name or the file `out` of a new view belongs to another view.

    `views` are those of the target. `digest` is that of the new view, None if it is not known yet.
    """
    is_file = out is not None and out.suffix == ".json"
    for view in views:
        if view.digest == digest or overwrite or not (is_file or name in view.names):
            continue
        made = f", selected with {flags}" if (flags := view.flags()) else ""
        of = f"view {view.digest[:12]}{made} from {view.dataset.get('images')} images"
        if is_file:
            raise UsageError(
                f"--out {out}: contains {of}; choose another --out, or replace it with --overwrite"
            )
        raise UsageError(
            f"{flag} {name!r}: belongs to {of}; choose another {flag}, or reassign it with --overwrite"
        )


def document_at(which: str) -> tuple[Reader, ViewDocument]:
    """The view at a path (.json, folder or FOLDER/NAME) and its reader; ManifestError: none, or several."""
    if "://" in which:
        raise ManifestError(
            f"{which}: a view's path must be on this machine; open a view at a URL by its name in the views/ "
            f"folder of its dataset directory"
        )
    path = _absolute(Path(which))
    if path.suffix == ".json":
        if not path.is_file():
            raise ManifestError(f"{which}: no such file; `{command('view')} --out` makes it")
        return Reader(path.parent), read_document(Reader(path.parent), path.name)
    folder = path if path.is_dir() else path.parent
    reader = Reader(folder.parent)
    documents = read_documents(reader, folder.name) if folder.is_dir() else []
    if folder != path:
        return reader, find(documents, path.name, str(PurePath(which).parent))
    if len(documents) != 1:
        known = "; ".join(map(str, documents)) or "none"
        raise ManifestError(
            f"{which}: a folder of {len(documents)} views ({known}); name one: {which.rstrip('/')}/NAME"
        )
    return reader, documents[0]
