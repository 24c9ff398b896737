"""Checks of views/: every document, its image ids and row numbers, and that the images are in the dataset.

The check of a document covers its fields and its digest. Its condition is not evaluated. The digest of a view
is computed from its image ids and its condition on masks (see sa1b.views.view). So a changed condition no
longer matches the digest in the file's name.
"""

import hashlib
import json
import re
import shlex
from typing import Any

import numpy as np

from sa1b.console import command
from sa1b.shards.documents import VIEW_FORMAT, FieldError, check_view
from sa1b.shards.image_ids import missing_ids
from sa1b.shards.manifest import VIEWS
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import json_bytes
from sa1b.storage.store import Store
from sa1b.verify.report import Findings, Problem, short

_NAME = re.compile(r"[0-9a-f]{64}\.json")
_GONE = "images_gone"
_Problem = tuple[str, str]  # kind and message of a finding


def check_views(store: Store, table: SampleTable | None) -> tuple[Findings, list[str]]:
    """Findings in views/, and notes. Without a readable sample table, images are not looked up."""
    findings = Findings()
    notes: list[str] = []
    present = store.names(VIEWS)
    names = [name for name in present if _NAME.fullmatch(name)]
    for name in names:
        path = store.url(f"{VIEWS}/{name}")
        try:
            raw = store.read(f"{VIEWS}/{name}")
            document = json.loads(raw)
            problem = _form(document, name.removesuffix(".json"))
            if problem is None and raw != json_bytes(document):
                problem = "not the bytes that are written for its content"
        except (OSError, ValueError, RecursionError) as error:
            document, problem = {}, short(error)
        if problem is not None:
            remedy = f"remove {shlex.quote(path)} and rebuild the view with `{command('view')}`"
            findings.add(Problem("view_unreadable", f"{VIEWS}/{name}", problem, remedy))
            continue
        for file, (kind, message) in _data(store, document, name, table).items():
            if kind == _GONE:  # the view is intact, and so is the dataset: sources were dropped
                notes.append(
                    f"{VIEWS}/{file}: {message}, as after --drop; remove the view, or rebuild it with "
                    f"{_again(store.root, document)}"
                )
                continue
            findings.add(Problem(kind, f"{VIEWS}/{file}", message, _again(store.root, document)))
    known = {
        f"{name.removesuffix('.json')}{ending}" for name in names for ending in (".json", ".ids", ".rows")
    }
    other = [name for name in present if name not in known]
    shown = ", ".join(other[:5]) + (" …" if len(other) > 5 else "")
    if other:
        notes.append(f"files in {VIEWS}/ that belong to no view: {shown}")
    return findings, notes


def _form(document: Any, digest: str) -> str | None:
    """Why the document of a view is invalid; None if it is valid."""
    if not isinstance(document, dict) or document.get("format") != VIEW_FORMAT:
        return "not the document of a view"
    try:
        check_view(document)
    except FieldError as error:
        return str(error)
    where, ids = document.get("masks_where"), document["ids_sha256"]
    made = ids if where is None else hashlib.sha256(f"{ids} {where}".encode()).hexdigest()
    if not document.get("digest") == digest == made:
        return f"its ids and condition have the digest {made}, the file is named {digest}"
    return None


def _data(
    store: Store, document: dict[str, Any], name: str, table: SampleTable | None
) -> dict[str, _Problem]:
    """File -> the problem with the image ids or the row numbers of a view."""
    found: dict[str, _Problem] = {}
    data = {}
    for ending, width in (("ids", 8), ("rows", 4)):
        one = f"{name.removesuffix('json')}{ending}"
        try:
            data[ending] = store.read(f"{VIEWS}/{one}")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            found[one] = ("view_data_missing", "not there" if missing else short(error))
            continue
        sha256 = hashlib.sha256(data[ending]).hexdigest()
        if len(data[ending]) != width * document["images"] or sha256 != document[f"{ending}_sha256"]:
            message = f"{len(data[ending]):,} bytes, sha256 {sha256}: not those of the view"
            found[one] = ("view_data_damaged", message)
    if found or table is None:
        return found
    same = document["dataset"]["ids_sha256"] == table.ids_digest
    if same and not _fit(np.frombuffer(data["rows"], "<u4"), table, document["ids_sha256"]):
        return {
            f"{name.removesuffix('json')}rows": (
                "view_data_damaged",
                "its row numbers are not those of its images",
            )
        }
    lost = len(missing_ids(np.frombuffer(data["ids"], "<u8"), table.image_id))
    return {name: (_GONE, f"{lost:,} of its images are not in the dataset")} if lost else {}


def _fit(rows: Any, table: SampleTable, ids_sha256: str) -> bool:
    """Whether row numbers are those of the images with this digest."""
    if len(rows) and int(rows.max()) >= len(table):
        return False
    return hashlib.sha256(table.image_id[rows].astype("<u8").tobytes()).hexdigest() == ids_sha256


def _again(root: str, document: dict[str, Any]) -> str:
    """The command that rebuilds a view."""
    chosen = document.get("chosen_by")
    flags = [f"--{flag} {shlex.quote(str(value))}" for flag, value in (chosen or {}).items()]
    flags += [f"--name {shlex.quote(str(name))}" for name in document["names"][:1]]
    return f"`{' '.join([command('view'), shlex.quote(root), *flags])}`"
