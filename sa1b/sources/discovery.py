"""Search of the user's paths for sources, with a list of everything else that is found.

A path is a tar, a folder of pairs, or a folder that contains these at any depth. Every file that is not taken
is listed:

    data/batch1/sa_000020.tar   a tar: by its content, or by its name (then a failed download is reported)
    data/X.TAR                  the same; the source is named X
    data/sa_000021/sa_5.jpg     a folder of pairs, see `sa1b.sources.folder`
    data/x.tar.gz.part          not taken: a partial download
    data/notes.txt              not taken: neither a tar nor a member of a pair
    data/train.json             a file in COCO's format if the user names it, see `sa1b.sources.coco`
"""

import os
import shlex
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sa1b.errors import SourceError
from sa1b.names import is_source_name, source_stem
from sa1b.report import first_names
from sa1b.sources.coco import CocoFormat
from sa1b.sources.folder import FOLDER, FolderFormat, inode_of, is_dataset, is_folder, is_of_system
from sa1b.sources.image_names import is_image_name
from sa1b.sources.images import ImageFolder, ImageRows
from sa1b.sources.source import Ignore, Source, SourceFormat
from sa1b.sources.tar_reader import TAR, holds_tar, is_tar_name

FORMATS: tuple[SourceFormat, ...] = (FOLDER, CocoFormat(), TAR)  # the last one takes every file
_UNREAD_IMAGES = (".heic", ".heif", ".avif", ".gif", ".jxl", ".jp2", ".svg")
_PARTIAL_ENDINGS = (".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp", ".!qb")
_MAGIC = {
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"(\xb5/\xfd": "compressed with Zstandard",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file that contains no tar",
}
_NO_SOURCE = "neither a tar nor a member of a pair"


def formats_with(*changed: SourceFormat) -> tuple[SourceFormat, ...]:
    """All formats, some of them with other settings."""
    of_kind = {format.kind: format for format in changed}
    return tuple(of_kind.get(format.kind, format) for format in FORMATS)


def format_of(kind: object) -> SourceFormat:
    """The format that a task file names; tars if it names none."""
    return next((format for format in (*FORMATS, ImageRows(0)) if format.kind == kind), TAR)


class NotTaken(NamedTuple):
    """A file or folder that is not ingested, and why."""

    path: Path
    reason: str


@dataclass(slots=True)
class Discovered:
    """Result of `discover`: sources sorted by name, and files not taken, sorted by path."""

    sources: list[Source] = field(default_factory=list)
    not_taken: list[NotTaken] = field(default_factory=list)


def discover(
    paths: Sequence[Path],
    ignore: Sequence[str] = (),
    *,
    skip: Collection[Path] = (),
    rename: Mapping[Path, str] | None = None,
    formats: Sequence[SourceFormat] = FORMATS,
    numbered: bool = False,
) -> Discovered:
    """Find all sources in tars, files in COCO's format (x.json), and folders, searched at any depth.

    Hidden files and folders are not taken, but listed; files that operating systems write are not
    (`.DS_Store`, `._*`, `Thumbs.db`, `lost+found`, ...). Symbolic links are followed; a folder that is
    reached twice counts once.

    Args:
        ignore: fnmatch patterns, compared with the file name and with the path relative to the given folder;
            a match is neither taken nor listed. They do not apply to `paths` themselves.
        skip: files and folders of this run, such as its output. They are neither taken nor listed, unless
            they are in `paths`.
        rename: path of a tar or of a folder of pairs -> the name of the source instead of its usual one.
        formats: how sources of each kind are read, see `formats_with`.
        numbered: the sources of the only path have numbers as names: no shard is named after them.

    Raises:
        SourceError: a path does not exist or holds no source, two sources have one name, extracted pairs and
            tars share a folder, a path is a dataset directory, a path in `rename` is no source, or a file in
            COCO's format cannot be used.
    """
    names = {os.path.realpath(path): name for path, name in (rename or {}).items()}
    skipped = {inode_of(path) for path in skip if path.exists()}
    sources: dict[str, Source] = {}
    not_taken: dict[str, NotTaken] = {}
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path}: no such file or folder; name tars, or folders that hold them")
        search = _Search(path, Ignore(path, tuple(ignore)), skipped, names, formats, numbered)
        for source in search.run():
            other = sources.setdefault(source_stem(source.name), source)
            if other.path.resolve() != source.path.resolve():
                raise SourceError(
                    f"{source.path}: has the name {source_stem(source.name)!r}, as {other.path} has, and "
                    "shards are named after their source; leave one out with --ignore, or give it "
                    f"another one with --rename {shlex.quote(f'{source.path}=NAME')}"
                )
        not_taken |= {os.path.realpath(entry.path): entry for entry in search.not_taken}
    taken = {os.path.realpath(source.path) for source in sources.values()}
    for path in rename or {}:
        if os.path.realpath(path) not in taken:
            raise SourceError(f"--rename {path}: no source is there; name a tar or a folder of pairs")
    return Discovered(
        sorted(sources.values(), key=lambda source: source.name),
        sorted(entry for path, entry in not_taken.items() if path not in taken),
    )


class _Search:
    """Search of one of the user's paths."""

    def __init__(
        self,
        path: Path,
        ignore: Ignore,
        skipped: set[tuple[int, int]],
        names: Mapping[str, str],
        formats: Sequence[SourceFormat],
        numbered: bool,
    ) -> None:
        self.numbered = numbered
        self.path, self.ignore, self.skipped, self.names, self.formats = path, ignore, skipped, names, formats
        self.folder = next(format for format in formats if isinstance(format, FolderFormat))
        self.tar = formats[-1]
        self.sources: list[Source] = []
        self.not_taken: list[NotTaken] = []
        self.seen = skipped - {inode_of(path)}  # folders
        self.tars: dict[tuple[int, int], Path] = {}
        self.waiting: list[tuple[Path, bool]] = [(path, False)]  # whether inside a folder source

    def run(self) -> list[Source]:
        if self.path.is_file():
            if is_image_name(self.path.name) and not holds_tar(self.path):
                raise SourceError(
                    f"{self.path}: an image, not a source; name its folder, with --images-only for images "
                    "without annotations"
                )
            self._take(next(format for format in self.formats if format.takes(self.path)), self.path)
            return self.sources
        if not self.path.is_dir():
            raise SourceError(f"{self.path}: neither a file nor a folder; write a pipe to a file first")
        if is_dataset([child.name for child in self.path.iterdir()]):
            raise SourceError(
                f"{self.path}: is a dataset directory, not a source; name the tars that it was made of, or, "
                "if another program wrote its dataset.json, move that file"
            )
        while self.waiting:
            self._folder(*self.waiting.pop())
        if not self.sources:
            left_out = [f"{entry.path.name} ({entry.reason})" for entry in sorted(self.not_taken)]
            hint = f" (found and not taken: {first_names(left_out, 3)})" if left_out else ""
            what, way = (
                ("no image, no tar and no Parquet file", "name a folder that contains some at any depth")
                if isinstance(self.folder, ImageFolder)
                else (
                    "no tar and no sa_<id>.jpg beside sa_<id>.json",
                    "name the folder of the downloaded tars or of extracted pairs, a file in COCO's format, "
                    "or pass --images-only for images alone",
                )
            )
            raise SourceError(f"{self.path}: holds {what}{hint}; {way}")
        return self.sources

    def _folder(self, path: Path, inside: bool) -> None:
        """Take the sources in one folder, without pairs if it is `inside` a folder source."""
        try:
            if (inode := inode_of(path)) in self.seen:
                return
            self.seen.add(inode)
            # Links come last, so that a file that is reached twice is reported by its own path.
            entries = sorted(os.scandir(path), key=lambda entry: (entry.is_symlink(), entry.name))
            if is_dataset([entry.name for entry in entries]):
                self._leave(path, "a dataset directory, not a source")
                return
            files = [] if inside else self.folder.files(path, self.ignore)
            pairs = any(self.folder.is_member(file.name) for file in files)
        except OSError as error:
            if not inside:  # other unreadable files are refused as members when the source is read
                self._leave(path, f"cannot be read: {error.strerror}")
            return
        if pairs:
            self._take(self.folder, path)
        parts = set(self.folder.parts(path, self.ignore)) if pairs else set()
        below = []
        for entry in entries:
            child = path / entry.name
            if is_of_system(entry.name) or self.ignore(child):
                continue
            if is_folder(entry):
                below.append((child, inside or child in parts))
            elif not self.folder.is_member(entry.name) and self._file(child) and pairs:
                what = "images" if isinstance(self.folder, ImageFolder) else "extracted pairs"
                raise SourceError(
                    f"{path}: holds {what} and {entry.name} too; name one of them, move one away, "
                    f"or leave one out with --ignore '{entry.name}'"
                )
        for child, _ in below:
            if child.name.startswith("."):
                self._leave(child, "a hidden folder")
        self.waiting += [item for item in reversed(below) if not item[0].name.startswith(".")]

    def _file(self, path: Path) -> bool:
        try:
            state = path.stat()
            inode = state.st_dev, state.st_ino
            if inode in self.skipped:
                return False
            format = next(
                (known for known in self.formats if known.in_folders and known.takes(path)), self.tar
            )
            reason = _why_not_taken(path, state, is_known=format is not self.tar)
            if reason == _NO_SOURCE and isinstance(self.folder, ImageFolder):
                reason = "neither an image nor a text beside one"
        except OSError as error:
            reason = "a link to a missing file" if path.is_symlink() else f"cannot be read: {error.strerror}"
        else:
            if reason is None and (other := self.tars.setdefault(inode, path)) != path:
                reason = f"the same file as {other}"
        if reason is None:
            self._take(format, path)
            return True
        self._leave(path, reason)
        return False

    def _take(self, format: SourceFormat, path: Path) -> None:
        name = self.names.get(os.path.realpath(path), format.name_of(path))
        if self.numbered:
            name = str(len(self.sources))
        if not is_source_name(name):
            unfit = (
                "the name becomes part of the names of shards; use letters, digits, '_', '-' and '.', or "
                f"give it another name with --rename {shlex.quote(f'{path}=NAME')}"
            )
            if path == self.path:
                raise SourceError(f"{path}: {unfit}")
            self._leave(path, unfit)
        else:
            measured = format.measure(path, name, self.ignore)
            self.sources.append(Source(name, path, format, *measured, ignore=self.ignore))

    def _leave(self, path: Path, reason: str) -> None:
        self.not_taken.append(NotTaken(path, reason))


def _why_not_taken(path: Path, state: os.stat_result, *, is_known: bool) -> str | None:
    """The reason why a file is not a source; None if a format knows it, or it is a tar by content or name."""
    # A file with the name of a tar and other content is taken as a source, so that its failure is reported.
    name = path.name.lower()
    if not stat.S_ISREG(state.st_mode):
        return "not a regular file"
    if name.startswith("."):
        return "a hidden file"
    if name.endswith(_PARTIAL_ENDINGS):
        return "a partial download"
    if is_known or is_tar_name(name) or holds_tar(path):
        return None
    if state.st_size == 0:
        return "an empty file"
    if name.endswith(_UNREAD_IMAGES):
        return "an image of a format that is not read; convert it to JPEG, PNG or WebP"
    with path.open("rb") as file:
        head = file.read(6)
    what = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), None)
    return f"{what}; only plain and gzip tars are read" if what else _NO_SOURCE
