"""A source as a stream of members, and the contract of a format of sources.

A format is one module and one entry in `FORMATS` of sa1b.sources.discovery: tars as downloaded (gzip or
plain), folders of extracted pairs, files of annotations in COCO's format with their images.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from sa1b.errors import SourceError
from sa1b.sources.pairing import WantedPairs
from sa1b.sources.stored_file import Link
from sa1b.sources.tar_stream import Damage, Member

Progress = Callable[[int], object]  # called with the number of bytes read


@dataclass(frozen=True, slots=True)
class Ignore:
    """fnmatch patterns of files to leave out, compared with a file's name and its path relative to `base`."""

    base: Path
    patterns: tuple[str, ...] = ()

    def __call__(self, path: Path) -> bool:
        if not self.patterns:
            return False
        names = (path.name, path.relative_to(self.base).as_posix() if path != self.base else ".")
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.patterns)


class SourceReading(ABC):
    """One pass over a source of one format."""

    # of a file in COCO's format, with all fields, once the first item is read
    categories: Sequence[dict[str, Any]] = ()
    # number of members or rows by ending or column that nothing is kept of, once all items are read
    left_out: Mapping[str, int] = {}

    @abstractmethod
    def items(self) -> Iterator[Member | Damage]:
        """Members and damage. Every byte is part of one, or of the format itself."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """sha256 of the source, and md5 of a tar if requested; reads the rest of the source."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise SourceError if a file of the source has changed since it was read."""

    def close(self) -> None:  # noqa: B027  most passes have nothing to close
        """Close the files; by default each is closed once it has been read."""


class SourceFormat(ABC):
    """A form of input. An instance has the settings that determine how its sources are read."""

    kind: ClassVar[str]  # name in task files
    ending: ClassVar[str]  # of the names of its files, for advice
    has_links: ClassVar[bool] = False  # a source may be at a URL
    in_folders: ClassVar[bool] = False  # the search of a folder takes what `takes` accepts

    def takes(self, path: Path) -> bool:
        """Whether a file that the user names is a source of this format."""
        return False

    @abstractmethod
    def name_of(self, path: Path) -> str:
        """The usual name of the source at a path."""

    def measure(self, path: Path, name: str, ignore: Ignore) -> tuple[int, int]:
        """Bytes of all files of a source, and the newest modification time in ns; SourceError: unusable."""
        state = path.stat()
        return state.st_size, state.st_mtime_ns

    @abstractmethod
    def open(self, source: "Source", *, md5: bool, progress: Progress | None) -> SourceReading:
        """Begin a pass. Raises OSError if a file cannot be opened."""

    def reading(self, source: "Source") -> dict[str, Any]:
        """What decides, beside the path, which pairs and ids a source gives: keys of `Source.reading`."""
        return {}


@dataclass(frozen=True, slots=True)
class Source:
    """One task of ingest."""

    name: str  # file name without ending, or the folder's name; part of the names of shards
    path: Path  # file or folder; only the name of the tar if it has a link
    format: SourceFormat
    size: int  # bytes of the tar, of the folder's files, or of the COCO file and its images
    mtime_ns: int  # of the tar, or of the newest of these files
    ignore: Ignore | None = None  # patterns of the files of a folder that are left out
    link: Link | None = None  # source of the tar's bytes if the tar is not a file
    wanted: WantedPairs | None = None  # the only pairs that are read; None: all

    @property
    def kind(self) -> str:
        """Name of the format."""
        return self.format.kind

    @property
    def reading(self) -> dict[str, Any]:
        """What decides, beside the path, which pairs and ids the source gives: recorded with it for a repair.

        - a COCO file: `image_ids`, and whether its images have a folder of their own;
        - a folder: the patterns of `ignore`;
        - images without annotations: `images_only`;
        - a source of which only wanted pairs are taken: `part`.

        Empty for other sources.
        """
        values = self.format.reading(self) | ({} if self.wanted is None else {"part": True})
        return {"kind": self.kind, **values} if values else {}

    @property
    def label(self) -> str:
        """Path or link, for messages."""
        return str(self.path) if self.link is None else self.link.label


class SourceReader:
    """One pass over a source: `items()`, then `digests()` and `check_unchanged()`, then `close()`."""

    def __init__(self, source: Source, *, md5: bool = False, progress: Progress | None = None) -> None:
        self.source = source
        self._pass = source.format.open(source, md5=md5, progress=progress)

    def items(self) -> Iterator[Member | Damage]:
        """Members and damage: in the order of the file, hard links last; of a folder by image id."""
        items = self._pass.items()
        return items if self.source.wanted is None else self.source.wanted.filter(items)

    def digests(self) -> dict[str, str]:
        """See SourceReading. Empty if only some pairs were wanted and the source was not read to its end."""
        if self.source.wanted is not None and not self.source.wanted.is_whole:
            return {}
        return self._pass.digests()

    def check_unchanged(self) -> None:
        """SourceError if size, inode, mtime or ctime changed; see `LocalFile.check_unchanged`."""
        self._pass.check_unchanged()

    def found(self) -> dict[str, Any]:
        """What the source has beside its pairs, to be recorded with it: `categories` and `left_out`."""
        fields = {"categories": list(self._pass.categories), "left_out": dict(self._pass.left_out)}
        return {name: value for name, value in fields.items() if value}

    def close(self) -> None:
        """Close the file. Call `check_unchanged` first."""
        self._pass.close()


def digest_of_source(source: Source, progress: Progress | None = None, kind: str = "sha256") -> str:
    """A digest of `SourceReader.digests`, with md5 for a tar; a tar is not unpacked."""
    reader = SourceReader(source, md5=kind == "md5", progress=progress)
    try:
        return reader.digests()[kind]
    finally:
        reader.close()


def read_checklist(path: Path) -> dict[str, str]:
    """File name -> md5, from lines of md5sum; SourceError names a line that is none, or contradicts."""
    digests: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{32})[ \t]+\*?(\S+)\s*", line)
        if match is None:
            raise SourceError(f"{path}, line {number}: {line[:80]!r} must be '<md5>  <file name>'")
        name, digest = match[2].rsplit("/", 1)[-1], match[1].lower()
        if digests.setdefault(name, digest) != digest:
            raise SourceError(
                f"{path}, line {number}: {name} has the md5 {digest}, and {digests[name]} on an earlier "
                "line; remove the wrong one"
            )
    return digests
