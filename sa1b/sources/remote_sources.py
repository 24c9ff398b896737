"""The sources at URLs: single tars and Parquet files, folders of them, and the tars of a list of links."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sa1b.errors import Sa1bError, SourceError
from sa1b.names import is_source_name
from sa1b.sources.source import Source, SourceFormat
from sa1b.sources.stored_file import Link, link_of, naming_link
from sa1b.sources.tar_reader import TAR, is_tar_name, tar_name
from sa1b.storage.errors import UnavailableError
from sa1b.storage.reader import Reader

PARQUET = ".parquet"
_REQUESTS = 4  # sizes requested at the same time: servers of signed links block hosts that ask for more
_DEADLINE = 60.0  # seconds until a server counts as unreachable


def links_at(url: str, options: Mapping[str, Any] | None = None) -> list[Link]:
    """The link to a tar or Parquet file, or to all directly in a folder; SourceError: neither."""
    options = dict(options or {})
    if _is_source(url.partition("?")[0]):
        return [replace(link_of(url), options=options)]
    root, _, folder = url.rstrip("/").rpartition("/")
    with Reader(root, options=options) as reader:
        names = [name for name in reader.names(folder) if _is_source(name)]
    if not names:
        way_out = "pass the URL of one, or of a folder with them, such as .../data"
        raise SourceError(f"{url}: no tar and no Parquet file is there; {way_out}")
    return [replace(link_of(f"{url.rstrip('/')}/{name}"), options=options) for name in names]


def _is_source(name: str) -> bool:
    return is_tar_name(name) or name.lower().endswith(PARQUET)


def named_links(links: Iterable[Link]) -> dict[str, Link]:
    """The links by the names of their sources, sorted; SourceError for an invalid or repeated name."""
    named: dict[str, Link] = {}
    for link in links:
        name = tar_name(link.file_name)
        if name.lower().endswith(PARQUET):
            name = name[: -len(PARQUET)]
        if not is_source_name(name):
            rule = "use letters, digits, '_', '-' and '.'"
            raise SourceError(f"{link.label}: the name becomes part of the names of shards; {rule}")
        if named.setdefault(name, link).url != link.url:
            raise SourceError(
                f"{link.label}: has the name {name!r}, as {named[name].label} has, and shards are named "
                "after their source; leave one of them out"
            )
    return dict(sorted(named.items()))


def remote_sources(
    named: Mapping[str, Link],
    known: Mapping[str, tuple[int, int]] | None = None,
    *,
    formats: Sequence[SourceFormat] = (TAR,),
    progress: Callable[[int], object] = lambda count: None,
) -> tuple[list[Source], dict[str, str]]:
    """The sources of links, by name, and the links that do not work: source -> error message.

    A size is one HEAD request, or one for a byte if the server refuses that. All links into a folder share
    their connections. After a server could not be reached, its other links fail without a request. `known`
    has size and mtime_ns of finished sources, whose links are not used. `progress` is called with 1 for each.
    """
    finished = known or {}
    with ExitStack() as stack:
        sizes = _Sizes(stack)

        def measured(name: str) -> Source | str:
            link = named[name]
            try:
                size, mtime_ns = finished.get(name) or (sizes.of(link), 0)
            except Sa1bError as error:
                return str(error)
            finally:
                progress(1)
            kind = "parquet" if link.file_name.lower().endswith(PARQUET) else TAR.kind
            format = next((candidate for candidate in formats if candidate.kind == kind), None)
            if format is None:
                return f"{link.label}: a Parquet file, which this command does not read; use sa1b reshard"
            return Source(name, Path(link.file_name), format, size, mtime_ns, link=link)

        sources: list[Source] = []
        failed: dict[str, str] = {}
        with ThreadPoolExecutor(_REQUESTS) as threads:
            try:
                for name, source in zip(named, threads.map(measured, named), strict=True):
                    if isinstance(source, Source):
                        sources.append(source)
                    else:
                        failed[name] = source
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    return sources, failed


class _Sizes:
    """Requests the sizes of objects, with one reader for each folder, which `stack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._readers = stack, dict[tuple[str, str], Reader]()
        self._unreachable: dict[str, str] = {}  # host -> error
        self._lock = threading.Lock()

    def of(self, link: Link) -> int:
        """Size in bytes. Raises the errors of `naming_link`."""
        root, name = link.split()
        host, key = urlsplit(root).netloc, (root, repr(link.reader_options))
        options: dict[str, Any] = {"deadline": _DEADLINE, "attempts_in_flight": _REQUESTS}
        with naming_link(link):
            if host in self._unreachable:
                raise UnavailableError(self._unreachable[host], url=link.url)
            with self._lock:
                if key not in self._readers:
                    reader = Reader(root, options=link.reader_options, **options)
                    self._readers[key] = self._stack.enter_context(reader)
                reader = self._readers[key]
            try:
                asked = partial(_head, url=f"{root}/{name}")
                size = reader.request(name, asked).result() if root.startswith("http") else 0
                return size or reader.size(name)
            except UnavailableError as error:
                self._unreachable[host] = f"{link.label}: unavailable; last: {error.last_error}"
                raise


async def _head(system: Any, url: str) -> int:
    """The size of an object of a web server; 0 if it does not say, as for a signature of GET alone."""
    session, headers = await system.set_session(), {"Accept-Encoding": "identity"}
    options = {**system.kwargs, "headers": headers | system.kwargs.get("headers", {})}
    async with session.head(system.encode_url(url), allow_redirects=True, **options) as response:
        return int(response.headers.get("Content-Length", 0)) if response.status == 200 else 0
