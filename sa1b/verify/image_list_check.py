"""Checks of views/ and quarantine/, the lists of images beside the dataset; images kept with a warning.

Of a view the fields and the digest are checked, its image ids and row numbers, and that the images are in the
dataset. Its condition is not evaluated. The digest of a view is computed from its image ids and its condition
on masks (see sa1b.views.view). So a changed condition no longer matches the digest in the file's name.
"""

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sa1b.console import command, counted
from sa1b.names import ID_END
from sa1b.report import first_names
from sa1b.shards.documents import VIEW_FORMAT, FieldError, Task, check_view, view_arguments, view_digest
from sa1b.shards.image_ids import missing_ids
from sa1b.shards.manifest import QUARANTINE, VIEWS
from sa1b.shards.quarantine import REFUSED, WARNINGS, read_lines, read_warnings
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import json_bytes, sha256_of
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.verify.report import Findings, Problem, VerifyRemedy, short

SHOWN = 20  # images of one reason on the screen
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
    if other:
        notes.append(f"files in {VIEWS}/ that belong to no view: {first_names(other)}")
    return findings, notes


def _form(document: Any, digest: str) -> str | None:
    """Why the document of a view is invalid; None if it is valid."""
    if not isinstance(document, dict) or document.get("format") != VIEW_FORMAT:
        return "not the document of a view"
    try:
        check_view(document)
    except FieldError as error:
        return str(error)
    layers = [layer["digest"] for layer in document.get("layers", [])]
    made = view_digest(document["ids_sha256"], document["masks_where"], layers)
    if not document.get("digest") == digest == made:
        return f"its ids and condition have the digest {made}, the file is named {digest}"
    return None


def _data(
    store: Store, document: dict[str, Any], name: str, table: SampleTable | None
) -> dict[str, _Problem]:
    """File -> the problem with the image ids or the row numbers of a view."""
    problems: dict[str, _Problem] = {}
    data = {}
    for ending, width in (("ids", 8), ("rows", 4)):
        file = f"{name.removesuffix('json')}{ending}"
        try:
            data[ending] = store.read(f"{VIEWS}/{file}")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            problems[file] = ("view_data_missing", "not there" if missing else short(error))
            continue
        sha256 = hashlib.sha256(data[ending]).hexdigest()
        if len(data[ending]) != width * document["images"] or sha256 != document[f"{ending}_sha256"]:
            message = f"{len(data[ending]):,} bytes, sha256 {sha256}: not those of the view"
            problems[file] = ("view_data_damaged", message)
    if problems or table is None:
        return problems
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
    layers = [layer["name"] for layer in document.get("layers", [])]
    verb, words = view_arguments(document["chosen_by"], layers, document["names"])
    return f"`{command(verb, root, *words)}`"


class QuarantineCheck:
    """Checks the quarantine of all sources. Memory does not grow with the refused members."""

    def __init__(
        self,
        store: Store,
        remedy: VerifyRemedy,
        tasks: Mapping[str, Task],
        active: set[str],
        table: SampleTable | None,
    ) -> None:
        self.store, self.remedy, self.tasks, self.table = store, remedy, tasks, table
        self.findings = Findings()
        self.notes: list[str] = []
        present = {*store.folders(QUARANTINE), *store.names(QUARANTINE)}
        for name, task in tasks.items():
            has_quarantine = task.counts["refused_members"] or task.damage or task.warnings
            if name not in active and (name in present or has_quarantine):
                self._source(name, task)
        strangers = sorted(present - tasks.keys() - active)
        if strangers:
            self.notes.append(
                f"{QUARANTINE}/ contains refused members of sources that are not in the dataset: "
                f"{first_names(strangers)}"
            )

    def _source(self, name: str, task: Task) -> None:
        # A task file that was rebuilt from shards has neither a sha256 nor counts of the source.
        known = task.source.get("sha256") is not None
        listed = {REFUSED, WARNINGS}
        lines: Counter[str] = Counter()
        members = stretches = 0
        for entry in self._lines(name, REFUSED):
            lines[entry["reason"]] += 1
            members += entry.get("name") is not None
            stretches += entry.get("name") is None
            if entry.get("file") is not None:
                listed.add(str(entry["file"]))
                self._kept_file(name, entry)
        if known:
            self._compare(name, REFUSED, "refused members", members, task.counts["refused_members"])
            self._compare(name, REFUSED, "damaged stretches", stretches, len(task.damage))
            for reason, count in task.counts["refused"].items():
                # One line for each member of a pair.
                if not count <= lines[reason] <= 2 * count:
                    self._compare(name, REFUSED, f"pairs with {reason!r}", lines[reason], count)
            odd: Counter[str] = Counter()
            for entry in self._lines(name, WARNINGS):
                odd[entry["reason"]] += 1
                if not self._holds(entry.get("image_id")):
                    message = f"image {entry.get('image_id')} is not in the dataset"
                    self._find("warning_image", name, WARNINGS, message)
            for reason in sorted({*odd, *task.warnings}):
                recorded = task.warnings.get(reason, 0)
                self._compare(name, WARNINGS, f"images with {reason!r}", odd[reason], recorded)
        for list_name, digest in (task.quarantine or {}).items():
            self._list_digest(name, list_name, digest)
        other = [file for file in self.store.names(f"{QUARANTINE}/{name}") if file not in listed]
        if other:
            self.notes.append(
                f"{QUARANTINE}/{name}: {len(other):,} files that {REFUSED} does not list: "
                f"{first_names(other)}"
            )

    def _compare(self, source: str, file: str, what: str, actual: int, recorded: int | None) -> None:
        if recorded is not None and actual != recorded:
            message = f"{actual:,} {what}, {recorded:,} in the task file"
            self._find("quarantine_counts", source, file, message)

    def _list_digest(self, source: str, file: str, recorded: str) -> None:
        name = f"{QUARANTINE}/{source}/{file}"
        if name in self.findings.counts or file not in {REFUSED, WARNINGS} or not self.store.exists(name):
            return  # there is another finding
        with self.store.files(name) as (path,):
            sha256 = sha256_of(path)
        if sha256 != recorded:
            self._find("quarantine_digest", source, file, f"sha256 {sha256}, {recorded} in the task file")

    def _kept_file(self, source: str, entry: Mapping[str, Any]) -> None:
        """The bytes that a line of refused.jsonl points to."""
        file = str(entry["file"])
        stated = entry.get("kept_bytes", entry.get("bytes"))
        name = f"{QUARANTINE}/{source}/{file}"
        size = None if "/" in file or self.store.is_folder(name) else self.store.size(name)
        if size is None:
            self._find("quarantine_file_missing", source, file, "not there")
        elif size != stated:
            self._find("quarantine_file_bytes", source, file, f"{size:,} bytes, {stated} stated in {REFUSED}")
        else:
            with self.store.files(name) as (path,):
                sha256 = sha256_of(path)
            if sha256 != (stated := entry.get("sha256")):
                message = f"sha256 {sha256}, {stated} stated in {REFUSED}"
                self._find("quarantine_file_digest", source, file, message)

    def _lines(self, source: str, file: str) -> Iterator[dict[str, Any]]:
        """The readable lines of a report; every other line is a finding."""
        with self.store.files(f"{QUARANTINE}/{source}/{file}") as (path,):
            for number, entry in read_lines(path):
                if entry is None:
                    self._find("quarantine_line", source, file, f"line {number:,} is not an entry")
                else:
                    yield entry

    def _holds(self, image_id: Any) -> bool:
        """Whether the dataset has an image, as far as is known."""
        if type(image_id) is not int or not 0 <= image_id < ID_END:
            return False
        if self.table is None or not len(self.table):
            return True
        return not len(missing_ids(np.array([image_id], np.uint64), self.table.image_id))

    def _find(self, kind: str, source: str, file: str, message: str) -> None:
        name = f"{QUARANTINE}/{source}/{file}"
        remedy = f"{self.store.url(name)}: {self.remedy.source(source)}"
        self.findings.add(Problem(kind, name, message, remedy))


@dataclass(slots=True)
class WarningList:
    """Images that ingest kept with a warning."""

    root: str
    counts: dict[str, int] = field(default_factory=dict)  # reason -> images
    # reason -> source, image_id, message and the other stored fields of each image
    images: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Root, *, limit: int | None = None) -> "WarningList":
        """All warnings of a dataset directory; `limit`: images to keep per reason."""
        store = open_store(root)
        warning_list = cls(store.root)
        for source, entry in read_warnings(store):
            reason = str(entry.pop("reason"))
            warning_list.counts[reason] = warning_list.counts.get(reason, 0) + 1
            if limit is None or warning_list.counts[reason] <= limit:
                warning_list.images.setdefault(reason, []).append({"source": source, **entry})
        return warning_list

    def document(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "counts": dict(sorted(self.counts.items())),
            "warnings": dict(sorted(self.images.items())),
        }

    def table(self) -> str:
        """Text for the terminal: the first SHOWN images of each reason."""
        lines = []
        for reason, count in sorted(self.counts.items()):
            lines.append(f"{reason}: {counted(count, 'image')}")
            for entry in self.images[reason][:SHOWN]:
                masks = entry.get("mask_count") or 0
                more = f" (and {masks - 1:,} more masks)" if masks > 1 else ""
                lines.append(f"  {entry['source']}  image {entry['image_id']}: {entry.get('message')}{more}")
            if count > SHOWN:
                lines.append(f"  and {count - SHOWN:,} more; --json lists all")
        lines.append(f"{counted(sum(self.counts.values()), 'warning')} in {self.root}")
        return "\n".join(lines)
