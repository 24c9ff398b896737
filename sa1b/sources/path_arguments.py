"""Checks of paths and URLs on the command line."""

from pathlib import Path

from sa1b.arguments import was_url
from sa1b.console import command
from sa1b.errors import UsageError
from sa1b.sources.link_list import is_url
from sa1b.storage.protocols import READ_ONLY, protocol_of


def check_here(flag: str, value: Path | None) -> None:
    """Refuse a URL as the value of a flag that needs a path of this machine.

    Raises:
        UsageError: the path was made from a URL, so that it begins with a scheme.
    """
    if value is not None and was_url(value):
        raise UsageError(f"{flag} {value}: must be a path of this machine, not a URL")


def check_writable(what: str, root: str) -> None:
    """Refuse a dataset directory at a URL that can only be read.

    Args:
        what: what the command writes, for the message.

    Raises:
        UsageError: the URL is of a web server or of the Hugging Face Hub.
    """
    protocol = protocol_of(root)
    if protocol in READ_ONLY:
        raise UsageError(
            f"{root}: {protocol} can only be read, and {what}; copy it to a folder with "
            f"`{command('copy')}` first"
        )


def check_scratch_flag(scratch: Path | None, *roots: str) -> None:
    """Refuse --scratch if no dataset directory is at a URL.

    Raises:
        UsageError: no root is a URL, or the folder is one.
    """
    check_here("--scratch", scratch)
    if scratch is not None and not any(map(is_url, roots)):
        raise UsageError(f"--scratch {scratch}: only for a dataset directory at a URL; omit it")
