"""The record of an export: the file `.export.jsonl`, which lists the parts of the export and their state.

It is a `ResumeRecord` whose key is the digest of the content of a part, and whose value has the counts of a
complete part. A part is complete if the record has its digest and its size, and its files have that size
together. A part without counts was in progress when the export ended, and is written again.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.names import is_bare_name
from sa1b.storage.resume_record import ResumeRecord, header

RECORD = ".export.jsonl"


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
    file: ResumeRecord | None = None  # open between `begin` and `close`

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
        self.file = ResumeRecord(self.out / RECORD, {"export": kind})
        self.file.add_all({name: (content, None) for name, content in contents.items()})

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.__exit__()

    def remove(self, name: str, paths: Iterable[str]) -> None:
        """Remove the files of a part that is not in the export any more, then its name."""
        for path in paths:
            (self.out / path).unlink(missing_ok=True)
        del self.contents[name]
        self.written.pop(name, None)
        if self.file is not None:
            self.file.add(name, None, None)

    def finish(self, name: str, written: Written) -> None:
        """Record a part that is complete."""
        self.written[name] = written
        if self.file is not None:
            self.file.add(name, self.contents[name], asdict(written))


def read_record(out: Path) -> ExportRecord:
    """The record of a folder; an empty record if the folder has none.

    Raises:
        UsageError: the record is damaged or has another format.
    """
    path = out / RECORD
    record = ExportRecord(out)
    try:
        with path.open("rb") as file:
            of = header(file.readline()) or {}
        record.kind = str(of["export"])
        for name, (content, counts) in ResumeRecord(path, of).known.items():
            if not is_bare_name(name):
                raise ValueError(f"a part named {name!r}")
            if content is not None:
                record.contents[name] = str(content)
            if counts is not None:
                written = Written(**counts)
                record.written[name] = replace(written, without_masks=tuple(written.without_masks))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: damaged ({error!r}); remove it, and export again with --overwrite"
        ) from None
    return record
