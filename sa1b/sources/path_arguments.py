"""Checks of paths and URLs on the command line."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from sa1b.arguments import Range, is_url, was_url
from sa1b.console import command, counted, show
from sa1b.errors import UsageError
from sa1b.report import first_names
from sa1b.sources.stored_file import Link, read_links
from sa1b.storage.open import open_store
from sa1b.storage.protocols import endpoint_options, kind_of, protocol_of
from sa1b.storage.store import Store

Endpoint = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="URL",
        help="With s3:// URLs: URL of an object store other than Amazon's, likewise with gs:// and hf://; by "
        "default $AWS_ENDPOINT_URL.",
    ),
]
_Code = TypeVar("_Code")


def takes_endpoint(main: Callable[..., _Code]) -> Callable[..., _Code]:
    """Add --endpoint to a verb, for the URLs of the command, also in processes that the verb starts."""

    @wraps(main)
    def verb(*arguments: Any, endpoint: str | None = None, **options: Any) -> _Code:
        if endpoint is None:
            return main(*arguments, **options)
        values = [*arguments, *options.values()]
        words = [word for value in values for word in (value if isinstance(value, tuple) else (value,))]
        urls = [word for word in map(str, words) if is_url(word) and endpoint_options(word, endpoint)]
        if not urls:
            raise UsageError(f"--endpoint {endpoint}: only with a URL such as s3://BUCKET/shards; omit it")
        variables = {kind_of(url).endpoint_variable for url in urls}
        before = {name: os.environ.pop(name) for name in variables & os.environ.keys()}
        os.environ.update(dict.fromkeys(variables, endpoint))
        try:
            return main(*arguments, **options)
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)

    main_signature = signature(main)
    flag = Parameter("endpoint", Parameter.KEYWORD_ONLY, default=None, annotation=Endpoint)
    vars(verb)["__signature__"] = main_signature.replace(
        parameters=[*main_signature.parameters.values(), flag]
    )
    verb.__annotations__ = {**main.__annotations__, "endpoint": Endpoint}
    return verb


def check_here(flag: str, value: Path | None) -> None:
    """UsageError for a URL as the value of a flag that needs a path of this machine."""
    if value is not None and was_url(value):
        raise UsageError(f"{flag} {value}: must be a path of this machine, not a URL")


def check_writable(what: str, root: str) -> None:
    """UsageError for a URL that can only be read, of a web server or the Hub; for `what` is written."""
    if kind_of(root).is_read_only:
        raise UsageError(
            f"{root}: {protocol_of(root)} can only be read, and {what}; copy it to a folder with "
            f"`{command('copy')}` first"
        )


def check_scratch_flag(scratch: Path | None, *roots: str) -> None:
    """UsageError for --scratch if no dataset directory is at a URL, or if it is one itself."""
    check_here("--scratch", scratch)
    if scratch is not None and not any(map(is_url, roots)):
        raise UsageError(f"--scratch {scratch}: only for a dataset directory at a URL; omit it")


def checked_quality(
    image_size: int | None, quality: int | None, *, annotations_only: bool = False
) -> int | None:
    """The JPEG quality; None if images are not re-encoded."""
    if annotations_only and image_size is not None:
        raise UsageError(f"--annotations-only: stores no images; omit --image-size {image_size}")
    if quality is not None and (image_size is None or not 1 <= quality <= 100):
        raise UsageError(f"--quality {quality}: must be from 1 to 100, and needs --image-size")
    if image_size is None:
        return None
    Range(16, 65500, unit=" pixels").check("--image-size", image_size)
    return quality or 95


def check_rate(flag: str, megabytes: float | None) -> None:
    """Refuse a rate in MB per second that is not above 0."""
    Range(above=0, below=inf).check(flag, megabytes)


def paths_of(source: tuple[str, ...]) -> tuple[Path, ...]:
    """The paths in SOURCE."""
    return tuple(Path(text) for text in source if not is_url(text))


def linked(
    source: tuple[str, ...],
    path: Path | None,
    connections: int,
    rate: float | None = None,
    endpoint: str | None = None,
) -> tuple[Link, ...]:
    """The links of the URLs in SOURCE and of --links; limits of each: connections, bytes per second."""
    from sa1b.sources.remote_sources import links_at

    urls = filter(is_url, source)
    all_links = [link for url in urls for link in links_at(url, endpoint_options(url, endpoint))]
    if path is not None:
        listed, others = read_links(path)
        all_links += listed
        if others:
            left_out = f"{counted(len(others), 'other file')} left out ({first_names(others, 3)})"
            show(f"note: {path}: {left_out}", sys.stderr)
    return tuple(
        replace(link, connections=connections, max_rate=rate, options=endpoint_options(link.url, endpoint))
        for link in all_links
    )


def store_of(out: str, scratch: Path | None, endpoint: str | None, source: tuple[str, ...]) -> Store:
    """The store of --out, a folder or a URL; UsageError if it cannot be written or a flag does not fit."""
    if kind_of(out).is_read_only:
        raise UsageError(
            f"--out {out}: {protocol_of(out)} can only be read; pass a folder, or a URL such as "
            "s3://BUCKET/FOLDER"
        )
    check_scratch_flag(scratch, out)
    if endpoint is not None and not any(map(is_url, (out, *source))):
        raise UsageError(f"--endpoint {endpoint}: only if --out or SOURCE is a URL; omit it")
    return open_store(out, scratch=scratch, options=endpoint_options(out, endpoint) if is_url(out) else None)
