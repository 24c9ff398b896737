"""Sources: what a person has on disk, as a stream of members.

A source is a tar as downloaded (gzip or plain), or a folder of extracted pairs: flat, `images/` beside
`annotations/`, or either of them one level down (`sa_000020/`).
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sa1b.errors import SourceError
from sa1b.names import is_source_name, parse_member_name, source_stem
from sa1b.sources.member import Damage, Member
from sa1b.sources.tar_reader import is_tar, members
from sa1b.sources.tar_stream import StoredStream

_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One task of ingest.

    Attributes:
        name: file name without ending, or the folder's name: names the shards, the task and the quarantine.
        path: where it lies.
        kind: "tar" or "folder".
        size: bytes as stored, of all files of a folder.
        mtime_ns: the newest file's.
    """

    name: str
    path: Path
    kind: str
    size: int
    mtime_ns: int


class SourceReader:
    """One pass over a source: `items()`, then `digests()`."""

    def __init__(
        self, source: Source, *, md5: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        self.source = source
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._stream = StoredStream(source.path, md5=md5, progress=progress) if source.kind == "tar" else None

    def items(self) -> Iterator[Member | Damage]:
        """Members and damage in the order of the source; a folder in the order of image ids."""
        return members(self._stream) if self._stream else self._folder_items()

    def digests(self) -> dict[str, str]:
        """sha256 of a tar as stored (and md5 if asked for), or of the names and contents of a folder."""
        return self._stream.digests() if self._stream else {"sha256": self._sha256.hexdigest()}

    def close(self) -> None:
        if self._stream:
            self._stream.close()

    def _folder_items(self) -> Iterator[Member | Damage]:
        for path in _pair_files(self.source.path):
            if not path.is_file():
                kind = (
                    "folder" if path.is_dir() else "link to nothing" if path.is_symlink() else "special file"
                )
                yield Member(path.name, kind, 0, b"")
                continue
            data = path.read_bytes()
            self._sha256.update(f"{path.name} {len(data)}\n".encode())
            self._sha256.update(data)
            if self._progress is not None:
                self._progress(len(data))
            yield Member(path.name, "file", 0, data)


def discover(paths: Sequence[Path]) -> list[Source]:
    """The sources behind what a person named, in order of their names.

    Raises:
        SourceError: nothing there, neither a tar nor a folder of pairs, or two sources of one name.
    """
    found: dict[str, Source] = {}
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path}: no such file or folder")
        for source in _sources(path):
            stem = source_stem(source.name)
            other = found.get(stem)
            if other is not None and other.path.resolve() != source.path.resolve():
                raise SourceError(
                    f"two sources are named {stem!r}: {other.path} and {source.path}; "
                    "the name goes into the shards, so leave one out or rename it"
                )
            found[stem] = source
    return sorted(found.values(), key=lambda source: source.name)


def _sources(path: Path) -> list[Source]:
    if path.is_file():
        if not is_tar(path):
            raise SourceError(f"{path}: neither a gzip file nor a tar; is the download complete?")
        return [_tar_source(path)]
    if _is_pair_folder(path):
        if tar := next((child for child in path.iterdir() if child.name.endswith(_TAR_ENDINGS)), None):
            raise SourceError(
                f"{path}: holds extracted pairs and {tar.name} too; name one of them, or move one away"
            )
        return [_folder_source(path)]
    below = []
    for child in sorted(path.iterdir()):
        if child.is_file() and child.name.endswith(_TAR_ENDINGS):
            below.append(_tar_source(child))  # one that is no tar fails by itself, the others go on
        elif child.is_dir() and _is_pair_folder(child):
            below.append(_folder_source(child))
    if not below:
        raise SourceError(f"{path}: holds no .tar files and no sa_<id>.jpg beside sa_<id>.json")
    return below


def _tar_source(path: Path) -> Source:
    name = path.name
    for ending in sorted(_TAR_ENDINGS, key=len, reverse=True):
        name = name.removesuffix(ending)
    stat = path.stat()
    return Source(_plain(name, path), path, "tar", stat.st_size, stat.st_mtime_ns)


def _folder_source(path: Path) -> Source:
    stats = [file.stat() if file.exists() else file.lstat() for file in _pair_files(path)]
    size = sum(stat.st_size for stat in stats)
    return Source(_plain(path.resolve().name, path), path, "folder", size, max(s.st_mtime_ns for s in stats))


def _plain(name: str, path: Path) -> str:
    if not is_source_name(name):
        raise SourceError(
            f"{path}: the name goes into the shards' names; use letters, digits, '_', '-' and '.'"
        )
    return name


def _is_pair_folder(path: Path) -> bool:
    return next(_pair_files(path, one=True), None) is not None


def _pair_files(path: Path, *, one: bool = False) -> Iterator[Path]:
    """The files of a folder source, jpg before json, by image id; `one`: any one of them, unsorted."""
    folders = [path]
    if (path / "images").is_dir() and (path / "annotations").is_dir():
        folders = [path / "images", path / "annotations"]
    named = ((parse_member_name(file.name), file) for folder in folders for file in folder.iterdir())
    files = ((name, str(file), file) for name, file in named if name is not None and name.ending != "masks")
    yield from (file for *_, file in (files if one else sorted(files)))


def digest_of_source(
    source: Source, progress: Callable[[int], object] | None = None, kind: str = "sha256"
) -> str:
    """The sha256 (of a tar also "md5") that `SourceReader.digests` gives, without unpacking anything."""
    if source.kind == "tar":
        with source.path.open("rb") as file:
            digest = hashlib.new(kind, usedforsecurity=False)
            while data := file.read(_CHUNK):
                digest.update(data)
                if progress is not None:
                    progress(len(data))
            return digest.hexdigest()
    reader = SourceReader(source, progress=progress)
    for _ in reader.items():
        pass
    return reader.digests()["sha256"]


def read_checklist(path: Path) -> dict[str, str]:
    """File name -> md5, from a list as md5sum writes it: `<32 hex digits>  <name>` a line.

    Raises:
        SourceError: a line of another form; the message names it.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{32})[ \t]+\*?(\S+)\s*", line)
        if match is None:
            raise SourceError(f"{path}, line {number}: expected '<md5>  <file name>', found {line[:80]!r}")
        found[match[2].rsplit("/", 1)[-1]] = match[1].lower()
    return found
