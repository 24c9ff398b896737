"""A source as a stream of members: a tar as downloaded (gzip or plain), a folder of extracted pairs, or a
file of annotations in COCO's format with its images."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa1b.errors import SourceError
from sa1b.sources.coco import CocoReader
from sa1b.sources.coco_file import CocoOptions
from sa1b.sources.folder import FolderReader, Ignore
from sa1b.sources.hard_links import resolve_links
from sa1b.sources.link_list import Link
from sa1b.sources.stored_file import open_stored
from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import Damage, Member, StoredStream
from sa1b.sources.wanted import WantedPairs

_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One task of ingest.

    Attributes:
        name: file name without ending, or the folder's name; part of the names of shards.
        path: file or folder; the name of the tar if it has a link.
        kind: "tar", "folder" or "coco".
        link: source of the tar's bytes if the tar is not a file; `path` is then only its name.
        wanted: the only pairs that are read; None: all.
        size: stored bytes of the tar, or of all files of the folder, or of the COCO file and its images.
        mtime_ns: modification time in nanoseconds of the tar, or of the newest of these files.
        ignore: patterns of the files of a folder that are left out.
        coco: how a COCO file is read.
    """

    name: str
    path: Path
    kind: str
    size: int
    mtime_ns: int
    ignore: Ignore | None = None
    link: Link | None = None
    wanted: WantedPairs | None = None
    coco: CocoOptions | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """What decides, beside the path, which pairs and ids the source gives: recorded with it for a repair.

        Of a COCO file image_ids and whether images has a folder of its own; of a folder the patterns of
        ignore; part for a source of which only wanted pairs are taken. Empty for a whole tar or folder.
        """
        found: dict[str, Any] = {}
        if self.kind == "coco":
            options = self.coco or CocoOptions()
            found = {"kind": "coco", "image_ids": options.ids, "images": options.images is not None}
        elif self.ignore is not None and self.ignore.patterns:
            found = {"kind": self.kind, "ignore": list(self.ignore.patterns)}
        return found if self.wanted is None else {"kind": self.kind, **found, "part": True}

    @property
    def label(self) -> str:
        """Path or link, for messages."""
        return str(self.path) if self.link is None else self.link.label


class SourceReader:
    """One pass over a source: `items()`, then `digests()` and `check_unchanged()`, then `close()`.

    Raises:
        OSError: a tar cannot be opened or read; the message names it.
    """

    def __init__(
        self, source: Source, *, md5: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        self.source = source
        self._progress = progress
        self._reader: StoredStream | FolderReader | CocoReader
        if source.kind == "tar":
            self._reader = StoredStream(source.link or source.path, md5=md5, progress=progress)
        elif source.kind == "coco":
            options = source.coco or CocoOptions()
            self._reader = CocoReader(source.path, source.name, options, progress=progress)
        else:
            ignore = source.ignore or Ignore(source.path)
            self._reader = FolderReader(source.path, ignore, progress=progress)

    def items(self) -> Iterator[Member | Damage]:
        """Members and damage.

        A tar and a COCO file have their order, hard links last; a folder is sorted by image id.
        """
        items: Iterator[Member | Damage]
        if isinstance(self._reader, StoredStream):
            items = resolve_links(members(self._reader), self._again)
        else:
            items = self._reader.items()
        return items if self.source.wanted is None else self.source.wanted.filter(items)

    def digests(self) -> dict[str, str]:
        """sha256 of a tar as stored (and md5 if requested), or of the names and contents of a folder.

        Empty if only some pairs were wanted and the source was not read to its end.
        """
        if self.source.wanted is not None and not self.source.wanted.is_whole:
            return {}
        return self._reader.digests()

    def check_unchanged(self) -> None:
        """Check that the source has not changed since it was found and since it was opened.

        Sizes, inodes, modification times and change times are compared. `StoredStream.check_unchanged` lists
        the changes that this cannot detect.

        Raises:
            SourceError: it changed while it was read.
        """
        self._reader.check_unchanged()
        if self.source.kind == "tar" and self.source.link is None:
            stat = self.source.path.stat()
            if (stat.st_size, stat.st_mtime_ns) != (self.source.size, self.source.mtime_ns):
                raise SourceError(
                    f"{self.source.path}: changed before it was read; run the same command again"
                )

    def categories(self) -> list[dict[str, Any]]:
        """The categories of a COCO file, with all their fields; empty for other sources."""
        return self._reader.categories if isinstance(self._reader, CocoReader) else []

    def close(self) -> None:
        """Close the file. Call `check_unchanged` first."""
        self._reader.close()

    def _again(self) -> StoredStream:
        # The second pass reports progress of 0 bytes: the bytes were counted in the first pass.
        progress = self._progress
        origin = self.source.link or self.source.path
        return StoredStream(origin, progress=None if progress is None else lambda _: progress(0))


def digest_of_source(
    source: Source, progress: Callable[[int], object] | None = None, kind: str = "sha256"
) -> str:
    """The digests of `SourceReader.digests`, with md5 for a tar; the source is not unpacked."""
    if source.kind == "tar":
        digest = hashlib.new(kind, usedforsecurity=False)
        file = open_stored(source.link or source.path)
        try:
            while data := file.read(_CHUNK):
                digest.update(data)
                if progress is not None:
                    progress(len(data))
        finally:
            file.close()
        return digest.hexdigest()
    reader = SourceReader(source, progress=progress)
    for _ in reader.items():
        pass
    return reader.digests()["sha256"]


def read_checklist(path: Path) -> dict[str, str]:
    """File name -> md5, from a file in the form of md5sum: `<32 hex digits>  <name>` on each line.

    Raises:
        SourceError: a line has another form, or another md5 for a name than a line before; the message names
            it.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{32})[ \t]+\*?(\S+)\s*", line)
        if match is None:
            raise SourceError(f"{path}, line {number}: {line[:80]!r} must be '<md5>  <file name>'")
        name, digest = match[2].rsplit("/", 1)[-1], match[1].lower()
        if found.setdefault(name, digest) != digest:
            raise SourceError(
                f"{path}, line {number}: {name} has the md5 {digest}, and {found[name]} on an earlier "
                "line; remove the wrong one"
            )
    return found
