"""Links to source tars: URLs of single files, and lists of signed links as Meta publishes them.

The list of SA-1B is a text file with two columns, `file_name` and `cdn_link`, separated by a tab, with a
header line and in no order. It also lists files that are not tars of SA-1B. Its links are signed and expire
after some weeks; the files themselves do not change.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from sa1b.arguments import fault_of_url, is_url
from sa1b.errors import SourceError, printable
from sa1b.storage.errors import DeniedError, MissingError, ReplacedError, StorageError
from sa1b.storage.reader import Reader, pieces_of

CONNECTIONS = 4  # requests of one source at the same time
_TAR = re.compile(r"sa_[0-9]+\.tar")


@dataclass(frozen=True, slots=True)
class Link:
    """A source tar at a URL, and how to read it."""

    url: str = field(repr=False)  # complete, perhaps signed: a secret, messages show `label`
    file_name: str  # of the tar
    label: str
    listed: Path | None = None  # the list with this link; None if the user named the URL
    connections: int = CONNECTIONS  # requests at the same time
    max_rate: float | None = None  # bytes per second; None: no limit
    options: Mapping[str, Any] = field(default_factory=dict)  # of fsspec's file system

    def split(self) -> tuple[str, str]:
        """The URL of the folder, and the name of the object with its query."""
        path, mark, query = self.url.partition("?")
        folder, _, name = path.rpartition("/")
        return folder, f"{name}{mark}{query}"

    @property
    def reader_options(self) -> dict[str, Any]:
        """Options of the reader: a signed query must be sent unchanged."""
        return {"encoded": True, **self.options} if self.url.startswith("http") else dict(self.options)

    def without_query(self, message: str) -> str:
        """A message of the reader with the label instead of the URL, without queries, users and passwords."""
        for url in (self.url, printable(self.url)):  # an error of the package has the second one
            message = message.replace(url, self.label)
        return printable(message).removeprefix(f"{self.label}: ")

    def problem(self, error: StorageError) -> str:
        """The second and third part of a message about a link that the server refuses."""
        why = self.without_query(str(error))
        if self.listed is not None:
            return (
                f"the link has expired or is wrong ({why.partition(';')[0]}); download the list of "
                "links again and pass it with --links: finished sources are kept"
            )
        # Servers without an object store have none of the credentials that the message lists.
        return f"{why.partition(';')[0]}; check the URL" if self.url.startswith("http") else why


def link_of(url: str) -> Link:
    """The link to a URL that the user named; SourceError if it has no host, or does not name a file."""
    parts = urlsplit(url)
    name = parts.path.rpartition("/")[2]
    label = printable(url)
    if not parts.netloc or not name:
        raise SourceError(f"{label}: names no file; pass the URL of a tar")
    return Link(url, name, label)


def read_links(path: Path) -> tuple[list[Link], list[str]]:
    """The tars of SA-1B in a list of links by name, and other files in it; SourceError names a bad line."""
    links_by_name: dict[str, Link] = {}
    others = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip() or line.split() == ["file_name", "cdn_link"]:
            continue
        name, tab, url = line.strip().partition("\t")
        name, url = name.strip(), url.strip()
        is_one = is_url(url) and url.isprintable() and len(url.split()) == 1
        if not tab or not name or not is_one or fault_of_url(url):
            shown = printable(line).partition("?")[0][:60]  # without a signature, also of what is no URL
            raise SourceError(
                f"{path}, line {number}: {shown!r} must be a file name, a tab and a URL; download the list "
                "of links again"
            )
        if not _TAR.fullmatch(name):
            others.append(name)
            continue
        link = Link(url, name, f"{path}, line {number}: {name}", path)
        if links_by_name.setdefault(name, link).url != url:
            raise SourceError(
                f"{path}, line {number}: {name} is listed before with another link "
                f"({links_by_name[name].label.rpartition(': ')[0]}); remove one of the two lines"
            )
    if not links_by_name:
        raise SourceError(
            f"{path}: lists no tar of SA-1B (sa_<number>.tar); pass Meta's list of links, "
            "with the columns file_name and cdn_link"
        )
    return [links_by_name[name] for name in sorted(links_by_name)], others


class LocalFile:
    """A file of a local or network file system: its size in bytes, and its bytes in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = os.fspath(path)
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._stat = os.fstat(self._file.fileno())
        self.size = self._stat.st_size

    def read(self, length: int) -> bytes:
        """The next bytes, at most `length`; empty at the end of the file."""
        try:
            return self._file.read(length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.label) from error

    def check_unchanged(self) -> None:
        """SourceError if inode, size, mtime or ctime differ from those at opening.

        An overwrite in place is detected even if the time of modification was restored, because that sets the
        ctime. Not detected: a change within one tick of the clock of the file system before the
        file was opened (4 ms on ext4), changes on file systems without a ctime (FAT, exFAT) or with cached
        attributes (NFS, until the cache expires), and writes through a memory map that was already dirty.
        """
        try:
            stats = [os.fstat(self._file.fileno()), self.path.stat()]
        except FileNotFoundError:
            raise SourceError(f"{self.label}: removed while it was read; restore it and run again") from None
        if any(_identity(stat) != _identity(self._stat) for stat in stats):
            raise SourceError(f"{self.label}: changed while it was read; run the same command again")

    def close(self) -> None:
        self._file.close()


class RemoteFile:
    """An object at a URL; SourceError: expired, or missing. StorageError: no answer, or no ranges."""

    def __init__(self, link: Link) -> None:
        self.link, self.label = link, link.label
        root, self._name = link.split()
        self._reader = Reader(root, attempts_in_flight=link.connections, options=link.reader_options)
        with naming_link(link):
            self.size = self._reader.size(self._name)
        self._pieces = self._reader.read_ranges(pieces_of(self._name, self.size), prefetch=link.connections)
        self._piece = memoryview(b"")
        self._received = 0
        self._began = time.monotonic()

    def read(self, length: int) -> bytes:
        """See LocalFile.read. Waits if the rate of the link's limit is exceeded."""
        if not self._piece:
            with naming_link(self.link):
                self._piece = memoryview(next(self._pieces, b""))
            self._received += len(self._piece)
            if self.link.max_rate is not None:
                allowed = self._began + self._received / self.link.max_rate
                time.sleep(max(0.0, allowed - time.monotonic()))
        data, self._piece = bytes(self._piece[:length]), self._piece[length:]
        return data

    def check_unchanged(self) -> None:
        """Compare the size with that at opening; every range has been compared with the first one's ETag."""
        with naming_link(self.link):
            size = self._reader.size(self._name)
        if size != self.size:
            raise SourceError(f"{self.label}: changed while it was read; run the same command again")

    def close(self) -> None:
        """Cancel pending requests and close the connections."""
        self._reader.close()


def open_stored(origin: Path | Link) -> LocalFile | RemoteFile:
    """Open a local or remote file for one pass."""
    return RemoteFile(origin) if isinstance(origin, Link) else LocalFile(origin)


@contextmanager
def naming_link(link: Link) -> Iterator[None]:
    """Turn the errors of a link that no longer works into errors that say how to get a new one."""
    try:
        yield
    except (DeniedError, MissingError) as error:
        raise SourceError(f"{link.label}: {link.problem(error)}") from None
    except ReplacedError:
        raise SourceError(f"{link.label}: changed while it was read; run the same command again") from None
    except StorageError as error:
        raise type(error)(f"{link.label}: {link.without_query(str(error))}", url=link.label) from None


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
