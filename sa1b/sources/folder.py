"""A folder of extracted pairs as a stream of members.

    sa_000020/sa_5.jpg, sa_5.json                       pairs in the folder itself
    sa_000020/images/sa_5.jpg, annotations/sa_5.json    in two folders at any depth, or beside them

Files are read one at a time, and a file above the size limit of a member is not read, so that one bad file
costs one member.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sa1b.errors import SourceError
from sa1b.names import ANNOTATE_LINES, ANNOTATE_SETTINGS, OPTIONS, parse_member_path, parse_shard_name
from sa1b.sources.source import Ignore, Progress, Source, SourceFormat, SourceReading
from sa1b.sources.tar_stream import MAX_MEMBER_BYTES, OVERSIZED, UNREADABLE, Member

LAYOUT = ("images", "annotations")
# Operating systems, file servers and tools write these files, users never do: neither taken nor listed.
_SYSTEM = (
    ".DS_Store",
    ANNOTATE_SETTINGS,
    ANNOTATE_LINES,
    ".export.jsonl",  # the record of `sa1b export` beside its tars
    "._*",
    ".Spotlight-V100",
    ".Trashes",
    ".fseventsd",
    ".nfs*",
    "@eaDir",
    "Thumbs.db",
    "desktop.ini",
    "lost+found",
)


def is_pair_name(name: str) -> bool:
    """Whether a file of this name is a member of a pair."""
    named = parse_member_path(name)
    return named is not None and named.ending != "masks"


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to a folder; never raises, unlike `entry.is_dir`."""
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, or a link into a folder that may not be read
        return False


def is_of_system(name: str) -> bool:
    """Whether a file or folder of this name is one that operating systems, file servers and tools write."""
    return any(fnmatchcase(name, pattern) for pattern in _SYSTEM)


def is_dataset(names: Sequence[str]) -> bool:
    """Whether a folder with these entries is a dataset directory, complete or not."""
    return "dataset.json" in names or (
        "tasks" in names and (OPTIONS in names or any(map(parse_shard_name, names)))
    )


def below(path: Path, folders: list[Path], ignore: Ignore) -> list[Path]:
    """The folders at any depth below some folders of a source, each once: without hidden ones, those of the
    system and dataset directories, such as the output of a conversion.
    """
    waiting, deeper = list(folders), list[Path]()
    seen = {inode_of(folder) for folder in (path, *folders)}
    while waiting:
        folder = waiting.pop()
        entries = list[os.DirEntry[str]]()
        with contextlib.suppress(OSError):  # a folder that cannot be read becomes a refused member
            entries = list(os.scandir(folder))
        if folder not in folders:
            if is_dataset([entry.name for entry in entries]):
                continue
            deeper.append(folder)
        for child in [folder / entry.name for entry in entries if is_folder(entry)]:
            if child.name[0] == "." or is_of_system(child.name) or ignore(child):
                continue
            with contextlib.suppress(OSError):
                if (inode := inode_of(child)) not in seen:
                    seen.add(inode)
                    waiting.append(child)
    return sorted(deeper)


def listed(path: Path, folders: list[Path]) -> tuple[list[Path], list[Path]]:
    """The files of a source and of folders below it, and those of these folders that cannot be listed."""
    files, unreadable = list[Path](), list[Path]()
    for folder in [path, *folders]:
        try:
            files += [folder / entry.name for entry in os.scandir(folder) if not is_folder(entry)]
        except OSError:
            if folder == path:
                raise
            unreadable.append(folder)
    return files, unreadable


class FolderPass(SourceReading):
    """One pass over the files of a folder."""

    def __init__(
        self, path: Path, ignore: Ignore, format: "FolderFormat", *, progress: Progress | None = None
    ) -> None:
        self.path, self.ignore, self._format = path, ignore, format
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._stats = hashlib.sha256()  # state of every file when it was read
        self._members = self._read()

    def items(self) -> Iterator[Member]:
        """Members in the order of the format; pairs by image id, jpg before json."""
        return self._members

    def _read(self) -> Iterator[Member]:
        for file in self._format.files(self.path, self.ignore):
            member = replace(self._member(file), name=self._format.member_name(self.path, file))
            self._sha256.update(f"{member.name} {len(member.data)}\n".encode("utf-8", "surrogateescape"))
            self._sha256.update(member.data)
            if self._progress is not None:
                self._progress(len(member.data))
            yield member

    def digests(self) -> dict[str, str]:
        """sha256 of names and contents; a file that cannot be a member counts as empty."""
        for _ in self._members:
            pass
        return {"sha256": self._sha256.hexdigest()}

    def check_unchanged(self) -> None:
        """SourceError if a file was added, removed, replaced or written, by name, size, mtime and ctime.
        `LocalFile.check_unchanged` lists the changes that cannot be detected.
        """
        stats = hashlib.sha256()
        for file in self._format.files(self.path, self.ignore):
            stats.update(fingerprint(file, stat_of(file)))
        if stats.digest() != self._stats.digest():
            raise SourceError(f"{self.path}: files changed while they were read; run the same command again")

    def _member(self, file: Path) -> Member:
        state = stat_of(file)
        self._stats.update(fingerprint(file, state))
        if isinstance(state, OSError):
            kind = "link to nothing" if file.is_symlink() else UNREADABLE
            return Member(file.name, kind, 0, b"", f"cannot be read: {state.strerror}")
        if self._leaves(file):
            return Member(file.name, "link out of the folder", 0, b"")
        if stat.S_ISDIR(state.st_mode):
            return Member(file.name, UNREADABLE, 0, b"", "a folder that cannot be listed")
        if not stat.S_ISREG(state.st_mode):
            return Member(file.name, "special file", 0, b"")
        if state.st_size > MAX_MEMBER_BYTES:
            why = f"{state.st_size:,} bytes, more than the {MAX_MEMBER_BYTES:,} that a member may have"
            return Member(file.name, OVERSIZED, 0, b"", why)
        try:
            with file.open("rb") as opened:
                data = opened.read(state.st_size)
        except OSError as error:
            return Member(file.name, UNREADABLE, 0, b"", f"cannot be read: {error.strerror}")
        if len(data) != state.st_size:
            why = f"cannot be read: {len(data):,} of {state.st_size:,} bytes received"
            return Member(file.name, UNREADABLE, 0, b"", why)
        return Member(file.name, "file", 0, data)

    def _leaves(self, file: Path) -> bool:
        if not file.is_symlink():
            return False
        target = file.resolve()
        return not any(target.is_relative_to(folder.resolve()) for folder in (self.path, file.parent))


def inode_of(path: Path) -> tuple[int, int]:
    """Device and inode, which are the same for all names of a file or folder."""
    state = path.stat()
    return state.st_dev, state.st_ino


def stat_of(file: Path) -> os.stat_result | OSError:
    """The state of a file, or the error that prevents reading it."""
    try:
        return file.stat()
    except OSError as error:
        return error


def fingerprint(file: Path, state: os.stat_result | OSError) -> bytes:
    """Bytes that differ if a file was changed; empty if it does not exist."""
    if isinstance(state, OSError):
        return b""  # the file was removed before it was read: its member is refused
    # Without the inode: some network file systems give a file a new number each time it is opened.
    numbers = state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return f"{file} {numbers}\n".encode("utf-8", "surrogateescape")


class FolderFormat(SourceFormat):
    """Folders of extracted pairs."""

    kind = "folder"
    ending = ""

    def files(self, path: Path, ignore: Ignore) -> list[Path]:
        """The files of a source in the order of its members; unreadable subfolders first."""
        keyed = []
        files, unreadable = listed(path, self.parts(path, ignore))
        for file in files:
            named = parse_member_path(file.name)
            if named is not None and named.ending != "masks" and not ignore(file):
                # sa_5.jpg sorts before sa_5.JPG, and the first one is used.
                keyed.append((named, not file.name.endswith(named.ending), str(file), file))
        return unreadable + [file for *_, file in sorted(keyed)]

    def parts(self, path: Path, ignore: Ignore) -> list[Path]:
        """The folders below a source that are part of it: those of LAYOUT, with all their subfolders."""
        folders = [path / name for name in LAYOUT]
        if not all(folder.is_dir() and not ignore(folder) for folder in folders):
            return []
        return sorted([*folders, *below(path, folders, ignore)])

    def is_member(self, name: str) -> bool:
        """Whether a file of this name may be part of a source; others are listed as not taken."""
        return is_pair_name(name)

    def member_name(self, path: Path, file: Path) -> str:
        return file.name

    def name_of(self, path: Path) -> str:
        return path.resolve().name

    def measure(self, path: Path, name: str, ignore: Ignore) -> tuple[int, int]:
        states = [
            state for file in self.files(path, ignore) if isinstance(state := stat_of(file), os.stat_result)
        ]
        size = sum(state.st_size for state in states if state.st_size <= MAX_MEMBER_BYTES)
        return size, max((state.st_mtime_ns for state in states), default=0)

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return FolderPass(source.path, source.ignore or Ignore(source.path), self, progress=progress)

    def reading(self, source: Source) -> dict[str, Any]:
        patterns = () if source.ignore is None else source.ignore.patterns
        return {"ignore": list(patterns)} if patterns else {}


FOLDER = FolderFormat()
