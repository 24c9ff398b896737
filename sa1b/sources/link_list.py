"""Links to source tars: URLs of single files, and lists of signed links as Meta publishes them.

The list of SA-1B is a text file with two columns, `file_name` and `cdn_link`, separated by a tab, with a
header line and in no order. It also lists files that are not tars of SA-1B. Its links are signed and expire
after some weeks; the files themselves do not change.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sa1b.arguments import fault_of_url
from sa1b.errors import SourceError, printable
from sa1b.storage.errors import StorageError

CONNECTIONS = 4  # requests of one source at the same time
_TAR = re.compile(r"sa_[0-9]+\.tar")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Link:
    """A source tar at a URL, and how to read it.

    Attributes:
        url: the complete URL, with its signature if it has one. It is a secret: messages show `label`.
        file_name: name of the tar.
        label: name of the link for messages.
        listed: path of the list with this link; None if the user named the URL.
        connections: requests at the same time.
        max_rate: limit in bytes per second; None: no limit.
        options: options of fsspec's file system.
    """

    url: str = field(repr=False)
    file_name: str
    label: str
    listed: Path | None = None
    connections: int = CONNECTIONS
    max_rate: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

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


def is_url(text: str) -> bool:
    """Whether a text is a URL and not a path."""
    return _SCHEME.match(text) is not None


def link_of(url: str) -> Link:
    """The link to a URL that the user named.

    Raises:
        SourceError: the URL has no host, or does not name a file.
    """
    parts = urlsplit(url)
    name = parts.path.rpartition("/")[2]
    label = printable(url)
    if not parts.netloc or not name:
        raise SourceError(f"{label}: names no file; pass the URL of a tar")
    return Link(url, name, label)


def read_links(path: Path) -> tuple[list[Link], list[str]]:
    """The tars of SA-1B in a list of links, sorted by name, and the names of the other files in it.

    Raises:
        SourceError: a line has another form, or a file is listed twice with different links. The message
            names the line.
        OSError: the list cannot be read.
    """
    found: dict[str, Link] = {}
    others = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip() or line.split() == ["file_name", "cdn_link"]:
            continue
        name, tab, url = line.strip().partition("\t")
        name, url = name.strip(), url.strip()
        if not tab or not name or not is_url(url) or len(url.split()) != 1 or fault_of_url(url):
            raise SourceError(
                f"{path}, line {number}: {printable(line)[:60]!r} must be a file name, a tab and a URL; "
                "download the list of links again"
            )
        if not _TAR.fullmatch(name):
            others.append(name)
            continue
        link = Link(url, name, f"{path}, line {number}: {name}", path)
        if found.setdefault(name, link).url != url:
            raise SourceError(
                f"{path}, line {number}: {name} is listed before with another link "
                f"({found[name].label.rpartition(': ')[0]}); remove one of the two lines"
            )
    if not found:
        raise SourceError(
            f"{path}: lists no tar of SA-1B (sa_<number>.tar); pass Meta's list of links, "
            "with the columns file_name and cdn_link"
        )
    return [found[name] for name in sorted(found)], others
