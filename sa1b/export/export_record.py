"""The record of an export, `.export.json` in its folder: which tars it owns, and which of them are complete.

A tar counts as complete if the record has its content and size and the file has that size. A tar that the
record names without a size was being written when the export ended: it is written again.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.export.source_tar import Written
from sa1b.storage.atomic import json_bytes, write_whole

RECORD = ".export.json"
FORMAT = "sa1b-export-1"


@dataclass(slots=True)
class ExportRecord:
    """The tars of an export folder.

    Attributes:
        contents: name -> digest of the content, see content_digest.
        written: name -> what is complete.
    """

    out: Path
    contents: dict[str, str] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)

    def owns(self, name: str, content: str) -> bool:
        """Whether the tar of this name is this export's: it may be skipped or written again."""
        return self.contents.get(name) == content

    def complete(self, name: str, content: str) -> bool:
        """Whether the tar with this content is there."""
        known = self.written.get(name)
        path = self.out / name
        return (
            known is not None
            and self.owns(name, content)
            and path.exists()
            and path.stat().st_size == known.bytes
        )

    def begin(self, contents: dict[str, str]) -> None:
        """Record tars that are going to be written, before the first one is."""
        self.contents.update(contents)
        for name in contents:
            self.written.pop(name, None)
        self._write()

    def finish(self, name: str, written: Written) -> None:
        """Record a tar that is complete."""
        self.written[name] = written
        self._write()

    def _write(self) -> None:
        tars = {
            name: {"content": content, **(asdict(self.written[name]) if name in self.written else {})}
            for name, content in sorted(self.contents.items())
        }
        write_whole(self.out / RECORD, json_bytes({"format": FORMAT, "tars": tars}))


def read_record(out: Path) -> ExportRecord:
    """The record of a folder; an empty one where there is none.

    Raises:
        UsageError: it is damaged or of another format.
    """
    path = out / RECORD
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        record = ExportRecord(out)
        for name, tar in document["tars"].items():
            record.contents[name] = str(tar["content"])
            if "bytes" in tar:
                record.written[name] = Written(int(tar["images"]), int(tar["masks"]), int(tar["bytes"]))
        return record
    except FileNotFoundError:
        return ExportRecord(out)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: damaged ({error!r}); remove it, and export again with --overwrite"
        ) from None
