"""Quarantine of a source: refused members with their bytes and the reason, and warnings about stored images.

quarantine/<source>/refused.jsonl    a line per refused member or damaged range: reason, message, name,
                                     offset in the tar, bytes, the file that contains the bytes, its sha256
quarantine/<source>/warnings.jsonl   a line per stored image and warning: reason, message, image id, indices
                                     and number of the affected masks
quarantine/<source>/000001-sa_5.jpg  the bytes of a refused member
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sa1b.console import command
from sa1b.errors import ManifestError, printable
from sa1b.names import image_name
from sa1b.shards.annotation_columns import ImageWarning
from sa1b.shards.manifest import QUARANTINE
from sa1b.sources.tar_stream import Damage, Member
from sa1b.storage.atomic import flush, sha256_of
from sa1b.storage.open import open_store
from sa1b.storage.store import Root

REFUSED, WARNINGS = "refused.jsonl", "warnings.jsonl"
EXAMPLES = 3
_MESSAGE = 500  # characters; names and values in a message come from the source


class Quarantine:
    """Collects the refusals and warnings of one source in a folder, which is created with the first one.

    Attributes:
        refused, warnings: reason -> number of pairs.
        damages: damaged ranges of the archive.
        examples: reason -> the first messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0
        self._kept: dict[str, str] = {}  # digest -> file
        self.refused: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.members = 0
        self.damages: list[dict[str, Any]] = []
        self.examples: dict[str, list[str]] = {}

    def refuse(self, reason: str, message: str, members: list[Member]) -> None:
        """Store the members of a pair, or a single member, that cannot be used."""
        self.refused[reason] += 1
        where = " + ".join(f"{member.name[-200:]} at offset {member.offset:,}" for member in members)
        self._example(reason, f"{where}: {message}")
        for member in members:
            self.members += 1
            fields = {"name": member.name, "offset": member.offset, "bytes": len(member.data)}
            self._line(REFUSED, reason, message, fields | self._keep(member.name, member.data))

    def damage(self, damage: Damage) -> None:
        """Store a damaged range of the archive."""
        kept = self._keep(f"{damage.reason}.bin", damage.data) if damage.data else {"file": None}
        reason, message, length = damage.reason, damage.message, damage.length
        found = {"reason": reason, "message": message, "offset": damage.offset, "length": length}
        self.damages.append(found)
        fields = {"name": None, "offset": damage.offset, "bytes": length, "kept_bytes": len(damage.data)}
        self._line(REFUSED, reason, message, fields | kept)

    def warn(self, image_id: int, reason: str, warning: ImageWarning) -> None:
        """Record a warning about a stored image."""
        self.warnings[reason] += 1
        self._example(reason, f"{image_name(image_id)}: {warning.message}")
        fields = {"image_id": image_id, "masks": warning.masks, "mask_count": warning.mask_count}
        self._line(WARNINGS, reason, warning.message, fields)

    def flush(self) -> None:
        """Flush every file and the folder to the disk; called before the task file is written."""
        if self.exists():
            for path in sorted(self._folder.iterdir()):
                flush(path)
            flush(self._folder)

    def digests(self) -> dict[str, str] | None:
        """sha256 of the two lists by name; None: there are none."""
        digests = {path.name: sha256_of(path) for path in sorted(self._folder.glob("*.jsonl"))}
        return digests or None

    def exists(self) -> bool:
        """Whether there is a folder to commit."""
        return self._folder.exists()

    def _example(self, reason: str, message: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(_printable(message))

    def _keep(self, name: str, data: bytes) -> dict[str, str]:
        """Write the bytes to a file, once, and return its name and digest as fields of a line."""
        digest = hashlib.sha256(data).hexdigest()
        if digest in self._kept:  # such as hard links to one member
            return {"file": self._kept[digest], "sha256": digest}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        # The name comes from the source and is not trusted: keep its last part and safe characters only.
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name.rsplit("/", 1)[-1])[-80:]
        file = f"{self._files:06d}-{plain}"
        (self._folder / file).write_bytes(data)
        self._kept[digest] = file
        return {"file": file, "sha256": digest}

    def _line(self, report: str, reason: str, message: str, fields: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / report).open("a", encoding="utf-8") as out:
            out.write(json.dumps({"reason": reason, "message": _printable(message), **fields}) + "\n")


def _printable(message: str) -> str:
    shown = printable(message[:_MESSAGE].replace("\n", "\\n").replace("\t", "\\t"))
    return shown if len(message) <= _MESSAGE else f"{shown} …"


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number (from 1) and content of each line; None: a line of another form. A missing file has no lines."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            whole = isinstance(entry, dict) and isinstance(entry.get("reason"), str) and line.endswith(b"\n")
            yield number, entry if whole else None


def read_warnings(root: Root) -> Iterator[tuple[str, dict[str, Any]]]:
    """Source and line of each image that was kept with a warning; ManifestError names a damaged line."""
    store = open_store(root)
    for source in store.folders(QUARANTINE):
        name = f"{QUARANTINE}/{source}/{WARNINGS}"
        with store.files(name) as (path,):
            for number, entry in read_lines(path):
                if entry is None or type(entry.get("image_id")) is not int:
                    raise ManifestError(
                        f"{store.url(name)}, line {number}: damaged; restore it from a copy, "
                        f"or run `{command('reshard')}` again with that source"
                    )
                yield source, entry
