"""What was refused, with its bytes and the reason, so that nothing is lost and everything is accounted for.

quarantine/<source>/refused.jsonl    a line per refused member or damaged stretch: reason, message, name,
                                     offset in the tar, bytes, the file that holds the bytes, its sha256
quarantine/<source>/warnings.jsonl   a line per image and reason that was kept although it is odd: reason,
                                     message, image id, indices and number of the masks concerned
                                     (doubtful.jsonl in directories of earlier versions, without masks)
quarantine/<source>/000001-sa_5.jpg  the bytes
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from sa1b.names import image_name
from sa1b.shards.image_warnings import ImageWarning
from sa1b.sources.tar_stream import Damage, Member
from sa1b.storage.atomic import flush

EXAMPLES = 3
_MESSAGE = 500  # characters; names and values in it come from outside


class Quarantine:
    """Collects one source's refusals and warnings in a folder, made when the first one comes.

    Attributes:
        refused, warnings: reason -> pairs.
        members: members refused so far.
        examples: reason -> the first messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0
        self.refused: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.members = 0
        self.damages: list[dict[str, Any]] = []
        self.examples: dict[str, list[str]] = {}

    def refuse(self, reason: str, message: str, members: list[Member]) -> None:
        """Keep the members of one pair, or a single one, that cannot be used."""
        self.refused[reason] += 1
        where = " + ".join(f"{member.name[-200:]} at offset {member.offset:,}" for member in members)
        self._example(reason, f"{where}: {message}")
        for member in members:
            self.members += 1
            self._line(
                "refused.jsonl",
                reason=reason,
                message=message,
                name=member.name,
                offset=member.offset,
                bytes=len(member.data),
                **self._keep(member.name, member.data),
            )

    def damage(self, damage: Damage) -> None:
        """Keep a stretch of the archive that holds no readable member."""
        kept = self._keep(f"{damage.reason}.bin", damage.data) if damage.data else {"file": None}
        self.damages.append(
            {
                "reason": damage.reason,
                "message": damage.message,
                "offset": damage.offset,
                "length": damage.length,
            }
        )
        self._line(
            "refused.jsonl",
            reason=damage.reason,
            message=damage.message,
            name=None,
            offset=damage.offset,
            bytes=damage.length,
            kept_bytes=len(damage.data),
            **kept,
        )

    def warn(self, image_id: int, reason: str, warning: ImageWarning) -> None:
        """List an image that was kept although something about it is odd."""
        self.warnings[reason] += 1
        self._example(reason, f"{image_name(image_id)}: {warning.message}")
        self._line(
            "warnings.jsonl",
            reason=reason,
            message=warning.message,
            image_id=image_id,
            masks=warning.masks,
            mask_count=warning.mask_count,
        )

    def flush(self) -> None:
        """Flush every file and the folder to the disk, before a task file relies on them."""
        if self.exists():
            for path in sorted(self._folder.iterdir()):
                flush(path)
            flush(self._folder)

    def exists(self) -> bool:
        """Whether there is a folder to commit."""
        return self._folder.exists()

    def _example(self, reason: str, message: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(_printable(message))

    def _keep(self, name: str, data: bytes) -> dict[str, str]:
        """Write the bytes to a file; the fields of a line that name it and give its digest."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        # The name comes from outside: only its last part, only harmless characters.
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name.rsplit("/", 1)[-1])[-80:]
        file = f"{self._files:06d}-{plain}"
        (self._folder / file).write_bytes(data)
        return {"file": file, "sha256": hashlib.sha256(data).hexdigest()}

    def _line(self, report: str, *, reason: str, message: str, **fields: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / report).open("a", encoding="utf-8") as out:
            out.write(json.dumps({"reason": reason, "message": _printable(message), **fields}) + "\n")


def _printable(message: str) -> str:
    """Fit for one line of a terminal, whatever the source put into it."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message[:_MESSAGE])
    return shown if len(message) <= _MESSAGE else f"{shown} …"
