"""The record of an export: the file `.export.json`, which lists the parts of the export and their state.

A part is complete if the record contains its digest and its size, and its files have that size together. A
part without a size in the record was in progress when the export ended, and is written again.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.names import is_bare_name
from sa1b.storage.atomic import json_bytes, write_whole

RECORD = ".export.json"
FORMAT = "sa1b-export-1"
_ALWAYS = ("images", "masks", "bytes")  # keys of every complete part


@dataclass(frozen=True, slots=True)
class Written:
    """A complete part: its counts, and the bytes of its files.

    Attributes:
        images: number of its images.
        masks: number of their masks.
        bytes: size of its files together.
        without_masks: ids of its images that have no mask.
        linked: number of its files that are hard links.
    """

    images: int
    masks: int
    bytes: int
    without_masks: tuple[int, ...] = ()
    linked: int = 0


@dataclass(slots=True)
class ExportRecord:
    """The parts of an export folder.

    Attributes:
        out: folder of the export.
        kind: its format, see Format.kind; empty if the folder has no record.
        contents: name of a part -> digest of its content, see sa1b.programs.export.export_part.
        written: name of a complete part -> its counts and size.
    """

    out: Path
    kind: str = ""
    contents: dict[str, str] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)

    def owns(self, name: str, content: str) -> bool:
        """Whether this export wrote the part of this name, so that it may be skipped or replaced."""
        return self.contents.get(name) == content

    def complete(self, name: str, content: str, paths: Iterable[str]) -> bool:
        """Whether the part has this content, and all its files exist with their size."""
        known = self.written.get(name)
        if known is None or not self.owns(name, content):
            return False
        try:
            return sum((self.out / path).stat().st_size for path in paths) == known.bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    def begin(self, kind: str, contents: dict[str, str]) -> None:
        """Record the format and the names of parts before the first one is written."""
        self.kind = kind
        self.contents.update(contents)
        for name in contents:
            self.written.pop(name, None)
        self._write()

    def remove(self, name: str, paths: Iterable[str]) -> None:
        """Remove the files of a part that is not in the export any more, then its name."""
        for path in paths:
            (self.out / path).unlink(missing_ok=True)
        del self.contents[name]
        self.written.pop(name, None)

    def finish(self, name: str, written: Written) -> None:
        """Record a part that is complete."""
        self.written[name] = written
        self._write()

    def _write(self) -> None:
        parts = {
            name: {"content": content, **_counts(self.written.get(name))}
            for name, content in sorted(self.contents.items())
        }
        write_whole(self.out / RECORD, json_bytes({"format": FORMAT, "kind": self.kind, "tars": parts}))


def _counts(written: Written | None) -> dict[str, int | Sequence[int]]:
    counts = {} if written is None else asdict(written)
    return {name: value for name, value in counts.items() if value or name in _ALWAYS}


def read_record(out: Path) -> ExportRecord:
    """The record of a folder; an empty record if the folder has none.

    Raises:
        UsageError: the record is damaged or has another format.
    """
    path = out / RECORD
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        record = ExportRecord(out, str(document.get("kind", "")))
        for name, part in document["tars"].items():
            if not is_bare_name(name):
                raise ValueError(f"a part named {name!r}")
            record.contents[name] = str(part["content"])
            if "bytes" in part:
                images, masks, size = (int(part[key]) for key in ("images", "masks", "bytes"))
                without_masks = tuple(map(int, part.get("without_masks", ())))
                record.written[name] = Written(images, masks, size, without_masks, int(part.get("linked", 0)))
        return record
    except FileNotFoundError:
        return ExportRecord(out)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: damaged ({error!r}); remove it, and export again with --overwrite"
        ) from None
