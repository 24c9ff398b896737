"""The record of an export: the file `.export.json`, which lists the tars of the export and their state.

A tar is complete if the record contains its digest and size and the file has that size. A tar without a size
in the record was in progress when the export ended, and is written again.
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
        out: folder of the export.
        contents: name of a tar -> digest of its content, see content_digest.
        written: name of a complete tar -> its counts and size.
    """

    out: Path
    contents: dict[str, str] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)

    def owns(self, name: str, content: str) -> bool:
        """Whether this export wrote the tar of this name, so that it may be skipped or replaced."""
        return self.contents.get(name) == content

    def complete(self, name: str, content: str) -> bool:
        """Whether the tar exists with this content and is complete."""
        known = self.written.get(name)
        path = self.out / name
        return (
            known is not None
            and self.owns(name, content)
            and path.exists()
            and path.stat().st_size == known.bytes
        )

    def begin(self, contents: dict[str, str]) -> None:
        """Record the names of tars before the first one is written."""
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
    """The record of a folder; an empty record if the folder has none.

    Raises:
        UsageError: the record is damaged or has another format.
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
